#!/usr/bin/env bash
# The ablation grid at a size for two laptop cores, and its report: scripts/run_ablations_cpu.sh [FOLDER] [options of scripts/sweep.py]
# FOLDER: of the results, outputs/ablations_cpu by default. Started again, it resumes. --dry-run: only say what would be run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
folder=$root/outputs/ablations_cpu
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    folder=$1
    shift
fi
[[ $folder == /* ]] || folder=$PWD/$folder
set_up digits
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$venv/bin/python" scripts/sweep.py train_configs/sweeps/cpu.toml --output "$folder" "$@"
[[ " $* " != *" --dry-run "* && " $* " != *" --help "* ]] || exit 0
exec "$venv/bin/python" optimization_analysis.py "$folder"
