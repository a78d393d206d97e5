"""One process at a time holds a run's folder; one that died holds nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

from tests.launcher import ROOT
from torchtitan.files.run_lock import LOCK_FILE, RunLock

HOLD = """
import sys, time
from pathlib import Path
from torchtitan.files.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
if len(sys.argv) > 2:
    import os
    if os.fork() == 0:
        os.close(1)
        time.sleep(5)
        os._exit(0)
time.sleep(60)
"""


def holder(folder, *more: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *more], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "None\n"
    return process


def test_a_second_process_is_shown_the_first_until_that_dies(tmp_path):
    process = holder(tmp_path)
    try:
        owner = RunLock(tmp_path).acquire()
        assert f"host {socket.gethostname()}, process {process.pid}, since 20" in owner
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == process.pid  # left behind, and no obstacle
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()
    again = holder(tmp_path)
    again.kill()
    again.wait()
    again.stdout.close()


def test_a_worker_that_outlives_a_killed_run_does_not_keep_the_folder(tmp_path):
    process = holder(tmp_path, "with a child")
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        lock = RunLock(tmp_path)
        assert lock.acquire() is None
        lock.release()
    finally:
        process.stdout.close()


def test_an_owner_that_cannot_be_read_is_another_process(tmp_path):
    process = holder(tmp_path)
    try:
        for content in ("", "{"):
            (tmp_path / LOCK_FILE).write_text(content)
            assert RunLock(tmp_path).acquire() == "another process"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_process_itself_takes_a_lock_once(tmp_path):
    """A POSIX lock would be taken twice, and lost with the first release."""
    first, second, other = RunLock(tmp_path), RunLock(tmp_path), RunLock(tmp_path, "other.lock")
    assert first.acquire() is None and other.acquire() is None
    assert f"process {os.getpid()}" in second.acquire()
    second.release()
    holds = "import sys; from pathlib import Path; from torchtitan.files.run_lock import RunLock; "
    tried = subprocess.run(
        [sys.executable, "-c", holds + "print(RunLock(Path(sys.argv[1])).acquire())", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"process {os.getpid()}" in tried.stdout
    waiting = threading.Thread(target=second.wait, args=(0.01,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    first.release()
    waiting.join(10)
    assert not waiting.is_alive() and first.acquire() is not None
