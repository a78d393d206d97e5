"""Evaluation of a run: its samples as a set in the run's folder, the origin of them, and its TensorBoard."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.evaluation.sample_plans import SetPlan
from torchtitan.evaluation.sample_sets import SampleSet, draw_set
from torchtitan.fidelity.images import ImageSet, open_images
from torchtitan.runs.evaluated import drawn_text
from torchtitan.runs.ownership import CONFIG_FILE
from torchtitan.sampling.setup import SamplingSetup, beside
from torchtitan.training.metric_sinks import TensorBoardFile


def is_run(folder: Path) -> bool:
    """Check whether a folder is a run's, by its configuration."""
    return (folder / CONFIG_FILE).is_file()


def draw_samples(setup: SamplingSetup, plan: SetPlan, group: dist.ProcessGroup | None, progress: bool = False) -> ImageSet:
    """Draw the set of a plan, or what is missing of it, and open its images; collective.

    The set's folder is named by a hash of its plan, so that sets of other methods and weights are beside one another.

    Raises:
        SampleSetError, Busy, EvaluationError: on every rank.
        SampleNotFinite, OSError: on the rank where it happens.
    """
    record = json.dumps(plan.record(), sort_keys=True).encode()
    folder = beside(setup.source, "sets") / hashlib.sha256(record).hexdigest()[:12]
    draw_set(SampleSet(folder, plan), setup.sampler(), setup.method(), setup.decoder, group, progress)
    return open_images(folder)


def origin(setup: SamplingSetup) -> dict[str, Any]:
    """Origin of drawn samples, for their record: the run's name, step and EMA track."""
    trained = setup.trained
    name = trained.config.job.name if setup.source.is_dir() else setup.source.name
    return {"run": name, "step": trained.step, "ema_track": trained.track or None, "weights": trained.label}


def log_scalars(run: Path, step: int, values: Mapping[str, float], samples: dict[str, Any]) -> None:
    """Log values to the run's TensorBoard, as `evaluation/NAME (HOW)`, HOW by the record of the samples."""
    how = drawn_text(samples)
    file = TensorBoardFile(run / "tb", steps_done=None)
    file.add_scalars(step, {f"evaluation/{name} ({how})": value for name, value in values.items()})
    file.sync()
    file.close()
