"""Routed runs on every layout, resumed across the end of the routing, and with all tokens kept."""

import itertools

import pytest

from tests.distributed.cases import resumed_as_whole
from tests.launcher import run_on_ranks

TREAD = ("--model.routing.name", "tread", "--model.routing.first_block", "2", "--model.routing.last_block", "2")
SPRINT = (
    "--model.routing.name", "sprint", "--model.routing.first_block", "2", "--model.routing.last_block", "2",
    "--model.routing.path_drop", "0.3", "--model.routing.finish_steps", "2", "--model.value_residual", "true",
    "--gns.enable", "true", "--gns.interval", "2", "--gns.num_bins", "4",
)  # fmt: skip
RECOMPUTED = ("--activation_checkpoint.mode", "full")


def case(replicas: int, shards: int, *overrides: str, accumulation: int = 1) -> dict:
    return {
        "steps": 3, "replicas": replicas, "shards": shards, "accumulation": accumulation, "overrides": overrides
    }  # fmt: skip


@pytest.fixture(scope="module")
def on_one() -> dict[str, list[list[float]]]:
    cases = {
        "tread": case(1, 1, *TREAD), "sprint": case(1, 1, *SPRINT, accumulation=2), "plain": case(1, 1),
        "all kept": case(1, 1, *TREAD, "--model.routing.keep", "1"),
    }  # fmt: skip
    return run_on_ranks("tests.distributed.cases:train_all", 1, {"cases": cases})[0]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, {"sprint, DDP": case(2, 1, *SPRINT), "sprint, FSDP": case(1, 2, *SPRINT)}),
        (4, {"tread, HSDP, recomputed": case(2, 2, *TREAD, *RECOMPUTED)}),
    ],
)
def test_every_layout_routes_as_one_process(ranks, cases, on_one):
    for name, curve in run_on_ranks("tests.distributed.cases:train_all", ranks, {"cases": cases})[0].items():
        reference = on_one[name.split(",")[0]]
        assert list(itertools.chain(*curve)) == pytest.approx(list(itertools.chain(*reference)), rel=1e-5), name


def test_all_tokens_kept_is_the_plain_run_bit_for_bit_and_fewer_are_not(on_one):
    assert on_one["all kept"] == on_one["plain"] and on_one["tread"][1] != on_one["plain"][1]


def test_a_run_resumed_across_the_end_of_its_routing_is_the_straight_one(tmp_path):
    routed = {"whole": [], "stopped": []}

    def see(name: str, trainer) -> None:
        routed[name].append(trainer.state.model._kept is not None)

    trainer = resumed_as_whole(tmp_path, (*SPRINT, "--validation.enable", "true"), 4, see)
    assert routed == {"whole": [True, True, False, False], "stopped": [True, True, False, False]}
    routed_steps, whole_steps = (2 * 3 * count(trainer.state.model.image_shape) for count in (
        trainer.state.model.training_macs_per_image, trainer.state.model.forward_macs_per_image
    ))  # fmt: skip
    assert trainer.state.flops_per_image == pytest.approx((routed_steps + whole_steps) / 2, rel=1e-6)
    assert routed_steps < 0.9 * whole_steps
