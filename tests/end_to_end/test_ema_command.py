"""scripts/ema.py on runs of train.py: killed within a snapshot and resumed, sampled from and swept."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.end_to_end.drawing import results_of, start_command
from tests.end_to_end.runs import write_config
from tests.end_to_end.tools import caller, load_tool
from tests.extractions import content
from tests.faults.forked import FAULT, ForkedRun
from tests.faults.moments import KILLED
from torchtitan.checkpoint.comparison import compare, open_checkpoint
from torchtitan.errors import CheckpointError
from torchtitan.runs.check import check_run
from torchtitan.weights.trained_model import load_run, load_weights

OPTIONS = (
    "--training.steps", "8", "--checkpoint.interval", "4", "--sampling.enable", "false", "--ema.snapshot_interval", "32",
    "--training.local_batch_size", "16", "--ema.tracks", '[{"name": "ema"}, {"name": "short", "kind": "power", '
    '"sigma_rel": 0.05}, {"name": "long", "kind": "power", "sigma_rel": 0.1}]', "--evaluation.reference", "validation",
    "--evaluation.count", "40", "--validation.enable", "true", "--validation.interval", "8",
)  # fmt: skip
tool = load_tool("ema")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("ema"))


@pytest.fixture(scope="module")
def straight(config) -> Path:
    run = ForkedRun(config, "straight", *OPTIONS)
    run.finish()
    return run.folder


@pytest.fixture
def command(capsys):
    return caller(tool, capsys)


def same_series(*runs: Path) -> bool:
    """Compare all but the run's name, which is in state.json and so in every manifest."""
    found, wanted = (content(run / "ema" / "snapshots") for run in runs)
    shards = {name for name in wanted if "shard-" in name}
    return found.keys() == wanted.keys() and all(found[name] == wanted[name] for name in shards)


def test_killed_within_snapshots_the_same_command_completes_the_same_series(config, straight, monkeypatch):
    # Snapshots after steps 2, 4, 6 and 8, checkpoints after 4 and 8: the fourth shard is of the snapshot of step 6.
    def start(fault: str) -> ForkedRun:
        monkeypatch.setenv(FAULT, fault)
        return ForkedRun(config, "killed", *OPTIONS)

    killed = start("0:in the write:4")
    assert killed.wait()[0][0] in KILLED
    series = killed.folder / "ema" / "snapshots"
    assert sorted(path.name.partition("-")[0] for path in series.iterdir()) == [".step", "step", "step"]
    again = start("0:after the rename:1")
    assert again.wait()[0][0] in KILLED
    assert sorted(path.name for path in series.iterdir()) == [f"step-0000000{step}" for step in (2, 4, 6)]
    monkeypatch.delenv(FAULT)
    last = ForkedRun(config, "killed", *OPTIONS)
    assert "resumed after step 4" in last.finish()[0]
    assert same_series(last.folder, straight)
    both = (open_checkpoint(run / "checkpoint" / "step-00000008") for run in (straight, last.folder))
    assert compare(*both).equal  # the series' hashes have the run's name in them, and do not count
    findings = [(finding.path.name, finding.problem) for finding in check_run(last.folder)]
    assert ("step-00000006", "") in findings and not any(problem for _, problem in findings)


def test_weights_of_any_length_are_loaded_from_the_run_and_from_a_file(straight, command, tmp_path):
    weights = tmp_path / "average.safetensors"
    code, output, _ = command("reconstruct", straight, "--std", 0.075, "--output", weights)
    assert code == 0 and "4 snapshots of short, long" in output
    device = torch.device("cpu")
    from_run = dict(load_run(straight, "std=0.075", None, device).model.named_parameters())
    from_file = dict(load_weights(weights, straight / "config.toml", device).model.named_parameters())
    tracked = dict(load_run(straight, "short", None, device).model.named_parameters())
    again = dict(load_run(straight, "std=0.05", 8, device).model.named_parameters())
    assert all(torch.equal(from_run[name], from_file[name]) for name in tracked)
    assert all(torch.equal(tracked[name], again[name]) for name in tracked)
    assert any(not torch.equal(tracked[name], from_run[name]) for name in tracked)
    for track, message in {"std=0.5": "below 0.2887", "std=wide": "names no length", "std=0.01": "above 0.1"}.items():
        with pytest.raises(CheckpointError, match=message):
            load_run(straight, track, None, device)


def scores(output: str, metric: str) -> dict[str, float]:
    return {std: float(value) for value, std in re.findall(rf"^{metric} (\S+): std (\S+) ", output, re.MULTILINE)}


def test_sweep_names_the_length_of_the_least_held_out_loss(straight, command):
    code, output, _ = command("sweep", straight, "--images", 40, "--stds", 0.1, 0.05, 0.075)
    found = scores(output, "loss")
    assert code == 0 and list(found) == ["0.05", "0.075", "0.1"] and len(set(found.values())) == 3
    assert output.splitlines()[-1].partition(",")[0] == f"best: std {min(found, key=found.get)}"
    points = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    (trained,) = (point[key] for point in points if (key := "validation_metrics/long/loss") in point)
    assert scores(command("sweep", straight, "--stds", 0.1)[1], "loss")["0.1"] == pytest.approx(trained, rel=1e-5)


def test_sweep_ranks_lengths_in_the_direction_of_a_metric_of_samples(straight, command):
    words = ("sweep", straight, "--stds", 0.05, 0.1, "--metric", "prdc", "--guidance-scale", 2, "--guide", ":std=0.12",
             "--extractor", "digits")  # fmt: skip
    code, output, _ = command(*words)
    found = scores(output, "precision")
    assert code == 0 and list(found) == ["0.05", "0.1"], output
    best = max(found, key=found.get)
    assert output.splitlines()[-1] == f"best: std {best}, the {'shortest' if best == '0.05' else 'longest'} that was tried"
    ended = results_of(start_command("ema", *words, ranks=2))
    assert [code for code, _ in ended] == [0, 0] and ended[1][1] == "", ended
    assert scores(ended[0][1], "precision") == pytest.approx(found, rel=1e-4)


SWEEPS = {
    "--stds 0.1 0.3": "below 0.2887",
    "--stds 0.1 --metric fod": "--metric: no metric is called 'fod' (there are: loss, fid,",
    "--stds 0.1 --extractor digits": "--extractor: has no effect on held-out loss",
    "--stds 0.1 --metric fd --extractor digits --reference nowhere": "nowhere",
    "--stds 0.1 --metric fd --extractor digits --images 20": "fd: a covariance of 64 features from 20 images",
    "--stds 0.1 --metric prdc --extractor digits --guidance-scale 2 --guide :nobody": "has no EMA track 'nobody'",
}


def test_a_guide_without_a_checkpoint_of_the_step_is_refused_by_its_key(straight, command, tmp_path):
    copy = shutil.copytree(straight, tmp_path / "copy")
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('guide_track = ""', 'guide_track = "long"'))
    shutil.rmtree(copy / "checkpoint" / "step-00000004", ignore_errors=True)
    words = ("--stds", 0.1, "--metric", "prdc", "--extractor", "digits", "--guidance-scale", 2, "--step", 4)
    code, _, error = command("sweep", copy, *words)
    assert code == 2 and "sampling.guide_track = long: " in error and "(give --guide :std=S, an average from snapshots" in error


@pytest.mark.parametrize("words", SWEEPS)
def test_refused_sweep_is_one_line(straight, command, words):
    code, output, error = command("sweep", straight, *words.split())
    assert (code, output) == (2, "") and error.count("\n") == 1 and SWEEPS[words] in error


def test_other_ranks_leave_the_file_to_the_first(straight, command, tmp_path, monkeypatch):
    output = tmp_path / "average.safetensors"
    monkeypatch.setattr(tool, "FIRST", False)
    assert command("reconstruct", straight, "--std", 0.1, "--output", output) == (0, "", "") and not output.exists()
