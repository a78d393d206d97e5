"""torchrun around train.py: restarts after a fault, none after a refusal, and two launchers as two nodes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.end_to_end.runs import Run, checkpoint_tensors, write_config
from tests.faults.forked import ForkedRun
from tests.launcher import ROOT, free_port
from tests.process_state import children
from torchtitan.distributed.mesh import crosses_nodes

TORCHRUN = [sys.executable, "-m", "torchtitan.processes.torchrun"]


@pytest.fixture
def config(tmp_path) -> Path:
    return write_config(tmp_path)


def torchrun(config: Path, name: str, *options: str, train: tuple[str, ...] = ()) -> subprocess.Popen:
    command = [
        *TORCHRUN, *options, "train.py", "--job.config_file", str(config), "--job.dump_folder",
        str(config.parent / "outputs"), "--job.name", name, *train,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def same_weights(one: Path, other: Path) -> bool:
    newest = [max((folder / "checkpoint").glob("step-*")) for folder in (one, other)]
    first, second = (checkpoint_tensors(folder) for folder in newest)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_refused_configuration_is_not_started_again(config, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(tmp_path / "status"))
    process = torchrun(
        config, "refused", "--standalone", "--nproc_per_node", "2", "--max-restarts", "3", train=("--optimizer.lr", "-1")
    )
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert output.count("optimizer.lr") == 1 and "Traceback" not in output, output
    assert json.loads((tmp_path / "status").read_text())["status"] == "refused"
    assert not (config.parent / "outputs").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_rank_that_was_killed_is_started_again_and_the_run_ends_as_if_nothing_had_been(config):
    quick = ("--training.steps", "45", "--checkpoint.interval", "10")
    layout = ("--parallelism.data_parallel_replicate_degree", "2", *quick)
    straight = ForkedRun(config, "straight", *quick, ranks=2, replicas=2)
    straight.finish()
    process = torchrun(config, "again", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1", train=layout)
    run = Run(config.parent / "outputs" / "again", [process])
    run.wait_for_step(25)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "resumed after step 20" in output or "resumed after step 30" in output
    assert same_weights(run.folder, straight.folder)
    assert run.losses() == straight.losses()


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_launchers_are_two_nodes_with_the_shards_of_a_copy_on_one(config, shards):
    straight = ForkedRun(config, "one_node", "--training.steps", "8", ranks=2 * shards, replicas=2, shards=shards)
    straight.finish()
    place = ("--nnodes", "2", "--nproc_per_node", str(shards), "--rdzv_backend", "c10d", "--rdzv_id", "two", "--rdzv_endpoint",
             f"localhost:{free_port()}")  # fmt: skip
    layout = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree",
              str(shards), "--training.steps", "8")  # fmt: skip
    nodes = [torchrun(config, "two_nodes", *place, train=layout) for _ in range(2)]
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "across nodes" not in "".join(outputs)
    folder = config.parent / "outputs" / "two_nodes"
    assert same_weights(folder, straight.folder)


SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show) seq -f %0200g 2 5000 | sed 1ilocalhost ;;  # more than a pipe holds
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


@pytest.fixture
def slurm(config, tmp_path):
    """Start the batch script of a job of one node and two processes, with a Slurm that is two small scripts."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    here = tmp_path / "repository"  # with an environment beside it, as `scripts/train.sh --setup-only` makes one
    here.mkdir()
    for path in ROOT.iterdir():
        if path.name not in (".venv", ".git", "outputs"):
            (here / path.name).symlink_to(path)
    (here / ".venv" / "bin").mkdir(parents=True)
    (here / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (here / ".venv" / "bin" / "python").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "REQUEUED": str(tmp_path / "requeued"), "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "localhost", "SLURM_SUBMIT_DIR": str(here), "PROCESSES_PER_NODE": "2",
        "PORT": str(free_port()), "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def start(*arguments: str, **variables: str) -> subprocess.Popen:
        command = [
            "bash", str(here / "scripts" / "multinode.slurm"), str(config), "--job.dump_folder",
            str(config.parent / "outputs"), *arguments,
        ]  # fmt: skip
        return subprocess.Popen(
            command, text=True, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path
        )

    return start


def test_a_job_near_its_time_limit_is_saved_and_queued_again(slurm, config, tmp_path):
    job = slurm("--parallelism.data_parallel_replicate_degree", "2", "--training.steps", "100000", "--job.name", "long")
    run = Run(config.parent / "outputs" / "long", [job])
    run.wait_for_step(10)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=300)[0]
    assert job.returncode == 75 and "Traceback" not in output, output
    assert (tmp_path / "requeued").read_text() == "17\n"
    status, summary = json.loads((run.folder / "status.json").read_bytes()), run.summary()
    assert (status["status"], status["exit_code"], summary["status"]) == ("requeue", 128 + signal.SIGUSR1, "interrupted")
    assert status["reason"] == "interrupted by SIGUSR1, and saved"
    assert not (run.folder / "faults").exists()
    assert any((run.folder / "checkpoint").glob("step-*/manifest.json"))


@pytest.mark.parametrize(("variables", "text"), [
    ({"SLURM_GPUS_ON_NODE": ""}, "the job has no GPUs (submit with --gpus-per-node N, or set PROCESSES_PER_NODE to train"),
    ({"SLURM_GPUS_ON_NODE": "64"}, "GPUs, and 64 processes are to use one each"),
])  # fmt: skip
def test_a_node_without_gpus_is_refused(slurm, tmp_path, variables, text):
    output = slurm(PROCESSES_PER_NODE="", **variables).communicate(timeout=300)[0]
    assert text in output and len(output.splitlines()) == 1, output
    assert not (tmp_path / "requeued").exists()


def test_a_refused_job_is_not_queued_again(slurm, tmp_path):
    job = slurm("--optimizer.lr", "-1")
    output = job.communicate(timeout=300)[0]
    assert job.returncode == 2 and output.count("optimizer.lr") == 1, output
    assert not (tmp_path / "requeued").exists()


def test_a_job_on_one_node_finds_the_repository_and_queues_an_interrupted_run_again(tmp_path):
    repository, spool = tmp_path / "repository", tmp_path / "spool"
    (repository / "scripts").mkdir(parents=True)
    (repository / "torchtitan").symlink_to(ROOT / "torchtitan")
    (repository / "scripts" / "status.sh").symlink_to(ROOT / "scripts" / "status.sh")
    train = repository / "scripts" / "train.sh"
    set_up = '[ "$1" != --setup-only ] || exit 0'
    train.write_text(f'#!/usr/bin/env bash\n{set_up}\necho "$PWD $NGPU $TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*"\nexit $CODE\n')
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$3" -le "$SEEN" ]\n')
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    for path in (train, scontrol, python):
        path.chmod(0o755)
    spool.mkdir()
    (spool / "slurm_script").write_text((ROOT / "scripts" / "one_node.slurm").read_text())  # as Slurm starts it

    def job(**variables):
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "REQUEUED": str(tmp_path / "requeued"), "SLURM_JOB_ID": "17",
            "SLURM_GPUS_ON_NODE": "8", "SEEN": "8", "CODE": "0", **variables,
        }  # fmt: skip
        command = ["bash", str(spool / "slurm_script"), "a.toml", "--training.steps", "3"]
        return subprocess.run(command, text=True, env=environment, capture_output=True, cwd=spool, timeout=60)

    for code, queued in ((75, "17\n"), (0, ""), (1, ""), (2, "")):
        (tmp_path / "requeued").write_text("")
        submitted = job(SLURM_SUBMIT_DIR=str(repository), CODE=str(code))
        assert (submitted.returncode, submitted.stdout) == (code, f"{repository} 8 240 a.toml --training.steps 3\n"), submitted
        assert (tmp_path / "requeued").read_text() == queued
    named = job(SLURM_SUBMIT_DIR=str(spool), REPOSITORY=str(repository), NGPU="1")
    assert named.stdout == f"{repository} 1 240 a.toml --training.steps 3\n"
    without = job(SLURM_SUBMIT_DIR=str(repository), SLURM_GPUS_ON_NODE="")
    assert without.returncode == 2 and without.stderr.startswith("one_node.slurm: the job has no GPUs (submit with")
    unseen = job(SLURM_SUBMIT_DIR=str(repository), SEEN="4")
    assert (unseen.returncode, unseen.stdout) == (2, "")
    elsewhere = job(SLURM_SUBMIT_DIR=str(spool))
    assert elsewhere.returncode == 2 and "is not the repository" in elsewhere.stderr
    for script, how in {"one_node.slurm": "sbatch (or set REPOSITORY)", "multinode.slurm": "sbatch --nodes N"}.items():
        alone = subprocess.run(["bash", str(ROOT / "scripts" / script), "digits"], text=True, capture_output=True, timeout=60)
        assert (alone.returncode, alone.stderr) == (2, f"{script}: start it with {how}\n")


@pytest.mark.parametrize(("script", "packages", "program"), [
    ("run_ablations_0.5B.sh", "digits lowbit", "scripts/sweep.py train_configs/sweeps/dit_0.5B.toml --dry-run"),
    ("run_ablations_cpu.sh", "digits", "scripts/sweep.py train_configs/sweeps/cpu.toml --output outputs/ablations_cpu --dry-run"),
    ("train.sh", "digits", "train.py --job.config_file a.toml --dry-run 1"),
])  # fmt: skip
def test_a_script_that_slurm_has_copied_finds_the_repository(tmp_path, script, packages, program):
    repository, spool = tmp_path / "repository", tmp_path / "spool"
    (repository / "scripts").mkdir(parents=True)
    (repository / ".venv" / "bin").mkdir(parents=True)
    (repository / "torchtitan").symlink_to(ROOT / "torchtitan")
    (repository / "scripts" / "status.sh").symlink_to(ROOT / "scripts" / "status.sh")
    (repository / "a.toml").touch()
    (repository / "scripts" / "environment.sh").write_text(
        'root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)\nvenv=$root/.venv\nset_up() { echo "set up $*"; }\n'
    )
    python = repository / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$PWD $*"\n')
    python.chmod(0o755)
    spool.mkdir()
    (spool / "slurm_script").write_text((ROOT / "scripts" / script).read_text())  # as Slurm starts it

    def job(folder, **variables):
        words = ["--config", "a.toml", "--dry-run", "1"] if script == "train.sh" else ["--dry-run"]
        environment = {name: value for name, value in os.environ.items() if name not in ("REPOSITORY", "SLURM_SUBMIT_DIR")}
        command = ["bash", str(spool / "slurm_script"), *words]
        return subprocess.run(
            command, text=True, env=environment | variables, capture_output=True, cwd=folder, timeout=60
        )

    submitted = job(repository, SLURM_SUBMIT_DIR=str(repository), SLURM_JOB_ID="17")
    assert submitted.returncode == 0, submitted.stderr
    set_up, *commands = submitted.stdout.splitlines()
    assert set_up == f"set up {packages}"
    assert commands[-1].replace(f"--output {repository}/", "--output ") == f"{repository} {program}"
    if script != "train.sh":  # its CONFIG is relative to the folder that it is called from
        assert job(spool, SLURM_SUBMIT_DIR=str(spool), REPOSITORY=str(repository)).stdout.splitlines() == [set_up, *commands]
    elsewhere = job(spool, SLURM_SUBMIT_DIR=str(spool))
    assert elsewhere.returncode == 2 and len(elsewhere.stderr.splitlines()) == 1
    assert elsewhere.stderr.startswith(f"{script}: {spool} is not the repository (submit from it, or set REPOSITORY)")


def test_shards_that_lie_across_nodes_are_pointed_out():
    def advice(replicas: int, shards: int, per_node: int) -> str | None:
        return crosses_nodes(SimpleNamespace(replicas=replicas, shards=shards), per_node)

    assert advice(4, 4, 8) is advice(1, 16, 8) is advice(8, 1, 6) is advice(2, 16, 8) is None
    assert "copies of 4 shards cross nodes of 6 processes" in advice(3, 4, 6)
