"""What is left of a launcher that is killed: nothing that it has started; and of a shell that ends: all of it."""

import ast
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launcher import ROOT
from tests.process_state import process_state
from torchtitan.processes import parent_death

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has a signal of the parent's death")

# The parent starts a child, which says that it is ready, and waits to be killed.
PARENT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from torchtitan.processes.parent_death import end_with_launcher
pid = os.fork()
if not pid:
    end_with_launcher()
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_the_oldest_python3_of_a_system_can_run_the_launcher():
    tree = ast.parse(Path(parent_death.__file__).read_text(encoding="utf-8"), feature_version=(3, 6))
    annotations = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg)]
    annotations += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert annotations and all(isinstance(found, ast.Name | ast.Constant) for found in annotations)  # no list[str]


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while process_state(pid) != "gone":
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.01)
    return True


def child_that_sleeps(pid: int) -> int:
    """The child of a process that has become `sleep`."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):  # it has ended
                if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep\0"):
                    return int(child)
        time.sleep(0.01)
    raise AssertionError


@pytest.mark.parametrize(("launched", "gone"), [(True, True), (False, False)])
def test_a_rank_ends_with_torchrun_and_a_run_without_launcher_outlives_its_shell(launched, gone):
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environment |= {"TORCHELASTIC_RUN_ID": "17"} if launched else {}
    command = [sys.executable, "-S", "-c", PARENT, str(ROOT)]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone_within(child, 5 if gone else 0.3) == gone


def test_a_command_whose_parent_is_gone_already_is_not_started(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, "-S", parent_death.__file__, str(gone.pid), "touch", str(tmp_path / "started")]
    assert subprocess.run(command).returncode == 128 + signal.SIGKILL
    assert not (tmp_path / "started").exists()


def test_the_command_of_a_launch_script_ends_with_it_and_keeps_its_code():
    script = f"source {ROOT}/scripts/status.sh; run_for_status "
    assert subprocess.run(["bash", "-c", script + "bash -c 'exit 7'"]).returncode == 7
    shell = subprocess.Popen(["bash", "-c", script + "sleep 60"])
    command = child_that_sleeps(shell.pid)
    shell.kill()
    shell.wait()
    assert gone_within(command, 5)
