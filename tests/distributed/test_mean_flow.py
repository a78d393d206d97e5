"""Mean flows on every layout, compiled and recomputed, and resumed."""

import itertools

import pytest

from tests.distributed.cases import AS_TRACED, resumed_as_whole
from tests.launcher import run_on_ranks

MEAN_FLOW = ("--objective.name", "mean_flow", "--objective.timesteps.mean", "-0.4")
SAMPLED = (*MEAN_FLOW, "--objective.tangent", "sampled", "--objective.weight_power", "0.5")
# Guidance as an input, and the head that predicts the velocity at t.
GUIDED = (*MEAN_FLOW, "--objective.guidance_max", "8", "--objective.tangent", "head", "--model.intermediate_head", "1")
COMPILED, RECOMPUTED = ("--compile.enable", "true"), ("--activation_checkpoint.mode", "full")


def case(replicas: int, shards: int, *overrides: str, accumulation: int = 1) -> dict:
    return {
        "steps": 3, "replicas": replicas, "shards": shards, "accumulation": accumulation, "backend": AS_TRACED,
        "overrides": overrides,
    }  # fmt: skip


@pytest.fixture(scope="module")
def on_one() -> dict[str, list[list[float]]]:
    cases = {"predicted": case(1, 1, *MEAN_FLOW, accumulation=2), "sampled": case(1, 1, *SAMPLED), "guided": case(1, 1, *GUIDED)}
    return run_on_ranks("tests.distributed.cases:train_all", 1, {"cases": cases})[0]


def test_every_layout_trains_as_one_process(on_one):
    cases = {
        "sampled, DDP, compiled": case(2, 1, *SAMPLED, *COMPILED),
        "predicted, FSDP, recomputed": case(1, 2, *MEAN_FLOW, *RECOMPUTED),
        "guided, FSDP": case(1, 2, *GUIDED),
    }  # fmt: skip
    found = run_on_ranks("tests.distributed.cases:train_all", 2, {"cases": cases})[0]
    cases = {"guided, HSDP": case(2, 2, *GUIDED), "predicted, HSDP": case(2, 2, *MEAN_FLOW)}
    found |= run_on_ranks("tests.distributed.cases:train_all", 4, {"cases": cases})[0]
    for name, curve in found.items():
        reference = on_one[name.split(",")[0]]
        assert list(itertools.chain(*curve)) == pytest.approx(list(itertools.chain(*reference)), rel=1e-5), name


def test_a_run_resumes_bit_for_bit_and_measures_its_held_out_loss(tmp_path):
    found = {}

    def see(name: str, trainer) -> None:
        if name == "whole" and trainer.state.step == 4:
            trainer.reports.validate()
            found.update(trainer.reports._results)

    trainer = resumed_as_whole(tmp_path, (*MEAN_FLOW, "--validation.enable", "true"), 4, see)
    assert any("duration_embed" in key for key in trainer.state.tensors())
    whole, equal, two = (found[f"validation_metrics/{part}loss"] for part in ("", "equal_times_", "two_times_"))
    # About half of the 297 held-out images have equal times.
    assert equal != two and 0.4 < (whole - two) / (equal - two) < 0.6
    assert "validation_metrics/two_times_loss_by_bin/9" in found
