"""What is written beside checkpoints when a disk is full or failing: nothing is lost, nothing half there."""

import errno
import json
import os
import resource
import sys
import threading
import tracemalloc
import types
from contextlib import contextmanager

import pytest
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from torchtitan.files import patient_file
from torchtitan.files.optional import OptionalOutputs
from torchtitan.files.patient_file import PatientFile
from torchtitan.sampling.run_samples import log_scalars
from torchtitan.training.config import MetricsConfig
from torchtitan.training.metric_points import iter_points
from torchtitan.training.metrics import METRICS_FILE, MetricsLog, cut_metrics


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
        assert log.settle(0.3) == (2, 2)
    assert log.settle(0.3) == (0, 2)
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


def test_records_that_wait_are_bounded_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(patient_file, "_MOST_WAITING", 1000)
    file = PatientFile(tmp_path / "in" / "lines", "lines")
    (tmp_path / "in").write_text("in the way")
    for number in range(500):
        file.add(f"{number:9}\n".encode())
    assert file.settle(0.0) == 100
    (tmp_path / "in").unlink()
    file.add(b"the last\n")
    assert (tmp_path / "in" / "lines").read_text().split() == [*map(str, range(400, 500)), "the", "last"]


def test_a_log_that_goes_back_waits_for_its_disk_and_then_reads_as_one_run(tmp_path):
    log = metrics_log(tmp_path)
    for step in (1, 2, 3, 4):
        log.write(step, {"attempt": 0})
    log.close()
    path = tmp_path / METRICS_FILE
    path.rename(tmp_path / "aside")
    path.mkdir()
    log = metrics_log(tmp_path, 2)
    log.write(3, {"attempt": 1})
    path.rmdir()
    (tmp_path / "aside").rename(path)
    log.write(4, {"attempt": 1})
    points = [(point["step"], point["attempt"]) for point in iter_points(path)]
    assert points == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_metrics_are_cut_in_place_where_nothing_good_follows_and_never_read_whole(tmp_path, monkeypatch):
    path = tmp_path / METRICS_FILE
    line = json.dumps({"step": 1, "text": "x" * 1000}) + "\n"
    path.write_bytes((line * 4000).encode() + bytes(100_000) + b'{"step": 2}\n')
    tracemalloc.start()
    with files_end_at(0):  # no file may be written
        cut_metrics(path, 1)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert path.stat().st_size == 4000 * len(line)


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
    log_scalars(tmp_path, 2, {"fid": 9.0})  # an evaluation hides nothing
    events = reader(str(tmp_path / "tb"))
    events.Reload()
    points = events.Scalars if reader is EventAccumulator else events.Tensors
    values = [event.value if reader is EventAccumulator else make_ndarray(event.tensor_proto) for event in points("attempt")]
    assert list(zip([event.step for event in points("attempt")], values, strict=True)) == shown


def test_tensorboard_whose_folder_cannot_be_made_costs_itself_alone(tmp_path, caplog):
    (tmp_path / "tb").write_text("in the way")
    log = metrics_log(tmp_path, enable_tensorboard=True)
    log.write(1, {"loss": 1.0})
    log.sync()
    log.close()
    assert steps(tmp_path) == [1] and len(caplog.messages) == 1 and "TensorBoard's file" in caplog.text


class FakeWandb(types.ModuleType):
    """Raises what wandb 0.31 was seen to: its Error where it cannot begin, OSError where it cannot write an image."""

    class Error(Exception):
        pass

    def __init__(self, begins: bool) -> None:
        super().__init__("wandb")
        self.begins, self.logged, self.full = begins, [], False

    def init(self, **arguments):
        if not self.begins:
            raise self.Error("No API key configured. Use `wandb login` to log in.")
        return self

    def log(self, content, step=None):
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.logged.append((step, content))

    def finish(self):
        pass


def test_weights_and_biases_costs_itself_alone(tmp_path, monkeypatch, caplog):
    for begins in (False, True):
        caplog.clear()
        fake = FakeWandb(begins)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        log = metrics_log(tmp_path, enable_wandb=True)
        log.write(1, {"loss": 1.0})
        fake.full = True
        log.write(2, {"loss": 2.0})
        fake.full = False
        log.write(3, {"loss": 3.0})
        log.close()
        assert fake.logged == ([(1, {"loss": 1.0}), (3, {"loss": 3.0})] if begins else [])
        assert len(caplog.messages) == (2 if begins else 1) and "Weights & Biases" in caplog.messages[0]
        assert "No space left" in caplog.text if begins else "No API key configured" in caplog.text


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
