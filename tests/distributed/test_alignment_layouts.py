"""Aligned runs: the same on every layout and without an alignment's weight, resumed across its end, exported without it."""

import json

import pytest
import torch

from tests.distributed.cases import AS_TRACED, compiler, make_trainer, remove, shared_folder
from tests.launcher import run_on_ranks
from torchtitan.evaluation.eval_mode import evaluating
from torchtitan.weights.trained_model import load_run

HERE = "tests.distributed.test_alignment_layouts"
SELF = (
    "--alignment.teacher=self", "--alignment.block=1", "--alignment.teacher_block=3", "--metrics.loss_bins=2",
    "--alignment.dual_share=0.25",
)  # fmt: skip
CONVOLUTION = ("--alignment.projector=convolution", "--alignment.spatial_norm=0.6")
DIGITS = ("--alignment.teacher=digits", "--alignment.block=2", *CONVOLUTION)
# Both teachers, and the end of one of them inside of what is compared.
TEACHERS = {"self": (*SELF, "--alignment.stop_steps=2"), "digits": (*DIGITS, "--metrics.loss_bins=2")}
STEPS = 3
RECOMPUTED = ("--compile.enable=true", "--activation_checkpoint.mode=full")


def trained(layouts: dict[str, dict]) -> dict[str, dict]:
    """Train with each teacher on each layout: norms, logged means of every step, and the projector."""
    folder, found = shared_folder(), {}
    for place, (layout, case) in enumerate(layouts.items()):
        beside = case.pop("beside", ())
        for number, (name, overrides) in enumerate(TEACHERS.items()):
            with compiler(AS_TRACED):
                trainer = make_trainer(folder, f"run{place}-{number}", steps=10, overrides=(*overrides, *beside), **case)
            trainer._warm_up()
            steps = []
            for _ in range(STEPS):
                trainer.state.step += 1
                norm, _ = trainer.train_step()
                steps.append({"norm": norm.item(), **trainer.state.window.reduce()})
            learned = trainer.state.objective.tensors()
            found[f"{layout}, {name}"] = {
                "steps": steps,
                "learned": {key: [value.double().sum().item(), value.double().norm().item()] for key, value in learned.items()},
            }
            trainer.close()
    remove(folder)
    return found


@pytest.fixture(scope="module")
def by_layout() -> dict[str, dict]:
    alone = {
        "alone": dict(replicas=1, shards=1, accumulation=2),
        "recomputed": dict(replicas=1, shards=1, accumulation=2, beside=RECOMPUTED),
    }
    (found,) = run_on_ranks(f"{HERE}:trained", 1, {"layouts": alone})
    pairs = {"DDP": dict(replicas=2, shards=1, accumulation=2), "FSDP": dict(replicas=1, shards=2, accumulation=2)}
    one, other = run_on_ranks(f"{HERE}:trained", 2, {"layouts": pairs})
    assert all(one[key]["learned"] == other[key]["learned"] for key in one)
    copies = {"HSDP": dict(replicas=2, shards=2, accumulation=1)}
    of_four, *_ = run_on_ranks(f"{HERE}:trained", 4, {"layouts": copies})
    return found | one | of_four


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("layout", ["recomputed", "DDP", "FSDP", "HSDP"])
def test_every_layout_aligns_as_one_process(layout, teacher, by_layout):
    wanted, found = by_layout[f"alone, {teacher}"], by_layout[f"{layout}, {teacher}"]
    for one, other in zip(wanted["steps"], found["steps"], strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if key != "loss_metrics/global_max_loss":  # of ranks
                assert other[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    for key, value in wanted["learned"].items():
        assert found["learned"][key] == pytest.approx(value, rel=1e-4, abs=1e-3), key
    logged = [step["alignment_loss/0"] for step in wanted["steps"]]
    assert all(-1 <= value < 1 for value in logged) and logged[0] != 0
    assert (logged[-1] == 0) == (teacher == "self")  # which has ended


def straight(folder: str, name: str, *overrides: str, steps: int = 6):
    """Trainer of a run that is trained to its end."""
    trainer = make_trainer(folder, name, steps=steps, replicas=1, shards=1, accumulation=1, overrides=overrides)
    assert trainer.train() == 0
    trainer.close()
    return trainer


def points(folder, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_without_weight_a_run_is_the_one_without_an_alignment(tmp_path):
    """Bit for bit: weights, averages, losses and held-out losses; and the projector counts as no parameter of the network."""
    beside = ("--validation.enable=true", "--validation.interval=3")
    plain = straight(str(tmp_path), "plain", *beside)
    for name, words in {"self": SELF[:3], "digits": DIGITS}.items():
        aligned = straight(str(tmp_path), name, *words, "--alignment.weight=0", *beside)
        found = aligned.state.tensors()
        for key, tensor in plain.state.tensors().items():
            assert torch.equal(found[key], tensor), key
        assert {key.split(".")[1] for key in found.keys() - plain.state.tensors().keys()} == {"alignment", "objective"}
        assert aligned.state.num_parameters == plain.state.num_parameters
        for one, other in zip(points(tmp_path, "plain"), points(tmp_path, name), strict=True):
            for key in (key for key in one if "loss" in key or key == "grad_norm"):
                assert other[key] == one[key], key


SNAPSHOTS = (
    '--ema.tracks=[{"name": "ema", "kind": "power", "sigma_rel": 0.05}, {"name": "long", "kind": "power", "sigma_rel": 0.1}]',
    "--ema.snapshot_interval=16",
)


def test_a_run_resumed_around_the_end_of_its_alignment_is_the_straight_one(tmp_path):
    overrides = (*SELF, "--alignment.stop_images=48", "--checkpoint.enable=true", "--checkpoint.interval=6", *SNAPSHOTS)
    whole = straight(str(tmp_path), "whole", *overrides)
    case = dict(steps=6, replicas=1, shards=1, accumulation=1, overrides=overrides)
    stopped = make_trainer(str(tmp_path), "stopped", **case)
    learned = {}
    while stopped.state.step < 5:
        stopped.state.step += 1
        stopped.train_step()
        if stopped.state.step in (2, 4):  # before its end, and after it
            stopped._save()
            stopped.state.checkpointer.require_saved()
            learned[stopped.state.step] = {key: tensor.clone() for key, tensor in stopped.state.objective.tensors().items()}
    stopped.close()
    for saved in (4, 2):
        again = (*overrides, f"--checkpoint.load_step={saved}")
        resumed = make_trainer(str(tmp_path), "stopped", **(case | {"overrides": again}))
        assert resumed.state.step == saved and resumed.train() == 0
        resumed.close()
        found = resumed.state.tensors()
        for key, tensor in whole.state.tensors().items():
            assert torch.equal(found[key], tensor), key
        # Three steps of 16 images are aligned: from there on the projector stays.
        kept = all(torch.equal(tensor, learned[saved][key]) for key, tensor in resumed.state.objective.tensors().items())
        assert kept == (saved > 3)
    check_what_is_read_back(tmp_path / "whole", whole.state)


def check_what_is_read_back(folder, state) -> None:
    """A run's network is read, and sampled from, without its projector, from checkpoint and snapshots."""
    for track in ("none", "std=0.08"):
        read = load_run(folder, track, None, torch.device("cpu"))
        assert not read.objective.tensors()
        if track == "none":
            x, t = torch.randn(2, 1, 8, 8), torch.tensor([100.0, 900.0])
            with torch.no_grad(), evaluating(state.model):
                wanted = state.model(x, t, torch.tensor([0, 1]))
            with torch.no_grad():
                assert torch.equal(read.model(x, t, torch.tensor([0, 1])), wanted)
