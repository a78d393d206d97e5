"""Weights that are normalised before each step: the same numbers on every layout, compiled too, and after a resume."""

from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cases import AS_TRACED, compiler, make_trainer, remove, shared_folder, stop_after, whole
from tests.launcher import run_on_ranks
from torchtitan.models.magnitude import NormalizedWeight

STEPS = 20
# Labels and gains that move, a rate as the paper's.
MODEL = ("--model.magnitude_preserving=true", "--model.num_layers=2", "--optimizer.lr=1e-2")
LAYOUTS = {
    1: {"one": (1, 1, 1), "one, accumulation": (1, 1, 2)},
    2: {"DDP": (2, 1, 1), "FSDP": (1, 2, 1), "FSDP, compiled": (1, 2, 1)},
    4: {"HSDP": (2, 2, 1)},
}


def trained(ranks: int) -> dict[str, dict[str, list[float]]]:
    """Weights after all steps of every layout of so many ranks, raw, by name."""
    folder, found = shared_folder(), {}
    for number, (name, (replicas, shards, accumulation)) in enumerate(LAYOUTS[ranks].items()):
        compiled = name.endswith("compiled")
        with compiler(AS_TRACED):
            trainer = make_trainer(
                folder, f"run{number}", steps=STEPS, replicas=replicas, shards=shards, accumulation=accumulation,
                overrides=(*MODEL, f"--compile.enable={str(compiled).lower()}"),
            )  # fmt: skip
        assert trainer.train() == 0
        found[name] = {
            key: whole(weight).flatten().tolist() for key, weight in trainer.state.parameters.items()
        }
        trainer.close()
    remove(folder)
    return found if not dist.is_initialized() or dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    found = chain.from_iterable(
        run_on_ranks("tests.distributed.test_normalized_weights:trained", ranks, {"ranks": ranks})[0].items()
        for ranks in LAYOUTS
    )
    return {name: {key: torch.tensor(values) for key, values in of_run.items()} for name, of_run in found}


@pytest.mark.parametrize("layout", list(chain.from_iterable(LAYOUTS.values()))[1:])
def test_weights_after_twenty_steps_are_those_of_one_process(layout, weights):
    wanted, found = weights["one"], weights[layout]
    assert wanted.keys() == found.keys()
    errors = {key: ((found[key] - wanted[key]).norm() / wanted[key].norm()).item() for key in wanted}
    assert max(errors.values()) <= 1e-6, max(errors.items(), key=lambda x: x[1])
    assert all(wanted[key].abs().max() > 1e-3 for key in wanted if key.endswith("gain"))


def test_rows_have_unit_mean_square_at_the_start_of_each_step_and_a_resume_changes_nothing(tmp_path):
    arguments = dict(steps=12, replicas=1, shards=1, accumulation=1)
    saving = (*MODEL, "--checkpoint.enable=true", "--checkpoint.interval=6")
    straight = make_trainer(str(tmp_path), "straight", overrides=saving, **arguments)
    differences: list[float] = []
    straight.state.model.register_forward_pre_hook(lambda *_: differences.append(from_unit(straight.state.model)))
    assert straight.train() == 0
    # Twice the epsilon of 1e-4 over a row's size before: of short rows 0.4 at first, then about 1.
    assert len(differences) == 12 and differences[0] < 6e-4 and max(differences[1:]) < 2.1e-4
    first = make_trainer(str(tmp_path), "resumed", overrides=saving, **arguments)
    stop_after(first, 6, saved=6)
    resumed = make_trainer(str(tmp_path), "resumed", overrides=saving, **arguments)
    assert resumed.state.step == 6 and resumed.train() == 0
    wanted = straight.state.tensors()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in resumed.state.tensors().items())
    for trainer in (straight, resumed):
        trainer.close()
    assert Path(tmp_path, "resumed", "checkpoint").is_dir()


def from_unit(model: torch.nn.Module) -> float:
    """Largest difference of a row's mean square from 1."""
    modules = (module for module in model.modules() if isinstance(module, NormalizedWeight))
    return max((module.weight.detach().square().mean(dim=1) - 1).abs().max().item() for module in modules)
