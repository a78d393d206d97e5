"""A network of all options on every layout; and a head without a share of the loss."""

import itertools

import pytest

from tests.distributed.cases import AS_TRACED, resumed_as_whole
from tests.launcher import run_on_ranks

OPTIONS = (
    "--model.patch_bottleneck", "6", "--model.mlp", "swiglu_bias", "--model.position", "sincos_rotary", "--model.norm_affine",
    "true", "--model.class_tokens", "3", "--model.class_tokens_start", "1", "--model.timestep_frequencies", "fourier",
    "--model.value_residual", "true", "--model.intermediate_head", "1",
    "--objective.intermediate_share", "0.5", "--model.wide_dim", "96", "--model.wide_heads", "4", "--model.wide_layers", "1",
)  # fmt: skip
OWN = ("--model.embedding_per_block", "true", "--model.mlp_norm_eps", "1e-4")
WIDENED = ("--model.mup_base_dim", "32", "--model.mup_base_heads", "4", "--optimizer.weight_decay", "0.1")  # of 64, four heads
MUONS = (*WIDENED, "--optimizer.name", "Muon")
HEAD = ("--model.intermediate_head", "1", "--objective.intermediate_share", "0")
COMPILED, RECOMPUTED = ("--compile.enable", "true"), ("--activation_checkpoint.mode", "full")


def case(replicas: int, shards: int, *overrides: str) -> dict:
    return {
        "steps": 4, "replicas": replicas, "shards": shards, "accumulation": 1, "backend": AS_TRACED,
        "overrides": ("--model.num_layers", "2", *overrides),
    }  # fmt: skip


@pytest.fixture(scope="module")
def on_one() -> dict[str, list[list[float]]]:
    cases = {"options": case(1, 1, *OPTIONS), "own": case(1, 1, *OWN), "plain": case(1, 1), "no share": case(1, 1, *HEAD)}
    cases |= {"widened": case(1, 1, *WIDENED), "Muon": case(1, 1, *MUONS)}
    cases["at its base"] = case(1, 1, "--model.mup_base_dim", "64", "--model.mup_base_heads", "4")
    return run_on_ranks("tests.distributed.cases:train_all", 1, {"cases": cases})[0]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, {
            "DDP": case(2, 1, *OPTIONS), "FSDP, compiled": case(1, 2, *OPTIONS, *COMPILED),
            "DDP, own": case(2, 1, *OWN), "FSDP, own, recomputed": case(1, 2, *OWN, *RECOMPUTED),
            "DDP, widened": case(2, 1, *WIDENED), "FSDP, widened": case(1, 2, *WIDENED),
            "DDP, Muon": case(2, 1, *MUONS), "FSDP, Muon": case(1, 2, *MUONS),
        }),
        (4, {"HSDP, recomputed": case(2, 2, *OPTIONS, *RECOMPUTED)}),
    ],
)
def test_all_options_train_alike_on_every_layout(ranks, cases, on_one):
    for name, curve in run_on_ranks("tests.distributed.cases:train_all", ranks, {"cases": cases})[0].items():
        reference = on_one[next((kind for kind in ("own", "widened", "Muon") if kind in name), "options")]
        assert reference[3][0] < reference[0][0]
        assert list(itertools.chain(*curve)) == pytest.approx(list(itertools.chain(*reference)), rel=1e-5), name


def test_a_head_without_a_share_of_the_loss_leaves_the_run_as_it_is(on_one):
    (losses, norms), (plain, plain_norms) = (zip(*on_one[name], strict=True) for name in ("no share", "plain"))
    assert losses == plain
    assert norms == pytest.approx(plain_norms, rel=1e-12)  # squares of zeros between them, which sums may group otherwise


def test_a_network_at_the_base_width_of_its_parametrisation_trains_bit_for_bit_as_without(on_one):
    assert on_one["at its base"] == on_one["plain"] != on_one["widened"]


def test_a_run_with_rates_by_role_resumes_bit_for_bit(tmp_path):
    def see(_name: str, trainer) -> None:
        groups = trainer.state.optimizer.param_groups
        rates = {float(group["lr"]) / group["lr_scale"] for group in groups}
        assert max(rates) == pytest.approx(min(rates)) and len(groups) > 3

    resumed_as_whole(tmp_path, MUONS, 3, see)
