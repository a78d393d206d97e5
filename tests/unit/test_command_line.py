"""The border of every command: readers that go away, full disks, closed outputs, folders in use."""

import dataclasses
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launcher import ROOT
from torchtitan.config.job import ConfigError, load_config
from torchtitan.files.run_lock import Busy
from torchtitan.processes.command_line import OneLineParser
from torchtitan.processes.exit_codes import BUSY
from torchtitan.settings.record import dump_config
from torchtitan.settings.sources import read_command_line
from torchtitan.training.schedules import lr_factor
from torchtitan_dit import cli
from torchtitan_dit.commands import train

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from torchtitan.processes.command_line import run_program
from torchtitan.files.run_lock import Busy

def long():
    for number in range(100_000):
        print(number)
    return 0

def busy():
    raise Busy("outputs/x", "host a, process 1", "give --output")

def opened():
    with open(sys.argv[3], "w") as file:
        print("printed")
        file.write("own")
    return 3

run_program(globals()[sys.argv[2]])
"""


def program(name: str, shell: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run one of the functions above in a shell's redirections; `$0 "$@"` is the command."""
    command = ["bash", "-c", f"set -o pipefail; {shell}", sys.executable, "-c", PROGRAM, str(ROOT), name, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_reader_that_goes_away_ends_a_command_quietly():
    done = program("long", '"$0" "$@" | head -1')
    assert (done.returncode, done.stdout, done.stderr) == (141, "0\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_that_is_full_is_one_line():
    done = program("long", '"$0" "$@" > /dev/full')
    assert (done.returncode, done.stderr) == (1, "standard output cannot be written: No space left on device\n")


def test_closed_outputs_are_no_error_and_no_file_takes_their_place(tmp_path):
    done = program("opened", '"$0" "$@" >&- 2>&- <&-', str(tmp_path / "file"))
    assert done.returncode == 3 and (tmp_path / "file").read_text() == "own"


def test_a_folder_in_use_is_one_line_and_75():
    done = program("busy", '"$0" "$@"')
    said = "outputs/x: another process writes here: host a, process 1 (wait for it, stop it, or give --output)\n"
    assert (done.returncode, done.stderr) == (75, said) and BUSY == 75
    assert str(Busy(*Busy("f", "o", "a").args)) == str(Busy("f", "o", "a"))  # as it travels between ranks


@pytest.mark.parametrize("nargs", [None, "?"])
@pytest.mark.parametrize("words", [
    ["w", "a.toml", "--world-size", "2"], ["--config", "a.toml", "w", "--world_size", "2"],
    ["--world_size=2", "w", "--config=a.toml"],
])  # fmt: skip
def test_options_take_either_spelling_and_a_configuration_its_option(words, nargs):
    parser = OneLineParser(prog="x", allow_abbrev=False)
    parser.add_argument("source")
    parser.add_argument("config", nargs=nargs, type=Path)
    parser.add_argument("--world-size", type=int)
    found, left = parser.parse_known_args([*words, "--sampling.images_per_class", "3"])
    assert (found.source, found.config, found.world_size) == ("w", Path("a.toml"), 2)
    assert left == ["--sampling.images_per_class", "3"]


@pytest.mark.parametrize("config", [["digits"], ["--config", "digits"], ["--job.config_file=digits"]])
def test_keys_take_dashes_and_the_configuration_needs_none(config):
    words = ["--sampling.images-per-class=3", *config, "--training.max-local-batch-size", "8"]
    texts = {"job.config_file": "digits", "sampling.images_per_class": "3", "training.max_local_batch_size": "8"}
    assert read_command_line(words) == (texts, [])


def test_training_without_arguments_shows_its_usage(capsys):
    assert train.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: train.py CONFIG ")


def test_the_tests_script_shows_its_own_options():
    done = subprocess.run(["bash", ROOT / "scripts" / "test.sh", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--all" in done.stdout and "-k WORD" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("given", "bound"), [
    ({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
])  # fmt: skip
def test_every_program_bounds_the_spin_of_its_threads_unless_the_environment_does(monkeypatch, given, bound):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr("torchtitan.processes.parent_death.end_with_launcher", lambda: None)
    monkeypatch.setattr("torchtitan.processes.command_line.run_rank", lambda main: seen.append(dict(os.environ)))
    monkeypatch.setattr(cli, "_imported", lambda module: SimpleNamespace(__doc__="", main=None))
    cli.run_command("sample")
    assert seen[0].get("GOMP_SPINCOUNT") == bound


def test_a_check_says_what_a_run_would_do(capsys, monkeypatch):
    monkeypatch.setenv("NGPU", "4")
    hsdp = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "-1")
    assert train.main(["digits", *hsdp, "--training.local_batch_size", "16", "--check-only"]) == 0
    said = capsys.readouterr().out
    assert said == "digits: ok: HSDP 2 x 2; 128 images per step, 2 microbatches of 16 a rank\n"


def test_a_check_refuses_a_folder_of_something_else(capsys, tmp_path):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "notes.txt").touch()
    assert train.main(["digits", "--job.dump_folder", str(tmp_path), "--check-only"]) == 2
    assert "digits: holds notes.txt, which is not a run's; nothing was written" in capsys.readouterr().err


def test_a_warm_up_is_cut_to_a_tenth_of_a_shorter_run_with_a_warning(capsys, tmp_path):
    assert train.main(["digits", "--training.steps", "40", "--check-only", "--job.dump_folder", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert said == "lr_scheduler.warmup_steps: 50 is more than training.steps = 40: cut to a tenth of the run\n"
    config = load_config(["--config", "digits", "--training.steps", "40"], 1)
    (tmp_path / "recorded.toml").write_text(dump_config(config))  # the file's value, so that a longer run resumes
    assert load_config(["--config", str(tmp_path / "recorded.toml")], 1).lr_scheduler == config.lr_scheduler
    schedule = config.lr_scheduler
    assert [lr_factor(schedule, step, 40) for step in (1, 2, 4, 5)] == [0.25, 0.5, 1, 1]
    assert lr_factor(schedule, 23, 40) == pytest.approx(0.5 * (1 + schedule.min_lr_factor))  # half way from 4 to 40


@pytest.mark.parametrize("more", [[], ["--sampling.interval", "100"], ["--evaluation.enable", "true"]])
def test_drawing_while_training_is_switched_off_by_one_key_and_nothing_else(more):
    whole = load_config(["--config", "digits"], 1)
    config = load_config(["--config", "digits", "--sampling.enable", "false", *more], 1)
    assert (config.sampling.num_steps, config.sampling.guidance_scale, config.evaluation.count) == (20, 1.5, 1000)
    assert dataclasses.replace(config.sampling, enable=True) == whole.sampling and config.evaluation == whole.evaluation
    recorded = tomllib.loads(dump_config(config))
    assert recorded["sampling"]["num_steps"] == 20 and recorded["evaluation"]["enable"]


def test_the_sampler_of_measurements_is_checked_as_that_of_grids():
    words = ["--config", "digits", "--sampling.enable", "false", "--sampling.ema_track", "emma"]
    with pytest.raises(ConfigError, match="sampling.ema_track: 'emma' is not a name in ema.tracks"):
        load_config(words, 1)
    assert load_config([*words, "--evaluation.enable", "false"], 1).sampling.ema_track == "emma"


def test_held_out_loss_of_averages_is_as_the_file_says_without_validation_while_training():
    config = load_config(["--config", "digits", "--validation.enable", "false"], 1)
    assert config.validation.num_images == 297 and "num_images = 297" in dump_config(config)


SAVES = """
import pathlib, sys, time
try:
    print("begun", flush=True)  # inside: the signal may come at once
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)  # longer than subprocess.run lets a child live after Ctrl-C
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(130)
"""


def test_a_benchmark_of_several_runs_lets_the_present_one_save_at_ctrl_c(tmp_path):
    called = f"five.main = lambda: five.command('-c', {SAVES!r}, {str(tmp_path / 'saved')!r}); five.until_interrupted()"
    words = [sys.executable, "-c", f"from benchmarks import five_pictures as five; {called}"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it, and so do its children
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert (process.returncode, error) == (75, "interrupted; the same command resumes\n")
    assert (tmp_path / "saved").exists()
