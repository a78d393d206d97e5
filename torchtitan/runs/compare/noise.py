"""Gradient noise scale of runs: what it says about the batch and the timesteps, and the picture that the run has drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torchtitan.gns.config import GNS_FOLDER, PICTURE_FILE
from torchtitan.runs.compare.samples import picture_source
from torchtitan.runs.compare.tables import Name
from torchtitan.runs.record import RunRecord
from torchtitan.training.config import LRSchedulerConfig
from torchtitan.training.schedules import lr_phase


@dataclass(frozen=True)
class NoiseScale:
    """Noise scale of a run.

    Attributes:
        conclusions: on its batch and its timesteps; none where nothing was logged.
        source: of the picture; "" where there is none.
    """

    name: Name
    conclusions: list[str]
    source: str


def noise_scales(names: Sequence[Name], runs: Sequence[RunRecord]) -> list[NoiseScale]:
    """Noise scales of the runs that have measured one."""
    found = (NoiseScale(name, _conclusions(run), _picture(run)) for name, run in zip(names, runs, strict=True))
    return [one for one in found if one.conclusions or one.source]


def without_noise(runs: Sequence[RunRecord]) -> str:
    """Sentence for a page on which no run has measured single samples."""
    said = "what the gradients of ranks or microbatches give is in metrics.jsonl"
    if runs and all(run.settings.get("gns.enable") and not run.settings.get("gns.single_pass") for run in runs):
        return f"Single samples are not measured: {said}."
    if runs and all(run.settings.get("lora.enable") for run in runs):
        keys = "--gns.enable true --gns.single_pass false --gns.rank_gradients true"
        how = f"{keys}, of two or more processes or microbatches and objective.spread = none"
        return f"Single samples are not measured where adapters train; with {how}, {said}."
    how = "where the objective allows it --gns.enable true measures, from step gns.interval on, and logs at gns.log_interval"
    yet = " yet" if any(run.settings.get("gns.enable") for run in runs) else ""
    of_ranks = f"; {said}" if any("/ranks/" in tag for run in runs for tag in run.tags) else ""
    return f"Nothing measured by single samples{yet} ({how}){of_ranks}."


def _conclusions(run: RunRecord) -> list[str]:
    if not any(tag.endswith("/all/headline") for tag in run.tags) or not run.settings:
        return []
    from torchtitan.gns.conclusion import conclusions  # imports torch

    first_batch = run.settings["training.global_batch_size"]
    logged = (point["global_batch_size"] for point in reversed(run.points) if point.get("global_batch_size"))
    batch = (run.summary or {}).get("grown_batch_size") or next(logged, None) or first_batch
    known = {field.name: run.settings.get(f"lr_scheduler.{field.name}") for field in fields(LRSchedulerConfig)}
    schedule = LRSchedulerConfig(**{name: value for name, value in known.items() if value is not None})

    def phase_at(step: int) -> str:  # as the run's own lines
        changed = run.settings.get("training.double_batch_after") or run.about.get("config_changes")
        return "" if changed else lr_phase(schedule, step, run.settings["training.steps"], first_batch)

    return conclusions(run.points, batch, first_batch, run.settings.get("gns.interval", 1), phase_at)


def _picture(run: RunRecord) -> str:
    try:
        return picture_source(run.folder / GNS_FOLDER / PICTURE_FILE)
    except (OSError, SyntaxError, ValueError):
        return ""
