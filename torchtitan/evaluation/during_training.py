"""Evaluation of a model while it trains: held-out loss, grids of samples, metrics of samples, decoded held-out latents."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from torchtitan.conditions import Condition
from torchtitan.data import DATASETS, DataConfig, Dataset, DatasetInfo, dataset_info
from torchtitan.data.base import Batch
from torchtitan.diffusion.guidance import HEAD, Guide, HeadGuide
from torchtitan.diffusion.objective import Objective
from torchtitan.distributed.mesh import Layout
from torchtitan.evaluation.config import SamplingConfig, ValidationConfig
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices, grid_choices, grid_labels, guidance_text
from torchtitan.evaluation.validation import validation_loss
from torchtitan.models.base import DiffusionModel
from torchtitan.pictures.grids import image_grid, to_rgb
from torchtitan.training.data_loading import num_validation_batches, validation_batches
from torchtitan.training.ema import EMABank

if TYPE_CHECKING:
    from torchtitan.data.online import OnlineEncoder
    from torchtitan.evaluation.decoding import LatentDecoder
    from torchtitan.evaluation.sample_metrics import SampleMetrics
    from torchtitan.fidelity.measurement import Measurement


@dataclass(frozen=True)
class SampleGrid:
    """Grid of samples; first: sample of each row, in its own size."""

    picture: Image.Image
    first: list[Image.Image]
    count: int


@dataclass(frozen=True)
class EvaluatedRun:
    """Evaluated parts of a run; decoder: of latents, where it has an autoencoder; encoder: of images, where it encodes them."""

    model: DiffusionModel
    objective: Objective
    ema: EMABank
    layout: Layout
    data: DataConfig
    info: DatasetInfo
    seed: int
    param_dtype: str
    decoder: "LatentDecoder | None"
    encoder: "OnlineEncoder | None" = None


class Evaluation:
    """Evaluation with the weights of a training and their averages. Every method is collective."""

    def __init__(self, run: EvaluatedRun, sampling: SamplingConfig) -> None:
        self._run, self._sampling = run, sampling
        self._sampler = ImageSampler(run.model, run.objective, run.param_dtype, run.layout.device)

    def validate(
        self, config: ValidationConfig, bin_edges: Tensor, on_unreadable: Callable[..., Any]
    ) -> dict[str, float]:
        """Validate: held-out losses of the trained and of every averaged weight, by tag.

        Args:
            bin_edges: inner edges in t of the bins of `loss_by_bin`.
            on_unreadable: called with every held-out image that cannot be decoded.
        """
        run, layout = self._run, self._run.layout
        dataset = self._held_out()
        count = min(config.num_images, len(dataset))
        metrics: dict[str, float] = {}
        info = run.info if run.encoder is None else dataset_info(run.data)
        for track in ("none", *run.ema.tracks):
            batches: Iterable[Batch] = validation_batches(
                dataset, info, count, config.batch_size, layout.rank, layout.world_size, on_unreadable=on_unreadable
            )
            if run.encoder is not None:
                batches = (run.encoder.held_out(batch, batch["indices"]) for batch in batches)
            batches = tqdm(
                batches, "held-out loss", num_validation_batches(dataset, count, config.batch_size, layout.world_size),
                unit="batch", delay=2, leave=False, disable=None if layout.rank == 0 else True,
            )
            with run.ema.weights(track, run.model):
                losses = validation_loss(
                    run.model, run.objective, batches, count=count, seed=run.seed, bin_edges=bin_edges,
                    param_dtype=run.param_dtype, device=layout.device, sharded=layout.sharded, timesteps=config.timesteps,
                )
            prefix = "validation_metrics" if track == "none" else f"validation_metrics/{track}"
            metrics |= {f"{prefix}/{name}": value for name, value in losses.items()}
        return metrics

    @property
    def row_names(self) -> list[str]:
        """Names of the grid's rows: prompts, or classes; "" each where they have none."""
        kind = self._run.info.condition_kind
        rows = grid_choices(kind.numbers_of(self._sampling.classes), kind.choices, 1).tolist()
        return [kind.choice_names[row] for row in rows] if kind.choice_names else [""] * len(rows)

    def sample_grid(self) -> SampleGrid | None:
        """Draw the grid of samples, a row per condition; on the first rank."""
        config = self._sampling
        kind = self._run.info.condition_kind
        choices = grid_choices(kind.numbers_of(config.classes), kind.choices, config.images_per_class)
        with self._run.ema.weights(config.ema_track, self._run.model):
            images = self._sampler.draw(
                choices, self._run.seed, **self._method(config.guidance_scale), batch_size=config.batch_size,
                sharded=self._run.layout.sharded, progress=self._run.layout.rank == 0 and sys.stderr.isatty(),
            )  # fmt: skip
        if self._run.decoder:
            images = self._run.decoder.decode(images)
        if self._run.layout.rank != 0:
            return None
        rows = choices[:: config.images_per_class].tolist()
        title = guidance_text(config.guidance_scale, kind)  # the animation writes the step
        picture = image_grid(images, len(rows), config.images_per_class, grid_labels(rows, kind), title)
        first = [Image.fromarray(each) for each in to_rgb(images[:: config.images_per_class].numpy())]
        return SampleGrid(picture, first, len(choices))

    def held_out_picture(self) -> Image.Image | None:
        """Picture of decoded held-out latents, which shows whether scale and shift are right; None without a decoder."""
        if self._run.decoder is None or not self._run.info.has_validation:
            return None
        from torchtitan.evaluation.decoding import held_out_picture

        return held_out_picture(self._held_out(), self._run.decoder, self._run.info.class_names, self._run.encoder)

    def measure(self, metrics: "SampleMetrics", guidance_scale: float) -> "Measurement":
        """Metrics of newly drawn samples. Raises EvaluationError, on every rank."""
        from torchtitan.evaluation.sample_metrics import measure_samples

        run, layout, config = self._run, self._run.layout, self._sampling
        choices = balanced_choices(metrics.count, run.info.condition_kind.choices)
        with run.ema.weights(config.ema_track, run.model):
            measurement = measure_samples(
                metrics, self._sampler, choices, run.seed, batch_size=config.batch_size, decoder=run.decoder,
                sharded=layout.sharded, **self._method(guidance_scale),
            )  # fmt: skip
        if layout.device.type == "cuda":  # what extraction needed is training's again
            torch.cuda.empty_cache()
        return measurement

    def _held_out(self) -> Dataset:
        return DATASETS[self._run.data.name](self._run.data, "validation")

    def _method(self, guidance_scale: float) -> dict[str, Any]:
        guidance = dataclasses.replace(self._sampling.guidance, scale=guidance_scale)
        return self._sampling.method() | {"guidance": guidance, "guide": self._guide() if guidance_scale != 1.0 else None}

    def _guide(self) -> Guide | HeadGuide | None:
        """Guide by another track: the same model, with that track's weights in it during each of the guide's forwards."""
        track = self._sampling.guide_track
        if track in ("", HEAD):
            return HeadGuide() if track else None

        def network(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
            with self._run.ema.weights(track, self._run.model):
                return self._run.model(x, time, condition)

        return Guide(network, self._run.objective, conditional=True)

    @torch.no_grad()
    def log_uncertainties(self, bins: int) -> dict[str, float]:
        """Learned ln of the loss in the middle of each of equally likely bins of timesteps, by tag."""
        density = self._run.objective.timestep_sampler.density
        t = density.quantile((torch.arange(bins, dtype=torch.float64) + 0.5) / bins)
        return self._run.objective.log_uncertainties(torch.logit(t).to(self._run.layout.device))
