"""Sets of samples by the command: the same on any number of processes and after a kill, guided by the run's own past."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.end_to_end.drawing import sample, start_sampling
from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from torchtitan.fidelity.images import open_images

RUN = (
    "--optimizer.lr", "1e-2", "--lr_scheduler.warmup_steps", "2", "--lr_scheduler.decay_type", "constant",
    "--training.steps", "20", "--checkpoint.interval", "10", "--sampling.interval", "20", "--sampling.num_steps", "3",
    "--sampling.guide_track", "long",
    "--ema.tracks", '[{"name": "ema", "decay": 0.8}, {"name": "long", "decay": 0.95}]',
)  # fmt: skip
SET = ("--seeds", "0-40,1000", "--batch-size", "4")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Run of two shards whose grid is guided by its longer average."""
    run = ForkedRun(write_config(tmp_path_factory.mktemp("sets")), "guided", *RUN, ranks=2, shards=2)
    run.finish()
    return run.folder


@pytest.fixture(scope="module")
def straight(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "set"
    succeeded(sample(folder, run, *SET))
    return folder


def succeeded(results: list[tuple[int, str]]) -> list[str]:
    assert [code for code, _ in results] == [0] * len(results), results
    return [said for _, said in results]


def refusal(results: list[tuple[int, str]]) -> str:
    (code, said), = results
    assert code == 2 and said.count("\n") == 1, said
    return said.strip()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def pictures(path: Path) -> np.ndarray:
    """Images of a grid with their labels at the left, without the title above, which may be wider."""
    rows, columns = 10 * 68 - 4 + 12, 2 * 68 - 4 + 24
    return np.asarray(Image.open(path)).astype(int)[-rows:, :columns]


def test_a_grid_of_sharded_training_is_guided_as_by_two_networks(run, tmp_path):
    trained = pictures(run / "samples" / "step-00000020.png")
    succeeded(sample(tmp_path, run, "--images-per-class", "2"))
    assert np.abs(pictures(next(tmp_path.glob("grid-*.png"))) - trained).max() <= 1
    succeeded(sample(tmp_path / "null", run, "--images-per-class", "2", "--guide", "none"))
    assert np.abs(pictures(next((tmp_path / "null").glob("grid-*.png"))) - trained).max() > 20


def test_three_processes_write_the_files_of_one(run, straight, tmp_path):
    succeeded(sample(tmp_path / "set", run, *SET, ranks=3))
    assert contents(tmp_path / "set") == contents(straight)
    names = sorted(path.name for path in straight.glob("*.png"))
    assert names == [f"{seed:06d}.png" for seed in (*range(41), 1000)]
    lines = (straight / "labels.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == names and len({line.split(",")[1] for line in lines}) > 5
    assert len({(straight / name).read_bytes() for name in names}) == len(names)
    assert open_images(straight).num_classes == 10  # by which a classifier of others is refused


def test_a_killed_set_resumes_to_the_same_set(run, straight, tmp_path):
    folder = tmp_path / "set"
    processes = start_sampling(folder, run, *SET, ranks=2)
    deadline = time.monotonic() + 300
    while len([*folder.glob("*.png")]) < 2:
        assert time.monotonic() < deadline, [process.said() for process in processes]
        time.sleep(0.002)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    assert -signal.SIGKILL in [process.wait(10) for process in processes]
    (folder / f".000040.png.{'0' * 32}.unfinished").write_bytes(b"what a kill leaves")
    succeeded(sample(folder, run, *SET))
    assert contents(folder) == contents(straight)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    said, = succeeded(sample(folder, run, *SET))
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name in before}
    assert "42 images" in said


def test_an_image_is_that_of_its_seed_in_any_set(run, straight, tmp_path):
    succeeded(sample(tmp_path / "some", run, "--seeds", "7,1000,3", "--batch-size", "2"))
    for seed in (3, 7, 1000):
        images = [Image.open(folder / f"{seed:06d}.png") for folder in (tmp_path / "some", straight)]
        one, other = (np.asarray(image).astype(int) for image in images)
        assert np.abs(one - other).max() <= 1


def test_other_continuations_and_other_folders_are_refused(run, straight, tmp_path):
    before = contents(straight)
    said = refusal(sample(straight, run, *SET, "--guide", "@10"))
    assert said.startswith(f"{straight}: was begun with guide.label 'step 20, long', not 'step 10, ema'")
    assert contents(straight) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "000000.png").write_bytes(b"mine")
    assert "holds 000000.png, which is not a set of samples'" in refusal(sample(tmp_path / "mine", run, "--count", "2"))
    assert contents(tmp_path / "mine") == {"000000.png": b"mine"}
    for options, reason in {
        ("--guide", ":ema"): "--guide: step 20, ema are the sampled weights themselves",
    }.items():
        assert refusal(sample(tmp_path / "none", run, *options)).startswith(reason)
    assert not (tmp_path / "none").exists()
