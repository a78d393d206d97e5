#!/usr/bin/env bash
# Train: scripts/train.sh [CONFIG] [--section.key value ...]   (CONFIG: train_configs/digits.toml)
#   NGPU=4 scripts/train.sh ...   that many processes
#   --setup-only                  stop after setting up .venv
# Other paths than CONFIG's are relative to the repository.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

config=$root/train_configs/digits.toml
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    config=$(cd "$(dirname "$1")" 2>/dev/null && pwd)/$(basename "$1")
    [ -e "$config" ] || config=$root/$1
    shift
fi
arguments=()
for argument in "$@"; do
    if [ "$argument" = --setup-only ]; then
        set_up digits
        exit 0
    fi
    arguments+=("$argument")
done

set_up digits
cd "$root"
[[ $config != "$root"/* ]] || config=${config#"$root"/}
export NGPU=${NGPU:-1}
"$venv/bin/python" train.py --check-only --job.config_file "$config" ${arguments[@]+"${arguments[@]}"}
if [ "$NGPU" = 1 ]; then
    exec "$venv/bin/python" train.py --job.config_file "$config" ${arguments[@]+"${arguments[@]}"}
fi
cores=$("$venv/bin/python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / NGPU > 0 ? cores / NGPU : 1))}
exec "$venv/bin/python" -m torch.distributed.run --standalone --nproc_per_node "$NGPU" \
    train.py --job.config_file "$config" ${arguments[@]+"${arguments[@]}"}
