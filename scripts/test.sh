#!/usr/bin/env bash
# Run the tests: scripts/test.sh [--all | --ray | --research] [pytest arguments]   (--all: the long ones too; --ray: those of Ray; --research: those of the studies alone; --setup-only: only .venv)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

selection=(-m "not long")
arguments=()
extras=(test)
export TESTS_WITHOUT=ray CUDA_VISIBLE_DEVICES=  # of other packages that are missing a test fails; benchmarks/gpu_day.sh tests a GPU
setup_only=
for argument in "$@"; do
    case $argument in
        --all) selection=() ;;
        --ray)
            extras+=(ray)
            TESTS_WITHOUT=
            arguments+=(tests/unit/test_launchers_ray.py)
            ;;
        --research) arguments+=(tests/research) ;;
        --setup-only) setup_only=1 ;;
        --help | -h)
            sed -n '2s/^# //p' "${BASH_SOURCE[0]}"
            echo "pytest's own: .venv/bin/python -m pytest --help, as -k WORD for tests with a word in the name, -x to stop at a failure"
            exit 0
            ;;
        *) arguments+=("$argument") ;;
    esac
done

set_up "${extras[@]}"
if [ -n "$setup_only" ]; then
    exit 0
fi
cd "$root"
# A test process takes a whole file, as the tests of a file share runs; -n 0 keeps all in one process, as --pdb needs.
# There is one process more than there are cores, since a test that starts ranks waits for a part of its time.
cores=$("$venv/bin/python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
# Begun in the order of tests/conftest.py, longest first, not in that of how many tests a file has.
parallel=(-n "$((cores < 7 ? cores + 1 : 8))" --dist loadfile --no-loadscope-reorder)
# Several test processes share the cores; spinning OpenMP threads would only slow each other down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/python" -m pytest "${parallel[@]}" ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}
