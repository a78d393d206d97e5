"""Probe of a batch size: a few steps of train.py in separate processes, with their memory and speed."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan.config.job import JobConfig, load_config
from torchtitan.experiments.command_lines import words_of
from torchtitan.experiments.grid import MEASURED_ALONE
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import repeat_killed, run_processes
from torchtitan.files.regular import read_regular
from torchtitan.settings.plugins import as_loaded, plugin_words
from torchtitan.settings.record import dump_config
from torchtitan.training.schedules import largest_growth

_STEPS = 4
_RUN_NAME = "probe"


@dataclass(frozen=True)
class Probe:
    """Probe of one batch size.

    Attributes:
        batch_size: images per rank in one forward.
        status: ok, or oom if memory ran out on any rank; other ends of a probe give no answer and are not kept.
        memory_gib: peak of the fullest rank, reserved on CUDA and resident on the CPU; None after oom.
        num_alloc_retries: times that a CUDA allocator had to free its cache, of the rank with most; None after oom.
        images_per_second: of all ranks together; None after oom.
        seconds: wall time, start-up included.
    """

    batch_size: int
    status: Literal["ok", "oom"]
    memory_gib: float | None
    num_alloc_retries: int | None
    images_per_second: float | None
    seconds: float

    def fits(self, limit_gib: float) -> bool:
        """Check whether it stayed within the limit without retries of the allocator."""
        within = self.memory_gib is not None and self.memory_gib <= limit_gib
        return self.status == "ok" and within and self.num_alloc_retries == 0


class ProbeFailed(Exception):
    """Probe that ended otherwise than by running or by running out of memory; no answer on the batch size."""

    def __init__(self, batch_size: int, outcome: Outcome, log: Path) -> None:
        advice = "a longer timeout gives it time; " if outcome.status == "timeout" else ""
        super().__init__(f"batch size {batch_size}: {outcome.status}: {outcome.reason} ({advice}its output: {log})")
        self.outcome = outcome


def probe_config(config: JobConfig, processes: int, folder: Path) -> tuple[JobConfig, list[str]]:
    """Derive the short run that probes a configuration.

    It takes the same steps, without checkpoints, samples, validation, traces and event files. Two microbatches per
    step represent any number of them, also of a batch that grows: the second one has the accumulated gradients in memory.

    Returns:
        the configuration of the short run, and its command line.
    """
    file = folder / f"{_RUN_NAME}.toml"
    file.write_text(dump_config(config), encoding="utf-8")
    batch = config.training.global_batch_size
    accumulated = 2 * config.parallelism.data_ranks * config.training.local_batch_size
    tapped = config.gns.enable and config.gns.single_pass
    if largest_growth(config) > 1:
        batch = max(batch, accumulated)
    if not config.gns.enable:
        batch = min(batch, accumulated)
    # A measured step of the noise scale needs more memory than others: there is one.
    steps = config.gns.interval if tapped else _STEPS
    words = words_of(MEASURED_ALONE | {
        "job.config_file": str(file), "job.dump_folder": str(folder), "job.name": _RUN_NAME, "training.steps": steps,
        "training.global_batch_size": batch, "training.double_batch_after": [], "lr_scheduler.unit": "steps",
        "lr_scheduler.warmup_steps": 0, "profiling.enable_profiling": False, "profiling.enable_memory_snapshot": False,
        "metrics.log_freq": steps, "metrics.enable_wandb": False,
    })  # fmt: skip
    words += plugin_words(as_loaded(config.job.plugins))
    return load_config(words, processes), words


def run_probe(config: JobConfig, *, processes: int, log: Path, **options: Any) -> Probe:
    """Probe the batch size of a configuration; further options are those of `run_processes`.

    Raises:
        ProbeFailed: it failed for another reason than memory.
        KeyboardInterrupt, Stopped: after its processes were ended.
    """
    batch_size = config.training.local_batch_size
    with tempfile.TemporaryDirectory(prefix="autotune-") as name:
        folder = Path(name)
        _, words = probe_config(config, processes, folder)
        outcome = repeat_killed(lambda: run_processes(words, processes=processes, log=log, **options), log)
        if outcome.status == "oom":
            return Probe(batch_size, "oom", None, None, None, round(outcome.seconds, 1))
        if outcome.status != "ok":
            raise ProbeFailed(batch_size, outcome, log)
        summary = json.loads(read_regular(folder / _RUN_NAME / "summary.json"))
    return Probe(
        batch_size, "ok",
        memory_gib=summary["peak_memory_GiB"],
        num_alloc_retries=summary["num_alloc_retries"],
        images_per_second=round(summary["tail_medians"]["throughput(img/s)"], 3),
        seconds=round(outcome.seconds, 1),
    )  # fmt: skip
