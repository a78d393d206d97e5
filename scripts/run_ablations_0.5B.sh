#!/usr/bin/env bash
# The ablation grid of the 462 M parameter model on 8 GPUs: scripts/run_ablations_0.5B.sh [options of scripts/sweep.py]
# Under Slurm: sbatch scripts/run_ablations_0.5B.sh [options]; stopped and submitted again, it resumes.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
# Slurm runs a copy of this script: the repository is then REPOSITORY, or the folder that sbatch was called in.
scripts=$(dirname "${BASH_SOURCE[0]}")
[ -e "$scripts/environment.sh" ] || scripts=${REPOSITORY:-${SLURM_SUBMIT_DIR:-$PWD}}/scripts
[ -e "$scripts/environment.sh" ] || { echo "run_ablations_0.5B.sh: ${scripts%/*} is not the repository (submit from it, or set REPOSITORY)" >&2; exit 2; }
source "$scripts/environment.sh"
set_up digits lowbit  # float8 is an arm
cd "$root"
exec "$venv/bin/python" scripts/sweep.py train_configs/sweeps/dit_0.5B.toml "$@"
