"""Visit to a GPU machine: a dry run of every stage on the CPU, and the page that its results make."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu_day import __main__ as program
from benchmarks.gpu_day.correct import FEATURES, feature_settings
from benchmarks.gpu_day.cuda_branches import ABOUT_CUDA, CUDA_BRANCHES, PATTERN
from benchmarks.gpu_day.page import BEGIN, END, PAGE, load_results, merge, part
from benchmarks.gpu_day.speed import ARMS, DRY_ARMS
from benchmarks.gpu_day.stages import CALLS, Stage
from benchmarks.gpu_day.visit import configuration
from tests.forked import run_script

COMPILED_TOO = ("float8", "memory budget", "EDM2", "RMSNorm")  # of the features, besides those that their names say
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def visit(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("visit")
    given = {"DEVICE": "cpu", "LIMIT": "3600"}
    for call in CALLS:
        if call == 1:
            script, environment = ROOT / "benchmarks" / "gpu_day.sh", {"OUT": str(folder), "PYTHON": os.sys.executable}
            done = subprocess.run([script, "1"], capture_output=True, text=True, env=os.environ | given | environment)
        else:  # as the script does, without a second import of everything
            done = run_script("-m", "benchmarks.gpu_day", str(call), str(folder), **given)
        log = folder / f"log-{call}.txt"
        assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    return folder


def rows_of(folder: Path) -> dict[str, dict[str, dict]]:
    rows: dict[str, dict[str, dict]] = {}
    for path in folder.glob("rows-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            rows.setdefault(line["stage"], {})[line["row"]] = line
    return rows


def test_a_dry_run_has_every_stage_and_its_numbers_are_right_where_the_cpu_can_tell(visit):
    rows = rows_of(visit)
    assert set(rows) == {stage.name for stages in CALLS.values() for stage in stages} - {*ARMS} | {*DRY_ARMS}
    failed = {(stage, row) for stage, found in rows.items() for row, values in found.items() if "failed" in values}
    assert {row for _, row in failed} <= {"DiT-XL/2 compiled, facebook", "DiT-XL/2 eager, facebook"}
    assert rows["random numbers"]["philox"]["words_equal"]
    same = {key: value for key, value in rows["parity"]["float32"].items() if key not in ("stage", "row")}
    assert same and set(same.values()) == {0}
    assert rows["two ranks"]["FSDP2"]["grad_norm"] < 1e-5
    assert rows["interrupt and resume"]["digits"] | {"last_loss": 0} == {
        "stage": "interrupt and resume", "row": "digits", "codes": [143, 0, 0, 0, 0], "status": "completed", "last_step": 20,
        "last_loss": 0,
    }  # fmt: skip
    assert rows["kernels"]["TFLOP per image"]["counted"] == pytest.approx(rows["kernels"]["TFLOP per image"]["formula"], rel=0.1)


def test_a_failed_stage_is_in_the_results_the_page_and_the_exit_code(tmp_path, monkeypatch):
    def broken(results):
        raise ZeroDivisionError("no device")

    stages = (
        Stage("machine", 20, lambda results: results.row("machine", device="GPU", date="", torch="", git_commit="")),
        Stage("parity", 20, broken), Stage("tests", 20, lambda results: results.row("tests", code=1)),
        Stage("loader", 20, lambda results: results.row("0")),
    )  # fmt: skip
    monkeypatch.setattr(program, "CALLS", {1: stages})
    monkeypatch.setattr("benchmarks.gpu_day.page.RESULTS", tmp_path / "gpu_day.json")
    monkeypatch.setattr("sys.argv", ["gpu_day", "1", str(tmp_path)])
    monkeypatch.setenv("LIMIT", "80")
    assert program.main() == 1
    assert rows_of(tmp_path)["parity"]["stage"]["failed"] == "FAILED: ZeroDivisionError: no device"
    merge(tmp_path)
    calls, missing = part(load_results()).split("\n\nNot measured yet: ")
    assert "; parity (failed: stage on " in calls and "; tests (failed: tests on " in calls and "; loader.\n" in f"{calls}\n"
    assert "; features; " in missing.partition(".\n")[0] and "loader" not in missing.partition(".\n")[0]


def test_a_stage_that_hangs_ends_with_its_children_and_costs_the_others_nothing(tmp_path):
    from benchmarks.gpu_day.visit import in_child

    alive = tmp_path / "alive"
    with pytest.raises(RuntimeError, match="took longer than 2 s"):
        in_child(_hang, alive, seconds=2)
    grandchild = int(alive.read_text())
    assert not Path(f"/proc/{grandchild}").exists() or "zombie" in Path(f"/proc/{grandchild}/status").read_text()


def _hang(alive: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    alive.write_text(str(child.pid))
    child.wait()


def test_results_of_a_visit_fill_the_page(visit, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_day.page.RESULTS", tmp_path / "gpu_day.json")
    before = part(load_results())
    merge(visit)
    after = part(load_results())
    assert "None of these has been measured" in before and "XL/2 compiled (goal: images per s >= 625 on H200" in before
    assert "### CPU x86_64" in after and "None of these" not in after
    assert "\n| XL/2 compiled | " in after and "\n| loader: 0 loader processes | " in after


@pytest.mark.parametrize("name", [*FEATURES, *ARMS])
def test_every_feature_and_arm_is_a_configuration_for_a_gpu(name):
    images, settings = (16, feature_settings(name)) if name in FEATURES else ARMS[name]
    config = configuration(settings, images or 128, elsewhere=True)
    assert config.compile.enable == any(word in name for word in ("compiled", "CUDA graphs", *COMPILED_TOO))


def test_the_page_is_made_from_the_results():
    assert BEGIN + part(load_results()) + END in PAGE.read_text(), "run benchmarks/gpu_day.sh page"


def test_every_branch_that_only_cuda_takes_has_a_stage():
    files = [*(ROOT / "torchtitan").rglob("*.py"), *(ROOT / "torchtitan_dit").rglob("*.py")]
    names = {str(path.relative_to(ROOT)) for path in files if PATTERN.search(path.read_text())}
    assert {name for name in names if not name.startswith(ABOUT_CUDA)} == set(CUDA_BRANCHES)
