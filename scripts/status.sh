# Sourced by launch scripts: `run_for_status COMMAND...` trains, and exits with a code that a scheduler can act on.
#   0 completed, 1 failed, 2 refused, 75 (EX_TEMPFAIL) interrupted by a signal and saved: run the same again
# torchrun turns every failure of a process into 1, so the processes leave their status in a file.

run_for_status() {
    local code=0 status child
    TRAIN_STATUS_FILE=$(mktemp)
    export TRAIN_STATUS_FILE
    trap 'rm -f "$TRAIN_STATUS_FILE"' EXIT
    # A process group of its own: of Ctrl-C, too, the command hears once, and by the traps below.
    set -m
    "$@" &
    child=$!
    set +m
    for signal in INT TERM HUP USR1; do
        trap "kill -$signal $child 2>/dev/null || true" "$signal"
    done
    while :; do  # a trapped signal ends wait before the command has ended
        code=0
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    status=$(sed -n 's/^ *"status": "\([a-z]*\)".*/\1/p' "$TRAIN_STATUS_FILE")
    case $code:$status in
        0:*) exit 0 ;;
        *:requeue) exit 75 ;;
        *:refused) exit 2 ;;
        *:failed) exit 1 ;;
        *) exit "$code" ;;
    esac
}
