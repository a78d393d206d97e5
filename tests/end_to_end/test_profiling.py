"""Runs with the profiler on: a trace of every rank, a page that adds up, the same losses, rates without traced steps."""

import json

import pytest
import torch

from tests.distributed.cases import make_trainer
from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from torchtitan import run as run_module
from torchtitan.config.job import load_config
from torchtitan.profiling.profiler import Profiler
from torchtitan.profiling.trace import PHASES, read_trace
from torchtitan_dit.commands.breakdown import main

ON = (
    "--profiling.enable_profiling", "true", "--profiling.profile_freq", "6", "--profiling.profiler_active", "2",
    "--profiling.profiler_warmup", "1",
)  # fmt: skip
# The window is of steps 4 to 6.


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
        if step == 6:  # 5 and 6 were traced; of 3 and 4, one
            assert not {"throughput(img/s)", "mfu(%)", "time_metrics/end_to_end(s)"} & point.keys()
        else:  # images per second times seconds per step: a rate that counts time and images alike
            assert point["throughput(img/s)"] * point["time_metrics/end_to_end(s)"] == pytest.approx(16, rel=1e-9)
            assert 0 <= point["time_metrics/data_loading(%)"] <= 100
    assert "throughput(img/s)" in json.loads((traced.state.folder.path / "summary.json").read_text())["tail_medians"]

    trace = read_trace(traced.state.folder.path / "profile" / "trace" / "step-00000006" / "rank0.json.gz")
    assert trace.num_steps == 2
    microbatch = ["data", "forward", "backward", "gradients"]
    order = [span.phase for span in trace.phases]
    assert order == 2 * [*microbatch, *microbatch, "gradients", "optimizer", "ema", "report"]
    page = json.loads((traced.state.folder.path / "profile" / "breakdown.json").read_text())
    assert page["besides_training"] == ["logging"]
    assert page["trace"] == "step-00000006/rank0.json.gz" and page["num_steps"] == 2
    for part in ("kinds", "phases"):
        assert sum(entry["share"] for entry in page[part].values()) == pytest.approx(1, abs=1e-9)
    assert all(page["phases"][phase]["share"] > 0 for phase in PHASES)
    kinds = page["kinds"]
    assert all(kinds[kind]["share"] > 0 for kind in ("attention", "matrix products", "pointwise and norms", "optimizer", "EMA"))
    assert kinds["communication"]["share"] == 0
    # Data, optimizer and EMA are phases and kinds at once.
    for phase, kind in (("optimizer", "optimizer"), ("ema", "EMA")):
        assert page["phases"][phase]["ms_per_step"] == pytest.approx(kinds[kind]["ms_per_step"])


def test_a_trace_says_what_its_steps_did_besides_training(tmp_path):
    noise = ("--gns.enable", "true", "--gns.num_bins", "2", "--gns.interval", "5", "--gns.log_interval", "6")
    traced = trained(tmp_path, "noise", "--profiling.enable_profiling", "true", *noise)
    folder = traced.state.folder.path / "profile"
    assert [path.name for path in (folder / "trace").iterdir()] == ["step-00000005"]  # 6 is the last: it logs, draws and saves
    assert json.loads((folder / "breakdown.json").read_text())["besides_training"] == ["gradient noise measured"]
    assert "Traced 1 step, besides training: gradient noise measured.\n" in (folder / "breakdown.md").read_text()


def test_every_rank_of_a_sharded_run_leaves_its_trace_and_the_script_reads_it(tmp_path, capsys):
    overrides = ("--training.steps", "6", "--sampling.enable", "false", "--checkpoint.enable", "false")
    run = ForkedRun(write_config(tmp_path), "fsdp", *overrides, *ON, ranks=2, shards=2)
    output = run.finish()[0]
    assert "communication, exposed" in output
    folder = run.folder / "profile"
    assert {path.name for path in (folder / "trace" / "step-00000004").iterdir()} == {"rank0.json.gz", "rank1.json.gz"}
    assert main([str(run.folder), "--rank", "1"]) == 0
    assert capsys.readouterr().out.strip() == (folder / "breakdown.md").read_text().strip()
    page = json.loads((folder / "breakdown.json").read_text())
    assert page["trace"] == "step-00000004/rank1.json.gz" and page["kinds"]["communication"]["share"] > 0
    assert {entry["name"] for entry in page["top"]} & {
        "gloo:all_gather",
        "gloo:reduce_scatter",
        "gloo:all_reduce",
        "FSDP::all_gather",
    }


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
