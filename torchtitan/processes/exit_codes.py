"""Exit codes of a process for the launcher that started it. Imports no torch."""

import os
import signal
import time

# Exit codes of a process.
FAILED = 1
REFUSED = 2  # before anything was written
BUSY = 75  # EX_TEMPFAIL, another process writes into the folder: nothing was written, try again later

_FIRST_SPEAKS = 10.0  # seconds


def before_exit(code: int) -> None:
    """Let the first process of a node be the one that ends a launcher's job; to be called last, with the exit code.

    torchrun ends the others when one process has ended with an error: of a refusal the first must have said why before. And
    torchrun knows no exit codes: with --max-restarts it restarts every failed job, where a refusal would recur and a
    requested stop must hold. So the first process ends torchrun then, as an external signal would.
    """
    if code in (0, FAILED):
        return
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    restarts_follow = restarts.isdecimal() and bool(restarts.strip("0"))
    rank = os.environ.get("LOCAL_RANK")
    if rank == "0" and restarts_follow:
        os.kill(os.getppid(), signal.SIGTERM)
    elif rank not in (None, "0") and (restarts_follow or code in (REFUSED, BUSY)):
        time.sleep(_FIRST_SPEAKS)
