"""Runs with the profiler on: a trace and a table of every rank, the same losses, rates without traced steps."""

import gzip
import json

import pytest
import torch

from tests.distributed.cases import make_trainer
from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from torchtitan import run as run_module
from torchtitan.config.job import load_config
from torchtitan.profiling.profiler import Profiler

ON = ("--profiling.enable_profiling", "true", "--profiling.profile_freq", "6")
# Of six steps that log at every second, the fifth is traced, and 2 to 4 warm the profiler up.
PHASES = ("data", "forward", "backward", "gradients", "optimizer", "ema", "report")


def points(trainer):
    return [json.loads(line) for line in (trainer.state.folder.path / "metrics.jsonl").read_text().splitlines()]


def trained(folder, name, *overrides):
    trainer = make_trainer(
        str(folder), name, steps=6, replicas=1, shards=1, accumulation=2,
        overrides=("--metrics.log_freq", "2", "--ema.tracks", '[{"name": "ema", "decay": 0.9}]', *overrides),
    )
    assert trainer.train() == 0
    trainer.close()
    return trainer


def test_traced_steps_learn_the_same_and_count_in_no_rate(tmp_path):
    plain, traced = trained(tmp_path, "plain"), trained(tmp_path, "traced", *ON, "--metrics.peak_tflops", "1")
    assert not (plain.state.folder.path / "profile").exists()
    losses = [[(p["step"], p["loss_metrics/global_avg_loss"], p["grad_norm"]) for p in points(run)] for run in (plain, traced)]
    assert losses[0] == losses[1]

    rates = {point["step"]: point for point in points(traced)}
    assert list(rates) == [1, 2, 4, 6]
    for step, point in rates.items():
        if step in (2, 4):  # 2 to 5 were profiled
            assert not {"throughput(img/s)", "mfu(%)", "time_metrics/end_to_end(s)"} & point.keys()
        else:  # images per second times seconds per step: a rate that counts time and images alike
            assert point["throughput(img/s)"] * point["time_metrics/end_to_end(s)"] == pytest.approx(16, rel=1e-9)
            assert 0 <= point["time_metrics/data_loading(%)"] <= 100
    assert "throughput(img/s)" in json.loads((traced.state.folder.path / "summary.json").read_text())["tail_medians"]

    folder = traced.state.folder.path / "profile" / "trace" / "step-00000005"
    events = json.loads(gzip.decompress((folder / "rank0.json.gz").read_bytes()))["traceEvents"]
    ranges = sorted((event["ts"], event["name"]) for event in events if event.get("name") in PHASES)
    microbatch = ["data", "forward", "backward", "gradients"]
    assert [name for _, name in ranges] == [*microbatch, *microbatch, "gradients", "optimizer", "ema", "report"]
    calls = {line.split()[0]: line.split()[-1] for line in (folder / "rank0.txt").read_text().splitlines() if line.strip()}
    assert (calls["forward"], calls["optimizer"]) == ("2", "1")
    phases = (folder / "rank0.txt").read_text().partition("\n\n")[0].splitlines()  # first, however short they are
    assert {name for _, name in ranges} <= {line.split()[0] for line in phases}
    assert {"aten::addmm", "aten::mul"} <= calls.keys()


def test_every_rank_of_a_sharded_run_leaves_its_trace_and_its_table(tmp_path):
    overrides = ("--training.steps", "6", "--sampling.enable", "false", "--checkpoint.enable", "false")
    run = ForkedRun(write_config(tmp_path), "fsdp", *overrides, *ON, ranks=2, shards=2)
    output = run.finish()[0]
    assert "trace of step 4" in output and "Self CPU" not in output
    folder = run.folder / "profile" / "trace" / "step-00000004"
    assert {path.name for path in folder.iterdir()} == {f"rank{rank}.{end}" for rank in (0, 1) for end in ("json.gz", "txt")}
    assert "Self CPU time total" in (folder / "rank0.txt").read_text()
    assert "FSDP::all_gather" in (folder / "rank1.txt").read_text()


def test_out_of_memory_asks_for_a_snapshot(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Profiler, "out_of_memory", lambda self, step: asked.append(step))

    def fail(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run_module.Trainer, "train_step", fail)
    argv = ["--model.flavor", "debug", "--job.dump_folder", str(tmp_path), "--job.name", "oom", "--training.steps", "2",
            "--lr_scheduler.warmup_steps", "0", "--metrics.enable_tensorboard", "false"]
    assert run_module.run(load_config(argv, 1)) == run_module.FAILED
    assert asked == [1]
    assert json.loads((tmp_path / "oom" / "summary.json").read_text())["status"] == "oom"
