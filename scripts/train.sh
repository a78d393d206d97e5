#!/usr/bin/env bash
# Train: scripts/train.sh [CONFIG] [--section.key value ...]   (CONFIG: a TOML file, or a shipped one's name; default: digits)
#   NGPU=4 scripts/train.sh ...   that many processes
#   --autotune                    find training.local_batch_size first; takes the options of
#                                 scripts/autotune_batch_size.py, as --memory 4 --headroom 0.2
#   --smoke                       try the configuration: two small steps of everything, in the folder NAME-smoke
#   --check-only                  check the configuration and stop
#   --setup-only                  stop after setting up .venv
# Other paths than CONFIG's are relative to the repository.
# Exit codes: 0 completed, 1 failed, 2 refused, 75 interrupted by a signal and saved, or another run writes into
# the folder (the same command, later, resumes).
set -euo pipefail
# Slurm runs a copy of this script: the repository is then REPOSITORY, or the folder that sbatch was called in.
scripts=$(dirname "${BASH_SOURCE[0]}")
[ -e "$scripts/environment.sh" ] || scripts=${REPOSITORY:-${SLURM_SUBMIT_DIR:-$PWD}}/scripts
[ -e "$scripts/environment.sh" ] || { echo "train.sh: ${scripts%/*} is not the repository (submit from it, or set REPOSITORY)" >&2; exit 2; }
source "$scripts/environment.sh"
source "$root/scripts/status.sh"

# --help [SECTION ...]: these options, then the keys of a configuration, once.
for argument in "$@"; do
    if [ "$argument" = --help ] || [ "$argument" = -h ]; then
        if [ "$*" = "$argument" ]; then
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
            echo "--section.key value: any key of a configuration; scripts/train.sh --help SECTION describes those of one:"
            echo
        fi
        set_up digits
        cd "$root"
        exec "$venv/bin/python" train.py "$@"
    fi
done
absolute() { if [ -e "$1" ]; then echo "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"; else echo "${1:-''}"; fi; }
config=
arguments=()
autotune= check_only= smoke=
search=()
while [ $# -gt 0 ]; do
    case $1 in
        --setup-only) set_up digits; exit 0 ;;
        --config=* | --job.config_file=*) arguments+=(${config:+"$config"}); config=$(absolute "${1#*=}") ;;
        --config | --job.config_file)
            arguments+=(${config:+"$config"})  # a second one is refused below
            config=$(absolute "${2-$1}")
            [ $# -lt 2 ] || shift
            ;;
        --check-only) check_only=1 ;;
        --autotune) autotune=1 ;;
        --multiple-of | --max | --headroom | --memory | --timeout)
            search+=("$1" ${2+"$2"})
            [ $# -lt 2 ] || shift
            ;;
        --multiple-of=* | --max=* | --headroom=* | --memory=* | --timeout=* | --fresh) search+=("$1") ;;
        --smoke) smoke=--smoke ;;
        --*=*) arguments+=("$1") ;;
        --*)
            arguments+=("$1")
            if [ $# -gt 1 ] && [[ $2 != --* ]]; then
                arguments+=("$2")
                shift
            fi
            ;;
        *) if [ -n "$config" ]; then arguments+=("$1"); else config=$(absolute "$1"); fi ;;
    esac
    shift
done
config=${config:-$root/train_configs/digits.toml}
if [ -z "$autotune" ] && [ ${#search[@]} -gt 0 ]; then
    echo "train.sh: ${search[0]%%=*} is an option of --autotune (add --autotune)" >&2
    exit 2
fi

set_up digits
cd "$root"
[[ $config != "$root"/* ]] || config=${config#"$root"/}
export NGPU=${NGPU:-1}
[[ $NGPU =~ ^[1-9][0-9]*$ ]] || { echo "NGPU: is the number of processes, 1 or more, and not '$NGPU'" >&2; exit 2; }
if [ "$NGPU" != 1 ]; then
    cores=$("$venv/bin/python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / NGPU > 0 ? cores / NGPU : 1))}
fi
if [ -n "$autotune" ]; then
    batch_size=$("$venv/bin/python" scripts/autotune_batch_size.py "$config" --processes "$NGPU" \
        ${search[@]+"${search[@]}"} ${arguments[@]+"${arguments[@]}"})
    arguments+=(--training.local_batch_size "$batch_size")
fi
"$venv/bin/python" train.py --check-only --job.config_file "$config" ${arguments[@]+"${arguments[@]}"} $smoke
[ -z "$check_only" ] || exit 0
command=("$venv/bin/python")
if [ "$NGPU" != 1 ]; then
    # torchrun would die of a SIGUSR1 that it does not handle, and leave its processes behind.
    command=("$venv/bin/python" -m torchtitan.processes.torchrun --standalone --nproc_per_node "$NGPU"
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
fi
export TORCHTITAN_DIT_CHECKED=1  # warnings have been given
run_for_status "${command[@]}" train.py --job.config_file "$config" ${arguments[@]+"${arguments[@]}"} $smoke
