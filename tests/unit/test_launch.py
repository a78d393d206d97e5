"""RANK, WORLD_SIZE and the like of a launcher: what is no place among the processes is refused in one line."""

import json
import os
import socket

import pytest
import torch

from torchtitan.distributed.config import CommConfig
from torchtitan.distributed.mesh import compute_device, init_process_group
from torchtitan.files.run_lock import RunLock
from torchtitan.processes import command_line, parent_death
from torchtitan.processes.exit_codes import FAILED, REFUSED, before_exit
from torchtitan.processes.launch import LaunchError, check_launch, check_rendezvous, launch_number
from torchtitan.runs.record import read_run
from torchtitan_dit import cli
from torchtitan_dit.commands import train

RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", RESTARTS)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch, words: str) -> None:
    for word in words.split():
        monkeypatch.setenv(*word.split("="))


@pytest.mark.parametrize("words", [
    "", "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=65535", "RANK=3", "LOCAL_RANK=0 RANK=0",
])  # fmt: skip
def test_places_among_processes_are_taken(monkeypatch, words):
    launched(monkeypatch, words)
    check_launch()
    assert launch_number("RANK", 7) == (3 if "RANK=3" in words else 0 if words else 7)


@pytest.mark.parametrize(("words", "key"), [
    ("RANK=first", "RANK"), ("WORLD_SIZE=0", "WORLD_SIZE"), ("RANK=5 WORLD_SIZE=1", "RANK"),
    ("WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK"), ("MASTER_PORT=70000", "MASTER_PORT"),
])  # fmt: skip
def test_what_is_no_place_ends_every_program_with_a_line_and_2(monkeypatch, capsys, words, key):
    launched(monkeypatch, words)
    assert command_line.exit_code(lambda: pytest.fail("was started")) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{key}: must be ") and line.count("\n") == 1
    assert line.strip().isprintable() and len(line) < 250


def test_processes_that_cannot_meet_are_refused(monkeypatch):
    init_process_group(CommConfig())  # alone: nothing to join
    launched(monkeypatch, "WORLD_SIZE=1 RANK=0")
    with pytest.raises(LaunchError, match="^WORLD_SIZE is set, but MASTER_ADDR and MASTER_PORT are not"):
        init_process_group(CommConfig())
    launched(monkeypatch, "MASTER_ADDR=127.0.0.1 MASTER_PORT=1")
    check_rendezvous()


def test_a_port_in_use_is_refused_and_a_lost_rank_before_there_is_a_folder_leaves_no_word_of_its_status(
    tmp_path, monkeypatch, capsys, caplog
):
    def lost(config, run_folder):
        raise torch.distributed.DistNetworkError("closed by peer")

    words = ["digits", "--job.dump_folder", str(tmp_path / "outputs")]
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        launched(monkeypatch, f"WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT={port}")
        assert train.main(words) == REFUSED
    assert capsys.readouterr().err.splitlines()[-1] == f"MASTER_PORT: port {port} is in use (give another)"
    monkeypatch.setattr("torchtitan.trainer.open_run", lost)
    assert train.main(words) == FAILED
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "rank 0: building the run: lost another rank: closed by peer"
    ]
    assert not (tmp_path / "outputs").exists()


def test_an_error_of_any_code_while_a_run_is_built_is_its_status_and_the_pages(tmp_path, monkeypatch):
    """As of a plugin: the run of the folder was complete, and is to be extended. A folder not yet opened is another's."""

    def broken(config, run_folder):
        lock = RunLock(folder)
        assert lock.acquire() is None
        raise NameError("name 'undefined'")

    def broken_before(config, run_folder):
        raise NameError("name 'undefined'")

    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "config.toml").write_text("")
    (folder / "summary.json").write_text('{"status": "completed", "step": 10}')
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(tmp_path / "status"))
    for place in (broken_before, broken):
        assert not (folder / "status.json").exists()
        monkeypatch.setattr("torchtitan.trainer.open_run", place)
        with pytest.raises(NameError):
            train.main(["digits", "--job.dump_folder", str(tmp_path)])
    reason = "building the run: NameError: name 'undefined'"
    for path in (folder / "status.json", tmp_path / "status"):
        assert json.loads(path.read_text()) == {"status": "failed", "exit_code": FAILED, "reason": reason}
    record = read_run(folder)
    assert (record.status, record.reason) == ("completed at step 10, failed since", reason)


def test_a_process_that_torchrun_has_started_again_forgets_the_end_of_the_one_before(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text(text := '{"status": "failed"}')
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(status))
    for environment, left in (("", text), ("TORCHELASTIC_RESTART_COUNT=1 LOCAL_RANK=1", text), ("LOCAL_RANK=0", "")):
        launched(monkeypatch, environment)
        assert train.main(["digits", "--check-only"]) == 0 and status.read_text() == left


def test_restarts_that_would_meet_in_the_store_of_the_lost_are_warned_of(monkeypatch, capsys):
    def warned():
        assert train.main(["digits", "--check-only"]) == 0
        return "(before torchrun: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)" in capsys.readouterr().err

    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    assert not warned()
    monkeypatch.setenv(RESTARTS, "3")
    assert warned()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not warned()


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launched(monkeypatch, "LOCAL_RANK=1")
    assert compute_device() == torch.device("cuda", 1)
    launched(monkeypatch, "LOCAL_RANK=2")
    with pytest.raises(LaunchError, match="^LOCAL_RANK: 2, but this process sees 2 GPUs"):
        compute_device()


@pytest.mark.parametrize(("restarts", "ended"), [("3", True), ("0", False), ("", False)])
def test_only_a_launcher_that_would_restart_is_ended(monkeypatch, restarts, ended):
    sent = []
    monkeypatch.setattr("os.kill", lambda *words: sent.append(words))
    launched(monkeypatch, "LOCAL_RANK=0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    before_exit(143)
    assert bool(sent) == ended


def test_the_first_process_has_said_why_a_job_is_refused_before_another_ends(monkeypatch):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    for rank, code in (("0", REFUSED), ("1", 0), ("1", FAILED), ("1", 143)):
        launched(monkeypatch, f"LOCAL_RANK={rank}")
        before_exit(code)
    assert not waited
    before_exit(REFUSED)
    assert len(waited) == 1


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_allocator_of_a_training_grows_its_segments_unless_the_environment_chooses(name, monkeypatch):
    chosen = []

    class Training:
        @staticmethod
        def main():
            chosen.append({key: os.environ[key] for key in os.environ if key.endswith("ALLOC_CONF")})
            raise SystemExit

    monkeypatch.setattr(cli.importlib, "import_module", lambda module: Training)
    monkeypatch.setattr(parent_death, "end_with_launcher", lambda: None)
    monkeypatch.setattr(command_line, "run_rank", lambda main: main())  # which ends the process
    monkeypatch.setattr(os, "environ", {})
    for value in ("", "max_split_size_mb:64", None):
        os.environ.clear()
        if value is not None:
            os.environ[name] = value
        with pytest.raises(SystemExit):
            cli.run_command("train")
    assert chosen == [{name: ""}, {name: "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}]
