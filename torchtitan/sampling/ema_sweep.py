"""Sweep over lengths of a weight average: each is reconstructed from a run's snapshots and scored."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config.latent_cache import store_of_latents
from torchtitan.config.sampling_checks import data_text
from torchtitan.data import DATASETS, DatasetInfo, dataset_info
from torchtitan.distributed.collectives import from_first_rank, group_for_work
from torchtitan.errors import CheckpointError, EvaluationError
from torchtitan.evaluation.config import EvaluationConfig
from torchtitan.evaluation.dataset_images import DatasetImages
from torchtitan.evaluation.decoding import run_decoder
from torchtitan.evaluation.sample_metrics import SampleMetrics, measure_samples
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices
from torchtitan.evaluation.validation import validation_loss
from torchtitan.fidelity.metrics import METRICS
from torchtitan.files.weight_files import WeightsError
from torchtitan.pictures.number_text import counted
from torchtitan.sampling.guides import open_guide
from torchtitan.training.data_loading import validation_batches
from torchtitan.weights.post_hoc_ema import MAX_ERROR, StoredAverages, reconstruct, stored_averages
from torchtitan.weights.trained_model import TrainedModel, empty_trained_model, fill_reconstructed

LOSS = "loss"


def sweep(
    run: Path, stds: Sequence[float], metric: str, device: torch.device, *, step: int | None = None,
    images: int | None = None, guidance_scale: float | None = None, guide: str | None = None,
    extractor: str | None = None, reference: str | None = None, max_error: float = MAX_ERROR,
    ignore_gaps: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Score averages of several lengths on the same images and noise; collective.

    Args:
        metric: LOSS, or one of METRICS.
        images: held-out images, or samples; None: those of `[validation]` or `[evaluation]`.
        guidance_scale, guide: of samples, the guide as in `open_guide`; None: those of the run.
        extractor, reference: of METRICS, as in `[evaluation]`; None: those of the run.

    Yields:
        notes, a line per length in the order of `stds`, and the best length.

    Raises:
        SnapshotError, WeightsError, ConfigError, DatasetError, EvaluationError.
    """
    trained = empty_trained_model(run, device)
    if metric not in (LOSS, *METRICS):
        raise WeightsError(f"--metric: no metric is called {metric[:40]!r} (there are: {', '.join((LOSS, *METRICS))})")
    if images is not None and images < 1:
        raise WeightsError(f"--images: must be at least 1, is {images}")
    stored: StoredAverages = from_first_rank(stored_averages, run, step, (), ignore_gaps)
    found = [reconstruct(stored, std, max_error) for std in stds]
    trained = dataclasses.replace(trained, step=stored.last.step)
    name, better = LOSS, "lower"
    if metric == LOSS:
        of_samples = {"guidance-scale": guidance_scale, "guide": guide, "extractor": extractor, "reference": reference}
        for option, value in of_samples.items():
            if value is not None:
                raise WeightsError(f"--{option}: has no effect on held-out loss (leave it out)")
        if not trained.info.has_validation:
            text = f"{data_text(trained.config.data)} holds out no images for a loss"
            raise WeightsError(f"--metric: {text} (give one of {', '.join(METRICS)})")
        score = _loss_score(trained, images, device)
    else:
        name, better = next((name, better) for name, better in METRICS[metric].better.items() if better)
        changed = {"extractor": extractor, "reference": reference, "count": images, "guidance_scale": guidance_scale}
        given: dict[str, Any] = {key: value for key, value in changed.items() if value is not None}
        evaluation = dataclasses.replace(trained.config.evaluation, metrics=[metric], **given)
        score = _sample_score(run, trained, evaluation, guide, device)
        yield f"note: {name} of {evaluation.count:,} samples each, without intervals: a small difference may be chance"
    yield from (f"note: {line}" for line in [*stored.notes, *found[0].warnings])
    values = []
    for each in found:
        fill_reconstructed(trained, each)
        values.append(score()[name])
        yield f"{name} {values[-1]:.6g}: {each.describe()}"
    best = min(range(len(values)), key=lambda n: values[n] if better == "lower" else -values[n])
    at_end = [word for word, end in (("shortest", min(stds)), ("longest", max(stds))) if len(stds) > 1 and stds[best] == end]
    equal = values.count(values[best]) - 1
    ties = f" ({counted(equal, 'other length')} equal)" if equal else ""
    yield f"best: std {found[best].std:g}" + (f", the {at_end[0]} that was tried" if at_end else "") + ties


def _loss_score(trained: TrainedModel, images: int | None, device: torch.device) -> Callable[[], Mapping[str, float]]:
    """Function that measures the held-out loss with the present weights; collective."""
    config, encoder = trained.config, None
    if config.autoencoder.encode:
        from torchtitan.data.online import OnlineEncoder

        encoder = OnlineEncoder(config.autoencoder, config.debug.seed, device, keeps_pixels=False)
    dataset = DATASETS[config.data.name](config.data, "validation")
    count = min(images or config.validation.num_images, len(dataset))
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def score() -> Mapping[str, float]:
        batches = validation_batches(dataset, _images_of(trained), count, config.validation.batch_size, rank, ranks)
        if encoder is not None:
            batches = (encoder.held_out(batch, batch["indices"]) for batch in batches)
        return validation_loss(
            trained.model, trained.objective, batches, count=count, seed=config.debug.seed,
            bin_edges=torch.empty(0, device=device), param_dtype="float32", device=device, sharded=False,
            timesteps=config.validation.timesteps,
        )  # fmt: skip

    return score


def _images_of(trained: TrainedModel) -> DatasetInfo:
    """Properties of the data as they are read, before a run encodes them."""
    return dataset_info(trained.config.data) if trained.config.autoencoder.encode else trained.info


def _sample_score(
    run: Path, trained: TrainedModel, evaluation: EvaluationConfig, guide: str | None, device: torch.device
) -> Callable[[], Mapping[str, float]]:
    """Function that draws samples with the present weights and measures them; collective."""
    (metric,), scale = evaluation.metrics, evaluation.guidance_scale
    config, info, sampling, kind = trained.config, trained.info, trained.config.sampling, METRICS[metric]
    evaluation.reference = evaluation.reference if kind.reference else ""
    evaluation.held_out = evaluation.held_out if kind.needs_held_out else ""
    try:
        opened = open_guide(guide, run, None, trained, scale, device)
    except CheckpointError as error:
        if guide or not sampling.guide_track:
            raise
        advice = "give --guide :std=S, an average from snapshots, or --guide none"
        raise WeightsError(f"sampling.guide_track = {sampling.guide_track}: {error} ({advice})") from error
    method = sampling.method() | {
        "guidance": dataclasses.replace(sampling.guidance, scale=scale), "guide": opened.guide if opened else None,
    }  # fmt: skip
    if trained.record.latents and config.autoencoder.name == "none":
        text = f"{data_text(config.data)} has latents, and metrics are of images"
        raise WeightsError(f"--metric: {text} (leave it out: averages are compared by their loss)")
    decoder = run_decoder(config.autoencoder, store_of_latents(config))
    size = None if trained.record.latents else info.image_shape[1:]
    try:
        open_split = partial(DatasetImages, config.data, _images_of(trained))
        metrics = SampleMetrics(evaluation, device, size, group_for_work(), open_split, info.num_classes)
    except EvaluationError as error:
        text = str(error).replace("evaluation.extractor", "--extractor").replace("evaluation.reference", "--reference")
        raise WeightsError(f"--metric {metric}: {text}") from error
    sampler = ImageSampler(trained.model, trained.objective, "float32", device)
    choices = balanced_choices(metrics.count, info.condition_kind.choices)

    def score() -> Mapping[str, float]:
        found = measure_samples(
            metrics, sampler, choices, config.debug.seed, batch_size=sampling.batch_size, decoder=decoder, **method
        )
        return {name: interval.value for name, interval in found.values.items()}

    return score
