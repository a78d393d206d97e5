"""scripts/checkpoint.py verify on a run: each kind of file, each defect with one line of advice."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from torchtitan.checkpoint.checkpointer import Checkpointer
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.runs.check import check_run


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run")
    (run / "config.toml").write_text('[model]\nflavor = "debug"\n')
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "lr": 1.0}) + "\n" for step in (1, 2, 2, 3)))
    (run / "summary.json").write_text(json.dumps({"status": "completed", "step": 3}))
    (run / "gns").mkdir()
    pq.write_table(pa.table({"step": list(range(100))}), run / "gns" / "raw-00000001-00000100.parquet")
    keeper = Checkpointer(run / "checkpoint", CheckpointConfig(), rank=0)
    for step in (1, 2, 3):
        keeper.save(step, {"a": torch.arange(4.0)}, {"step": step})
    return run


@pytest.fixture
def run(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


NAMES = [
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "raw-00000001-00000100.parquet",
    *(f"step-0000000{n}" for n in (1, 2, 3)),
]


def test_a_whole_run_is_good(run):
    found = list(check_run(run))
    assert [finding.path.name for finding in found] == NAMES
    assert not any(finding.problem or finding.advice for finding in found)


def test_a_run_that_was_killed_early_has_no_defect(run):
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).unlink()
    assert not any(finding.problem for finding in check_run(run))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 - 8 : len(content) // 2 + 8] = b"\xff" * 16
    path.write_bytes(content)


DEFECTS = {
    "config missing": ("config.toml", Path.unlink, "missing", "start the run's command again"),
    "config cut": ("config.toml", cut, "is no TOML", "start the run's command again"),
    "config binary": ("config.toml", middle, "is no TOML", "start the run's command again"),
    "metrics cut": ("metrics.jsonl", cut, "line 4 is damaged", "remove that line"),
    "metrics binary": ("metrics.jsonl", middle, "is damaged", "remove that line"),
    "metrics order": (
        "metrics.jsonl",
        lambda path: path.write_text('{"step": 2}\n{"step": 1}\n'),
        "line 2",
        "remove that line",
    ),
    "metrics list": ("metrics.jsonl", lambda path: path.write_text("[1]\n"), "line 1 is damaged", "remove that line"),
    "metrics nested": (
        "metrics.jsonl",
        lambda path: path.write_text("[" * 100_000),
        "line 1 is damaged",
        "remove that line",
    ),
    "summary cut": ("summary.json", cut, "is damaged", "remove it"),
    "summary other": (
        "summary.json",
        lambda path: path.write_text('{"status": "fine"}'),
        "does not contain the end",
        "remove it",
    ),
    "parquet cut": ("gns/raw-00000001-00000100.parquet", cut, "is damaged", "remove it"),
    "parquet empty": (
        "gns/raw-00000001-00000100.parquet",
        lambda path: path.write_bytes(b""),
        "is damaged",
        "remove it",
    ),
    "old checkpoint": (
        "checkpoint/step-00000001/state.json",
        cut,
        "bytes instead of",
        "remove it: a resume uses step 3",
    ),
    "newest checkpoint": ("checkpoint/step-00000003/shard-00001.safetensors", middle, "is damaged", "uses step 2"),
    "manifest": ("checkpoint/step-00000003/manifest.json", Path.unlink, "missing", "nothing needs to be done"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named_with_what_to_do(run, name):
    file, harm, problem, advice = DEFECTS[name]
    harm(run / file)
    found = [finding for finding in check_run(run) if finding.problem]
    assert len(found) == 1 and found[0].path in (run / file, (run / file).parent)
    assert problem in found[0].problem and advice in found[0].advice
    assert "\n" not in found[0].problem + found[0].advice


def test_a_run_that_has_lost_its_checkpoints_is_not_good(run):
    (run / "config.toml").write_text("[checkpoint]\nenable = true\n")
    assert not any(finding.problem for finding in check_run(run))
    (run / "checkpoint").rename(run / "elsewhere")
    assert [finding.problem for finding in check_run(run)].count("holds no checkpoint, and the run saved some") == 1
    (run / "summary.json").write_text('{"status": "failed", "step": 1}')  # before the first
    assert not any(finding.problem for finding in check_run(run))


def test_without_any_good_checkpoint_the_advice_is_another(run):
    for step in (1, 2, 3):
        cut(run / "checkpoint" / f"step-0000000{step}" / "state.json")
    found = [finding for finding in check_run(run) if finding.problem]
    assert len(found) == 3 and all("put a copy of a good one back" in finding.advice for finding in found)
