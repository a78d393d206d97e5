"""The runs of a sweep or a study write into its folder, each into its own, and nowhere else; what is not there is no result."""

import dataclasses
import json
import sys

import pytest

from torchtitan.config.job import JobConfig
from torchtitan.config.places import place_problems, written_places
from torchtitan.data import DATASETS
from torchtitan.experiments import process
from torchtitan.experiments.grid import SweepError, read_sweep
from torchtitan.experiments.process import run_processes
from torchtitan.experiments.record import SweepFolder
from torchtitan.experiments.runner import plan_sweep

SWEEP = """
[fixed]
model.flavor = "debug"
data.name = "synthetic"
training.steps = 4
{fixed}
[axes]
training.local_batch_size = [1, 2]
{axes}
"""


def plan(tmp_path, fixed="", axes="", base=None):
    text = SWEEP.format(fixed=fixed, axes=axes)
    if base is not None:
        (tmp_path / "base.toml").write_text(base)
        text = 'base = "base.toml"\n' + text
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return plan_sweep(read_sweep(path), SweepFolder(tmp_path / "results"))


def test_the_keys_that_name_written_places_are_declared_so():
    found = {key: field.metadata["writes"] for key, _, field in written_places(JobConfig())}
    for section in (dataclasses.replace(dataset.Config(), name=name) for name, dataset in DATASETS.items()):
        places = written_places(dataclasses.replace(JobConfig(), data=section))
        found |= {key: field.metadata["writes"] for key, _, field in places}
    assert found == {
        "job.dump_folder": "run", "job.name": "run", "checkpoint.folder": "run", "cache.folder": "shared",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"fixed": 'job.dump_folder = "/elsewhere"'}, "fixed.job.dump_folder: every run writes into a separate folder"),
        ({"fixed": 'job.name = "one"'}, "fixed.job.name: every run writes into a separate folder"),
        ({"fixed": 'checkpoint.enable = true\ncheckpoint.folder = "/elsewhere"'}, "fixed.checkpoint.folder: every run"),
        ({"fixed": "checkpoint.enable = true", "base": '[checkpoint]\nfolder = "/elsewhere"\n'}, "base: {}/base.toml: check"),
    ],
)  # fmt: skip
def test_a_sweep_whose_runs_would_write_elsewhere_is_refused_before_anything_is_written(tmp_path, where, words):
    with pytest.raises(SweepError) as caught:
        plan(tmp_path, **where)
    assert words.format(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "results").exists()


def test_places_of_a_base_that_the_sweep_replaces_do_not_matter(tmp_path):
    base = '[job]\ndump_folder = "/elsewhere"\nname = "x"\n[checkpoint]\nfolder = "/elsewhere"\n'
    assert len(plan(tmp_path, base=base).missing) == 2  # checkpoints are off, and the run's folder is the sweep's


def test_what_runs_share_lies_in_one_folder_of_the_sweep(tmp_path):
    results = tmp_path / "results"

    def problems(folder):
        config = JobConfig()
        config.job.dump_folder, config.job.name = str(results), "cell"
        config.data.name, config.cache.enable, config.cache.folder = "captioned_folder", True, str(folder)
        return [key for key, _ in place_problems(config, results, results, "cell")]

    assert problems("") == problems(results / "shared") == problems(results / "shared" / "latents") == []
    outside = (tmp_path, results, results / "cell", results / "shared" / ".." / "cell", results / "shared-not")
    assert all(problems(path) == ["cache.folder"] for path in outside)
    results.mkdir()
    (results / "shared").mkdir()
    (results / "shared" / "link").symlink_to(tmp_path)
    assert problems(results / "shared" / "link") == ["cache.folder"]


@pytest.mark.parametrize(
    ("left", "status", "words"),
    [
        (None, "failed", "exit code 0, but {}/run/summary.json was not written"),
        ({"status": "interrupted"}, "failed", "the run's status is interrupted, not completed"),
        ("torn", "failed", "not completed"),
        ({"status": "completed"}, "ok", ""),
    ],
)
def test_a_run_that_ends_well_and_leaves_no_result_has_failed(tmp_path, monkeypatch, left, status, words):
    if left is not None:
        (tmp_path / "run").mkdir()
        text = left if left == "torn" else json.dumps(left)
        (tmp_path / "run" / "summary.json").write_text(text)  # of a launch before: a finished run does not write again
    monkeypatch.setattr(process, "_command", lambda arguments, processes: [sys.executable, "-S", "-c", "print('done')"])
    arguments = ["--model.flavor=debug", f"--job.dump_folder={tmp_path}", "--job.name=run"]
    outcome = run_processes(arguments, timeout_s=60, log=tmp_path / "run.log")
    assert outcome.status == status and words.format(tmp_path) in outcome.reason
