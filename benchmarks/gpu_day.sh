#!/usr/bin/env bash
# One visit to a machine with a GPU: benchmarks/gpu_day.sh prepare | 1 | 2 | 3 | page [FOLDER]
#   prepare  on a machine with a network: fill .gpu/ with what the GPU machine lacks; DIT_MODELS=FILE adds facebookresearch/DiT's
#            models.py for comparison. The folder travels with the checkout, and git ignores it.
#   1        does it run: numbers against the CPU, every feature, interrupt and resume, two ranks
#   2        is it fast: train steps of S, B, XL and 7B, the device's ceilings
#   3        what it costs: others' networks, noise scale, kernels, sampling, checkpoints, loader
#   page     merge the results in FOLDER into benchmarks/results/gpu_day.json, and write its part of docs/speed.md
# Each call ends within LIMIT seconds (460) whatever fails; results are in $OUT. STAGES="parity,two ranks" runs only these,
# PYTHON=... takes another Python, DEVICE=cpu is a dry run without a GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
call=${1:-}
case $call in
    prepare)
        rm -rf .gpu/wheels  # two versions of a package would not install
        mkdir -p .gpu/wheels
        python=${PYTHON:-$root/.venv/bin/python}
        get=("$python" -m pip download --quiet --disable-pip-version-check --dest .gpu/wheels --only-binary=:all:
             --python-version 3.12 --implementation cp --platform manylinux2014_x86_64)
        for glibc in 28 24 17; do get+=(--platform "manylinux_2_${glibc}_x86_64"); done  # pip matches each exactly
        "${get[@]}" 'pydantic>=2.7' tomli-w
        "${get[@]}" --no-deps 'diffusers>=0.32' 'torchao>=0.18,<0.19'
        [ -z "${DIT_MODELS:-}" ] || cp "$DIT_MODELS" .gpu/dit_models.py
        [ -e .gpu/dit_models.py ] || echo "without facebookresearch/DiT: DIT_MODELS=models.py adds that repository's models.py"
        du -sh .gpu
        exit 0
        ;;
    1 | 2 | 3 | page) ;;
    *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
temporary=${TMPDIR:-/tmp}/gpu_day
python=${PYTHON:-python3}
if [ "${DEVICE:-}" = cpu ] || [ "$call" = page ]; then
    python=${PYTHON:-$root/.venv/bin/python}
elif [ -d .gpu/wheels ] && [ ! -e "$temporary/site/.installed" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$temporary/site" .gpu/wheels/*.whl
    touch "$temporary/site/.installed"
fi
export PYTHONPATH=$root:$temporary/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 LIMIT=${LIMIT:-460}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$temporary/inductor} HF_HUB_OFFLINE=1 WANDB_MODE=disabled
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# The stages are forks of a process that must not have touched the device: this check looks at the driver's library alone.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
if [ "$call" = page ]; then
    exec "$python" -m benchmarks.gpu_day page "${@:2}"
fi
IFS=, read -ra stages <<< "${STAGES:-}"
exec "$python" -m benchmarks.gpu_day "$call" "${OUT:-$temporary/results}" ${stages[@]+"${stages[@]}"}
