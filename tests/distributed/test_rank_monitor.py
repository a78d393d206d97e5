"""Norms of small and large batches in a run's metrics, against plain backwards of every microbatch by itself."""

import pytest

from tests.distributed.rank_monitor_cases import RANKS, STEPS
from tests.launcher import run_on_ranks

# Of unequal masses, so that importance weights are not 1.
EDGES = {2: "[0, 0.3, 1]", 4: "[0, 0.3, 0.5, 0.8, 1]"}


MUON = ["--optimizer.name", "Muon", "--gns.nuclear_norm", "true", "--gns.interval", "1"]


def bin_pure(bins: int, *more: str) -> list[str]:
    return [*RANKS, *more, "--gns.bin_pure_microbatches", "true", "--gns.bin_edges", EDGES[bins]]


# ranks -> name -> layout
CASES = {
    1: {"microbatches": {"replicas": 1, "shards": 1, "accumulation": 4, "overrides": RANKS}},
    2: {
        "DDP": {"replicas": 2, "shards": 1, "accumulation": 2, "overrides": [*RANKS, *MUON]},
        "FSDP": {"replicas": 1, "shards": 2, "accumulation": 2, "overrides": RANKS},
        "2 bins": {"replicas": 2, "shards": 1, "accumulation": 4, "overrides": bin_pure(2)},
        "4 bins": {"replicas": 2, "shards": 1, "accumulation": 4, "overrides": bin_pure(4, *MUON)},
    },
}
PURE = {name: int(name.split()[0]) for name in CASES[2] if name.endswith("bins")}
RANK_CASES = [name for name in CASES[2] if name not in PURE]


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict]]:
    steps = {}
    for ranks, cases in CASES.items():
        steps |= run_on_ranks("tests.distributed.rank_monitor_cases:measure_all", ranks, {"cases": cases})[0]
    assert all(len(of_case) == STEPS for of_case in steps.values())
    return steps


def expected(small: list[float], large: float, samples: int) -> dict[str, float]:
    """Metrics of groups of `samples` samples each with squared norms `small`, whose mean has `large`."""
    groups, total = len(small), samples * len(small)
    noise = (samples * sum(small) - total * large) / (groups - 1)
    return {
        "small_square_norm": sum(small) / groups, "large_square_norm": large, "small_batch": samples,
        "large_batch": total, "noise": noise, "signal": large - noise / total,
    }  # fmt: skip


def of_step(step: dict, name: str, geometry: str = "plain") -> dict[str, float]:
    prefix = f"gns/{geometry}/ranks/{name}/"
    return {tag.removeprefix(prefix): value for tag, value in step["metrics"].items() if tag.startswith(prefix)}


def agree(measured: dict[str, float], wanted: dict[str, float], *, first: bool) -> bool:
    """Sizes and norms are the last step's; noise and signal are pooled, so that they tell of the first step only."""
    names = wanted.keys() if first else wanted.keys() - {"noise", "signal"}
    # The signal is a difference of the norms, and has their error.
    slack = 1e-5 * wanted["small_square_norm"]
    return all(
        measured[name] == pytest.approx(wanted[name], rel=1e-5, abs=slack if name == "signal" else 0.0) for name in names
    )


@pytest.mark.parametrize("name", RANK_CASES)
def test_norms_of_ranks_and_of_their_mean_equal_plain_backwards(found, name):
    for number, step in enumerate(found[name]):
        wanted = expected(step["small"], step["large"], 8)
        assert agree(of_step(step, "all"), wanted, first=number == 0), (of_step(step, "all"), wanted)
        assert "gns/reductions_per_step" not in step["metrics"]


def test_one_process_compares_its_microbatches(found):
    for number, step in enumerate(found["microbatches"]):
        wanted = expected([small for small, in step["small_of_microbatches"]], step["large"], 4)
        assert agree(of_step(step, "all"), wanted, first=number == 0), (of_step(step, "all"), wanted)
        assert step["metrics"]["gns/reductions_per_step"] == 4


@pytest.mark.parametrize("name", PURE)
def test_bin_pure_microbatches_give_every_bin_its_own_norms_without_importance_weights(found, name):
    seen = set()
    for step in found[name]:
        assert step["metrics"]["gns/reductions_per_step"] == 4
        last = {}
        for bins, small, large in zip(
            step["bins"], step["small_of_microbatches"], step["large_of_microbatches"], strict=True
        ):
            assert len(bins) == 1, "a microbatch mixes bins"
            last[bins[0]] = expected(small, large, 2)
        assert len(last) == PURE[name]
        for k, wanted in last.items():
            first = PURE[name] == 4 and k not in seen
            assert agree(of_step(step, str(k)), wanted, first=first), (k, of_step(step, str(k)), wanted)
            seen.add(k)


def test_gradient_of_a_step_is_that_of_plain_accumulation_with_the_importance_weights(found):
    for name, steps in found.items():
        for step in steps:
            assert step["grad_norm"] == pytest.approx(step["step_norm"], rel=1e-6), name
    # The weights are not 1: without them it would be another gradient.
    for name in PURE:
        assert all(step["step_norm"] ** 2 != pytest.approx(step["large"], rel=1e-2) for step in found[name])


def test_what_is_measured_is_not_clipped(found):
    for name, steps in found.items():
        for step in steps:
            norms = [value for tag, value in step["metrics"].items() if tag.endswith("large_square_norm")]
            assert norms and min(norms) > 1e-4, name  # clipping leaves 1e-8


def test_noise_scale_in_the_norm_of_muons_step_follows_from_singular_values(found):
    """Of both steps together: in the first the blocks' gradients are 0, behind an output layer of zeros."""
    wanted = {"all": [step["nuclear"] for step in found["DDP"]]}
    for step in found["4 bins"]:
        for of, values in zip(step["bins"], step["nuclear_of_microbatches"], strict=True):
            wanted.setdefault(str(of[0]), []).append(values)
    assert len(wanted) == 5
    for name, steps in wanted.items():
        measured = of_step(found["DDP" if name == "all" else "4 bins"][-1], name, "muon")
        # The first half-life is as long as the step before.
        noise, signal = ((0.5 * steps[0][key] + steps[1][key]) / 1.5 for key in ("noise", "signal"))
        assert len(steps) == STEPS and noise > 0 and measured["small_batch"] == steps[0]["small_batch"]
        assert measured["noise"] == pytest.approx(noise, rel=1e-4)
        assert measured["signal"] == pytest.approx(signal, rel=1e-4, abs=1e-5 * noise)  # a difference
        assert measured["b_simple"] == pytest.approx(measured["noise"] / measured["signal"])
