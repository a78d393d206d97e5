"""What the ranks of test_rank_monitor run; see tests.launcher."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.cases import make_trainer, remove, shared_folder
from torchtitan.diffusion.objective import Microbatch
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.models import build_model
from torchtitan.trainer import Trainer

STEPS = 2

# Clipped to next to nothing: what is measured is the gradient before that.
RANKS = (
    "--gns.enable", "true", "--gns.rank_gradients", "true", "--gns.single_pass", "false",
    "--lr_scheduler.warmup_steps", "0", "--training.max_norm", "1e-4",
)  # fmt: skip


def measure_all(cases: dict[str, dict]) -> dict[str, list[dict]]:
    """For each case and step: the metrics, and the gradients of every rank's microbatches by brute force."""
    folder = shared_folder()
    found = {name: _measure(make_trainer(folder, name, steps=STEPS, **case)) for name, case in cases.items()}
    remove(folder)
    return found


def _measure(trainer: Trainer) -> list[dict]:
    found, batches = [], []
    next_batch, train_step = trainer.state.data.next_batch, trainer.train_step

    def recorded_batch() -> dict[str, Tensor]:
        batches.append(next_batch())
        return batches[-1]

    def measured_step() -> tuple[Tensor, float]:
        model, first = _plain_copy(trainer), trainer.state.data.next_sample
        batches.clear()
        norm, lr = train_step()
        by_hand = _by_hand(trainer, model, batches, first)
        found.append({"metrics": trainer.state.gns.metrics(), "grad_norm": norm.item(), **by_hand})
        return norm, lr

    trainer.state.data.next_batch, trainer.train_step = recorded_batch, measured_step
    assert trainer.train() == 0
    trainer.close()
    return found


def _plain_copy(trainer: Trainer) -> nn.Module:
    """The model with the present weights, as built: neither wrapped nor sharded."""
    model = build_model(trainer.config.model, trainer.state.info.image_shape, trainer.state.info.condition_kind)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            trained = trainer.state.parameters[name].detach()
            parameter.copy_(trained.full_tensor() if hasattr(trained, "full_tensor") else trained)
    return model.train()


def _by_hand(trainer: Trainer, model: nn.Module, batches: list[dict], first: int) -> dict:
    """Of this step's microbatches m: squared norms of each rank's mean gradient [m][rank] and of the ranks' mean [m].

    Without importance weights; `step_norm` is the norm of the step's gradient, with them.
    """
    samples = GlobalBatch(first, trainer.config.training.global_batch_size, trainer.state.data.attempt)
    bins, gradients, weighted = [], [], 0.0
    for batch in batches:
        draw = trainer.state.objective.draw(tuple(batch["images"].shape[1:]), samples, batch["samples"])
        condition = trainer.state.condition(batch, draw)
        weights = draw.importance
        assert (weights == weights[0]).all()
        draw = draw._replace(importance=torch.ones_like(weights))
        loss = trainer.state.objective.loss(model, Microbatch(batch["images"], condition), draw).loss.mean()
        own = torch.cat([part.flatten().double() for part in torch.autograd.grad(loss, list(model.parameters()))])
        gradients.append(_of_all_ranks(own))  # [ranks, parameters]
        weighted = weighted + weights[0].double() * gradients[-1].mean(0) / len(batches)
        edges = getattr(trainer.state.objective.timestep_sampler, "edges", torch.empty(0))
        bins.append(sorted(set(torch.bucketize(draw.t, edges).tolist())))
    accumulated = torch.stack(gradients).mean(0)  # [ranks, parameters]
    return {
        "nuclear": _nuclear(trainer, model, accumulated, 8),
        "nuclear_of_microbatches": [_nuclear(trainer, model, part, 2) for part in gradients],
        "bins": bins,
        "small_of_microbatches": [part.square().sum(1).tolist() for part in gradients],
        "large_of_microbatches": [part.mean(0).square().sum().item() for part in gradients],
        "small": accumulated.square().sum(1).tolist(),
        "large": accumulated.mean(0).square().sum().item(),
        "step_norm": weighted.square().sum().sqrt().item(),
    }


def _nuclear(trainer: Trainer, model: nn.Module, gradients: Tensor, samples: int) -> dict[str, float] | None:
    """Noise and signal in the dual norm of Muon's step, from gradients [ranks, parameters]; None for another optimizer."""
    if trainer.config.optimizer.name != "Muon":
        return None
    in_blocks = {parameter for block in model.blocks() for parameter in block.parameters()}
    parts = zip(model.parameters(), gradients.split([p.numel() for p in model.parameters()], dim=1), strict=True)
    of_blocks = [part.view(-1, *p.shape) for p, part in parts if p in in_blocks and p.ndim == 2]

    def norm(pick: Callable[[Tensor], Tensor]) -> float:
        return sum(0.2 * max(part.shape[1:]) ** 0.5 * torch.linalg.svdvals(pick(part)).sum().item() for part in of_blocks)

    ranks = len(gradients)
    apart = [norm(lambda part, rank=rank: part[rank] - part.mean(0)) for rank in range(ranks)]
    halves = [norm(lambda part: part[: ranks // 2].mean(0)), norm(lambda part: part[ranks // 2 :].mean(0))]
    return {
        "noise": samples * (sum(apart) / ranks) ** 2 * ranks / (ranks - 1),
        "signal": 2 * norm(lambda part: part.mean(0)) ** 2 - (halves[0] ** 2 + halves[1] ** 2) / 2,
        "small_batch": samples,
    }


def _of_all_ranks(values: Tensor) -> Tensor:
    if not dist.is_initialized():
        return values[None]
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return torch.stack(everyone)
