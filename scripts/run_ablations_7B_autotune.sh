#!/usr/bin/env bash
# The ablation grid of the 7.1 B parameter model at the largest batch that fits on 8 GPUs: scripts/run_ablations_7B_autotune.sh [options of scripts/sweep.py]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
set_up digits
cd "$root"
exec "$venv/bin/python" scripts/sweep.py train_configs/sweeps/dit_7B_autotune.toml "$@"
