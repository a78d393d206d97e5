"""Sweep over lengths of a weight average: each is reconstructed from a run's snapshots and scored."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.sampling_checks import data_text
from torchtitan.data import DATASETS
from torchtitan.distributed.collectives import from_first_rank, group_for_work
from torchtitan.evaluation.decoding import run_decoder
from torchtitan.evaluation.image_sets import DatasetImages
from torchtitan.evaluation.sample_metrics import SampleMetrics
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices
from torchtitan.evaluation.validation import validation_loss
from torchtitan.fidelity.metrics import METRICS
from torchtitan.files.weight_files import WeightsError
from torchtitan.pictures.grids import to_rgb
from torchtitan.runs.guides import open_guide
from torchtitan.runs.post_hoc_ema import MAX_ERROR, StoredAverages, reconstruct, stored_averages
from torchtitan.runs.trained_model import TrainedModel, empty_trained_model, fill_reconstructed
from torchtitan.training.data_loading import validation_batches

LOSS = "loss"


def sweep(
    run: Path, stds: Sequence[float], metric: str, device: torch.device, *, step: int | None = None,
    images: int | None = None, guidance_scale: float | None = None, guide: str | None = None,
    max_error: float = MAX_ERROR, ignore_gaps: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Score averages of several lengths on the same images and noise; collective.

    Args:
        stds: lengths.
        metric: LOSS, or a value of the metrics of the run's `[evaluation]`, as "fid".
        step: of the last snapshot; None for the newest.
        images: held-out images, or samples; None: those of `[validation]` or `[evaluation]`.
        guidance_scale, guide: of samples, the guide as in `open_guide`; None: those of the run.
        max_error: largest profile error that is accepted.
        ignore_gaps: do without missing or damaged snapshots.

    Yields:
        notes, a line per length in the order of `stds`, and the best length.

    Raises:
        SnapshotError, WeightsError, ConfigError, DatasetError, EvaluationError.
    """
    trained = empty_trained_model(run, device)
    better = _known_metrics(trained)
    if metric not in better:
        there = ", ".join(better) or "none: no images are held out, and [evaluation] is not enabled"
        raise WeightsError(f"--metric: {data_text(trained.config.data)} has no {metric!r} (there are: {there})")
    if images is not None and images < 1:
        raise WeightsError(f"--images: must be at least 1, is {images}")
    stored: StoredAverages = from_first_rank(stored_averages, run, step, (), ignore_gaps)
    found = [reconstruct(stored, std, max_error) for std in stds]
    trained = dataclasses.replace(trained, step=stored.last.step)
    if metric == LOSS:
        for name, value in (("--guidance-scale", guidance_scale), ("--guide", guide)):
            if value is not None:
                raise WeightsError(f"{name}: has no effect on held-out loss (leave it out)")
        score: Callable[[], float] = partial(_held_out_loss, trained, images, device)
    else:
        score = _sample_score(run, trained, metric, images, guidance_scale, guide, device)
    yield from (f"note: {line}" for line in [*stored.notes, *found[0].warnings])
    values = []
    for each in found:
        fill_reconstructed(trained, each)
        values.append(score())
        yield f"{metric} {values[-1]:.6g}: {each.describe()}"
    best = min(range(len(values)), key=lambda n: values[n] if better[metric] == "lower" else -values[n])
    yield f"best: std {found[best].std:g}"


def _known_metrics(trained: TrainedModel) -> dict[str, str]:
    """Metrics that a run can be measured by, and the direction in which each is better."""
    evaluation = trained.config.evaluation
    known = {LOSS: "lower"} if trained.info.has_validation else {}
    for name in evaluation.metrics if evaluation.enable else ():
        known |= {value: better for value, better in METRICS[name].better.items() if better}
    return known


def _held_out_loss(trained: TrainedModel, images: int | None, device: torch.device) -> float:
    config = trained.config
    dataset = DATASETS[config.data.name](config.data, "validation")
    count = min(images or config.validation.num_images, len(dataset))
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches = validation_batches(dataset, trained.info, count, config.validation.batch_size, rank, ranks)
    losses = validation_loss(
        trained.model, trained.objective, batches, count=count, seed=config.debug.seed,
        bin_edges=torch.empty(0, device=device), param_dtype="float32", device=device, sharded=False,
        timesteps=config.validation.timesteps,
    )  # fmt: skip
    return losses[LOSS]


def _sample_score(
    run: Path, trained: TrainedModel, metric: str, images: int | None, guidance_scale: float | None, guide: str | None,
    device: torch.device,
) -> Callable[[], float]:  # fmt: skip
    """Function that draws samples with the present weights and returns their metric; collective."""
    config, sampling = trained.config, trained.config.sampling
    measured = [name for name in config.evaluation.metrics if metric in METRICS[name].better]
    evaluation = dataclasses.replace(config.evaluation, metrics=measured, count=images or config.evaluation.count)
    scale = evaluation.guidance_scale if guidance_scale is None else guidance_scale
    opened = open_guide(guide, run, None, trained, scale, device)
    method = sampling.method() | {
        "guidance": dataclasses.replace(sampling.guidance, scale=scale), "guide": opened.guide if opened else None,
    }  # fmt: skip
    decoder = run_decoder(config.autoencoder, config.data, draws_pictures=True)
    open_split = partial(DatasetImages, config.data, trained.info)
    metrics = SampleMetrics(evaluation, device, None, group_for_work(), open_split)
    sampler = ImageSampler(trained.model, trained.objective, "float32", device)
    choices = balanced_choices(metrics.count, trained.info.condition_kind.choices)

    def score() -> float:
        with (
            sampler.drawing(config.debug.seed, purpose="evaluation", **method) as draw_batch,
            decoder.on_device() if decoder else nullcontext(),
        ):

            def draw(numbers: Tensor) -> tuple[np.ndarray, int]:
                drawn = draw_batch(choices[numbers], numbers)
                drawn = decoder.decode_alone(drawn) if decoder else drawn.cpu()
                return to_rgb(drawn.numpy()), int((~drawn.isfinite()).flatten(1).any(dim=1).sum())

            features = metrics.extract(draw, sampling.batch_size)
        return metrics.measure(features).values[metric].value

    return score
