"""scripts/evaluate.py: one process and several, of a run and of images; and its refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.drawing import results_of, start_command
from tests.evaluations import random_images, write_folder
from torchtitan.config.job import load_config
from torchtitan.run import run
from torchtitan.sampling.run_samples import is_run
from torchtitan_dit.commands import evaluate

DIGITS = ("--extractor", "digits")
DRAWN = ("--count", "96", "--batch-size", "16", "--num-steps", "2", "--guidance-scale", "1.5")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    words = (
        "--job.name run --data.name synthetic --data.kind gaussian --data.shape [1,8,8] --model.flavor debug --model.dim 8"
        " --model.num_layers 1 --model.num_heads 2 --training.steps 2 --training.local_batch_size 4 --sampling.enable false"
        " --metrics.enable_tensorboard false"
    )
    assert run(load_config([*words.split(), "--job.dump_folder", str(folder), "--ema.tracks", '[{"name": "ema"}]'], 1)) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "digits.npz"
    words = ("reference", "digits", "--name", "digits-test", "--split", "validation", *DIGITS)
    assert evaluate.main([*words, "--output", str(path)]) == 0
    return path


def evaluated(*words, ranks: int = 1) -> list[str]:
    """What every rank said, of a command that succeeded."""
    results = results_of(start_command("evaluate", *words, ranks=ranks))
    assert [code for code, _ in results] == [0] * ranks, results
    return [said for _, said in results]


def entries(path: Path) -> list[dict]:
    return json.loads(path.read_text())["evaluations"]


def values(entry: dict) -> dict:
    """All numbers of an entry, without what is of the time and place of their making."""
    made = ("time", "device", "versions")
    return {name: {key: value for key, value in result.items() if key not in made} for name, result in entry["results"].items()}


def test_a_run_has_the_results_of_one_process_on_several_and_every_fact_is_recorded(trained, reference, tmp_path):
    metrics = ("--metrics", "fd,kid,is,prdc", *DIGITS, "--reference", str(reference), "--allow-small")
    for name in ("one", "two"):
        shutil.copytree(trained, tmp_path / name)
        config = tmp_path / name / "config.toml"
        config.write_text(config.read_text().replace("enable_tensorboard = false", "enable_tensorboard = true"))
    assert is_run(tmp_path / "one") and not is_run(reference.parent)
    evaluated(tmp_path / "one", *metrics, *DRAWN)
    said, other = evaluated(tmp_path / "two", *metrics, *DRAWN, ranks=2)
    assert "precision" in said and "digits-test" in said and "precision" not in other
    (one,), (two,) = (entries(tmp_path / name / "evaluation.json") for name in ("one", "two"))
    assert values(one) == values(two) and one["samples"]["count"] == 96
    drawn, source = one["samples"]["set"], one["samples"]["source"]
    assert (drawn["seeds"], drawn["num_steps"], drawn["guidance_scale"], drawn["dtype"]) == ("0-95", 2, 1.5, "float32")
    assert drawn["solver"]["name"] == "euler" and source["step"] == 2 and source["ema_track"]
    assert one["reference"]["name"] == "digits-test" and one["reference"]["count"] == 297
    extractor = one["extractors"]["digits"]
    assert len(extractor["sha256"]) == 64 and extractor["resize"] and one["results"]["fd"]["extractor"] == "digits"
    assert one["results"]["fd"]["values"]["fd"]["lower"] < one["results"]["fd"]["values"]["fd"]["upper"]
    logged = scalars(tmp_path / "one" / "tb")
    how = "(digits, 96 samples by euler in 2 steps, guidance 1.5 against digits-test, written "
    (fd,) = (value for tag, value in logged.items() if tag.startswith(f"evaluation/fd {how}"))
    assert fd == (2, pytest.approx(one["results"]["fd"]["values"]["fd"]["value"], rel=1e-6))
    assert any(tag.startswith(f"evaluation/recall {how}") for tag in logged)


def scalars(folder: Path) -> dict[str, tuple[int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for path in folder.iterdir() for event in EventFileLoader(str(path)).Load()]
    return {value.tag: (event.step, value.tensor.float_val[0]) for event in events for value in event.summary.value}


def test_images_measured_by_three_processes_have_the_values_of_one(tmp_path):
    np.savez(tmp_path / "images.npz", arr_0=random_images(600), arr_1=np.arange(600) % 10)
    np.savez(tmp_path / "reference.npz", arr_0=random_images(200, seed=1))
    words = (tmp_path / "images.npz", "--reference", tmp_path / "reference.npz", "--metrics", "fd,is,accuracy", *DIGITS)
    evaluated(*words, "--output", tmp_path / "three.json", "--feature-batch-size", "32", ranks=3)
    assert evaluate.main([*map(str, words), "--output", str(tmp_path / "one.json"), "--feature-batch-size", "32"]) == 0
    (one,), (three,) = (entries(tmp_path / f"{name}.json") for name in ("one", "three"))
    assert values(one) == values(three) and 0 < one["results"]["accuracy"]["values"]["accuracy"]["value"] < 0.5


def test_earlier_results_stay_and_the_same_measurement_replaces_its_own(reference, tmp_path):
    folder = write_folder(tmp_path / "images", random_images(70))
    output = tmp_path / "images.evaluation.json"
    words = [str(folder), "--reference", str(reference), *DIGITS]
    for metrics, more in (("fd", ()), ("is", ()), ("fd,prdc", ()), ("is", ("--seed", "1"))):
        assert evaluate.main([*words, "--metrics", metrics, *more]) == 0
    first, second = entries(output)
    assert sorted(first["results"]) == ["fd", "is", "prdc"] and list(second["results"]) == ["is"]
    (folder / "000069.png").unlink()
    assert evaluate.main([*words, "--metrics", "fd"]) == 0
    assert [entry["samples"]["count"] for entry in entries(output)] == [70, 70, 69]


def test_refusals_are_one_line_and_nothing_is_written(trained, reference, tmp_path, capsys):
    folder = write_folder(tmp_path / "images", random_images(70))
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    before = sorted(tmp_path.rglob("*"))
    given = ("--reference", reference, *DIGITS)
    for words, reason in (
        ((folder, *given, "--metrics", "fid"), "--metrics: fid is of inception features (with --extractor digits it is fd)"),
        ((folder, *given, "--metrics", "fd,fdd"), "--metrics: no metric is called 'fdd' (there are: fid,"),
        ((folder, *given, "--metrics", "is", "--ema", "ema"), "--ema: has no effect on images that are there"),
        ((folder, *given, "--metrics", "is", "--count", "71"), "--count: 71, but "),
        ((folder, *given, "--metrics", "fd", "--count", "64"), "fd: a covariance of 64 features from 64 images (samples)"),
        ((folder, *given, "--metrics", "fd", "--output", tmp_path / "mine.json"), f"{tmp_path / 'mine.json'}: there is a file"),
        ((folder, "--metrics", "fd", *DIGITS), "--reference: not given, and needed by fd"),
        ((folder, "--metrics", "accuracy", *DIGITS), f"{folder}: accuracy needs the class that each was drawn for (of "),
        (("reference", folder, "--name", "c", "--output", reference, *DIGITS), f"{reference}: exists already"),
        ((folder, "--reference", trained, "--metrics", "fd", *DIGITS), f"--reference: {trained} is a run"),
        ((trained, *given, "--metrics", "is", "--ema", "none-such"), f"{trained}: has no EMA track 'none-such'"),
    ):
        assert evaluate.main([*map(str, words)]) == 2, words
        said = capsys.readouterr().err.strip().split("\r")[-1].strip()
        assert said.startswith(reason) and "\n" not in said, (said, words)
    assert sorted(tmp_path.rglob("*")) == before and not list(trained.glob("evaluation*"))
