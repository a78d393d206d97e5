"""torchrun without a traceback after the last line of train.py: -m torchtitan.processes.torchrun OPTIONS train.py ..."""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from torchtitan.processes.exit_codes import BUSY, FAILED, REFUSED


def run() -> int:
    """Run torchrun on `sys.argv`; return 1, without a traceback, after a signal or a process that refused to start."""
    try:
        main()
    except SignalException:
        return FAILED
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in (REFUSED, BUSY) and failure.exitcode <= 128:
            raise
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(run())
