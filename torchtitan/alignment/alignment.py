"""Alignment of a network's tokens with a teacher's features: a term of the loss beside any objective's.

    loss = importance x (the objective's + weight x cosine_loss(projector(tokens behind block k), features))

A teacher is a frozen encoder of the clean images (REPA: Yu et al., arXiv 2410.06940), also as a store of its features, or the
run's own average at a lower time, on the same image, noise and condition (SRA: Jiang et al., arXiv 2505.02831). The term may
end after some steps (HASTE: Wang et al., arXiv 2505.16792). No held-out loss has it, and samplers that learn from losses do
not see it.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.alignment.dual_times import lowered, with_second_time
from torchtitan.alignment.loss import cosine_loss, spatially_normalised
from torchtitan.alignment.plan import Plan, open_encoder
from torchtitan.alignment.tap import Tap
from torchtitan.data.base import FEATURES, PIXELS
from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch, Objective
from torchtitan.diffusion.paths import indexed, per_image
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.precision import compute_context
from torchtitan.models.base import DiffusionModel
from torchtitan.training.ema import EMABank

LEARNED = "alignment"  # the projector's name in `Objective.learned`
DIAGNOSTIC = "alignment_loss"
# Most that the average's time lies below the network's. Source: SRA's code.
LARGEST_GAP = 0.2


class Alignment:
    """Alignment of a run. Its projector is learned with the objective: whole on every rank, and in checkpoints.

    Attributes:
        steps: aligned steps, each of the first batch size.
    """

    diagnostics = (DIAGNOSTIC,)

    def __init__(self, job: Any, plan: Plan, layout: Layout) -> None:
        """job: the run's JobConfig. Raises ConfigError: the encoder's weights cannot be read."""
        training, self._config, self._plan = job.training, job.alignment, plan
        self.steps = self._config.steps(training.steps, training.global_batch_size)
        self._dtype, self._layout = training.mixed_precision_param, layout
        self._encoder = open_encoder(self._config, layout.device) if self._config.encodes_images else None
        self.flops_per_image = plan.flops_per_image(training.steps, training.global_batch_size)

    def introduction(self) -> str:
        """Line that the console shows at the start of a run, but for the end."""
        config = self._config
        teacher = f'block {config.teacher_block} of the average "{config.track}"' if config.teacher == "self" else config.teacher
        teacher = "stored features" if config.teacher == "stored" else teacher
        second = f", {100 * config.dual_share:.3g} % of the tokens at a second time" if config.dual_share else ""
        return f"alignment: block {config.block} with {teacher}, weight {config.weight:g}{second}"

    def attach(self, model: DiffusionModel, objective: Objective) -> None:
        """Attach to a run's network, wrapped for its layout, and draw the projector from the seed, alike on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(objective.seed)
            self._projector = self._plan.projector().to(self._layout.device)
        objective.learned[LEARNED] = self._projector
        self._model, self._objective = model, objective
        self._student = Tap(model, self._plan.student.point)
        self._teacher = Tap(model, self._plan.teacher.point) if self._plan.teacher is not None else None

    def lasts(self, progress: int) -> bool:
        """Whether the step after `progress` steps of the first batch size is aligned."""
        return progress < self.steps

    def left_out(self, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of an objective by name, without the projector's."""
        return {name: tensor for name, tensor in learned.items() if not name.startswith(f"{LEARNED}.")}

    def drawn(self, draw: Draw, samples: Tensor, attempt: int) -> Draw:
        """Draw of an aligned microbatch of sample numbers [B]: with a second time in each image, if there is one."""
        if not self._config.dual_share:
            return draw
        return with_second_time(draw, self._objective, samples, attempt, self._config.dual_share, self._plan.student.grid)

    @torch.no_grad()
    def features(self, batch: Microbatch, draw: Draw, attempt: int, ema: EMABank) -> Tensor:
        """Features [B, T, C] of a microbatch, before its forward; the average's are collective where it is sharded.

        Args:
            attempt: of the samples, which changes after a rollback.
        """
        if self._encoder is not None:
            with self._autocast(sharded=False):
                features = self._encoder(batch.entries.get(PIXELS, batch.images), self._plan.student.grid)
        elif self._plan.teacher is None:
            features = batch.entries[FEATURES].flatten(2).transpose(1, 2)
        else:
            features = self._of_average(batch, draw, attempt, ema)
        gamma = self._config.spatial_norm
        return features if gamma is None else spatially_normalised(features, gamma)

    def tapped(self) -> AbstractContextManager:
        """Context of the objective's loss, in which the network's tokens are kept."""
        return self._student.taken(grad=True)

    def added(self, terms: LossTerms, features: Tensor | None, draw: Draw) -> LossTerms:
        """Add the term, and its mean over an image's tokens as a diagnostic; features: None after the end, which logs 0."""
        loss = torch.zeros_like(terms.loss)
        if features is not None:
            with self._autocast(sharded=False):
                projected = self._projector(self._student.tokens())
            loss = cosine_loss(projected, features)
            term = draw.importance * self._config.weight * loss
            terms = replace(terms, beside=term if terms.beside is None else terms.beside + term)
        return replace(terms, diagnostics={**terms.diagnostics, DIAGNOSTIC: loss.detach()})

    def _of_average(self, batch: Microbatch, draw: Draw, attempt: int, ema: EMABank) -> Tensor:
        """Tokens of the average at time max(t - u LARGEST_GAP, 0), u uniform; on a path in steps, at the nearest one."""
        assert self._teacher is not None
        path, images = self._objective.path, batch.images
        numbers = batch.entries["samples"]
        first, second = (  # of either group of tokens
            LARGEST_GAP * philox.uniform(self._objective.seed, "alignment", each, attempt).to(draw.t)
            for each in (numbers, numbers + (1 << 41))
        )
        t = lowered(draw, first, second)
        if path.discrete:
            t = indexed(path).index_to_t(indexed(path).t_to_index(t)).to(draw.t)
        a, b = path.coefficients(per_image(t, images))
        inputs, time, *_ = self._objective.network_inputs(a * images + b * draw.noise, t)
        with (
            ema.weights(self._config.track, self._model), _in_eval_mode(self._model),
            self._autocast(self._layout.sharded), self._teacher.taken(grad=False),
        ):  # fmt: skip
            self._model(inputs, time, batch.condition)
        return self._teacher.tokens().clone()  # a block that is replayed as a CUDA graph overwrites its output

    def _autocast(self, sharded: bool) -> AbstractContextManager:
        return compute_context(self._dtype, self._layout.device, sharded)


@contextmanager
def _in_eval_mode(model: DiffusionModel) -> Iterator[None]:
    """Nothing is dropped in here."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
