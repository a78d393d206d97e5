"""Searches and extractions through a launcher: which jobs they are, and what becomes of their ends."""

import argparse
import pickle
import threading

import pytest

from tests.extractions import content, write_inputs
from torchtitan.experiments.launchers import LAUNCHERS, program
from torchtitan.experiments.launchers.choice import (
    HERE,
    Launching,
    add_launcher_options,
    launching_of,
    without_launcher_options,
)
from torchtitan.experiments.launchers.job import LauncherError
from torchtitan.experiments.launchers.program import Program, report, run_program_job
from torchtitan.experiments.outcome import Outcome
from torchtitan_dit.commands import autotune_batch_size, extract_latents

LOST = Outcome("killed", "its machine was taken away", 1.0, 1, {"slurm_state": "PREEMPTED"})


class Elsewhere:
    """In place of a scheduler: jobs, as another process gets them, are called here, after those ends that are to come first."""

    jobs, ends = [], []

    def __init__(self, folder, jobs, options):
        self.folder, self.options = folder, options

    def check(self, jobs):
        for job in jobs:
            if job.gpus > 8:
                raise LauncherError(f"{job.name}: no machine has {job.gpus} GPUs")

    def run(self, job, stop, poll=lambda: None):
        self.jobs.append(job)
        poll()
        if self.ends:
            return self.ends.pop(0)
        there = pickle.loads(pickle.dumps(job))
        assert repr(there.arguments) == repr(job.arguments)  # by which a Slurm job is found again
        return there.function(*there.arguments, devices=None, stop=None, node=None, poll=poll)


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "slurm", Elsewhere)
    monkeypatch.setattr(Elsewhere, "jobs", [])
    monkeypatch.setattr(Elsewhere, "ends", [])
    return Elsewhere


def test_the_options_of_a_launcher_are_one_group_and_a_job_gets_the_others_in_their_order():
    parser = argparse.ArgumentParser()
    add_launcher_options(parser, jobs="N", machines=True)
    words = ["--launcher", "slurm", "--slurm", "partition=gpu", "--slurm", "time=60", "--gpus", "--jobs", "3", "--machines", "2"]
    launching = launching_of(parser.parse_args(words))
    assert launching == Launching("slurm", 3, {"partition": "gpu", "time": "60"}, gpus=True, nodes=2)
    assert launching.devices_of(16) == 8 and launching.elsewhere and launching.concurrent == 3
    assert launching_of(parser.parse_args([])) == HERE and HERE.concurrent == 1
    mixed = ["NAME", "--arm", "a", "x.y=1", *words[:4], "--retry-failed", *words[4:], "--model.flavor", "debug"]
    rest = ["NAME", "--arm", "a", "x.y=1", "--retry-failed", "--model.flavor", "debug"]
    assert without_launcher_options(mixed) == [*rest, "--launcher", "local"]


def test_a_search_is_one_job_whose_number_is_printed(tmp_path, monkeypatch, elsewhere, capsys):
    started = []

    def run_program(words, *, processes, log, output, environment, **options):
        started.append((words, processes))
        output.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("batch size 48: does not fit\n")
        output.write_text("24\n")
        return Outcome("ok", "", 1.0, 0) if len(started) == 1 else Outcome("failed", "nothing fits", 1.0, 1)

    monkeypatch.setattr(program, "run_program", run_program)
    config = tmp_path / "a.toml"
    config.write_text('[model]\nflavor = "debug"\n[data]\nname = "synthetic"\n')
    words = [str(config), "--launcher", "slurm", "--gpus", "--processes", "2", "--job.dump_folder", str(tmp_path / "out")]
    assert autotune_batch_size.main(words) == 0
    printed = capsys.readouterr()
    assert printed.out == "24\n" and "batch size 48: does not fit" in printed.err
    for_the_job = (str(config), "--processes", "2", "--job.dump_folder", str(tmp_path / "out"), "--launcher", "local")
    assert started == [(("autotune", *for_the_job), 2)]
    [job] = elsewhere.jobs
    assert (job.name, job.processes, job.gpus) == ("autotune", 2, 2) and (tmp_path / "out" / "autotune.jobs").is_dir()
    assert autotune_batch_size.main(words) == 1 and capsys.readouterr().out == ""
    assert autotune_batch_size.main([*words, "--optimizer.lr", "-1"]) == 2 and len(started) == 2  # before a job is submitted
    assert autotune_batch_size.main([str(config), "--gpus", "--memory", "1"]) == 2
    assert "a run needs 1 CUDA devices, and this machine has 0" in capsys.readouterr().err


def test_a_command_in_a_job_answers_with_its_output_and_exit_code(tmp_path, capsys):
    def run(*words):
        command = Program(words, 1, tmp_path)
        return command, run_program_job(command, devices=None, stop=threading.Event(), node=None, poll=lambda: None)

    command, outcome = run("--help")
    assert outcome.status == "ok" and report(outcome, command) == 0
    assert "torchtitan-dit COMMAND" in capsys.readouterr().out
    command, outcome = run("no-command")
    assert (outcome.status, report(outcome, command)) == ("refused", 2)
    assert "no-command: no such command" in command.log.read_text() and command.output.read_text() == ""
    assert report(LOST, command) == 1 and "killed: its machine was taken away (its output: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"), 9)


def test_parts_of_a_store_make_the_bytes_of_one_start(photographs, tmp_path, capsys):
    assert extract_latents.main(["--output", str(tmp_path / "whole"), *photographs]) == 0
    words = ["--output", str(tmp_path / "store"), *photographs]
    assert extract_latents.main([*words, "--part", "2/2"]) == 0
    assert "part 2 of 2 is written; a start without --part writes the index" in capsys.readouterr().out
    shards = [path.name for path in (tmp_path / "store").glob("shard-*")]
    assert shards == ["shard-00001.safetensors"] and not (tmp_path / "store" / "index.json").exists()
    assert extract_latents.main([*words, "--part", "1/2"]) == 0 and extract_latents.main(words) == 0
    assert "nothing was missing" in capsys.readouterr().out and content(tmp_path / "store") == content(tmp_path / "whole")


def test_an_extraction_is_a_job_for_each_part_and_one_for_the_index(photographs, tmp_path, monkeypatch, elsewhere, capsys):
    started, fails = [], ["2/3"]

    def run_program(words, *, processes, log, output, environment, **options):
        part = words[words.index("--part") + 1] if "--part" in words else "index"
        started.append((part, processes))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(f"{part} is done\n")
        failed = Outcome("failed", "exit code 1: the disk is full", 1.0, 1)
        return failed if part in fails else Outcome("ok", "", 1.0, 0)

    monkeypatch.setattr(program, "run_program", run_program)
    words = ["--output", str(tmp_path / "store"), "--launcher", "slurm", "--processes", "2", *photographs]
    assert extract_latents.main(words) == 1  # nine images in files of three: three parts, whatever --jobs is
    assert sorted(started) == [("1/3", 2), ("2/3", 2), ("3/3", 2)]
    assert "store: 1 of 3 parts are not written" in capsys.readouterr().err
    fails.clear()
    assert extract_latents.main([*words, "--jobs", "2"]) == 0 and sorted(started[3:]) == [("1/2", 2), ("2/2", 2), ("index", 1)]
    assert capsys.readouterr().out == "index is done\n"


@pytest.mark.parametrize(("words", "reason"), [
    (["--gpus"], "--gpus: is of jobs (add --jobs N or --launcher)"),
    (["--slurm", "partition=gpu"], "--slurm: is of jobs"),
    (["--processes", "2"], "--processes: is of jobs"),
    (["--jobs", "2", "--part", "1/2"], "--part: is chosen for each of the jobs"),
    (["--jobs", "2", "--slurm", "partition=gpu"], "--slurm: is an option of --launcher slurm"),
    (["--part", "3/2"], "--part: must be K/N, a part of N from 1 to N, is '3/2'"),
])  # fmt: skip
def test_unsupported_options_of_an_extraction_are_refused(photographs, tmp_path, capsys, words, reason):
    try:
        code = extract_latents.main(["--output", str(tmp_path / "store"), *photographs, *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and reason in capsys.readouterr().err and not (tmp_path / "store").exists()
