"""Breakdowns against traces whose every microsecond is known; the profiler's rhythm; what it refuses."""

import gzip
import json
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from torchtitan.config.job import ConfigError, load_config
from torchtitan.profiling import breakdown, profiler
from torchtitan.profiling.breakdown import as_record, as_text, break_down
from torchtitan.profiling.config import ProfilingConfig
from torchtitan.profiling.profiler import Profiler
from torchtitan.profiling.trace import Span, TraceError, find_trace, read_trace, trace_path
from torchtitan_dit.commands.breakdown import main

CPU = SimpleNamespace(device=torch.device("cpu"), rank=0)


def event(cat, name, start, end, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": tid, "args": args}


def write_trace(path, events):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def kinds_of(found):
    return {kind: found.of_kind(kind) for kind in breakdown.KINDS if found.of_kind(kind)}


def phases_of(found):
    return {phase: found.of_phase(phase) for phase in (*breakdown.PHASES, "outside") if found.of_phase(phase)}


def launch(name, number, at, start, end, *, kernel, stream=7):
    """An operation, its launch, and the kernel that runs later."""
    return [
        event("cpu_op", name, at, at + 2),
        event("cuda_runtime", "cudaLaunchKernel", at + 0.5, at + 1, correlation=number),
        event("kernel", kernel, start, end, tid=stream, correlation=number),
    ]


CUDA_EVENTS = [
    event("user_annotation", "ProfilerStep#1", 0, 200),
    event("user_annotation", "data", 0, 20),
    event("user_annotation", "forward", 20, 40),
    event("user_annotation", "backward", 40, 60),
    event("user_annotation", "optimizer", 60, 70),
    *launch("aten::addmm", 1, 22, 30, 60, kernel="nvjet_tst_128x256_64x4_1x2_h_bz_TNT"),
    *launch("aten::_flash_attention_forward", 2, 25, 60, 75, kernel="void pytorch_flash::flash_fwd_kernel<Flash>(...)"),
    # Between 80 and 100 both of them run: that is hidden; from 100 to 120 communication is alone.
    *launch("aten::mul", 3, 42, 75, 100, kernel="void at::native::vectorized_elementwise_kernel<4, Mul>(...)"),
    *launch("c10d::_reduce_scatter_base_", 4, 45, 80, 120, kernel="ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", stream=9),
    # The copies of FSDP are communication by the range that launched them, not by their kernel's name.
    event("user_annotation", "FSDP::all_gather_copy_out", 50, 55),
    *launch("aten::split_with_sizes_copy", 5, 51, 120, 125, kernel="void at::native::split_with_sizes_copy_out(...)"),
    *launch("aten::_fused_adamw_", 6, 62, 130, 150, kernel="void at::native::multi_tensor_apply_kernel<FusedAdam>(...)"),
    # Backward runs in a thread of its own; its phase is that of the train loop's thread.
    event("cpu_op", "aten::mm", 52, 58, tid=2),
    event("cuda_runtime", "cudaLaunchKernel", 53, 54, tid=2, correlation=8),
    event("kernel", "sm90_xmma_gemm_bf16", 150, 160, tid=7, correlation=8),
    event("kernel", "an_unknown_kernel", 160, 161, tid=7, correlation=99),
]


def test_gpu_time_counts_each_instant_once_and_tells_hidden_communication(tmp_path):
    found = break_down(read_trace(write_trace(tmp_path / "t.json.gz", CUDA_EVENTS)), "t")
    assert found.cuda and found.total == 200
    assert kinds_of(found) == {
        "attention": 15, "matrix products": 30 + 10, "pointwise and norms": 25, "communication": 20 + 5, "data": 20,
        "optimizer": 20, "other": 1, "idle": 200 - 146,
    }
    assert found.hidden_communication == 20
    assert phases_of(found) == {"data": 20, "forward": 45, "backward": 25 + 25 + 10, "optimizer": 20, "outside": 55}
    assert sum(found.by_phase_and_kind.values()) == found.total
    assert found.top[0] == ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication", 1, 40)


CPU_EVENTS = [
    event("user_annotation", "ProfilerStep#5", 0, 50),
    event("user_annotation", "ProfilerStep#6", 50, 100),
    event("user_annotation", "data", 0, 10),
    event("user_annotation", "forward", 10, 40),
    event("cpu_op", "aten::linear", 12, 22),
    event("cpu_op", "aten::addmm", 14, 20),
    event("cpu_op", "aten::scaled_dot_product_attention", 22, 30),
    event("cpu_op", "aten::bmm", 24, 28),
    event("cpu_op", "aten::mul", 30, 33),
    event("user_annotation", "backward", 50, 80),
    event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 50, 60),
    event("cpu_op", "aten::mul", 52, 57),
    event("user_annotation", "gloo:all_reduce", 55, 75, tid=3),
    event("cpu_op", "aten::add_", 70, 72, tid=3),
    event("user_annotation", "ema", 85, 95),
    event("cpu_op", "aten::_foreach_lerp_", 86, 90),
]


def test_cpu_time_belongs_to_the_innermost_operation_and_adds_up(tmp_path):
    found = break_down(read_trace(write_trace(tmp_path / "t.json.gz", CPU_EVENTS)), "t")
    assert not found.cuda and (found.num_steps, found.total) == (2, 100)
    assert kinds_of(found) == {
        "attention": 8, "matrix products": 10, "pointwise and norms": 3 + 5, "communication": 18, "data": 10, "EMA": 10,
        "idle": 100 - 64,
    }
    assert found.hidden_communication == 2
    # linear in two stretches is one call; mul twice.
    assert {(name, calls, time) for name, _, calls, time in found.top} >= {("aten::linear", 1, 4), ("aten::mul", 2, 8)}
    record = as_record(found)
    for part in ("kinds", "phases"):
        assert sum(entry["share"] for entry in record[part].values()) == pytest.approx(1, abs=1e-12)
        assert sum(entry["ms_per_step"] for entry in record[part].values()) == pytest.approx(0.05)
    page = as_text(found)
    assert "| total" in page and "100.0 %" in page
    assert all(len({len(line) for line in table.splitlines() if line.startswith("|")}) <= 1 for table in page.split("\n\n"))


def test_overlaps_are_cut_as_when_every_instant_is_looked_at():
    generator = random.Random(0)

    def spans(count):
        starts = [generator.randrange(200) for _ in range(count)]
        return [Span(start, start + generator.randrange(1, 30), "outside", (str(start),)) for start in starts]

    for _ in range(50):
        cover, layer = breakdown._disjoint(spans(12)), breakdown._disjoint(spans(12))
        covered, wanted = ({t for span in found for t in range(span.start, span.end)} for found in (cover, layer))
        left = breakdown._uncovered(layer, cover)
        instants = [t for span in left for t in range(span.start, span.end)]
        assert sorted(instants) == sorted(wanted - covered)  # each once


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matrix products"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("triton_red_fused_native_layer_norm_add_mul_3", "pointwise and norms"),
        ("triton_poi_fused__scaled_mm_clamp_0", "pointwise and norms"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_2", "pointwise and norms"),
        ("triton_tem_fused_mm_4", "matrix products"),
        ("void at::native::reduce_kernel<512, 1>", "pointwise and norms"),
        ("Memcpy DtoD (Device -> Device)", "pointwise and norms"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("mystery", "other"),
    ],
)
def test_kernels_are_known_by_name(kernel, kind):
    assert breakdown._kind(Span(0, 1, "forward", (kernel,))) == kind


def test_a_damaged_or_foreign_file_is_one_line_and_exit_code_2(tmp_path, capsys):
    whole = write_trace(tmp_path / "run" / "profile" / "trace" / "step-00000010" / "rank0.json.gz", CPU_EVENTS)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole.read_bytes()[:-40])
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"events": []}')
    empty = write_trace(tmp_path / "empty.json.gz", [])
    cases = [
        (["cut.json.gz"], "not whole"), (["foreign.json"], "traceEvents"), (["empty.json.gz"], "no operation"),
        (["missing.json.gz"], "No such file"), (["run", "--step", "11"], "there are: 10"), (["run", "--rank", "1"], "rank 1"),
        (["cut.json.gz", "--rank", "0"], "no run folder"),
    ]  # fmt: skip
    for (source, *rest), reason in cases:
        assert main([str(tmp_path / source), *rest]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1
    assert cut.exists() and empty.exists()
    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2
    assert main([str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "profile" / "breakdown.md").read_text() in capsys.readouterr().out
    with pytest.raises(TraceError):
        find_trace(tmp_path, rank=3)


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


def test_traces_end_with_multiples_and_a_run_that_resumes_inside_a_window_leaves_it_out(tmp_path, monkeypatch):
    config = ProfilingConfig(enable_profiling=True, profile_freq=8, profiler_active=2, profiler_warmup=2)
    monkeypatch.setattr(profiler, "write_breakdown", lambda *arguments: "")
    assert profiled_steps(tmp_path / "whole", config, 1, 22) == [5, 6, 7, 8, 13, 14, 15, 16, 21, 22]
    assert profiled_steps(tmp_path / "resumed", config, 8, 14) == [13, 14]
    folder = tmp_path / "whole" / "profile"
    assert sorted(folder.rglob("*.json.gz")) == [trace_path(folder, step, 0) for step in (8, 16)]
    assert read_trace(trace_path(folder, 16, 0)).num_steps == 2
    assert not list((tmp_path / "resumed").rglob("*"))  # cut off in the middle: nothing is left


@pytest.mark.parametrize(("steps", "within", "between", "traced"), [
    (30, (10, 5), (8,), [8, 19, 29]),  # 10 and 20 log, 8 samples before 9, 30 is the last
    (30, (1,), (), [10, 20, 30]),  # no step is without a log
    (6, (10,), (2,), [4]),  # fewer steps than profile_freq: 6 is the last, 4 samples before 5
])  # fmt: skip
def test_a_trace_is_of_steps_that_only_train_where_there_are_any(tmp_path, monkeypatch, steps, within, between, traced):
    config = ProfilingConfig(enable_profiling=True, profile_freq=10, profiler_active=1, profiler_warmup=3)
    monkeypatch.setattr(profiler, "write_breakdown", lambda *arguments: "")
    profiled_steps(tmp_path, config, 1, steps, steps, within, between)
    assert sorted(tmp_path.rglob("*.json.gz")) == [trace_path(tmp_path / "profile", step, 0) for step in traced]


def test_a_window_may_fill_the_whole_cycle(tmp_path, monkeypatch):
    config = ProfilingConfig(enable_profiling=True, profile_freq=4, profiler_active=3, profiler_warmup=1)
    monkeypatch.setattr(profiler, "write_breakdown", lambda *arguments: "")
    assert profiled_steps(tmp_path, config, 1, 8) == list(range(1, 9))
    assert [read_trace(trace_path(tmp_path / "profile", step, 0)).num_steps for step in (4, 8)] == [3, 3]


def test_nothing_happens_where_profiling_is_off(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "profile", None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", None)
    assert profiled_steps(tmp_path, ProfilingConfig(profile_freq=2), 1, 4) == []
    Profiler(ProfilingConfig(), tmp_path, CPU, nullcontext).out_of_memory(3)
    assert not list(tmp_path.iterdir())


def test_memory_snapshots_come_by_their_rhythm_and_when_memory_runs_out(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    config = ProfilingConfig(enable_memory_snapshot=True, memory_snapshot_freq=2)
    layout = SimpleNamespace(device=torch.device("cuda", 0), rank=3)
    profiler = Profiler(config, tmp_path, layout, nullcontext)
    for step in range(1, 5):
        with profiler.step(step):
            pass
    profiler.out_of_memory(5)
    profiler.close()
    folder = tmp_path / "profile" / "memory"
    names = ("step-00000002", "step-00000004", "step-00000005-out-of-memory")
    assert calls[1:-1] == [str(folder / name / "rank3.pickle") for name in names]
    assert calls[0]["max_entries"] > 0 and calls[-1] == {"enabled": None}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("enable_profiling true profile_freq 3", "profile_freq: 3 steps hold no trace of"),
        ("enable_profiling true profiler_warmup 55", "profiler_warmup: no step would be traced, for training.steps = 50"),
        ("enable_memory_snapshot true", "enable_memory_snapshot: a snapshot is of CUDA's allocator"),
        ("profile_freq 10", "profile_freq: has no effect when profiling.enable_profiling = false"),
    ],
)
def test_what_would_record_nothing_is_refused(overrides, problem):
    words = overrides.split()
    argv = [word for key, value in zip(words[::2], words[1::2], strict=True) for word in (f"--profiling.{key}", value)]
    with pytest.raises(ConfigError) as refused:
        load_config([*argv, "--training.steps", "50", "--lr_scheduler.warmup_steps", "0"], 1)
    assert [line for line in refused.value.problems if f"profiling.{problem}" in line], refused.value.problems
    assert len(refused.value.problems) == 1
