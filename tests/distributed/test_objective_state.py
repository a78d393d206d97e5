"""What an objective learns beside the network: the same on every layout, in the checkpoint, and read back for sampling."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.cases import make_trainer, remove, shared_folder, stop_after
from tests.launcher import ROOT, run_on_ranks
from torchtitan.config.job import ConfigError, load_config
from torchtitan.data import DATASETS
from torchtitan.diffusion.objectives import OBJECTIVES as REGISTRY
from torchtitan.diffusion.objectives import attach, build_objective
from torchtitan.estimate.simulation import simulate_step
from torchtitan.run import REFUSED, run
from torchtitan.supervision.recovery import Fault, go_back
from torchtitan.weights.trained_model import WeightsError, load_run, load_weights
from torchtitan_dit.api import load
from torchtitan_dit.commands.train import main

HEADS = '--objective.heads=["x0","noise","v"]'
BASE = (
    "--objective.path=ddpm_linear", "--objective.prediction=v", "--objective.preconditioning=index",
    "--objective.timesteps.name=uniform", "--metrics.loss_bins=2",
)  # fmt: skip
OBJECTIVES = {
    "learned uncertainty": (*BASE, "--objective.learned_uncertainty=true"),
    "inverse variance": (*BASE, HEADS),
    "soft minimum": (*BASE, HEADS, "--objective.combine.name=soft_minimum"),
    "aligned": (
        *BASE, "--objective.name=aligned", "--objective.learned_uncertainty=true", "--data.name=stripes", "--data.width=8",
    ),
}  # fmt: skip
ON_FOUR = ("soft minimum", "aligned")  # of the others, what is learned is summed alike
LAYOUTS = [
    (layout, name) for layout in ("alone", "DDP", "FSDP", "HSDP") for name in OBJECTIVES if layout != "HSDP" or name in ON_FOUR
]
CHECKPOINTS = ("--checkpoint.enable=true", "--checkpoint.interval=3")
TRACKS = [{"name": f"std{std}", "kind": "power", "sigma_rel": std} for std in (0.05, 0.1)]
SNAPSHOTS = (f"--ema.tracks={json.dumps(TRACKS)}", "--ema.snapshot_interval=16", "--sampling.ema_track=none")


def documented(page: str, name: str) -> type:
    """A class of the first example of a page in Python."""
    names = {"__name__": page}
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)[1], names)
    return names[name]


def add_documented() -> None:
    """Add the dataset and the objective of the documentation, as a reader does."""
    DATASETS["stripes"] = documented("data.md", "Stripes")
    REGISTRY["aligned"] = documented("objectives.md", "Aligned")


@pytest.fixture
def added():
    add_documented()
    yield
    DATASETS.pop("stripes", None)
    del REGISTRY["aligned"]


def trained(layouts: dict[str, dict]) -> dict[str, dict]:
    """Train each objective on each layout for 4 steps; the last gradient norm, loss, and what was learned."""
    add_documented()
    folder, found = shared_folder(), {}
    for place, (layout, case) in enumerate(layouts.items()):
        for number, (name, overrides) in enumerate(OBJECTIVES.items()):
            if (layout, name) not in LAYOUTS:
                continue
            trainer = make_trainer(folder, f"run{place}-{number}", steps=10, overrides=overrides, **case)
            trainer._warm_up()  # as `train` does, on images without content
            for _ in range(4):
                trainer.state.step += 1
                norm, _ = trainer.train_step()
            found[f"{layout}, {name}"] = {
                "norm": norm.item(),
                "metrics": trainer.state.window.reduce(),
                "learned": {key: value.tolist() for key, value in trainer.state.objective.tensors().items()},
                "plain": not any(isinstance(value, DTensor) for value in trainer.state.objective.tensors().values()),
            }
            trainer.close()
    remove(folder)
    return found


@pytest.fixture(scope="module")
def by_layout() -> dict[str, dict]:
    alone = {"alone": dict(replicas=1, shards=1, accumulation=2)}
    (found,) = run_on_ranks("tests.distributed.test_objective_state:trained", 1, {"layouts": alone})
    pairs = {"DDP": dict(replicas=2, shards=1, accumulation=2), "FSDP": dict(replicas=1, shards=2, accumulation=2)}
    one, other = run_on_ranks("tests.distributed.test_objective_state:trained", 2, {"layouts": pairs})
    assert one.keys() == other.keys() and all(one[key]["learned"] == other[key]["learned"] for key in one)
    copies = {"HSDP": dict(replicas=2, shards=2, accumulation=1)}
    of_four, *_ = run_on_ranks("tests.distributed.test_objective_state:trained", 4, {"layouts": copies})
    return found | one | of_four


@pytest.mark.parametrize(("layout", "objective"), LAYOUTS[len(OBJECTIVES) :])
def test_every_layout_learns_what_one_process_learns(layout, objective, by_layout):
    wanted, found = by_layout[f"alone, {objective}"], by_layout[f"{layout}, {objective}"]
    assert found["plain"]  # whole on every rank, whatever the network is
    assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-4)
    assert found["metrics"].keys() == wanted["metrics"].keys()
    for key, value in wanted["metrics"].items():
        if key != "loss_metrics/global_max_loss":  # of ranks
            assert found["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    for key, value in wanted["learned"].items():
        torch.testing.assert_close(torch.tensor(found["learned"][key]), torch.tensor(value), rtol=1e-3, atol=1e-5)
        assert torch.tensor(value).abs().max() > 1e-3, key  # it has moved


def test_values_of_an_objective_are_logged_by_its_name_for_them(by_layout):
    assert by_layout["alone, aligned"]["metrics"]["alignment/1"] > 0


def test_shares_of_the_heads_are_logged_by_timestep_and_sum_to_1(by_layout):
    metrics = by_layout["alone, soft minimum"]["metrics"]
    for k in range(2):
        shares = [metrics[f"head_share/{name}/{k}"] for name in ("x0", "noise", "v")]
        assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0


@pytest.mark.parametrize("objective", ["learned uncertainty", "soft minimum", "aligned"])
def test_a_run_that_stopped_goes_on_with_it_bit_for_bit_and_sampling_reads_it(objective, tmp_path, added):
    overrides = (*OBJECTIVES[objective], *CHECKPOINTS, *SNAPSHOTS, "--validation.enable=true")
    case = dict(steps=6, replicas=1, shards=1, accumulation=1, overrides=overrides)
    straight = make_trainer(str(tmp_path), "straight", **case)
    assert straight.train() == 0
    straight.close()
    stopped = make_trainer(str(tmp_path), "stopped", **case)
    stop_after(stopped, 4, saved=3)
    resumed = make_trainer(str(tmp_path), "stopped", **case)
    assert resumed.state.step == 3
    assert resumed.train() == 0
    resumed.close()
    wanted, found = straight.state.tensors(), resumed.state.tensors()
    own = [name for name in wanted if "objective." in name]
    assert any(name.startswith("objective.") for name in own)
    if objective == "learned uncertainty":
        assert "optimizer.objective.uncertainty.weight.exp_avg" in own
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name

    for track in ("none", "std=0.08"):  # of the checkpoint, and of the snapshots
        read = load_run(tmp_path / "straight", track, None, torch.device("cpu"))
        assert len(read.objective.tensors()) == len([name for name in own if name.startswith("objective.")])
        for name, tensor in read.objective.tensors().items():
            assert torch.equal(tensor, wanted[f"objective.{name}"]), name
    weights = tmp_path / "weights.safetensors"
    save_file({name: p.detach() for name, p in straight.state.parameters.items()}, weights)
    config = Path(tmp_path) / "straight" / "config.toml"
    if objective == "soft minimum":  # how heads are mixed is not in a file of weights
        with pytest.raises(WeightsError, match="combines the heads by shares learned in training"):
            load_weights(weights, config, torch.device("cpu"))
    else:
        load_weights(weights, config, torch.device("cpu"))
    if objective == "aligned":
        assert load(tmp_path / "straight").sample([0, 1], num_steps=2, output="tensor").isfinite().all()
        del DATASETS["stripes"]  # what is known of it is in the checkpoint
        recorded = load_run(tmp_path / "straight", "none", None, torch.device("cpu"))
        assert recorded.objective.learned["projector"].weight.equal(wanted["objective.projector.weight"])


def saved_after_3_steps(folder: str, objective: str) -> dict[str, list]:
    """Train on all ranks, sharded; returns what was learned when the checkpoint was written."""
    overrides = (*OBJECTIVES[objective], *CHECKPOINTS)
    trainer = make_trainer(folder, "moved", steps=10, replicas=1, shards=2, accumulation=1, overrides=overrides)
    stop_after(trainer, 3, saved=3)
    return {name: tensor.tolist() for name, tensor in trainer.state.objective.tensors().items()}


def test_it_goes_on_where_another_number_of_ranks_has_left_it(tmp_path):
    """And goes back to it when steps have to be repeated."""
    arguments = {"folder": str(tmp_path), "objective": "inverse variance"}
    learned, _ = run_on_ranks("tests.distributed.test_objective_state:saved_after_3_steps", 2, arguments)
    overrides = (*OBJECTIVES["inverse variance"], *CHECKPOINTS)
    alone = make_trainer(str(tmp_path), "moved", steps=10, replicas=1, shards=1, accumulation=1, overrides=overrides)
    assert alone.state.step == 3
    assert {name: tensor.tolist() for name, tensor in alone.state.objective.tensors().items()} == learned
    moments = [alone.state.optimizer.state[p]["exp_avg"] for p in alone.state.objective.parameters().values()]
    assert all(moment.abs().max() > 0 for moment in moments)
    alone.state.step += 1
    alone.train_step()
    assert {name: tensor.tolist() for name, tensor in alone.state.objective.tensors().items()} != learned
    go_back(alone.state, Fault(alone.state.step, "a fault"))
    assert alone.state.step == 3
    assert {name: tensor.tolist() for name, tensor in alone.state.objective.tensors().items()} == learned
    alone.close()


def test_u_has_a_parameter_group_of_its_own_and_what_else_is_learned_the_rate_of_the_network(tmp_path, added):
    overrides = (*OBJECTIVES["aligned"], "--objective.uncertainty_lr_scale=7", "--optimizer.weight_decay=0.1")
    trainer = make_trainer(str(tmp_path), "run", steps=10, replicas=1, shards=1, accumulation=1, overrides=overrides)
    settings = {}
    for name, p in trainer.state.objective.parameters().items():
        (group,) = [group for group in trainer.state.optimizer.param_groups if any(p is each for each in group["params"])]
        settings[name.removeprefix("objective.")] = group["lr_scale"], group["weight_decay"]
    assert settings == {"uncertainty.weight": (7, 0), "projector.weight": (1, 0.1), "projector.bias": (1, 0)}
    trainer.close()


def test_what_an_objective_makes_follows_from_its_seed_alone(added):
    model = SimpleNamespace(blocks=lambda: [nn.Identity()], config=SimpleNamespace(dim=3))
    made = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        objective = build_objective(REGISTRY["aligned"].Config(), 5)
        attach(objective, model, {"features": ((4,), torch.float32)})
        assert torch.equal(torch.get_rng_state(), before)
        made.append(objective.learned["projector"].weight)
    assert made[0].shape == (4, 3) and torch.equal(*made)


def test_a_step_is_simulated_with_the_entries_of_the_data(tmp_path, added):
    arguments = ["--model.flavor=debug", *OBJECTIVES["aligned"]]
    assert simulate_step(load_config(arguments, 2), 2).held["parameters"] > 0


def refused(folder: str) -> list[str]:
    """What a rank says of an objective that its data do not suit, replicated and sharded."""
    add_documented()
    said, overrides = [], (*BASE, "--objective.name=aligned")  # of digits, which have no features
    for shards in (1, 2):
        with pytest.raises(ConfigError) as error:
            make_trainer(folder, "none", steps=1, replicas=2 // shards, shards=shards, accumulation=1, overrides=overrides)
        said.append(str(error.value))
    return said


def test_an_objective_refuses_data_in_one_line_on_every_rank_and_leaves_nothing(tmp_path):
    said = "objective.name: aligned needs features, which the data do not have (choose other data)"
    assert run_on_ranks("tests.distributed.test_objective_state:refused", 2, {"folder": str(tmp_path)}) == [[said] * 2] * 2
    assert not (tmp_path / "none").exists()


def test_a_refused_objective_ends_a_run_and_its_check_with_one_line(tmp_path, capsys, added):
    arguments = ["--job.dump_folder", str(tmp_path), "--job.name=none", "--model.flavor=debug", "--objective.name=aligned"]
    assert run(load_config(arguments, 1)) == REFUSED == main([*arguments, "--check-only"])
    (first, second) = capsys.readouterr().err.splitlines()
    assert first == second and first.startswith("objective.name: aligned needs features")
    assert not list(tmp_path.iterdir())
