"""Gradients of an aligned training's two losses at a checkpoint, the flow's and the alignment's, and their noise by timestep bin.

Both are of the same samples, and over the parameters that both reach: those before the aligned block's output. The projector
is left out. Losses are as trained, with the alignment's weight and the average or encoder that teaches.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from research.block_products import BlockProducts
from research.offline_gradients import GradientError, Gradients, TimestepBin
from torchtitan.alignment.alignment import LEARNED, Alignment
from torchtitan.checkpoint.checkpointer import checkpoint_path, read_tensors
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.data import DATASETS
from torchtitan.diffusion.objective import LossTerms
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.precision import compute_context
from torchtitan.training.ema import EMABank
from torchtitan.weights.network import alignment_plan
from torchtitan.weights.trained_model import load_run

# Estimates of a bin: squared norms of both mean gradients, and their product; traces of the covariances of single samples'
# gradients, and of the cross-covariance; cosine, and the product over the flow's squared norm; ln of the noise scale of the
# sum of both gradients over the flow's.
ESTIMATES = ("flow", "align", "product", "flow_noise", "align_noise", "cross_noise", "cosine", "share", "log_ratio")


class AlignedGradients:
    """Mean gradients of blocks of training images, at a checkpoint of a run with alignment.

    Attributes:
        names: of the parameters that both losses reach, once a block has been measured.
    """

    def __init__(self, run: Path, step: int, *, seed: int, device: torch.device) -> None:
        """Open a checkpoint. Raises CheckpointError, WeightsError, ConfigError, DatasetError."""
        trained = load_run(run, "none", step, device)
        config, self.model = trained.config, trained.model
        plan = alignment_plan(config, trained.info)
        assert plan is not None
        self._layout, self._dtype = Layout(config.parallelism, device), config.training.mixed_precision_param
        self.alignment = Alignment(config, plan, self._layout)
        self.alignment.attach(self.model, trained.objective)
        self.ema = EMABank(dict(self.model.named_parameters()), config.ema, config.training.global_batch_size)
        saved = {f"ema.{name}": tensor for name, tensor in self.ema.tensors().items()}
        projector = trained.objective.learned[LEARNED].state_dict()
        saved |= {f"objective.{LEARNED}.{name}": tensor for name, tensor in projector.items()}
        read_tensors(checkpoint_path(run_checkpoints(run), step), saved)
        self.gradients = Gradients(
            self.model, trained.objective, DATASETS[config.data.name](config.data, "train"),
            label_dropout=config.model.label_dropout, horizontal_flip=config.data.horizontal_flip, seed=seed, device=device,
            dtype=self._dtype,
        )  # fmt: skip
        self.names: list[str] = []

    def terms(self, where: TimestepBin, stream: int, numbers: Tensor) -> LossTerms:
        """Losses of samples [N] of a bin: the objective's, and the alignment's beside it."""
        batch, draw = self.gradients.samples(where, stream, numbers)
        numbers = numbers.to(self._layout.device)
        batch = replace(batch, entries={**batch.entries, "samples": numbers})
        self.model.draw_dropout(self.gradients.seed, numbers, stream)
        features = self.alignment.features(batch, draw, stream, self.ema)
        with compute_context(self._dtype, self._layout.device, sharded=False), self.alignment.tapped():
            terms = self.gradients.objective.loss(self.model, batch, draw)
        return self.alignment.added(terms, features, draw)

    def blocks(self, where: TimestepBin, stream: int, count: int, size: int) -> Tensor:
        """Mean gradients of blocks of a bin's samples: of the flow's loss, then of the alignment's, [2, count, P].

        Raises:
            GradientError: one is not finite.
        """
        found = []
        for block in torch.arange(count * size).view(count, size):
            terms = self.terms(where, stream, block)
            assert terms.beside is not None
            losses = terms.loss.mean(), terms.beside.mean()
            if not self.names:
                self._find_shared(losses[1])
            parameters = [self.model.get_parameter(name) for name in self.names]
            parts = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
            found.append(torch.stack([torch.cat([part.flatten() for part in each]) for each in parts]))
        if not all(block.isfinite().all() for block in found):
            raise GradientError("a gradient is not finite")
        return torch.stack(found, 1)

    def _find_shared(self, loss: Tensor) -> None:
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        reached = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        self.names = [name for name, gradient in zip(names, reached, strict=True) if gradient is not None]


def estimates(products: BlockProducts, size: int) -> Tensor:
    """Estimates of each of K bins of equal mass and of the whole range, float64 [len(ESTIMATES), K + 1].

    The whole range's mean gradient is the mean over bins, its covariance that within bins and of the bins' means. A cosine is NaN
    where the estimate of a squared norm is not positive.

    Args:
        products: of blocks of the flow's gradients in K bins, then of the alignment's.
        size: samples of a block.
    """
    bins = len(products.values) // 2
    values, noise = (each.view(2, bins, 2, bins) for each in (products.values, size * products.noise))
    within, spread = (torch.diagonal(each, dim1=1, dim2=3) for each in (values, noise))  # [2, 2, K]
    whole = values.mean((1, 3))
    within_whole = (spread + within).mean(2) - whole
    means, noises = (torch.cat((a, b[..., None]), 2) for a, b in ((within, whole), (spread, within_whole)))
    flow, align, product = means[0, 0], means[1, 1], means[0, 1]
    cross = 0.5 * (noises[0, 1] + noises[1, 0])
    total, total_noise = flow + 2 * product + align, noises[0, 0] + 2 * cross + noises[1, 1]
    log_ratio = (total_noise / total).log() - (noises[0, 0] / flow).log()
    cosine = product / (flow.sqrt() * align.sqrt())
    return torch.stack((flow, align, product, noises[0, 0], noises[1, 1], cross, cosine, product / flow, log_ratio))
