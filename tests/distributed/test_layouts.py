"""The same global batch gives the same loss and gradient norm on every layout, at every step."""

import functools
import itertools

import pytest

from tests.distributed.cases import WITHOUT_CODE, by_inductor
from tests.launcher import run_on_ranks

STEPS, FEWER = 50, 8  # fewer where two ranks have shown more, and what each step does alike: accumulate, recompute, compile


def case(replicas: int, shards: int, accumulation: int = 1, *overrides: str, backend: str = WITHOUT_CODE) -> dict:
    steps = FEWER if accumulation > 1 or overrides or max(replicas, shards) > 2 else STEPS
    return {
        "steps": steps, "replicas": replicas, "shards": shards, "accumulation": accumulation, "backend": backend,
        "overrides": ("--model.num_layers", "2", *overrides),
    }


AC = "--activation_checkpoint.mode"
COMPILE = ("--compile.enable", "true")
WHOLE = (*COMPILE, "--compile.scope", "model")

ON_ONE = {"one, accumulation 2": case(1, 1, 2), "one, full": case(1, 1, 1, AC, "full")}
ON_TWO = {
    "DDP": case(2, 1), "DDP, accumulation 2": case(2, 1, 2),
    "FSDP": case(1, 2), "FSDP, accumulation 2": case(1, 2, 2),
}
ON_FOUR = {
    "DDP": case(4, 1), "FSDP, accumulation 2": case(1, 4, 2), "HSDP, accumulation 2": case(2, 2, 2),
}
COMPILED = {
    "one, whole, memory budget": case(1, 1, 1, *WHOLE, AC, "memory_budget"),
    "one, full, with code": case(1, 1, 1, *COMPILE, AC, "full", backend="inductor"),
}
CHECKPOINTED_ON_TWO = {
    "FSDP, selective": case(1, 2, 1, AC, "selective"), "DDP, full": case(2, 1, 1, AC, "full"),
    "FSDP, selective in every second block": case(1, 2, 1, AC, "selective", "--activation_checkpoint.every", "2"),
    "FSDP, compiled, full": case(1, 2, 1, *COMPILE, AC, "full"), "DDP, compiled": case(2, 1, 1, *COMPILE),
}
# Each combines two settings that cases above have separately.
FURTHER_ON_ONE = {
    "one, selective": case(1, 1, 1, *COMPILE, AC, "selective"),
    "one, full": case(1, 1, 2, *COMPILE, AC, "full"), "one, whole, selective": case(1, 1, 1, *WHOLE, AC, "selective"),
}
FURTHER_ON_TWO = {
    "DDP, whole, full": case(2, 1, 1, *WHOLE, AC, "full"),
    "FSDP, compiled, memory budget": case(1, 2, 1, *COMPILE, AC, "memory_budget"),
}


@pytest.fixture(scope="module")
def references() -> dict[int, list[list[float]]]:
    """Steps -> loss and gradient norm of one process, one microbatch, eager: what everything is held against."""
    cases = {str(steps): case(1, 1) | {"steps": steps} for steps in (STEPS, FEWER)}
    curves = run_on_ranks("tests.distributed.cases:train_all", 1, {"cases": cases})[0]
    return {int(steps): curve for steps, curve in curves.items()}


def largest_difference(curve: list[list[float]], steps: int, references: dict[int, list[list[float]]]) -> float:
    assert len(curve) == len(references[steps]) == steps
    pairs = zip(itertools.chain(*curve), itertools.chain(*references[steps]), strict=True)
    return max(abs(value - wanted) / abs(wanted) for value, wanted in pairs)


EAGER = {1: ON_ONE, 2: ON_TWO, 4: ON_FOUR}


@functools.cache
def trained(ranks: int) -> list[dict[str, dict]]:
    return run_on_ranks("tests.distributed.cases:train_and_look", ranks, {"cases": EAGER[ranks]})


@pytest.mark.parametrize("ranks", EAGER)
def test_loss_and_grad_norm_equal_single_process(ranks, references):
    found = trained(ranks)[0]
    differences = {
        name: largest_difference(found[name]["curve"], case["steps"], references) for name, case in EAGER[ranks].items()
    }
    assert max(differences.values()) <= 1e-5, differences


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, COMPILED),
        (2, CHECKPOINTED_ON_TWO),
        pytest.param(1, by_inductor(COMPILED | FURTHER_ON_ONE), marks=pytest.mark.long),
        pytest.param(2, by_inductor(CHECKPOINTED_ON_TWO | FURTHER_ON_TWO), marks=pytest.mark.long),
    ],
)
def test_compile_and_checkpointing_change_nothing(ranks, cases, references):
    curves = run_on_ranks("tests.distributed.cases:train_all", ranks, {"cases": cases})[0]
    differences = {name: largest_difference(curve, cases[name]["steps"], references) for name, curve in curves.items()}
    assert len(differences) == len(cases)
    assert max(differences.values()) <= 1e-4, differences


TERMS = (
    "--objective.prediction", "x0", "--objective.weighting.name", "velocity", "--objective.noise_std", "2",
    "--objective.shift", "latent_size", "--objective.cosine_weight", "0.5", "--objective.contrastive_weight", "0.05",
    "--optimizer.name", "Muon", "--optimizer.muon_scale", "fan", "--lr_scheduler.decay_between", "[5,7]",
    "--model.label_dropout", "0.3",
)  # fmt: skip


def test_pairs_terms_and_shifts_of_the_objective_are_the_same_on_every_layout():
    on = {"one": (1, 1, 1), "DDP": (2, 1, 2), "FSDP": (1, 2, 1), "HSDP": (2, 2, 2)}
    cases = {name: case(*layout, *TERMS) | {"steps": 6} for name, layout in on.items()}
    curves = {}
    for ranks, names in ((1, ("one",)), (2, ("DDP", "FSDP")), (4, ("HSDP",))):
        of_ranks = {name: cases[name] for name in names}
        curves |= run_on_ranks("tests.distributed.cases:train_all", ranks, {"cases": of_ranks})[0]
    wanted = list(itertools.chain(*curves.pop("one")))
    for name, curve in curves.items():
        assert list(itertools.chain(*curve)) == pytest.approx(wanted, rel=1e-5), name


def test_the_reference_moves(references):
    losses = [loss for loss, _ in references[STEPS]]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def test_a_run_begins_without_warnings_of_torch():
    assert [of_rank[layout]["warnings"] for of_rank in trained(2) for layout in ("DDP", "FSDP")] == [[]] * 4


def test_layouts_place_parameters_as_named():
    found = trained(4)[0]
    found |= {name: found[f"{name}, accumulation 2"] for name in ("FSDP", "HSDP")}
    rows, width = found["DDP"]["global"]
    assert found["DDP"]["wrapper"] == "DistributedDataParallel" and found["DDP"]["placements"] == []
    assert found["DDP"]["mesh"] == [4] and found["DDP"]["local"] == [rows, width]
    assert found["FSDP"]["placements"] == ["S(0)"] and found["FSDP"]["local"] == [rows // 4, width]
    # Two-dimensional: a flattened mesh would shard over all four processes.
    assert found["HSDP"]["placements"] == ["R", "S(0)"] and found["HSDP"]["mesh"] == [2, 2]
    assert found["HSDP"]["local"] == [rows // 2, width]
