"""Studies that train: stopped and resumed, equal samples, failures as rows, pictures, refusals in one line."""

import os
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image

from research import command_line, grid_plots, prediction_types
from tests.end_to_end.tools import table
from tests.faults.forked import _train
from tests.forked import ForkedProcess
from tests.research.small_runs import SMALL
from torchtitan.diffusion.timesteps.slot_edges import write_slot_edges
from torchtitan.experiments import training
from torchtitan.experiments.outcome import Outcome
from torchtitan.files.run_lock import RunLock

CONFIG = SMALL + """[objective]
path = "ddpm_linear"
prediction = "v"
preconditioning = "index"
timesteps.name = "uniform"
[training]
steps = 10
local_batch_size = 4
global_batch_size = 4
[[ema.tracks]]
name = "slow"
decay = 0.9
[sampling]
enable = false
"""
ARMS = ["--arm", "uniform", "--arm", "beta", "objective.timesteps.name=beta"]
QUICK = ["--seeds", "2", "--samples", "32", "--checkpoints", "2", "--images", "4", "--nodes", "1"]


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


class Trainings:
    """Trains as `run_processes` does, in forks; remembers what it trained."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.interrupt: str | None = None  # run that is killed after its first checkpoint, as by Ctrl-C
        self.stop: str | None = None  # run before which all ends, as by Ctrl-C
        self.fail: str | None = None  # run that fails

    def __call__(self, arguments, *, processes, log, **options) -> Outcome:
        name = log.stem
        if name == self.stop:
            self.stop = None
            raise KeyboardInterrupt
        self.names.append(name)
        if name == self.fail:
            return Outcome("failed", "made to fail", 0.1)
        environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0"}
        process = ForkedProcess(_train, (arguments,), environment)
        while process.poll() is None:
            if name == self.interrupt and (log.with_suffix("") / "checkpoint" / "step-00000004").exists():
                process.kill()
                process.wait()
                self.interrupt = None
                raise KeyboardInterrupt
            time.sleep(0.005)
        assert process.returncode == 0, process.said()
        return Outcome("ok", "", 0.1)


@pytest.fixture
def trainings(monkeypatch) -> Trainings:
    found = Trainings()
    monkeypatch.setattr(training, "run_processes", found)
    return found


@pytest.fixture
def no_pictures(monkeypatch):
    """A call: from then on nothing is drawn, which takes longer than measuring."""

    def stop_drawing() -> None:
        monkeypatch.setattr(grid_plots, "draw_bins", lambda *of: "")
        monkeypatch.setattr(grid_plots, "draw_curves", lambda *of: "")
        monkeypatch.setattr(prediction_types, "_draw", lambda *of: "")

    return stop_drawing


def assert_picture(path: Path) -> None:
    with Image.open(path) as image:
        assert len(set(image.convert("RGB").resize((90, 60)).get_flattened_data())) > 5


def losses_by_bin(summary: Path) -> dict[str, str]:
    """Timesteps -> loss of the reference, as the last table has them."""
    lines = summary.read_text().rpartition("### By timestep")[2].splitlines()
    return {cells[1].strip(): cells[2].strip() for line in lines if len(cells := line.split("|")) > 3}


def test_samplers_interrupted_failed_and_gone_on_with(config, trainings, study, no_pictures, tmp_path):
    folder = tmp_path / "results"
    words = ["compare_settings", config, *ARMS, *QUICK, "--output", folder]
    names = ["uniform_s0", "beta_s0", "uniform_s1", "beta_s1"]
    trainings.interrupt = names[1]
    code, _, error = study(*words)
    assert code == 130 and "the same command resumes" in error and trainings.names == names[:2]
    first = folder / "runs" / names[0] / "checkpoint" / "step-00000008" / "manifest.json"
    half = folder / "runs" / names[1] / "checkpoint" / "step-00000004" / "manifest.json"
    before = [path.stat().st_mtime_ns for path in (first, half)]

    trainings.names.clear()
    trainings.fail = names[3]
    code, output, _ = study(*words)
    assert code == 0 and output == f"{folder / 'summary.md'}\n"
    assert trainings.names == names[1:]  # the finished one is left alone, the interrupted one goes on
    assert [path.stat().st_mtime_ns for path in (first, half)] == before
    assert [row["status"] for row in table(folder / "training.csv")] == ["ok", "ok", "ok", "failed"]
    assert {row["samples"] for row in table(folder / "training.csv")} == {"32"}
    rows = table(folder / "results.csv")
    # Two checkpoints of EMA weights and the last one's trained weights, ten bins each; one row for the failed run.
    assert len(rows) == 3 * 3 * 10 + 1 and "made to fail" in rows[-1]["reason"]
    assert {row["samples"] for row in rows[:-1]} == {"16", "32"}
    summary = (folder / "summary.md").read_text()
    assert "made to fail" in summary and "| 1 of 2 seeds; 1 failed |" in summary
    for picture in ("bins_1", "curves"):
        assert f"({picture}.png)" in summary
        assert_picture(folder / f"{picture}.png")

    no_pictures()
    trainings.names.clear()
    trainings.fail = None
    study(*words)
    assert trainings.names == [] and len(table(folder / "results.csv")) == len(rows)
    study(*words, "--retry-failed")
    assert trainings.names == names[3:] and len(table(folder / "results.csv")) == len(rows) + 30
    summary = (folder / "summary.md").read_text()
    assert " cells, 0 failed; " in summary and "Failed cells" not in summary and "1 failed" not in summary
    assert "| 2 |" in summary and "| reference |" in summary and "277-999" in summary

    # A bin of the same edges is another one's number among other bins.
    before = losses_by_bin(folder / "summary.md")
    write_slot_edges(tmp_path / "edges.json", [0, 56, 82, 1000], "index")
    code, _, error = study(*words, "--edges", tmp_path / "edges.json")
    assert code == 0, error
    after = losses_by_bin(folder / "summary.md")
    assert after["56-81"] == before["56-81"] and list(after)[-3:] == ["0-55", "56-81", "82-999"]
    assert len(set(after.values())) == len(after)

    code, _, error = study(*words, "--checkpoints", "4")
    assert code == 2 and "holds another run, checkpoint.interval: 4 -> 2" in error and error.count("\n") == 1


def test_settings_whose_batch_grows_are_compared_at_equal_samples(config, trainings, study, no_pictures, tmp_path):
    no_pictures()
    arms = ["--arm", "constant", "--arm", "ramp", "training.double_batch_after=[8]", "--target"]
    code, _, error = study("compare_settings", config, *arms, *QUICK, "--checkpoints", "4", "--output", tmp_path / "ramp")
    assert code == 0, error
    rows = [row for row in table(tmp_path / "ramp" / "results.csv") if row["weights"] != "none"]
    seen = {
        arm: sorted({(int(row["step"]), int(row["samples"])) for row in rows if row["settings"] == arm})
        for arm in ("constant", "ramp")
    }
    assert seen["constant"] == [(2, 8), (4, 16), (6, 24), (8, 32)]
    assert seen["ramp"] == [(2, 8), (3, 16), (4, 24), (5, 32)]
    summary = (tmp_path / "ramp" / "summary.md").read_text()
    header = next(line for line in summary.splitlines() if line.startswith("| rank"))
    assert header.endswith("| samples to target | steps |") and "sets the target | 8 |" in summary
    ranked = [line.split("|") for line in summary.splitlines() if line.count("|") == header.count("|")]
    assert [cells[-2].strip() for cells in ranked if cells[2].strip() == "ramp"] == ["5", "5"]  # of both averages


def test_batches_at_equal_samples_and_prediction_types_of_their_runs(
    config, trainings, study, no_pictures, tmp_path
):
    folder, compared = tmp_path / "batches", tmp_path / "compared"
    asked = ["--batches", "4,16", "--lr-rule", "linear", "--output", folder]
    code, _, error = study("compare_settings", config, *ARMS, *asked, *QUICK)
    assert code == 0, error
    kinds = ("b4_uniform", "b4_beta", "b16_uniform", "b16_beta")
    assert trainings.names == [f"{kind}_s{seed}" for seed in (0, 1) for kind in kinds]
    rows = table(folder / "results.csv")
    assert {(row["group"], float(row["lr"])) for row in rows} == {("batch size 4", 1e-4), ("batch size 16", 4e-4)}
    assert {row["samples"] for row in rows} == {"16", "32"} and {row["parametrisation"] for row in rows} == {"v"}
    assert "## batch size 16" in (folder / "summary.md").read_text()

    runs = [folder / "runs" / name for name in ("b4_uniform_s0", "b16_uniform_s0", "b4_uniform_s1")]
    words = ["prediction_types", *runs, "--images", "4", "--nodes", "1", "--output", compared]
    code, _, error = study(*words, "--parametrisation", "x0")
    assert code == 0, error
    rows = table(compared / "results.csv")
    assert len(rows) == 30 and {row["log_ratio"] for row in rows[:10]} == {"0"}
    assert any(float(row["log_ratio"]) != 0 for row in rows[10:])
    assert_picture(compared / "bins.png")
    summary = (compared / "summary.md").read_text()
    assert "b16_uniform_s0 (v, step 2, 32 images seen, EMA slow, half-life 26" in summary
    assert "the same number of images" not in summary and "are not averaged alike" not in summary
    no_pictures()
    study(*words)
    in_v = table(compared / "results.csv")[30:]
    # One factor per timestep, the same for every run: the ratios of errors of one timestep per bin stay.
    for old, new in zip(rows, in_v, strict=True):
        assert old["error"] != new["error"]
        assert float(old["log_ratio"]) == pytest.approx(float(new["log_ratio"]), abs=1e-6)

    # Another run of the same name is another; the same run elsewhere is not.
    elsewhere = [tmp_path / "elsewhere" / name for name in ("b4_uniform_s0", "b16_uniform_s0")]
    shutil.copytree(runs[0], elsewhere[0])
    shutil.copytree(folder / "runs" / "b16_uniform_s1", elsewhere[1])
    code, _, error = study("prediction_types", *elsewhere, *words[4:])
    assert code == 0, error
    new = table(compared / "results.csv")[60:]
    assert {row["model"] for row in new} == {"b16_uniform_s0"} and len(new) == 10
    assert new[0]["error"] != in_v[10]["error"] and new[0]["checkpoint"] != in_v[10]["checkpoint"]

    code, _, error = study("prediction_types", *runs, "--images", "99999", "--output", tmp_path / "none")
    assert code == 2 and "99999 images are requested" in error and error.count("\n") == 1
    shutil.rmtree(elsewhere[1] / "checkpoint" / "step-00000002")
    code, _, error = study("prediction_types", *elsewhere, *words[4:])
    assert code == 0 and "have not seen the same number of images" in (compared / "summary.md").read_text(), error


def _study_process(words: list[str]) -> int:
    return command_line.main(words)


def test_a_killed_study_leaves_no_process_and_goes_on(config, trainings, study, no_pictures, tmp_path):
    folder = tmp_path / "killed"
    arms = ["--arm", "v", "--arm", "x0", "objective.prediction=x0", "--parametrisation", "v"]
    words = ["compare_settings", config, *arms, *QUICK, "--output", folder]
    trainings.stop = "x0_s0"
    assert study(*words)[0] == 130
    rows = table(folder / "training.csv")
    assert [(row["run"], row["status"]) for row in rows] == [("v_s0", "ok")]

    process = ForkedProcess(_study_process, (list(map(str, words)),), dict(os.environ))  # its training is a real one
    lock = folder / "runs" / "x0_s0" / ".lock"
    deadline = time.monotonic() + 300
    while not lock.exists() or not lock.read_text():
        assert process.poll() is None and time.monotonic() < deadline, process.said()
        time.sleep(0.01)
    process.kill()
    process.wait()
    training = RunLock(lock.parent)
    while training.acquire():  # until the guard has ended it
        assert time.monotonic() < deadline
        time.sleep(0.05)
    training.release()

    no_pictures()
    trainings.names.clear()
    code, _, error = study(*words)
    assert code == 0, error
    assert trainings.names == ["x0_s0", "v_s1", "x0_s1"] and table(folder / "training.csv")[:1] == rows
    assert "against v" in (folder / "summary.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare_settings", "{config}", *ARMS, "objective.timesteps.name=slots"], "slots needs objective.timesteps.edges"),
        (["compare_settings", "{config}", *ARMS, "--seeds", "1"], "--seeds: must be at least 2"),
        (["compare_settings", "{config}", *ARMS, "--set", "model.depth=2"], "unknown key"),
        (["compare_settings", "{config}", *ARMS, "--set", "depth"], "is no KEY=VALUE"),
        (["compare_settings", "{config}", *ARMS, "--weights", "fast"], "there are: none, slow"),
        (["compare_settings", "{config}", *ARMS, "--batches", "8,x"], "invalid batch sizes value"),
        (["compare_settings", "{config}", *ARMS, "--images", "9999"], "9999 images are requested"),
        (["compare_settings", "{config}", *ARMS, "--edges", "{missing}"], "cannot be read"),
        (["compare_settings", "{missing}", *ARMS], "no such file"),
        (["compare_settings", "{config}", *ARMS, "--batches", "4,64"], "too few for"),
        (["compare_settings", "{config}", "--arm", "a", "--arm", "b", "model.dim"], "--arm b: 'model.dim' is no KEY=VALUE"),
        (["compare_settings", "{config}", "--arm", "a"], "--arm: give 2 arms at least"),
        (["compare_settings", "{config}", "--arm", "a", "--arm", "a"], "--arm: 'a' is given twice"),
        (["compare_settings", "{config}", "--arm", "a", "--arm", "../b", "model.dim=8"], "--arm: '../b' names runs"),
        (["compare_settings", "{config}", "--arm", "a", "--arm", "b", "debug.seed=8"], "debug.seed cannot differ between arms"),
        (["compare_settings", "{config}", "--arm", "a", "--arm", "b", "model.dims=8"], "b_s0: command line: --model.dims: un"),
        (["compare_settings", "{config}", *ARMS, "--parametrisation", "w"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config, study, trainings, tmp_path, words, message):
    quick = [] if "--images" in words else QUICK[4:]
    asked = [word.format(config=config, missing=tmp_path / "missing.toml") for word in words]
    code, output, error = study(*asked, "--samples", "32", *quick, "--output", tmp_path / "out")
    assert code == 2 and output == "" and message in error
    assert error.count("\n") == 1 and trainings.names == [] and not (tmp_path / "out").exists()


def test_runs_of_other_data_or_path_are_refused(config, study, tmp_path):
    def run(name: str, data: str, path: str, more: str = "") -> Path:
        folder = tmp_path / name
        (folder / "checkpoint" / "step-00000001").mkdir(parents=True)
        (folder / "config.toml").write_text(
            f'[objective]\npath = "{path}"\nprediction = "v"\ntimesteps.name = "uniform"\n'
            f'[data]\nname = "{data}"\n{more}\n'
        )
        return folder

    runs = {
        "one": run("one", "digits", "ddpm_linear"), "two": run("two", "synthetic", "ddpm_linear"),
        "three": run("three", "digits", "ddpm_cosine"),
        "four": run("four", "digits", "ddpm_linear", '[ema]\ntracks = []\n[sampling]\nema_track = "none"'),
    }  # fmt: skip
    for names, message in (
        (["one", "two"], "compare runs of the same data"),
        (["one", "three"], "compare runs of one path"),
        (["one", "four"], "would be measured by its trained weights, one by its EMA ema, decay"),
        (["one"], "give 2 at least"),
        (["one", "one"], "two runs are called one"),
    ):
        code, _, error = study("prediction_types", *(runs[name] for name in names))
        assert code == 2 and message in error and error.count("\n") == 1, error
