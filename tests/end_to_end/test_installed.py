"""The project as a wheel: what it holds, and its command in a folder that has nothing of the checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from glob import glob
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because a build writes beside what it reads."""
    source = tmp_path_factory.mktemp("source")
    for name in ("data", "torchtitan", "torchtitan_dit", "train_configs"):
        ignored = shutil.ignore_patterns("__pycache__", "schema.json")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, source)
    (source / "scripts").mkdir()
    measured = "benchmarks/results/gpu_day.json"
    (source / measured).parent.mkdir(parents=True)
    shutil.copy(ROOT / measured, source / measured)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", ".", str(source)]
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """`torchtitan-dit` of the installed wheel, in an empty folder: words -> the finished process."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)

    def call(*words: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHONPATH": str(site)}
        program = [sys.executable, str(site / "bin" / "torchtitan-dit"), *words]
        return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)

    call.folder, call.site = folder, site
    return call


def test_contents_of_the_wheel(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"torchtitan", "torchtitan_dit"}
    sources = (glob(f"{folder}/**/*.py", root_dir=ROOT, recursive=True) for folder in ("torchtitan", "torchtitan_dit"))
    files = [file for found in sources for file in found]
    files += [f"torchtitan/{file.relative_to(ROOT)}" for file in (ROOT / "train_configs").rglob("*.toml")]
    assert set(files) <= set(names)
    assert any(name.endswith(".safetensors") for name in names) and any(name.endswith(".html") for name in names)


def test_train_and_sample_from_another_folder(command):
    words = ["--job.config_file", "digits", "--job.name", "short", "--training.steps", "3", "--lr_scheduler.warmup_steps", "1"]
    words += ["--model.flavor", "debug", "--training.local_batch_size", "32", "--gns.enable", "false"]
    words += ["--sampling.num_steps", "2", "--sampling.images_per_class", "1"]
    trained = command("train", *words)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    run = command.folder / "outputs" / "short"
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    drawn = command("sample", str(run), "--num-steps", "2", "--images-per-class", "1", "--out", "grid")
    assert drawn.returncode == 0, drawn.stdout + drawn.stderr
    assert (command.folder / "grid").is_dir()


def test_an_estimate_knows_what_visits_to_devices_measured(command):
    told = command("estimate", "digits", "--device", "H100", "--training.mixed_precision_param", "bfloat16")
    assert told.returncode == 0 and "% of memory bandwidth (measured, NVIDIA H100" in told.stdout, told.stdout + told.stderr


def test_help_speaks_of_the_command_that_was_called(command):
    told = command("sample", "--help")
    assert told.returncode == 0 and "torchtitan-dit sample" in told.stdout and "scripts/" not in told.stdout.split("\n\n")[1]
    usage = command()
    assert usage.returncode == 2 and "autotune" in usage.stdout
    assert command("trian").stderr == "torchtitan-dit: trian: no such command (did you mean train?)\n"


def test_another_torchtitan_in_the_environment_is_named(command):
    folder = command.site / "torchtitan-0.2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.0\n")
    refused = command("train", "--help")
    shutil.rmtree(folder)
    assert refused.returncode == 2 and "pip uninstall torchtitan" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
