"""What is written beside checkpoints when a disk is full or failing: nothing is lost, nothing half there."""

import json
import os
import resource
import threading
from contextlib import contextmanager

import pytest
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from torchtitan.files.optional import OptionalOutputs
from torchtitan.files.patient_file import PatientFile
from torchtitan.sampling.run_samples import log_scalars
from torchtitan.training.config import MetricsConfig
from torchtitan.training.metric_cut import cut_metrics
from torchtitan.training.metrics import METRICS_FILE, MetricsLog


@contextmanager
def files_end_at(size: int):
    """No file of this process grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def metrics_log(folder, steps_done=0, **config) -> MetricsLog:
    config = MetricsConfig(**({"enable_tensorboard": False} | config))
    return MetricsLog(folder, config, "run", {}, steps_done)


def steps(folder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]


@pytest.mark.parametrize("room", [0, 30, 100])
def test_points_wait_in_memory_until_there_is_room(tmp_path, caplog, room):
    log = metrics_log(tmp_path)
    path = tmp_path / METRICS_FILE
    log.write(1, {"loss": 1.0})
    before = path.read_bytes()
    with files_end_at(len(before) + room):
        for step in range(2, 6):
            log.write(step, {"loss": float(step), "text": "x" * 40})
            assert all(json.loads(line) for line in path.read_text().splitlines())
    assert path.read_bytes().startswith(before) and len(steps(tmp_path)) < 5
    said = f"{path}: the file of metrics cannot be written: File too large; training continues, its records wait in memory"
    assert caplog.messages == [said]
    log.write(6, {"loss": 6.0})
    log.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert caplog.messages[1:] == [f"{path}: the file of metrics can be written again"]


def test_points_that_wait_are_written_at_the_end(tmp_path):
    log = metrics_log(tmp_path)
    with files_end_at(0):
        log.write(1, {"loss": 1.0})
        log.write(2, {"loss": 1.0})
        assert log.settle() == (2, 2)
    assert log.settle() == (0, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_sync_beside_training_holds_no_line_up(tmp_path, monkeypatch):
    file = PatientFile(tmp_path / "lines", "lines")
    file.add(b"one\n")
    began, may_end = threading.Event(), threading.Event()

    def slow(descriptor):
        began.set()
        assert may_end.wait(10)

    monkeypatch.setattr(os, "fsync", slow)
    thread = threading.Thread(target=file.sync)
    thread.start()
    assert began.wait(10)
    file.add(b"two\n")  # a deadlock here would be one of training
    may_end.set()
    thread.join(10)
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_what_a_power_cut_left_between_points_goes_and_the_points_after_it_stay(tmp_path, end):
    path = tmp_path / METRICS_FILE
    lines = [json.dumps({"step": step}).encode() for step in (1, 2, 3, 4)]
    path.write_bytes(b"\n".join([lines[0], bytes(50), lines[1], b'{"st', lines[3], lines[2]]) + end)
    cut_metrics(path, 3)
    assert path.read_bytes() == b"\n".join(lines[:3]) + b"\n" and os.listdir(tmp_path) == [METRICS_FILE]


def test_tensorboard_misses_nothing_where_its_disk_was_full_for_a_while(tmp_path, caplog):
    log = metrics_log(tmp_path, enable_tensorboard=True)
    log.write(1, {"loss": 1.0})
    with files_end_at(0):
        log.write(2, {"loss": 2.0})
        log.write_image(2, "samples", Image.new("RGB", (9, 5)))
        log.sync()
    log.write(3, {"loss": 3.0})
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    [image] = events.Images("samples")
    assert (image.step, image.width, image.height) == (2, 9, 5)
    assert sum("TensorBoard's file cannot be written" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("reader", [EventAccumulator, plugin_event_accumulator.EventAccumulator])
@pytest.mark.parametrize(("sessions", "shown"), [
    ([(0, (1, 2, 3)), (1, (2,))], [(1, 0.0), (2, 1.0)]),
    ([(0, (0, 1, 2, 3)), (0, (0, 1))], [(0, 1.0), (1, 1.0)]),  # killed before its first checkpoint
    ([(0, (1, 2)), (0, (1, 2, 3)), (2, (3,))], [(1, 1.0), (2, 1.0), (3, 2.0)]),
])  # fmt: skip
def test_a_run_started_again_hides_its_later_points_from_tensorboard(tmp_path, reader, sessions, shown):
    for attempt, (done, wrote) in enumerate(sessions):
        log = metrics_log(tmp_path, done, enable_tensorboard=True)
        for step in wrote:
            log.write(step, {"attempt": float(attempt)})
        log.close()
    results = {"fid": {"extractor": "inception", "values": {"fid": {"value": 9.0}}}}
    log_scalars(tmp_path, 2, {"samples": {"count": 8}, "reference": None, "results": results})  # hides nothing
    events = reader(str(tmp_path / "tb"))
    events.Reload()
    points = events.Scalars if reader is EventAccumulator else events.Tensors
    values = [event.value if reader is EventAccumulator else make_ndarray(event.tensor_proto) for event in points("attempt")]
    assert list(zip([event.step for event in points("attempt")], values, strict=True)) == shown


def test_an_output_that_fails_is_said_when_it_begins_and_when_it_ends(tmp_path, caplog):
    outputs = OptionalOutputs()
    path = tmp_path / "in the way"
    path.write_text("")

    def draw(number):
        with outputs.attempt("the picture", path / "picture.png"):
            (path / "picture.png").write_text(str(number))
            return True
        return False

    assert [draw(1), draw(2)] == [False, False]
    with outputs.attempt("the page", path):
        pass
    path.unlink()
    path.mkdir()
    assert [draw(3), draw(4)] == [True, True] and (path / "picture.png").read_text() == "4"
    assert caplog.messages == [
        f"{path}/picture.png: the picture cannot be written: Not a directory; training continues, and the next "
        "interval tries again",
        f"{path}/picture.png: the picture can be written again",
    ]
    with pytest.raises(ZeroDivisionError), outputs.attempt("the page", path):
        raise ZeroDivisionError
