"""The profiler's rhythm, its trace and table; what it refuses."""

import gzip
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from torchtitan.config.job import ConfigError, load_config
from torchtitan.profiling.config import ProfilingConfig
from torchtitan.profiling.profiler import Profiler

CPU = SimpleNamespace(device=torch.device("cpu"), rank=0)


def trace_path(folder, step):
    return folder / "profile" / "trace" / f"step-{step:08d}" / "rank0.json.gz"


def traced_steps(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return len({event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")})


def profiled_steps(tmp_path, config, first, last, *work):
    """Run the profiler over steps of one operation each; the steps in which it was on."""
    profiler = Profiler(config, tmp_path, CPU, nullcontext, *work)
    on = []
    for step in range(first, last + 1):
        with profiler.step(step) as traced:
            torch.ones(2).mul(step)
        on += [step] * traced
    profiler.close()
    return on


def test_traces_end_with_multiples_and_a_run_that_resumes_inside_a_window_leaves_it_out(tmp_path):
    config = ProfilingConfig(enable_profiling=True, profile_freq=8)
    assert profiled_steps(tmp_path / "whole", config, 1, 22) == [5, 6, 7, 8, 13, 14, 15, 16, 21, 22]
    assert profiled_steps(tmp_path / "resumed", config, 8, 14) == [13, 14]
    folder = tmp_path / "whole"
    traces = [trace_path(folder, step) for step in (8, 16)]
    assert sorted(folder.rglob("*.json.gz")) == traces
    assert traced_steps(traces[1]) == 1
    for trace in traces:
        table = trace.with_name("rank0.txt").read_text().splitlines()
        (row,) = (line.split() for line in table if "aten::mul" in line)
        assert row[-1] == "1"  # a call in each step
    assert not list((tmp_path / "resumed").rglob("*"))  # cut off in the middle: nothing is left


@pytest.mark.parametrize(("steps", "within", "between", "traced"), [
    (30, (10, 5), (8,), [8, 19, 29]),  # 10 and 20 log, 8 samples before 9, 30 is the last
    (30, (1,), (), [10, 20, 30]),  # no step is without a log
    (6, (10,), (2,), [4]),  # fewer steps than profile_freq: 6 is the last, 4 samples before 5
])  # fmt: skip
def test_a_trace_is_of_steps_that_only_train_where_there_are_any(tmp_path, steps, within, between, traced):
    config = ProfilingConfig(enable_profiling=True, profile_freq=10)
    profiled_steps(tmp_path, config, 1, steps, steps, within, between)
    assert sorted(tmp_path.rglob("*.json.gz")) == [trace_path(tmp_path, step) for step in traced]


def test_memory_snapshots_come_by_their_rhythm_and_when_memory_runs_out(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    config = ProfilingConfig(enable_memory_snapshot=True)
    layout = SimpleNamespace(device=torch.device("cuda", 0), rank=3)
    profiler = Profiler(config, tmp_path, layout, nullcontext)
    for step in range(99, 201):
        with profiler.step(step):
            pass
    profiler.out_of_memory(201)
    profiler.close()
    folder = tmp_path / "profile" / "memory"
    names = ("step-00000100", "step-00000200", "step-00000201-out-of-memory")
    assert calls[1:-1] == [str(folder / name / "rank3.pickle") for name in names]
    assert calls[0]["max_entries"] > 0 and calls[-1] == {"enabled": None}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("enable_profiling true profile_freq 3", "profile_freq: must be at least 4, is 3"),
        ("enable_memory_snapshot true", "enable_memory_snapshot: a snapshot is of CUDA's allocator"),
    ],
)
def test_what_would_record_nothing_is_refused(overrides, problem):
    words = overrides.split()
    argv = [word for key, value in zip(words[::2], words[1::2], strict=True) for word in (f"--profiling.{key}", value)]
    with pytest.raises(ConfigError) as refused:
        load_config([*argv, "--training.steps", "50", "--lr_scheduler.warmup_steps", "0"], 1)
    assert [line for line in refused.value.problems if f"profiling.{problem}" in line], refused.value.problems
    assert len(refused.value.problems) == 1


def test_a_run_that_ends_before_the_profiler_is_warm_is_refused():
    with pytest.raises(ConfigError, match=r"profiling.enable_profiling: no step would be traced, for training.steps = 3 "):
        load_config(["--profiling.enable_profiling", "true", "--training.steps", "3"], 1)
