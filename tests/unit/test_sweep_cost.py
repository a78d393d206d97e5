"""Hours of a sweep before it is run, against sums by hand."""

import pytest

from torchtitan.estimate.devices import DEVICES
from torchtitan.experiments import cost
from torchtitan.experiments.cost import COMPILE_SECONDS, START_SECONDS, cost_table, device_of, estimate_cost
from torchtitan.experiments.grid import SweepError, read_sweep
from torchtitan.experiments.record import SweepFolder
from torchtitan.experiments.runner import plan_sweep
from torchtitan_dit.commands.sweep import main

SWEEP = """
processes = 4
repeats = 2
device = "H100"
[fixed]
model.flavor = "debug"
data.name = "synthetic"
training.steps = 100
lr_scheduler.warmup_steps = 0
[axes]
dtype = ["bfloat16"]
layout = ["ddp"]
compile.enable = [false, true]
training.local_batch_size = [1, 2, 4, 8]
[extended]
dtype = ["float8"]
"""
GIB = 2**30


class Memory:
    """In place of the simulation: needed memory in GiB is the batch size times ten."""

    least, start_up, parameters, optimizer, ema, all_gradients = None, 0, 0, 0, 0, 0

    def __init__(self, batch_size):
        self.needed = 10 * batch_size * GIB


@pytest.fixture
def simulated(monkeypatch):
    """Configurations that were simulated; a step takes a second."""
    found = []

    def memory_by_batch_size(config, processes, on_gpu):
        assert on_gpu  # of the GPUs that these tests name
        found.append(config)
        return Memory

    class Second:
        step, hours = 1.0, 1 / 36

    monkeypatch.setattr(cost, "memory_by_batch_size", memory_by_batch_size)
    monkeypatch.setattr(cost, "model_on_meta", lambda config: None)
    monkeypatch.setattr(cost, "estimate_step_time", lambda *arguments: Second)
    return found


def plan(tmp_path, text=SWEEP, extended=False):
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return plan_sweep(read_sweep(path, extended), SweepFolder(tmp_path / "results"))


def test_hours_are_starts_and_steps_and_one_run_out_of_memory(tmp_path, simulated):
    eager, compiled = estimate_cost(plan(tmp_path), tmp_path, DEVICES["H100"])
    # 79.1 GiB, nine tenths usable: 1, 2 and 4 fit; 8 is out of memory once, and skipped in its repeat.
    assert (eager.name, eager.runs, eager.out_of_memory, eager.skipped) == ("dtype=bfloat16_compile=false", 6, 1, 1)
    assert eager.seconds == 6 * (START_SECONDS + 100) + START_SECONDS
    assert compiled.seconds == 6 * (START_SECONDS + COMPILE_SECONDS + 100) + START_SECONDS
    assert eager.device_seconds == 4 * eager.seconds
    assert len(simulated) == 1  # neither batch size, seed nor compilation is another simulation
    table = cost_table([eager, compiled], DEVICES["H100"], jobs=2).splitlines()
    hours = (eager.seconds + compiled.seconds) / 3600
    assert table[-2].split() == ["total", "12", "2", "2", f"{hours:.2f}", f"{4 * hours:.1f}"]
    assert f"with 2 jobs about {hours / 2:.2f} hours" in table[-1]


def test_float8_needs_no_hardware_to_be_estimated(tmp_path, simulated):
    arms = estimate_cost(plan(tmp_path, extended=True), tmp_path, DEVICES["H100"])
    assert [arm.runs for arm in arms] == [6, 6, 6, 6] and len(simulated) == 1


def test_float8_is_timed_by_its_own_peak_and_refused_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "memory_by_batch_size", lambda config, processes, on_gpu: Memory)
    alone = SWEEP.replace("processes = 4", "processes = 1").replace('layout = ["ddp"]\n', "")  # nothing is communicated
    bfloat16, _, float8, _ = estimate_cost(plan(tmp_path, alone, extended=True), tmp_path, DEVICES["H100"])
    assert bfloat16.name == "dtype=bfloat16_compile=false" and float8.name == "dtype=float8_compile=false"
    assert bfloat16.runs == float8.runs == 6 and float8.seconds < bfloat16.seconds
    # The linears' products, a share s of all, are twice as fast there: steps take (1 - s / 2) of the time, and no less.
    starts, steps = 7 * START_SECONDS, bfloat16.seconds - 7 * START_SECONDS
    assert steps / 2 < float8.seconds - starts < 0.9 * steps
    without = estimate_cost(plan(tmp_path, alone, extended=True), tmp_path, DEVICES["A100-80"])[2]
    assert (without.runs, without.refused, without.seconds) == (0, 8, 0.0)
    assert "8 runs in it would be refused" in cost_table([without], DEVICES["A100-80"], 1)


def test_a_searched_batch_size_is_the_largest_that_fits(tmp_path, simulated):
    text = SWEEP.replace("training.local_batch_size = [1, 2, 4, 8]", "").replace("processes", "autotune = true\nprocesses")
    eager, _ = estimate_cost(plan(tmp_path, text), tmp_path, DEVICES["H100"])
    assert eager.runs == 2 and eager.seconds == 2 * (START_SECONDS + 100) + 6 * (START_SECONDS + 4)
    small = cost._StepEstimator(plan(tmp_path, text).sweep, tmp_path, DEVICES["H100"])
    assert small._largest_batch(plan(tmp_path, text).tasks[0].cell) == 7


def test_the_device_is_the_files_or_the_named_one(tmp_path):
    sweep = plan(tmp_path).sweep
    assert device_of(sweep, None) == DEVICES["H100"] and device_of(sweep, "A100-80") == DEVICES["A100-80"]
    with pytest.raises(SweepError, match="--device: 'P100' is none of H200, H100"):
        device_of(sweep, "P100")
    assert device_of(plan(tmp_path, SWEEP.replace('device = "H100"', "")).sweep, None) is None


def test_the_command_says_what_it_would_take_or_that_it_cannot_tell(tmp_path, simulated, capsys):
    plan(tmp_path)
    words = [str(tmp_path / "grid.toml"), "--output", str(tmp_path / "results")]
    assert main([*words, "--dry-run", "--repeats", "1", "--jobs", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 runs, 8 to run" in lines and lines[-2].split()[:4] == ["total", "6", "2", "0"]
    assert main([*words, "--dry-run", "--device", "P100"]) == 2 and main([*words, "--device", "H100"]) == 2
    assert "--device: is the device that --dry-run estimates for" in capsys.readouterr().err
    plan(tmp_path, SWEEP.replace('device = "H100"', ""))
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("no estimate of hours (name a device: --device H200")
    assert not (tmp_path / "results").exists()
