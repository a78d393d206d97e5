"""Evaluation of a run: its samples as a set in the run's folder, the origin of them, and its TensorBoard."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.evaluation.sample_plans import SetPlan
from torchtitan.evaluation.sample_sets import SampleSet, draw_set
from torchtitan.fidelity.images import ImageSet, open_images
from torchtitan.runs.evaluated import is_number, measured_so
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
    """Origin of drawn samples, for their record: the run's name, step and EMA track, and the run of a guide from elsewhere."""
    trained = setup.trained
    name = trained.config.job.name if setup.source.is_dir() else setup.source.name
    guide = {"guide": setup.guide.run} if setup.guide and setup.guide.run else {}
    return {"run": name, "step": trained.step, "ema_track": trained.track or None, "weights": trained.label, **guide}


def log_scalars(run: Path, step: int, entry: dict[str, Any]) -> None:
    """Log the finite values of an entry of evaluation.json to the run's TensorBoard, as `evaluation/NAME (HOW)`."""
    values = {
        f"evaluation/{name} ({how})": value["value"]
        for how, found in measured_so(entry) for name, value in found.items() if is_number(value["value"])
    }  # fmt: skip
    file = TensorBoardFile(run / "tb", steps_done=None)
    file.add_scalars(step, values)
    file.sync()
    file.close()
