"""A run that is killed and started again ends as if nothing had happened."""

import re
import signal
import statistics

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.runs import Run, checkpoint_tensors, write_config
from tests.faults.forked import FAULT, ForkedRun
from torchtitan.errors import CheckpointError
from torchtitan.runs.record import read_run
from torchtitan_dit.commands.checkpoint import checkpoints_of
from torchtitan_dit.commands.train import main as train


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("resume"))


def kill_after(run: Run, step: int) -> None:
    run.wait_for_step(step)
    run.send(signal.SIGKILL)
    run.wait()


def test_killed_and_resumed_run_equals_straight_run_bit_for_bit(config):
    # Slow enough to be killed between the checkpoint of step 30 and the last step.
    straight = ForkedRun(config, "straight", ranks=2, shards=2)
    straight.finish()
    killed = ForkedRun(config, "killed", ranks=2, shards=2)
    kill_after(killed, 35)
    assert not (killed.folder / "summary.json").exists()
    points = killed.folder / "metrics.jsonl"  # as if a step before the kill had needed more
    points.write_text(re.sub(r'("memory/max_resident\(GiB\)": )[\d.]+', r"\g<1>99.5", points.read_text(), count=1))
    resumed = ForkedRun(config, "killed", ranks=2, shards=2)
    outputs = resumed.finish()
    assert "resumed after step 30" in outputs[0]

    assert resumed.losses() == straight.losses() and resumed.summary()["peak_memory_GiB"] == 99.5
    wanted = checkpoint_tensors(straight.folder / "checkpoint" / "step-00000060")
    found = checkpoint_tensors(resumed.folder / "checkpoint" / "step-00000060")
    assert found.keys() == wanted.keys()
    assert {name.split(".")[0] for name in found} == {"model", "optimizer", "ema"}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    grids = [run.folder / "samples" / "step-00000060.png" for run in (straight, resumed)]
    assert grids[0].read_bytes() == grids[1].read_bytes()


def stop_after(run: Run, step: int, number: int) -> None:
    run.wait_for_step(step)
    run.processes[-1].send_signal(number)
    codes, outputs = run.wait()
    assert codes == [128 + number] * len(codes), outputs


def test_four_ranks_then_two_then_one_then_four_in_other_layouts_go_on_as_one_run(config):
    more = ("--checkpoint.interval", "10", "--sampling.enable", "false", "--validation.enable", "true",
            "--validation.interval", "20", "--validation.num_images", "64")  # fmt: skip
    straight = ForkedRun(config, "unmoved", *more)
    straight.finish()
    first = ForkedRun(config, "moved", *more, ranks=4, replicas=2, shards=2)
    kill_after(first, 15)
    stop_after(ForkedRun(config, "moved", *more, ranks=2, shards=2), 25, signal.SIGTERM)
    stop_after(ForkedRun(config, "moved", *more), 35, signal.SIGUSR1)
    last = ForkedRun(config, "moved", *more, ranks=4, replicas=4)
    assert "resumed after step" in last.finish()[0]
    # (The largest of the ranks' losses is another number on another number of ranks.)
    compared = ("loss_metrics/global_avg", "loss_by_bin", "grad_norm", "lr", "validation", "n_images_seen")
    assert [point["step"] for point in last.points()] == [point["step"] for point in straight.points()]
    for point, wanted in zip(last.points(), straight.points(), strict=True):
        tags = [tag for tag in wanted if tag.startswith(compared)]
        assert {tag: point[tag] for tag in tags} == pytest.approx({tag: wanted[tag] for tag in tags}, rel=1e-5)
    assert sum(tag.startswith("validation") for point in straight.points() for tag in point) >= 6
    # Speeds are those of the last layout.
    timed, record = last.summary()["timed"], read_run(last.folder)
    assert timed["as"].startswith("DDP x 4 on CPU") and 35 <= timed["after_step"] < last.summary()["step"]
    points = [point for point in last.points() if point["step"] > timed["after_step"]]
    logged = [point["throughput(img/s)"] for point in points if "throughput(img/s)" in point]
    assert list(record.speeds("throughput(img/s)").values) == logged
    assert last.summary()["tail_medians"]["throughput(img/s)"] == statistics.median(logged[len(logged) // 2 :])
    assert straight.summary()["timed"]["after_step"] == 0


SHORT = ("--training.steps", "8", "--sampling.enable", "false")


@pytest.fixture(scope="module")
def short(config) -> ForkedRun:
    """A finished run, which each test leaves finished."""
    run = ForkedRun(config, "short", *SHORT)
    run.finish()
    return run


def test_a_finished_run_is_compared_with_the_configuration_as_an_unfinished_one_is(config, short):
    before = {path: path.stat().st_mtime_ns for path in short.folder.rglob("*")}
    assert "this run is finished" in ForkedRun(config, "short", *SHORT, "--metrics.log_freq", "1").finish()[0]
    other = (*SHORT, "--optimizer.lr", "5e-3", "--model.dim", "128")
    (finished,), (output,) = ForkedRun(config, "short", *other).wait()
    assert {path: path.stat().st_mtime_ns for path in short.folder.rglob("*")} == before
    assert "short: holds a run of another configuration" in output and "  optimizer.lr: " in output
    summary = (short.folder / "summary.json").rename(short.folder / "aside.json")
    (unfinished,), (wanted,) = ForkedRun(config, "short", *other).wait()
    summary.rename(short.folder / "summary.json")
    assert (finished, unfinished, wanted) == (2, 2, output)


def test_final_weights_that_a_finished_run_is_asked_for_are_written_from_its_last_checkpoint(config, short):
    points, asked = short.points(), (*SHORT, "--checkpoint.final_weights", "float32")
    output = ForkedRun(config, "short", *asked).finish()[0]
    assert "resumed after step 8" in output and "finished (" not in output and short.points() == points
    found = load_file(short.folder / "short-step-00000008.safetensors")
    wanted = checkpoint_tensors(short.folder / "checkpoint" / "step-00000008")
    assert found.keys() and all(torch.equal(found[name], wanted[f"ema.ema.{name}"]) for name in found)
    (short.folder / "short-step-00000008.safetensors").unlink()  # the user's choice: it has been written
    assert "this run is finished (more --training.steps extend it" in ForkedRun(config, "short", *asked).finish()[0]
    aside = (short.folder / "checkpoint").rename(short.folder / "aside")
    output = ForkedRun(config, "short", *SHORT, "--checkpoint.final_weights", "bfloat16").finish()[0]
    aside.rename(short.folder / "checkpoint")
    assert "this run is finished (no checkpoint is left to extend it, or to write final weights, from" in output


def test_kills_while_final_weights_are_written_leave_nothing_hidden(tmp_path, monkeypatch):
    small = write_config(tmp_path)
    words = ("--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--sampling.enable", "false")
    words += ("--checkpoint.final_weights", "float32")
    monkeypatch.setenv(FAULT, "0:before the final weights:1")
    for _ in range(2):
        assert ForkedRun(small, "final", *words).wait()[0] == [-signal.SIGKILL]
    run = tmp_path / "outputs" / "final"
    assert len(list(run.glob(".final-step-*"))) == 1  # the first is gone
    (run / ".final-step-00000002.safetensors.unfinished").write_text("a user's")
    monkeypatch.delenv(FAULT)
    ForkedRun(small, "final", *words).finish()
    assert [path.name for path in run.glob(".final-step-*")] == [".final-step-00000002.safetensors.unfinished"]
    assert (run / "final-step-00000002.safetensors").is_file()


def test_the_configuration_beside_a_run_that_was_moved_says_how_to_continue_it(tmp_path, capsys):
    words = ("--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--sampling.enable", "false")
    run = ForkedRun(write_config(tmp_path), "first", *words)
    run.finish()

    def said(folder, *words):
        assert train([str(folder / "config.toml"), *words, "--check-only"]) == 0
        return capsys.readouterr().err

    assert "to continue" not in said(run.folder)
    moved = run.folder.rename(run.folder.with_name("moved"))
    assert f"(to continue that: --job.dump_folder={moved.parent} --job.name=moved)" in said(moved)
    assert "to continue" not in said(moved, "--job.name", "moved") + said(moved, "--job.name", "third")


def test_a_run_from_an_earlier_step_that_is_killed_resumes_from_its_newest_checkpoint(config, monkeypatch):
    arguments = ("--training.steps", "12", "--checkpoint.interval", "2", "--sampling.enable", "false")
    whole = ForkedRun(config, "branched", *arguments, "--checkpoint.keep_latest_k", "0")
    whole.finish()
    checkpoints = whole.folder / "checkpoint"
    wanted, losses = checkpoint_tensors(checkpoints / "step-00000012"), whole.losses()
    again = (*arguments, "--checkpoint.keep_latest_k", "2", "--checkpoint.load_step", "4")
    resumed = []
    for occurrence, log_freq in ((1, "12"), (3, "5")):  # before its first checkpoint, and with those of steps 6 and 8 only
        monkeypatch.setenv(FAULT, f"0:before the rename:{occurrence}")
        codes, outputs = ForkedRun(config, "branched", *again, "--metrics.log_freq", log_freq).wait()
        assert codes == [-signal.SIGKILL], outputs
        resumed += outputs
        assert not (whole.folder / "summary.json").exists()  # of steps that the run went back from, without a point since
    monkeypatch.delenv(FAULT)
    assert not (checkpoints / "step-00000004").exists()  # beyond keep_latest_k by now
    resumed += ForkedRun(config, "branched", *again).finish()
    steps = [output.partition("resumed after step ")[2].split()[0] for output in resumed]
    assert steps == ["4", "4", "8"] and "load_step: 4: was applied before; resuming from the newest" in resumed[2]
    found = checkpoint_tensors(checkpoints / "step-00000012")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted) and whole.losses() == losses
    aside = sorted(path.name[:23] for path in checkpoints.glob("set-aside-*"))
    assert aside == [f"set-aside-step-{step:08d}" for step in (6, 8, 10, 12)]
    with pytest.raises(CheckpointError, match="is a checkpoint under another name than its step's"):
        checkpoints_of(next(checkpoints.glob("set-aside-*")))
    assert "this run is finished" in ForkedRun(config, "branched", *again).finish()[0]


def test_ctrl_c_that_the_launcher_passes_on_still_saves(config):
    run = ForkedRun(config, "interrupted", "--training.steps", "100000", ranks=2, replicas=2)
    run.wait_for_step(10)
    run.send(signal.SIGINT)  # from the terminal, then from torchrun
    run.send(signal.SIGTERM)
    codes, outputs = run.wait(300)
    assert codes[0] == codes[1] and codes[0] - 128 in (signal.SIGINT, signal.SIGTERM), outputs
    summary = run.summary()
    assert summary["status"] == "interrupted"
    assert (run.folder / "checkpoint" / f"step-{summary['step']:08d}" / "manifest.json").exists()
