"""What is written beside checkpoints when the disk is full: nothing is lost, nothing is half there, training goes on."""

import json
import resource
from contextlib import contextmanager

import pytest

from torchtitan.training.metrics import METRICS_FILE, MetricsConfig, MetricsLog


@contextmanager
def files_end_at(size: int):
    """No file of this process grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 30, 100])
def test_points_wait_in_memory_until_there_is_room(tmp_path, caplog, room):
    log = MetricsLog(tmp_path, MetricsConfig(enable_tensorboard=False), "run", {}, 0)
    path = tmp_path / METRICS_FILE
    log.write(1, {"loss": 1.0})
    before = path.read_bytes()
    with files_end_at(len(before) + room):
        for step in range(2, 6):
            log.write(step, {"loss": float(step), "text": "x" * 40})
            assert all(json.loads(line) for line in path.read_text().splitlines())
    assert path.read_bytes().startswith(before) and len(path.read_text().splitlines()) < 5
    assert caplog.text.count("training goes on, lines wait in memory") == 1
    log.write(6, {"loss": 6.0})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_points_that_wait_are_written_at_the_end(tmp_path):
    log = MetricsLog(tmp_path, MetricsConfig(enable_tensorboard=False), "run", {}, 0)
    with files_end_at(0):
        log.write(1, {"loss": 1.0})
    log.close()
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == {"step": 1, "loss": 1.0}
