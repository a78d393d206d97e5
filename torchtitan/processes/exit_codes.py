"""Exit codes of a process for the launcher that started it. Imports no torch."""

import os
import signal
import time

# Exit codes of a process.
FAILED = 1
REFUSED = 2  # before anything was written
BUSY = 75  # EX_TEMPFAIL, another process writes into the folder: nothing was written, try again later

_FIRST_SPEAKS = 10.0  # seconds


def forbid_restart() -> None:
    """Forbid torchrun from restarting the job: a refusal would recur, and a requested stop must hold.

    torchrun knows no exit codes: with --max-restarts it restarts every failed job. So the first process of each node
    ends its launcher, as an external signal would.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not restarts.isdecimal() or not restarts.strip("0"):
        return
    if os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)
    else:  # torchrun ends the others when one has failed: the first must have said why, and ended torchrun, before
        time.sleep(_FIRST_SPEAKS)
