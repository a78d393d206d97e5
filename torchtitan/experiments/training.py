"""Training of one run of an experiment to its end in separate processes; another start resumes it."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

from torchtitan.config.job import JobConfig
from torchtitan.experiments.process import repeat_killed, run_processes
from torchtitan.files.durable import replace_file
from torchtitan.files.regular import open_regular
from torchtitan.settings.plugins import as_loaded, loaded_plugins, plugin_words
from torchtitan.settings.record import dump_config
from torchtitan.training.metrics import METRICS_FILE

SAVING_SECONDS = 60.0  # for the checkpoint of a run that is stopped


class TrainingFailed(Exception):
    """Run of an experiment that did not finish; the message is one line."""


class Diverged(TrainingFailed):
    """Run whose gradients became infinite or NaN."""


def train(config: JobConfig, processes: int, request: Path, log: Path, advance: Callable[[int], object]) -> None:
    """Train a run to its end, from its newest checkpoint where its folder has one, again where it is killed from outside.

    Args:
        advance: told how many more samples the run has seen, now and then.

    Raises:
        Diverged: its gradients became infinite or NaN.
        TrainingFailed: with any other reason.
        KeyboardInterrupt: asked to stop; the run has saved a checkpoint if there was time.
        OSError: a file cannot be written.
    """
    folder, seen = Path(config.job.dump_folder) / config.job.name, 0

    def follow() -> None:
        nonlocal seen
        logged = max(samples_logged(folder), seen)
        advance(logged - seen)
        seen = logged

    replace_file(request, dump_config(config))
    words = ["--job.config_file", str(request), *plugin_words(as_loaded(config.job.plugins or loaded_plugins()))]
    outcome = repeat_killed(lambda: run_processes(
        words, processes=processes, timeout_s=math.inf, log=log, stop_grace_s=SAVING_SECONDS, poll=follow
    ), log)  # fmt: skip
    if outcome.status != "ok":
        kind = "" if outcome.status == "failed" else f"{outcome.status}: "
        diverged = "gradient norm is" in outcome.reason
        raise (Diverged if diverged else TrainingFailed)(kind + outcome.reason)


def samples_logged(folder: Path) -> int:
    """Images that a run has seen, by the last whole line of its metrics; 0 where there is none."""
    try:
        with open_regular(folder / METRICS_FILE) as file:
            file.seek(-min(os.fstat(file.fileno()).st_size, 8192), os.SEEK_END)
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["n_images_seen"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0
