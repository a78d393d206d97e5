"""scripts/ema.py on runs of train.py: killed within a snapshot and resumed, sampled from, swept and swept again."""

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
from tests.forked import run_script
from torchtitan.checkpoint.comparison import compare, open_checkpoint
from torchtitan.errors import CheckpointError
from torchtitan.runs import ema_sweep
from torchtitan.runs.check import check_run
from torchtitan.runs.trained_model import load_run, load_weights

OPTIONS = (
    "--training.steps", "8", "--checkpoint.interval", "4", "--sampling.enable", "false", "--ema.snapshot_interval", "32",
    "--training.local_batch_size", "16", "--ema.tracks", '[{"name": "ema"}, {"name": "short", "kind": "power", '
    '"sigma_rel": 0.05}, {"name": "long", "kind": "power", "sigma_rel": 0.1}]',
    "--evaluation.extractor", "digits", "--evaluation.reference", "train",
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


def test_samples_are_drawn_from_the_file(straight, command, tmp_path):
    weights = tmp_path / "average.safetensors"
    assert command("reconstruct", straight, "--std", 0.075, "--output", weights)[0] == 0
    options = ("--num-steps", "2", "--classes", "3", "--guidance-scale", "1")
    result = run_script("scripts/sample.py", str(weights), "--config", str(straight / "config.toml"), *options)
    assert result.returncode == 0 and list((tmp_path / "average").glob("grid-*-seed-0.png")), result.stderr


def test_stopped_sweep_keeps_its_finished_lengths_and_resumes(straight, command, tmp_path, monkeypatch):
    run = Path(shutil.copytree(straight, tmp_path / "straight"))
    words = ("sweep", run, "--images", 40, "--stds")
    assert command(*words, 0.05, 0.075, 0.1, "--output", tmp_path / "whole.json")[0] == 0
    score, scored = ema_sweep._score, []

    def stopped(*arguments):
        scored.append(1)
        if len(scored) == 3:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr(ema_sweep, "_score", stopped)
    code, _, error = command(*words, 0.05, 0.075, 0.1)
    assert code == 130 and "the same command resumes" in error
    record = run / "ema" / "sweep-step-00000008-loss.json"
    assert [entry["std"] for entry in json.loads(record.read_text())["lengths"]] == [0.05, 0.075]
    assert command(*words, 0.05, 0.075, 0.1)[0] == 0 and len(scored) == 4  # one was left
    assert record.read_bytes() == (tmp_path / "whole.json").read_bytes()
    code, output, _ = command(*words, 0.12)
    assert code == 0 and output.count("\nstd ") == 3 and len(scored) == 5  # a length is added
    assert record.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


SWEEPS = {
    "--stds 0.1 0.3": "below 0.2887",
    "--stds 0.1 0.28": "above 0.1; they reach",
    "--stds 0.1 --metric fod": "--metric: no metric is called 'fod' (there are: loss, fid,",
    "--stds 0.1 --metric fd --images 20": "fd: a covariance of 64 features from 20 images",
    "--stds 0.1 --metric memorisation": "--metric memorisation: evaluation.held_out: not given",
    "--stds 0.1 --guidance-scale 2": "has no effect on held-out loss",
    "--stds 0.1 --metric accuracy --guidance-scale 2 --guide :nobody": "has no EMA track 'nobody'",
    "--stds 0.1 --metric accuracy --guidance-scale 1 --guide :long": "--guide: has no effect at a guidance scale of 1",
    "--stds 0.1 --images 0": "--images: must be at least 1",
    "--stds 0.1 --output {run}/scores.txt": "must end in .json",
    "--stds 0.1 --output {run}/config.json": "is no record of a sweep",
    "--stds 0.1 --output {run}/other.json": "is the record of a sweep with step = 7 instead of 8",
    "--stds 0.1 --output {run}/picture.json": "picture.png: exists already",
}


@pytest.mark.parametrize("words", SWEEPS)
def test_refused_sweep_is_one_line_and_writes_nothing(straight, command, tmp_path, words):
    run = Path(shutil.copytree(straight, tmp_path / "run"))
    (run / "config.json").write_text("{}")
    (run / "other.json").write_text(json.dumps({"settings": {"step": 7, "run": "run"}, "lengths": []}))
    (run / "picture.png").write_text("mine")

    def kept() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and ".lock" not in path.name}

    before = kept()
    code, output, error = command("sweep", run, *words.format(run=run).split())
    assert (code, output) == (2, "") and error.count("\n") == 1 and SWEEPS[words] in error
    assert kept() == before


def test_sweep_of_a_run_without_labels_has_no_accuracy(straight, command, tmp_path):
    run = Path(shutil.copytree(straight, tmp_path / "run"))
    text = (run / "config.toml").read_text()
    changed = re.sub("label_dropout = .*", "label_dropout = 0.0", text.replace("labels = true", "labels = false"))
    assert changed != text
    (run / "config.toml").write_text(changed)
    code, _, error = command("sweep", run, "--stds", 0.1, "--metric", "accuracy")
    assert code == 2 and "accuracy: digits knows 10 classes, the data have 0 (leave it out)" in error


def test_sweep_by_a_metric_ranks_lengths_in_its_direction(straight, command, tmp_path):
    record = tmp_path / "metric.json"
    options = (
        "--metric", "accuracy", "--images", 40, "--num-steps", 2, "--guidance-scale", 2, "--guide", ":std=0.12",
        "--output", record,
    )  # fmt: skip
    assert command("sweep", straight, "--stds", 0.05, 0.1, *options)[0] == 0
    found = json.loads(record.read_text())
    scores = {entry["std"]: entry["accuracy"] for entry in found["lengths"]}
    assert found["settings"]["better"] == "higher" and scores[found["best_std"]] == max(scores.values())
    assert found["settings"]["guide"] == ":std=0.12, step 8, std=0.12"
    assert found["lengths"][0].keys() == {"std", "accuracy", "profile_error", "sum_of_coefficient_magnitudes"}
    distances = command("sweep", straight, "--stds", 0.1, "--metric", "fd", "--images", 80, "--num-steps", 2, "--output", record)
    assert distances[0] == 2 and "is the record of a sweep with metric = accuracy instead of fd" in distances[2]
    words = ("sweep", straight, "--stds", 0.05, 0.1, *options[:-1], tmp_path / "two.json")
    ended = results_of(start_command("ema", *words, ranks=2))
    assert [code for code, _ in ended] == [0, 0] and ended[1][1] == "", ended
    two = json.loads((tmp_path / "two.json").read_text())
    assert two["lengths"] == [pytest.approx(entry, rel=1e-4) for entry in found["lengths"]]


def test_other_ranks_leave_the_file_to_the_first(straight, command, tmp_path, monkeypatch):
    output = tmp_path / "average.safetensors"
    monkeypatch.setattr(tool, "FIRST", False)
    assert command("reconstruct", straight, "--std", 0.1, "--output", output) == (0, "", "") and not output.exists()
