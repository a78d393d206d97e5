"""How the end of a run is told from exit code, output and summary; real processes are in tests/end_to_end."""

import pytest

from torchtitan.experiments.outcome import Outcome, classify
from torchtitan.experiments.process import _environment, repeat_killed

LOST = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:28872."


def torchrun(*codes: int, output: str = "", killed: tuple[int, ...] = ()) -> str:
    """Output of ranks and torchrun's report as torch 2.13 writes it; the first code is the root cause's."""
    place = "1121 18:27:59.9 6939 torch/distributed/elastic/multiprocessing/api.py:1028]"
    lines = ["12:00:00 run: debug, 230,384 parameters", output]
    lines += [f"W{place} Sending process 101 closing signal SIGTERM"]
    for pid in killed:
        lines += [f"W{place} Unable to shutdown process {pid} via SIGTERM, forcefully exiting via SIGKILL"]
    lines += [f"E{place} failed (exitcode: {codes[0]}) local_rank: 0 (pid: 100) of binary: python"]
    lines += ["Traceback (most recent call last):", "torch.distributed.elastic.errors.ChildFailedError: "]
    lines += [f"[{rank}]:\n  exitcode  : {code} (pid: {100 + rank}) " for rank, code in enumerate(codes)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("exit_code", "log", "summary", "status", "words"),
    [
        (0, "", {}, "ok", ""),
        (1, "", {"status": "oom", "reason": "step 3: out of memory"}, "oom", "step 3"),
        (1, torchrun(1, 1, output=f"{LOST}\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried"),
         {"status": "failed", "reason": "step 2: Connection closed by peer"}, "oom", "CUDA out of memory"),
        (1, torchrun(-9, 1, output=LOST), {"status": "failed", "reason": LOST}, "killed", "SIGKILL"),
        (137, "", {}, "killed", "SIGKILL"),
        (1, torchrun(1, 137, output=LOST), {}, "killed", "SIGKILL"),
        # A preempted run says so, or its root cause is the scheduler's signal; torchrun sends SIGTERM to the others.
        (1, torchrun(-15, -15), {}, "killed", "SIGTERM"),
        (1, torchrun(1, 1), {"status": "interrupted"}, "killed", "by a signal from outside"),
        (1, torchrun(1, -15, output="[rank0]: ValueError: odd"), {}, "failed", "1: ValueError: odd"),
        # A rank that hung after another one's error, so that torchrun killed it, is no sign of missing memory.
        (1, torchrun(1, -9, output="[rank0]: ValueError: odd", killed=(101,)), {}, "failed", "1: ValueError: odd"),
        (1, torchrun(1, 1, output=f"{LOST}\n[rank1]: KeyError: 'lost'"),
         {"status": "failed", "reason": "step 2: Connection closed by peer"}, "failed", "KeyError: 'lost'"),
        (1, torchrun(1, 1), {"status": "failed", "reason": "step 9: gradient norm is nan"}, "failed", "gradient norm"),
        (1, torchrun(2, 2, output="run: holds a run of another configuration\n  optimizer.lr: 1 -> 2"), {}, "refused",
         "run: holds a run of another configuration; optimizer.lr: 1 -> 2"),
        (2, "data.path: nowhere\n", {}, "refused", "data.path: nowhere"),
        (143, "12:00:00 interrupted\n", {}, "killed", "SIGTERM"),
        (139, "12:00:00 step\n", {}, "failed", "exit code 139"),
        (1, "", {}, "failed", "no output"),
    ],
)  # fmt: skip
def test_classification(exit_code, log, summary, status, words):
    found, reason = classify(exit_code, log, summary)
    assert found == status and words in reason, reason
    assert "\n" not in reason


def test_a_long_reason_is_cut_between_words():
    differences = [f"key.number_{number}: 0.001 -> 0.0003" for number in range(60)]
    _, reason = classify(2, "\n".join(["outputs/a: holds a run of another configuration", *differences]), {})
    assert reason.endswith(" ...") and len(reason) <= 1000 and not reason.endswith("-> 0 ...")
    assert classify(2, "\n".join(differences[:20]), {})[1] == "; ".join(differences[:20])


def test_a_killed_run_is_repeated_a_stated_number_of_times(tmp_path):
    log, started = tmp_path / "run.log", []

    def attempt(*ends: str) -> Outcome:
        started.append(log.exists())
        status = ends[len(started) - 1]
        log.write_text(status)
        return Outcome(status, "" if status == "ok" else f"by {len(started)}", 2.0)

    done = repeat_killed(lambda: attempt("killed", "killed", "ok"), log, retries=2)
    assert (done.status, done.seconds) == ("ok", 6.0)
    assert (log.read_text(), (tmp_path / "run.killed2.log").read_text()) == ("ok", "killed")
    started.clear()
    left = repeat_killed(lambda: attempt("killed", "killed", "killed", "ok"), log, retries=2)
    assert (left.status, left.reason, len(started)) == ("killed", "by 3", 3)
    started.clear()
    assert repeat_killed(lambda: attempt("oom", "ok"), log, retries=2).status == "oom" and len(started) == 1


@pytest.mark.parametrize(("outside", "inside"), [(None, "1,2"), ("4,5,6,7", "5,6")])
def test_devices_are_numbered_among_the_visible_ones(monkeypatch, outside, inside):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outside:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outside)
    monkeypatch.setenv("RANK", "3")  # a sweep started by a launcher must not hand its rank on
    found = _environment(2, {}, [1, 2])
    assert found["CUDA_VISIBLE_DEVICES"] == inside and "RANK" not in found
