"""Sweep over lengths of a weight average: each is reconstructed from a run's snapshots and scored."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from torchtitan.checkpoint.manifest import MANIFEST, hash_file, read_json
from torchtitan.config.sampling_checks import data_text
from torchtitan.data import DATASETS
from torchtitan.diffusion.guidance import Guide
from torchtitan.distributed.collectives import from_first_rank, group_for_work
from torchtitan.errors import DamagedFile, EvaluationError, first_line
from torchtitan.evaluation.config import LATENT_DATASETS
from torchtitan.evaluation.decoding import run_decoder
from torchtitan.evaluation.image_sets import DatasetImages
from torchtitan.evaluation.sample_metrics import SampleMetrics, measure_samples
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices
from torchtitan.evaluation.validation import validation_loss
from torchtitan.fidelity.metrics import METRICS
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.run_lock import Busy, RunLock
from torchtitan.files.weight_files import WeightsError
from torchtitan.runs.ema_sweep_chart import draw_sweep
from torchtitan.runs.guides import LoadedGuide, open_guide
from torchtitan.runs.post_hoc_ema import MAX_ERROR, Reconstruction, StoredAverages, reconstruct, stored_averages
from torchtitan.runs.trained_model import TrainedModel, empty_trained_model, fill_reconstructed
from torchtitan.training.data_loading import validation_batches
from torchtitan.training.ema_snapshots import EMA_FOLDER

LOSS = "loss"


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep; None stands for the run's own value.

    Attributes:
        stds: lengths, rising.
        metric: LOSS, or one of METRICS, by the extractor and the reference of the run's `[evaluation]`.
        images: held-out images, or samples.
        batch_size: images at a time on each rank.
        guidance_scale, num_steps: of the samples.
        guide: `RUN[@step][:track]` of their guidance, "none" for the null condition.
        seed: of noise and timesteps.
        max_error: largest profile error that is accepted.
    """

    stds: tuple[float, ...]
    metric: str = LOSS
    images: int | None = None
    batch_size: int = 256
    guidance_scale: float | None = None
    num_steps: int | None = None
    guide: str | None = None
    seed: int | None = None
    max_error: float = MAX_ERROR


def sweep(
    run: Path, step: int | None, options: SweepOptions, output: Path | None, ignore_gaps: bool, device: torch.device
) -> Iterator[str]:
    """Score averages of several lengths; collective.

    The record is written after each length: a sweep that was stopped resumes, and more lengths may be added later.

    Args:
        run: the run's folder.
        step: of the last snapshot; None for the newest.
        options: lengths and their scoring.
        output: JSON file of the record, its picture beside it; None: in the run's folder.
        ignore_gaps: do without missing or damaged snapshots.
        device: of the model.

    Yields:
        lines for the user.

    Raises:
        SnapshotError, WeightsError, ConfigError, DatasetError: nothing was written.
        Busy: another process writes the record.
    """
    trained = empty_trained_model(run, device)
    options = _resolved(options, trained)
    stored: StoredAverages = from_first_rank(stored_averages, run, step, (), ignore_gaps)
    found = [reconstruct(stored, std, options.max_error) for std in options.stds]
    trained = dataclasses.replace(trained, step=stored.last.step)
    scale = _given(options.guidance_scale, 1.0)
    guide = open_guide(options.guide, run, None, trained, scale, device)
    metrics = None if options.metric == LOSS else _sample_metrics(trained, options, device)
    output = output or run / EMA_FOLDER / f"sweep-step-{stored.last.step:08d}-{options.metric}.json"
    record = SweepRecord(output, _settings(run, stored, options, trained, guide))
    with _locked(output):
        from_first_rank(record.open)
        record.scores = from_first_rank(lambda: record.scores)
        yield from (f"note: {line}" for line in [*stored.notes, *(found[0].warnings if found else [])])
        left = [each for each in found if each.std not in record.scores]
        first = not dist.is_initialized() or dist.get_rank() == 0
        hidden = None if first else True  # None: where stderr is no terminal
        for each in tqdm(left, desc=f"{options.metric} by length", unit="length", file=sys.stderr, disable=hidden):
            fill_reconstructed(trained, each)
            record.add(each, _score(trained, options, device, guide.guide if guide else None, metrics))
        from_first_rank(record.draw)
    yield from record.lines()
    yield str(output)
    yield str(record.picture)


class SweepRecord:
    """Record of a sweep in a JSON file, written by the first rank.

    Attributes:
        picture: file of the chart.
        scores: length -> scores by name.
    """

    def __init__(self, path: Path, settings: dict) -> None:
        """settings: whatever the scores depend on besides the length."""
        self.picture = path.with_suffix(".png")
        self.scores: dict[float, dict[str, float]] = {}
        self._path, self._settings = path, settings

    def open(self) -> None:
        """Read the lengths that are finished. Raises WeightsError: the file is that of something else, or is damaged."""
        if self._path.suffix != ".json":
            raise WeightsError(f"{self._path}: must end in .json, the format of the record")
        if not self._path.exists():
            if self.picture.exists():
                raise WeightsError(f"{self.picture}: exists already, without its record (give another --output)")
            return
        try:
            content = read_json(self._path, dict)
            settings = content["settings"]
            lengths = [{name: float(value) for name, value in entry.items()} for entry in content["lengths"]]
            scores = {entry.pop("std"): entry for entry in lengths}
        except (DamagedFile, KeyError, TypeError, ValueError, AttributeError) as error:
            raise WeightsError(f"{self._path}: is no record of a sweep (give another --output)") from error
        if other := [name for name in {**settings, **self._settings} if settings.get(name) != self._settings.get(name)]:
            was, now = settings.get(other[0]), self._settings.get(other[0])
            raise WeightsError(
                f"{self._path}: is the record of a sweep with {other[0]} = {was} instead of {now} (give another --output)"
            )
        if any(self._settings["metric"] not in entry for entry in scores.values()):
            raise WeightsError(f"{self._path}: is damaged: scores are missing (give another --output)")
        self.scores = scores

    def add(self, found: Reconstruction, scores: dict[str, float]) -> None:
        """Add a length and write the record; on every rank."""
        accuracy = {
            "profile_error": found.combination.error, "sum_of_coefficient_magnitudes": found.combination.magnitude
        }
        self.scores[found.std] = scores | accuracy
        from_first_rank(self._write)

    def best(self) -> float:
        """Length with the best score."""
        sign = 1 if self._settings["better"] == "lower" else -1
        return min(self.scores, key=lambda std: sign * self.scores[std][self._settings["metric"]])

    def lines(self) -> Iterator[str]:
        """Describe each length in a line."""
        metric, best = self._settings["metric"], self.best()
        for std, scores in sorted(self.scores.items()):
            error, magnitude = scores["profile_error"], scores["sum_of_coefficient_magnitudes"]
            accuracy = f"profile error {error:.3g}, sum of |coefficients| {magnitude:.3g}"
            yield f"std {std:g}: {metric} {scores[metric]:.6g}, {accuracy}{' (best)' if std == best else ''}"

    def draw(self) -> None:
        """Draw the chart. Raises WeightsError: it cannot be written."""
        try:
            draw_sweep(self.picture, self._settings, dict(sorted(self.scores.items())), self.best())
        except OSError as error:
            raise WeightsError(f"{self.picture}: cannot be written: {first_line(error)}") from error

    def _write(self) -> None:
        lengths = [{"std": std, **scores} for std, scores in sorted(self.scores.items())]
        content = {"settings": self._settings, "best_std": self.best(), "lengths": lengths}
        try:
            replace_file(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise WeightsError(f"{self._path}: cannot be written: {first_line(error)}") from error


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Lock the record against other processes; on the first rank, for all. Raises Busy, WeightsError."""
    lock = RunLock(output.parent, f".{output.name}.lock")

    def take() -> None:
        try:
            make_folder(output.parent)
            owner = lock.acquire()
        except OSError as error:
            raise WeightsError(f"{output}: cannot be written: {first_line(error)}") from error
        if owner:
            raise Busy(output, owner, "give another --output")

    from_first_rank(take)
    try:
        yield
    finally:
        lock.release()


def _resolved(options: SweepOptions, trained: TrainedModel) -> SweepOptions:
    """Options with the run's values. Raises WeightsError: the metric cannot be measured."""
    data, sampling, validation = trained.config.data, trained.config.sampling, trained.config.validation
    if options.metric not in (LOSS, *METRICS):
        raise WeightsError(f"--metric: no metric is called {options.metric[:40]!r} (there are: {', '.join((LOSS, *METRICS))})")
    if options.metric == LOSS and not trained.info.has_validation:
        raise WeightsError(f"--metric: {data_text(data)} holds out no images for a loss (give one of {', '.join(METRICS)})")
    loss = options.metric == LOSS
    held_out = len(DATASETS[data.name](data, "validation")) if loss else 0
    if loss and (given := [name for name in ("guidance_scale", "num_steps", "guide") if getattr(options, name) is not None]):
        raise WeightsError(f"--{given[0].replace('_', '-')}: has no effect on held-out loss (leave it out)")
    resolved = dataclasses.replace(
        options,
        images=min(_given(options.images, validation.num_images), held_out) if loss
        else _given(options.images, trained.config.evaluation.count),
        guidance_scale=None if loss else _given(options.guidance_scale, sampling.guidance_scale),
        num_steps=None if loss else _given(options.num_steps, sampling.num_steps),
        seed=_given(options.seed, trained.config.debug.seed),
    )
    for name in ("images", "batch_size", *(() if loss else ("num_steps",))):
        if getattr(resolved, name) < 1:
            raise WeightsError(f"--{name.replace('_', '-')}: must be at least 1, is {getattr(resolved, name)}")
    if not 0 <= (resolved.seed or 0) < 2**64:
        raise WeightsError(f"--seed: must be in 0..2^64 - 1, is {resolved.seed}")
    return resolved


def _settings(
    run: Path, stored: StoredAverages, options: SweepOptions, trained: TrainedModel, guide: LoadedGuide | None
) -> dict:
    """Settings of the scores: a record of others is not continued."""
    reference = options.guide or f":{trained.config.sampling.guide_track}"
    metric, better = (LOSS, "lower") if options.metric == LOSS else next(iter(METRICS[options.metric].better.items()))
    snapshots = {str(snapshot.step): hash_file(snapshot.path / MANIFEST)[:16] for snapshot in stored.snapshots}
    return {
        "run": run.resolve().name, "step": stored.last.step, "images_trained": stored.last.images, "metric": metric,
        "better": better, "images": options.images, "seed": options.seed, "guidance_scale": options.guidance_scale,
        "num_steps": options.num_steps, "guide": f"{reference}, {guide.model.label}" if guide else None,
        "tracks": {name: stored.last.tracks[name] for name in stored.tracks}, "snapshots": snapshots,
    }  # fmt: skip


def _score(
    trained: TrainedModel, options: SweepOptions, device: torch.device, guide: Guide | None, metrics: SampleMetrics | None
) -> dict[str, float]:
    """Scores of the present weights; collective."""
    if metrics is None:
        return _held_out_loss(trained, options, device)
    sampling = trained.config.sampling
    choices = balanced_choices(metrics.count, trained.info.condition_kind.choices)
    guidance = dataclasses.replace(sampling.guidance, scale=_given(options.guidance_scale, 1.0))
    method = sampling.method() | {"guidance": guidance, "num_steps": options.num_steps, "guide": guide}
    sampler = ImageSampler(trained.model, trained.objective, "float32", device)
    decoder = run_decoder(trained.config.autoencoder, trained.config.data, draws_pictures=True)
    found = measure_samples(
        metrics, sampler, choices, options.seed or 0, batch_size=options.batch_size, decoder=decoder, **method
    )
    return {name: interval.value for name, interval in found.values.items()}


def _sample_metrics(trained: TrainedModel, options: SweepOptions, device: torch.device) -> SampleMetrics:
    """Metrics by the run's `[evaluation]`; collective. Raises WeightsError: they cannot be measured."""
    data, info, metric = trained.config.data, trained.info, METRICS[options.metric]
    evaluation = dataclasses.replace(trained.config.evaluation, metrics=[options.metric], count=options.images or 0)
    evaluation.reference = evaluation.reference if metric.reference else ""
    evaluation.held_out = evaluation.held_out if metric.needs_held_out else ""
    latents = data.name in LATENT_DATASETS
    if latents and trained.config.autoencoder.name == "none":
        raise WeightsError(f"--metric: {data_text(data)} has latents, and metrics are of images (set autoencoder.name)")
    size = None if latents else info.image_shape[1:]
    try:
        return SampleMetrics(evaluation, device, size, group_for_work(), partial(DatasetImages, data, info), info.num_classes)
    except EvaluationError as error:
        raise WeightsError(f"--metric {options.metric}: {error}") from error


def _held_out_loss(trained: TrainedModel, options: SweepOptions, device: torch.device) -> dict[str, float]:
    dataset = DATASETS[trained.config.data.name](trained.config.data, "validation")
    count = options.images or 0
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches = validation_batches(dataset, trained.info, count, options.batch_size, rank, ranks)
    losses = validation_loss(
        trained.model, trained.objective, batches, count=count, seed=options.seed or 0,
        bin_edges=torch.empty(0, device=device), param_dtype="float32", device=device, sharded=False,
        timesteps=trained.config.validation.timesteps,
    )  # fmt: skip
    return {name: value for name, value in losses.items() if name in (LOSS, "loss_stderr")}


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
