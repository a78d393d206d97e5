"""Snapshots of averages and averages reconstructed from them: accuracy, damage, strangers, and what is refused."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.end_to_end.tools import caller, load_tool
from tests.extractions import content
from torchtitan.checkpoint.manifest import MANIFEST, checkpoint_path, checkpoint_steps
from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.runs.check import check_run
from torchtitan.training.ema import EMABank
from torchtitan.training.ema_snapshots import EMASnapshots
from torchtitan.training.power_profiles import Profile, combine
from torchtitan.weights import post_hoc_ema
from torchtitan.weights.post_hoc_ema import reconstruct, stored_averages

TOML = """
[data]
name = "digits"
[training]
global_batch_size = 8
local_batch_size = 8
[ema]
snapshot_interval = {interval}
snapshot_dtype = "{dtype}"
[[ema.tracks]]
name = "ema"
[[ema.tracks]]
name = "short"
kind = "power"
sigma_rel = 0.05
[[ema.tracks]]
name = "long"
kind = "power"
sigma_rel = 0.1
[[ema.tracks]]
name = "held"
kind = "power"
sigma_rel = 0.15
"""
STEPS, INTERVAL = 64, 64  # images between snapshots: 8 steps
tool = load_tool("ema")


class Training:
    """A walk of a few weights, with its averages and snapshots."""

    def __init__(self, run: Path, seed: int = 0, dtype: str = "float32", *options: str) -> None:
        run.mkdir(parents=True, exist_ok=True)
        toml = run / "given.toml"
        toml.write_text(TOML.format(interval=INTERVAL, dtype=dtype))
        arguments = ["--job.config_file", str(toml), "--sampling.enable", "false", "--debug.seed", str(seed), *options]
        self.config: JobConfig = load_config(arguments, 1)
        (run / "config.toml").write_bytes(toml.read_bytes())
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = {
            "a": nn.Parameter(torch.randn(6, 5, generator=self.generator)),
            "b": nn.Parameter(torch.randn(7, generator=self.generator)),
            "frequencies": nn.Parameter(torch.randn(3, generator=self.generator), requires_grad=False),
        }
        self.buffers = {"phases": torch.randn(4, generator=self.generator, dtype=torch.float64)}
        self.bank = EMABank(self.parameters, self.config.ema, 8)
        self.snapshots = EMASnapshots(run, self.config, self.bank, self.parameters)
        self.snapshots.load_state_dict([], 0)
        self.step = 0

    def train(self, steps: int) -> "Training":
        for _ in range(steps):
            self.step += 1
            for parameter in (self.parameters["a"], self.parameters["b"]):
                parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=self.generator))
            self.bank.update(self.step)
            if self.snapshots.due(self.step, 8):
                self.snapshots.save(self.step, self.step, self.buffers, {"u.weight": torch.full((2,), float(self.step))})
        return self


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("template") / "walk"
    trained = Training(run).train(STEPS)
    torch.save(trained.bank.tracks, run / "tracks.pt")
    torch.save(trained.parameters | trained.buffers, run / "parameters.pt")
    return run


@pytest.fixture
def run(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "walk"))


@pytest.fixture
def command(capsys):
    return caller(tool, capsys)


def folder(run: Path, step: int) -> Path:
    return checkpoint_path(run / "ema" / "snapshots", step)


# ---------------------------------------------------------------------- what is reconstructed


def test_tracked_length_is_its_snapshot_bit_for_bit(run):
    tracked = torch.load(run / "tracks.pt")
    for track, std in {"short": 0.05, "long": 0.1, "held": 0.15}.items():
        found = dict(reconstruct(stored_averages(run), std).tensors())
        assert torch.equal(found["a"], tracked[track]["a"]) and torch.equal(found["b"], tracked[track]["b"])


def test_length_left_out_comes_near_to_its_tracked_average_as_predicted(run):
    tracked = torch.load(run / "tracks.pt")["held"]
    errors = {}
    for count in (2, 4, 8):
        stored = stored_averages(run, without=["held"])
        evenly = dataclasses.replace(stored, snapshots=stored.snapshots[8 // count - 1 :: 8 // count])
        found = reconstruct(evenly, 0.15, max_error=1)
        profiles = [Profile(STEPS * k // count, std) for k in range(1, count + 1) for std in (0.05, 0.1)]
        predicted = combine(profiles, Profile(STEPS, 0.15))
        assert found.combination == predicted
        gap = torch.cat([(value - tracked[name]).flatten() for name, value in found.tensors() if name in ("a", "b")])
        size = torch.cat([tracked[name].flatten() for name in ("a", "b")]).norm()
        errors[count] = float(gap.norm() / size)
        # The walk moves by less than its own size, so weights differ by less than their profiles.
        assert errors[count] < predicted.error
        assert found.beside()["u.weight"].tolist() == [STEPS, STEPS]
    assert errors[8] < errors[4] / 2 < errors[2] / 4


def test_reconstruction_is_the_sum_in_float64_however_few_tensors_are_read_at_once(run, monkeypatch):
    found = reconstruct(stored_averages(run, without=["held"]), 0.15)
    wanted = torch.zeros(6, 5, dtype=torch.float64)
    for (snapshot, track), coefficient in zip(found.stored.places, found.combination.coefficients, strict=True):
        stored = load_file(next(snapshot.path.glob("*.safetensors")))
        wanted += coefficient * stored[f"ema.{track}.a"].double()
    whole = dict(found.tensors())
    assert torch.allclose(whole["a"], wanted.float(), rtol=1e-6, atol=0)
    monkeypatch.setattr(post_hoc_ema, "_READ_AT_ONCE", 1)
    single = list(found.tensors())
    assert len(single) == 4 and all(torch.equal(value, whole[name]) for name, value in single)


def test_file_holds_parameters_and_their_origin_and_frozen_ones_as_they_are(run, command):
    code, output, _ = command("reconstruct", run, "--std", 0.075)
    path = run / "ema" / "step-00000064-std-0.075.safetensors"
    assert code == 0 and str(path) in output and "profile error" in output
    found, trained = load_file(path), torch.load(run / "parameters.pt", weights_only=False)
    assert set(found) == {"a", "b", "frequencies", "phases"}
    for name in ("frequencies", "phases"):
        assert torch.equal(found[name], trained[name].data) and found[name].dtype == trained[name].dtype
    with safe_open(path, framework="pt") as file:
        told = file.metadata()
    combination = combine(stored_averages(run).profiles, Profile(STEPS, 0.075))
    assert (told["run"], told["step"], told["images"], told["std"]) == ("walk", "64", "512", "0.075")
    assert told["weights"] == "walk, step 64, std=0.075"
    assert float(told["profile_error"]) == combination.error
    assert float(told["sum_of_coefficient_magnitudes"]) == combination.magnitude


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_precision_costs_what_the_coefficients_say_and_is_refused_for_short_lengths(
    run, tmp_path, command, dtype, rounding
):
    half = tmp_path / dtype
    Training(half, 0, dtype).train(STEPS)
    exact = dict(reconstruct(stored_averages(run, without=["held"]), 0.13).tensors())
    found = reconstruct(stored_averages(half, without=["held"]), 0.13)
    stored = load_file(next(folder(half, 64).glob("*.safetensors")))
    assert stored["ema.long.a"].dtype == getattr(torch, dtype) and stored["model.frequencies"].dtype == torch.float32
    largest = max(t.abs().max() for t in torch.load(run / "tracks.pt")["long"].values())
    for name, value in found.tensors():
        assert value.dtype == exact[name].dtype
        assert (value - exact[name]).abs().max() <= found.combination.magnitude * rounding * largest
    gap = (dict(found.tensors())["a"] - exact["a"]).abs().max()
    assert gap > rounding * 1e-3  # it was rounded
    assert bool(found.warnings) == (dtype == "bfloat16")
    before = content(half)
    code, _, error = command("reconstruct", half, "--std", 0.04)
    assert code == 2 and error.count("\n") == 1 and f"snapshots are {dtype}" in error and content(half) == before


# ---------------------------------------------------------------------- what is refused


def remove(run: Path) -> None:
    shutil.rmtree(folder(run, 24))


def damage(run: Path) -> None:
    path = next(folder(run, 24).glob("shard-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def tear(run: Path) -> None:
    (folder(run, 24) / MANIFEST).unlink()


GAPS = {remove: "is missing", damage: "is damaged", tear: "the save was cut off"}


@pytest.mark.parametrize("defect", GAPS, ids=lambda defect: defect.__name__)
def test_gap_is_named_and_may_be_ignored_at_a_larger_error(run, command, defect):
    whole = reconstruct(stored_averages(run), 0.2)
    defect(run)
    before = content(run)
    code, _, error = command("reconstruct", run, "--std", 0.2)
    assert code == 2 and error.count("\n") == 1 and content(run) == before
    assert "step-00000024" in error and GAPS[defect] in error and "--ignore-gaps" in error
    code, output, error = command("reconstruct", run, "--std", 0.2, "--ignore-gaps")
    assert code == 0 and "left out" in error and "7 snapshots" in output
    assert reconstruct(stored_averages(run, ignore_gaps=True), 0.2).combination.error > whole.combination.error
    findings = {finding.path.name: finding for finding in check_run(run) if finding.path.parent.name == "snapshots"}
    assert [name for name, finding in findings.items() if finding.problem] == ["step-00000024"]
    assert len(findings) == 8 and "--ignore-gaps" in findings["step-00000024"].advice


@pytest.mark.parametrize("step", [24, 64], ids=["in the middle", "the newest"])
def test_snapshot_of_another_run_is_refused(run, tmp_path, command, step):
    Training(tmp_path / "other", seed=1).train(STEPS)
    shutil.rmtree(folder(run, step))
    shutil.copytree(folder(tmp_path / "other", step), folder(run, step))
    for words in ((), ("--ignore-gaps",)):
        code, _, error = command("reconstruct", run, "--std", 0.075, *words)
        assert code == 2 and error.count("\n") == 1 and "of another run" in error
    assert any("of another run" in finding.problem for finding in check_run(run))


REFUSED = {
    "--std 0": "must be above 0",
    "--std 0.01": "above 0.1; they reach 0.0",
    "--std 0.1 --step 7": "has no snapshot of step 7",
    "--std 0.1 --without short long held": "no track is left",
    "--std 0.1 --output {run}/there.safetensors": "exists already",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusal_is_one_line_and_writes_nothing(run, command, words):
    (run / "there.safetensors").write_text("mine")
    before = content(run)
    code, output, error = command("reconstruct", run, *words.format(run=run).split())
    assert (code, output) == (2, "") and error.count("\n") == 1 and REFUSED[words] in error
    assert content(run) == before


def test_run_without_snapshots_and_values_that_are_not_finite_are_refused(run, tmp_path, command):
    for place in (tmp_path / "nowhere", tmp_path):
        code, _, error = command("reconstruct", place, "--std", 0.1)
        assert code == 2 and error.count("\n") == 1
    broken = Training(tmp_path / "broken")
    broken.train(7).parameters["b"].data.fill_(math.inf)
    broken.train(1)
    code, _, error = command("reconstruct", tmp_path / "broken", "--std", 0.1)
    assert code == 2 and "b is not finite" in error and not list((tmp_path / "broken" / "ema").glob("*.safetensors"))


def test_snapshots_need_a_power_track():
    with pytest.raises(ConfigError, match=r"ema.snapshot_interval: there is no track of kind power"):
        load_config(["--job.config_file", "train_configs/digits.toml", "--ema.snapshot_interval", "100"], 1)
    with pytest.raises(ConfigError, match=r"ema.snapshot_dtype: has no effect when ema.snapshot_interval = 0"):
        load_config(["--job.config_file", "train_configs/digits.toml", "--ema.snapshot_dtype", "float16"], 1)


# ---------------------------------------------------------------------- resuming


def test_interval_counts_images_whatever_the_batch(tmp_path):
    snapshots = Training(tmp_path / "run").snapshots
    assert [step for step in range(1, 30) if snapshots.due(step, 8)] == [8, 16, 24]
    assert snapshots.due(9, 16) and not snapshots.due(10, 16)  # steps of two batches: 7 -> 9 passes 64 images
    never = Training(tmp_path / "never", 0, "float32", "--ema.snapshot_interval", "1000000").snapshots
    assert not any(never.due(step, 8) for step in range(1, 30))


def test_resume_takes_back_later_snapshots_and_writes_them_again_bit_for_bit(run, template):
    resumed = Training(run.parent / "resumed").train(32)
    shutil.copytree(folder(template, 40), folder(resumed.snapshots.folder.parents[1], 40))  # after the checkpoint
    (resumed.snapshots.folder / ".step-00000048-0123abcd").mkdir()  # of a save that was killed
    (resumed.snapshots.folder / ".step-00000048-0123abcd" / "shard-00001.safetensors").write_bytes(b"torn")
    resumed.snapshots.load_state_dict(json.loads(json.dumps(resumed.snapshots.state_dict())), 32)
    assert checkpoint_steps(resumed.snapshots.folder) == [32, 24, 16, 8]
    assert not list(resumed.snapshots.folder.glob(".*"))
    resumed.train(32)
    assert content(resumed.snapshots.folder) == content(template / "ema" / "snapshots")


def test_resume_sets_aside_what_it_does_not_know_to_be_its_own(run, template, tmp_path):
    Training(tmp_path / "other", seed=1).train(16)
    own = run.parent / "own"
    training = Training(own).train(8)
    for step, source in ((16, folder(tmp_path / "other", 16)), (24, folder(template, 24)), (32, folder(template, 32))):
        shutil.copytree(source, folder(own, step))
    (folder(own, 24) / "state.json").write_text("{")  # damaged
    (folder(own, 32) / "notes.txt").write_text("mine")
    training.snapshots.load_state_dict(training.snapshots.state_dict(), 8)
    names = sorted(path.name for path in training.snapshots.folder.iterdir())
    assert [name.rpartition("-")[0] for name in names] == [
        "kept-deleted-step-00000032", "set-aside-step-00000016", "set-aside-step-00000024", "step",
    ]
    assert (training.snapshots.folder / names[0] / "notes.txt").read_text() == "mine"


def test_snapshot_that_could_not_be_written_is_a_gap_of_the_series(tmp_path, command, monkeypatch):
    training = Training(tmp_path / "run").train(8)
    monkeypatch.setattr(training.snapshots._writer._store, "begin", lambda step: (_ for _ in ()).throw(OSError("no space")))
    training.train(8)
    monkeypatch.undo()
    training.train(8)
    code, _, error = command("reconstruct", tmp_path / "run", "--std", 0.1)
    assert code == 2 and "step-00000016: is missing: it could not be written in training" in error
