#!/usr/bin/env bash
# Run the tests: scripts/test.sh [--all] [pytest arguments]   (--all: the long ones too; --setup-only: only .venv)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

selection=(-m "not long")
arguments=()
setup_only=
for argument in "$@"; do
    case $argument in
        --all) selection=() ;;
        --setup-only) setup_only=1 ;;
        *) arguments+=("$argument") ;;
    esac
done

set_up digits test
if [ -n "$setup_only" ]; then
    exit 0
fi
cd "$root"
# Several test processes share the cores; spinning OpenMP threads would only slow each other down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/python" -m pytest ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}
