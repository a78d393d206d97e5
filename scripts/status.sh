# Sourced by launch scripts: `run_for_status COMMAND...` trains, and returns a code that a scheduler can act on.
#   0 completed, 1 failed, 2 refused, 75 (EX_TEMPFAIL): run the same again, for it was interrupted by a signal and saved, or
#   ended by a signal other than Ctrl-C (130) before it could save, or another run writes into its folder
# torchrun turns every failure of a process into 1, so the processes leave their status in a file.
# On Linux the command ends with this shell, even if that is killed; python3 arranges it, where there is one.

parent_death=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/torchtitan/processes/parent_death.py

run_for_status() {
    local code=0 status child ended_by="" shell=${BASHPID-} given=${TRAIN_STATUS_FILE-}
    local -x TRAIN_STATUS_FILE=${given:-$(mktemp)}
    : > "$TRAIN_STATUS_FILE"
    # A process group of its own: of Ctrl-C, too, the command hears once, and by the traps below.
    set -m
    if [ -n "$shell" ] && command -v python3 >/dev/null; then
        python3 -S "$parent_death" "$shell" "$@" &
    else
        "$@" &
    fi
    child=$!
    set +m
    for signal in INT TERM HUP USR1; do
        trap "ended_by=$signal; kill -$signal $child 2>/dev/null || true" "$signal"
    done
    while :; do  # a trapped signal ends wait before the command has ended
        code=0
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    status=$(sed -n 's/^ *"status": "\([a-z]*\)".*/\1/p' "$TRAIN_STATUS_FILE")
    [ -n "$given" ] || rm -f "$TRAIN_STATUS_FILE"
    trap - INT TERM HUP USR1
    case $code:$status in
        0:*) return 0 ;;
        *:requeue | *:busy) return 75 ;;
        *:refused) return 2 ;;
        *:failed) return 1 ;;
        *) [[ $status || ! $ended_by ]] && return "$code"; [[ $ended_by = INT ]] && return 130; return 75 ;;
    esac
}

# Refuse a node with fewer GPUs than PyTorch is to use: refuse_unseen_gpus COUNT COMMAND... (which runs Python on each node)
refuse_unseen_gpus() {
    "${@:2}" -c '
import socket, sys, torch
found = torch.cuda.device_count()
text = f"{socket.gethostname()}: PyTorch sees {found} GPUs, and {sys.argv[1]} processes are to use one each (is its torch built for CUDA?)"
sys.exit(text if found < int(sys.argv[1]) else 0)
' "$1" || exit 2
}

# Refuse a job without GPUs: refuse_without_gpus PROCESSES SCRIPT VARIABLE (which says how many processes to start without)
refuse_without_gpus() {
    if [ "$1" = 0 ]; then
        echo "$2: the job has no GPUs (submit with --gpus-per-node N, or set $3 to train on processors)" >&2
        exit 2
    fi
}
