"""Which runs a sweep makes, in what order, and what it writes down; the processes are stood in for."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import torchtitan.experiments.cell_run as cell_run
import torchtitan.experiments.launchers.local as local
from torchtitan.experiments.autotune.tuning import NothingFits
from torchtitan.experiments.engine import settle_cells
from torchtitan.experiments.grid import SweepError, read_sweep
from torchtitan.experiments.launchers.choice import Launching
from torchtitan.experiments.launchers.job import LauncherError
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Stopped
from torchtitan.experiments.record import SweepFolder
from torchtitan.experiments.runner import plan_sweep, run_sweep
from torchtitan_dit.commands import sweep as sweep_command

SWEEP = """
repeats = 2
[fixed]
model.flavor = "debug"
data.name = "synthetic"
training.steps = 8
lr_scheduler.warmup_steps = 0
[axes]
training.local_batch_size = [1, 2, 4]
activation_checkpoint.mode = ["none", "full"]
"""


class Processes:
    """In place of run_processes: out of memory from a batch of 2 on without checkpointing."""

    def __init__(self):
        self.started, self.fail_at, self.stop_after, self.kill_at = [], "", None, ""

    def __call__(self, arguments, *, stop, **options):
        given = dict(argument[2:].split("=", 1) for argument in arguments)
        if self.stop_after is not None and len(self.started) >= self.stop_after:
            raise KeyboardInterrupt
        self.started.append(given["job.name"])
        if given["job.name"] == self.fail_at:
            return Outcome("failed", "step 2: it broke", 1.0)
        if given["job.name"] == self.kill_at:
            return Outcome("killed", "a rank was killed by SIGKILL", 1.0)
        if given["activation_checkpoint.mode"] == "none" and int(given["training.local_batch_size"]) >= 2:
            return Outcome("oom", "step 1: CUDA out of memory", 2.0)
        return Outcome("ok", "", 3.0)


@pytest.fixture
def processes(monkeypatch):
    stand_in = Processes()
    monkeypatch.setattr(cell_run, "run_processes", stand_in)
    return stand_in


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(SWEEP)
    return read_sweep(path)


def run(sweep, tmp_path, jobs=1, **options):
    folder = SweepFolder(tmp_path / "results")
    plan = plan_sweep(sweep, folder, **options)
    run_sweep(plan, Launching(jobs=jobs))
    return [json.loads(line) for line in (folder.path / "sweep.jsonl").read_text().splitlines()]


def test_larger_batches_are_skipped_after_out_of_memory(sweep, tmp_path, processes):
    rows = run(sweep, tmp_path)
    status = {row["name"]: row["status"] for row in rows}
    assert status == {
        f"batch={batch}_ac={mode}_r{repeat}": "ok" if mode == "full" or batch == 1 else
        "oom" if (batch, repeat) == (2, 0) else "skipped"  # a batch that has run out of memory does so at every seed
        for batch in (1, 2, 4) for mode in ("none", "full") for repeat in (0, 1)
    }
    assert len(processes.started) == 9 and processes.started[:2] == ["batch=1_ac=none_r0", "batch=2_ac=none_r0"]
    assert all(name.endswith("_r0") for name in processes.started[:5])  # the whole grid before any repeat
    skipped, repeated, _ = (row for row in rows if row["status"] == "skipped")
    assert skipped["reason"] == "training.local_batch_size = 2 is out of memory already"
    assert (repeated["name"], repeated["reason"]) == ("batch=2_ac=none_r1", "repeat 0 is out of memory already")
    assert list(skipped) == "cell name axes repeat status reason seconds run processes started".split()
    assert skipped["axes"] == {"training.local_batch_size": 4, "activation_checkpoint.mode": "none"}


def test_a_stopped_sweep_goes_on_and_repeats_nothing(sweep, tmp_path, processes):
    processes.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        run(sweep, tmp_path)
    processes.stop_after = 6
    with pytest.raises(KeyboardInterrupt):
        run(sweep, tmp_path)
    processes.stop_after = None
    rows = run(sweep, tmp_path)
    assert len(rows) == 12 and len({(row["cell"], row["repeat"]) for row in rows}) == 12
    assert len(processes.started) == len(set(processes.started)) == 9
    run(sweep, tmp_path)
    assert len(processes.started) == 9


def test_a_killed_run_leaves_larger_batches_alone_and_is_retried(sweep, tmp_path, processes):
    processes.kill_at = "batch=1_ac=full_r0"
    rows = {row["name"]: row for row in run(sweep, tmp_path)}
    assert rows["batch=1_ac=full_r0"]["status"] == "killed"
    assert rows["batch=1_ac=full_r0"]["reason"] == "a rank was killed by SIGKILL"
    assert processes.started.count("batch=1_ac=full_r0") == 3 and len(processes.started) == 9 + 2
    assert {rows[f"batch={batch}_ac=full_r0"]["status"] for batch in (2, 4)} == {"ok"}
    processes.kill_at = ""
    again = run(sweep, tmp_path, retry_failed=True)[12:]
    assert [(row["name"], row["status"]) for row in again] == [("batch=1_ac=full_r0", "ok")]


def test_failures_are_kept_and_retried_on_request_only(sweep, tmp_path, processes):
    processes.fail_at = "batch=1_ac=full_r0"
    rows = run(sweep, tmp_path)
    assert [row["reason"] for row in rows if row["status"] == "failed"] == ["step 2: it broke"]
    assert len(rows) == 12
    processes.fail_at = ""
    assert len(run(sweep, tmp_path)) == 12
    rows = run(sweep, tmp_path, retry_failed=True)
    assert len(rows) == 13 and rows[-1]["name"] == "batch=1_ac=full_r0" and rows[-1]["status"] == "ok"


def test_a_grid_that_grows_runs_what_is_new(sweep, tmp_path, processes):
    run(sweep, tmp_path, only={"activation_checkpoint.mode": ["full"]})
    processes.started.clear()
    text = SWEEP.replace("[1, 2, 4]", "[1, 2, 4, 8]").replace("repeats = 2", "repeats = 1")
    rows = run(_read(tmp_path, text), tmp_path, only={"activation_checkpoint.mode": ["full"]})
    assert processes.started == ["batch=8_ac=full_r0"] and len(rows) == 7
    with pytest.raises(SweepError, match="sweep.toml: axes: .* -> .*, axes.optimizer.weight_decay"):
        run(_read(tmp_path, SWEEP + "optimizer.weight_decay = [0.0]\n"), tmp_path)  # another axis makes another grid


def test_a_grid_that_needs_gpus_does_not_start_without(tmp_path, processes):
    with pytest.raises(LauncherError, match="needs.gpus: a run needs 8 CUDA devices, and this machine has 0 "):
        run(_read(tmp_path, "processes = 8\nneeds = {gpus = 8}" + SWEEP), tmp_path)
    assert processes.started == [] and not (tmp_path / "results").exists()


def test_float8_is_refused_by_the_machine_that_runs_it(tmp_path):
    sweep = _read(tmp_path, SWEEP + 'dtype = ["bfloat16", "float8"]\n')
    with pytest.raises(SweepError, match="float8.enable: the CPU has no .*dtype=float8"):
        plan_sweep(sweep, SweepFolder(tmp_path / "results"))
    assert len(plan_sweep(sweep, SweepFolder(tmp_path / "results"), elsewhere=True).tasks) == 24


def _read(tmp_path, text):
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return read_sweep(path)


def test_only_some_cells(sweep, tmp_path, processes):
    run(sweep, tmp_path, only={"activation_checkpoint.mode": ["full"], "training.local_batch_size": ["1", "4"]})
    assert processes.started == [f"batch={batch}_ac=full_r{repeat}" for repeat in (0, 1) for batch in (1, 4)]
    with pytest.raises(SweepError, match="--only layout: is no axis"):
        plan_sweep(sweep, SweepFolder(tmp_path / "results"), only={"layout": ["ddp"]})


def test_jobs_run_side_by_side_and_an_interrupt_reaches_all(sweep, tmp_path, monkeypatch):
    meeting = threading.Barrier(4)

    def together(arguments, *, stop, **options):
        meeting.wait(10)  # breaks unless all four are at work at once
        if any("ac=full" in argument for argument in arguments):
            raise KeyboardInterrupt
        assert stop.wait(10)
        raise Stopped

    monkeypatch.setattr(cell_run, "run_processes", together)
    with pytest.raises(KeyboardInterrupt):
        run(sweep, tmp_path, jobs=4, only={"training.local_batch_size": ["1"]})
    assert not (tmp_path / "results" / "sweep.jsonl").exists()


def test_an_interrupt_between_two_starts_ends_the_run_that_has_begun(monkeypatch):
    stop, ended, submit = threading.Event(), [], ThreadPoolExecutor.submit

    def settle(cell, advance):
        ended.append(stop.wait(5))

    def interrupted(pool, function, position, cell):
        if cell == 1:
            raise KeyboardInterrupt
        return submit(pool, function, position, cell)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        settle_cells([0, 1], [0, 1], settle, cost=lambda cell: 1, unit="run", jobs=2, stop=stop)
    assert ended == [True]


def test_devices_are_handed_out_and_taken_back(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(local.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 2)
    in_use, seen, lock = set(), [], threading.Lock()

    def on_devices(arguments, *, devices, **options):
        with lock:
            assert len(devices) == 1 and not in_use & set(devices)
            in_use.update(devices)
            seen.extend(devices)
        threading.Event().wait(0.01)
        with lock:
            in_use.difference_update(devices)
        return Outcome("ok", "", 0.01)

    monkeypatch.setattr(cell_run, "run_processes", on_devices)
    run(sweep, tmp_path, jobs=2)
    assert len(seen) == 12 and set(seen) == {0, 1}
    with pytest.raises(LauncherError, match="1 process x 3 jobs need more than the 2 CUDA devices"):
        run(sweep, tmp_path, jobs=3)


@pytest.mark.parametrize("statuses, code", [
    (("ok", "oom", "refused"), 0), (("oom", "refused", "oom"), 1), (("ok", "ok", "failed"), 1),
    (("timeout", "timeout", "timeout"), 1),
])  # fmt: skip
def test_the_exit_code_of_a_sweep(tmp_path, monkeypatch, capsys, statuses, code):
    axes = "[axes]\noptimizer.lr = [1e-3, 1e-4, 1e-5]\n"
    (tmp_path / "grid.toml").write_text("retries = 0\n" + SWEEP.partition("[axes]")[0] + axes)
    left = iter(statuses)
    monkeypatch.setattr(cell_run, "run_processes", lambda *_, **__: Outcome(next(left), "not done after 4 s", 1.0))
    options = ["--output", str(tmp_path / "out"), "--repeats", "1"]
    assert sweep_command.main([str(tmp_path / "grid.toml"), *options]) == code
    said = capsys.readouterr().out
    assert said.count("not done after 4 s (timeout_s)\n") == statuses.count("timeout")


def test_a_searched_batch_size_is_trained_and_recorded(tmp_path, monkeypatch):
    path = tmp_path / "grid.toml"
    table = SWEEP.replace("repeats = 2", "autotune = true\nautotune_memory_gib = 2.0")
    table = table.replace("training.local_batch_size = [1, 2, 4]\n", "")
    path.write_text(table.replace("autotune_memory_gib = 2.0\n", ""))
    with pytest.raises(SweepError, match="autotune_memory_gib: not given, and a CPU's memory is shared"):
        run(read_sweep(path), tmp_path)
    path.write_text(table)
    asked, trained = [], []

    def search(arguments, processes, *, memory_gib, cache, multiple_of, **options):
        assert (processes, memory_gib, multiple_of) == (1, 2.0, 1)
        assert cache == tmp_path / "results" / "autotune"
        assert not any("local_batch_size" in argument for argument in arguments)
        asked.append(arguments)
        if "--activation_checkpoint.mode=none" in arguments:
            raise NothingFits("batch 1 does not fit in 2 GiB")
        return SimpleNamespace(batch_size=24)

    def train(arguments, **options):
        trained.append(arguments)
        return Outcome("ok", "", 1.0)

    monkeypatch.setattr(cell_run, "autotune", search)
    monkeypatch.setattr(cell_run, "run_processes", train)
    none, full = run(read_sweep(path), tmp_path)
    assert (none["status"], none["reason"]) == ("oom", "batch 1 does not fit in 2 GiB")
    assert full["axes"] == {"activation_checkpoint.mode": "full", "training.local_batch_size": 24}
    assert full["cell"] == "ac=full" and trained == [[*asked[1], "--training.local_batch_size=24"]]
