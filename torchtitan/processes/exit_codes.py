"""What a process tells the launcher that started it. Imports no torch."""

import os
import signal

# Exit codes of a process.
FAILED = 1
REFUSED = 2  # before anything was written
BUSY = 75  # EX_TEMPFAIL, another process writes into the folder: nothing was written, try again later


def forbid_restart() -> None:
    """Have torchrun end the job: what was refused would be refused again, and what was told to stop must not go on.

    torchrun knows no exit codes: with --max-restarts it starts whatever has failed once more. So the first process of
    each node ends its launcher, as a signal from outside would.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts.isdecimal() and restarts.strip("0") and os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)
