#!/usr/bin/env bash
# The ablation grid at a size for two laptop cores, and its report: scripts/run_ablations_cpu.sh [FOLDER] [options of scripts/sweep.py]
# FOLDER: of the results, outputs/ablations_cpu by default. Started again, it resumes. --dry-run: only say what would be run.
set -euo pipefail
# Slurm runs a copy of this script: the repository is then REPOSITORY, or the folder that sbatch was called in.
scripts=$(dirname "${BASH_SOURCE[0]}")
[ -e "$scripts/environment.sh" ] || scripts=${REPOSITORY:-${SLURM_SUBMIT_DIR:-$PWD}}/scripts
[ -e "$scripts/environment.sh" ] || { echo "run_ablations_cpu.sh: ${scripts%/*} is not the repository (submit from it, or set REPOSITORY)" >&2; exit 2; }
source "$scripts/environment.sh"
folder=$root/outputs/ablations_cpu
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    folder=$1
    shift
fi
[[ $folder == /* ]] || folder=$PWD/$folder
set_up digits
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=
"$venv/bin/python" scripts/sweep.py train_configs/sweeps/cpu.toml --output "$folder" "$@" && code=0 || code=$?
[ $code -le 1 ] || exit $code
[[ " $* " != *" --dry-run "* && " $* " != *" --help "* && " $* " != *" -h "* ]] || exit $code
"$venv/bin/python" optimization_analysis.py "$folder"  # of the cells that ran, also where others failed
exit $code
