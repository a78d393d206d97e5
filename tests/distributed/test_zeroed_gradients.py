"""Non-finite gradient elements set to zero: the same on every layout, counted, and kept out of norms and noise scales."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cases import make_trainer, remove, shared_folder
from tests.distributed.test_ema_and_optimizers import whole
from tests.launcher import run_on_ranks
from torchtitan.distributed.config import ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import local, zero_non_finite
from torchtitan.training.metrics import METRICS_FILE

FAULTY, STEPS = 3, 4  # before, the embedding of classes has no gradient
LAYOUTS = {"one process": (1, 1), "ddp": (2, 1), "fsdp": (1, 2)}
ZERO = (
    "--training.non_finite_gradients=zero", "--training.max_norm=0.1", "--lr_scheduler.warmup_steps=0",
    "--objective.weighting.name=edm", "--objective.path=edm", "--objective.prediction=edm",
    "--objective.preconditioning=edm", "--objective.timesteps.name=lognormal_sigma",
)  # fmt: skip
OVERRIDES = {
    "gradient": (
        *ZERO, "--objective.learned_uncertainty=true", "--gns.enable=true", "--gns.num_bins=2", "--gns.interval=1",
        "--gns.sketch_size=2",
    ),
    "loss": ZERO,
}  # fmt: skip


def inject(trainer, fault: str) -> None:
    """Break the last half of the global batch in step FAULTY."""
    half = 8 if not dist.is_initialized() else 0
    if dist.is_initialized() and dist.get_rank() != 1:
        return

    def broken(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        if fault == "gradient":
            changed[half:, ..., 3] = math.inf  # of one channel: downstream finite, upstream inf, -inf and NaN
        else:
            changed[half:] *= math.nan
        return changed

    def hook(module, inputs, output):
        if trainer.state.step != FAULTY:
            return None
        if fault == "loss":
            return broken(output)
        output.register_hook(broken)
        return None

    trainer.state.model.get_submodule("layers.1.mlp.out").register_forward_hook(hook)


def train(layout: str, faults: list[str]) -> dict[str, dict]:
    folder, found = shared_folder(), {}
    replicas, shards = LAYOUTS[layout]
    for fault in faults:
        trainer = make_trainer(
            folder, fault, steps=STEPS, replicas=replicas, shards=shards, accumulation=1, overrides=OVERRIDES[fault]
        )
        inject(trainer, fault)
        state, seen, concluded = trainer.state, [], []
        step, conclude = state.optimizer.step, state.gns.conclude if state.gns else None

        def watched_step(skip, state=state, seen=seen, step=step):
            gradients = [whole(p.grad).double() for p in state.parameters.values() if p.grad is not None]
            seen.append(sum(gradient.square().sum().item() for gradient in gradients) ** 0.5)
            step(skip)

        def watched_conclude(skip, concluded=concluded, conclude=conclude):
            concluded.append(bool(skip))
            conclude(skip)

        state.optimizer.step = watched_step
        if state.gns:
            state.gns.conclude = watched_conclude
        assert trainer.train() == 0
        counts = state.guard.counts()
        weights = {name: whole(parameter.detach()) for name, parameter in state.parameters.items()}
        pooled = [value for tag, value in state.gns.metrics().items() if "/all/" not in tag] if state.gns else []
        trainer.close()
        if not dist.is_initialized() or dist.get_rank() == 0:
            points = [json.loads(line) for line in (Path(folder) / fault / METRICS_FILE).read_text().splitlines()]
            points = [point for point in points if "grad_norm" in point]
            found[fault] = {
                "counts": counts, "applied": seen, "concluded": concluded,
                "norms": [point["grad_norm"] for point in points],
                "logged": [point.get("zeroed_gradient_elements", 0) for point in points],
                "summary": json.loads((Path(folder) / fault / "summary.json").read_text()),
                "weights": {name: weight.flatten()[::17].tolist() for name, weight in weights.items()},
                "sizes": {name: weight.numel() for name, weight in weights.items()},
                "pool": all(map(math.isfinite, pooled)) and len(pooled) > 0,
            }  # fmt: skip
    remove(folder)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    """Layout -> fault -> what became of it."""
    return {
        layout: run_on_ranks(
            "tests.distributed.test_zeroed_gradients:train", replicas * shards,
            {"layout": layout, "faults": ["gradient", "loss"]},
        )[0]
        for layout, (replicas, shards) in LAYOUTS.items()
    }  # fmt: skip


def test_elements_are_zeroed_counted_and_logged_the_same_on_every_layout(found):
    alone = found["one process"]["gradient"]
    upstream = sum(size for name, size in alone["sizes"].items() if name.startswith("layers.0."))
    number = alone["counts"]["zeroed_gradient_elements"]
    assert alone["counts"] == {"zeroed_steps": 1, "zeroed_gradient_elements": number}
    assert upstream < number < sum(alone["sizes"].values())
    assert alone["logged"] == [0, 0, 0, number]  # known to the host one step late
    assert alone["summary"]["zeroed_gradient_elements"] == number and alone["summary"]["zeroed_steps"] == 1
    for layout in ("ddp", "fsdp"):
        other = found[layout]["gradient"]
        assert other["counts"] == alone["counts"] and other["logged"] == alone["logged"], layout
        assert other["norms"] == pytest.approx(alone["norms"], rel=1e-6), layout
        for name, weight in alone["weights"].items():
            assert other["weights"][name] == pytest.approx(weight, rel=0, abs=5e-7), (layout, name)


def test_norm_and_clipping_come_after_the_zeros(found):
    for layout in found:
        case = found[layout]["gradient"]
        assert all(math.isfinite(norm) and norm > 0.1 for norm in case["norms"]), layout
        assert case["applied"] == pytest.approx([0.1] * STEPS, rel=1e-5), layout  # 1e-6 is added to the norm


def test_a_noise_scale_leaves_steps_with_zeros_out(found):
    for layout in found:
        case = found[layout]["gradient"]
        assert case["concluded"] == [step == FAULTY for step in range(1, STEPS + 1)], layout
        assert case["pool"], layout


def test_a_loss_that_is_not_finite_still_skips_the_step(found):
    for layout in found:
        case = found[layout]["loss"]
        assert case["counts"] == {"skipped_steps": 1}, layout
        # On another rank, classes that only the other half has keep finite gradients, which would count otherwise.
        assert (case["applied"][FAULTY - 1] > 0) == (layout != "one process"), layout
    alone = found["one process"]["loss"]
    for layout in ("ddp", "fsdp"):
        for name, weight in alone["weights"].items():
            assert found[layout]["loss"]["weights"][name] == pytest.approx(weight, rel=0, abs=5e-7), (layout, name)


def test_finite_elements_stay_as_they_are():
    gradient = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    parameters = [torch.nn.Parameter(torch.zeros(40, 30)), torch.nn.Parameter(torch.zeros(3))]
    parameters[0].grad = gradient.clone()
    for place, value in (((0, 0), math.nan), ((7, 29), math.inf), ((39, 2), -math.inf)):
        parameters[0].grad[place] = value
        gradient[place] = 0.0
    layout = Layout(ParallelismConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=1), torch.device("cpu"))
    assert zero_non_finite(parameters, layout).item() == 3
    assert torch.equal(local(parameters[0].grad), gradient) and parameters[1].grad is None
    assert zero_non_finite(parameters, layout).item() == 0
