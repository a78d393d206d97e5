"""Tuned batch size of a cell, in a sweep that searches it."""

import threading
import time
from pathlib import Path

from torchtitan.config.job import ConfigError
from torchtitan.errors import unwrapped
from torchtitan.experiments.autotune.candidates import AutotuneRefused
from torchtitan.experiments.autotune.probe import ProbeFailed
from torchtitan.experiments.autotune.record import RecordError
from torchtitan.experiments.autotune.tuning import NothingFits, autotune
from torchtitan.experiments.grid import SweepSettings
from torchtitan.experiments.outcome import Outcome, Status


def tuned_batch_size(
    arguments: list[str], processes: int, settings: SweepSettings, *, cache: Path, devices: list[int] | None,
    stop: threading.Event,
) -> int | Outcome:  # fmt: skip
    """Search training.local_batch_size with a sweep's autotune keys.

    Args:
        arguments: of train.py, without a batch size.
        processes: of the run.
        settings: of the sweep.
        cache: folder of the searches' records; an interrupted one resumes.
        devices: numbers of the CUDA devices to use.
        stop: ends the search.

    Returns:
        the batch size, or the cell's outcome if there is none: oom if not even the smallest fits.

    Raises:
        Stopped: `stop` was set.
    """
    begun = time.perf_counter()

    def ended(status: Status, error: Exception) -> Outcome:
        return Outcome(status, unwrapped(error), time.perf_counter() - begun, 1)

    try:
        return autotune(
            arguments, processes, goal=settings.autotune_goal, memory_gib=settings.autotune_memory_gib, cache=cache,
            multiple_of=settings.autotune_multiple_of, timeout_s=settings.timeout_s, devices=devices, stop=stop,
        ).batch_size  # fmt: skip
    except NothingFits as error:
        return ended("oom", error)
    except (ConfigError, AutotuneRefused) as error:
        return ended("refused", error)
    except ProbeFailed as error:
        return ended("killed" if error.outcome.status == "killed" else "failed", error)
    except RecordError as error:
        return ended("failed", error)
