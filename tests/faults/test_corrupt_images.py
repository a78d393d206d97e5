"""Whole runs on folders of which some images cannot be decoded."""

import numpy as np
from PIL import Image

from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun

COUNT, CORRUPT = 300, (7, 150, 299)  # one in a hundred


def write_images(folder) -> set[str]:
    """Two classes of noise; paths of the images that cannot be decoded, each for another reason."""
    draw, corrupt = np.random.default_rng(0), set()
    for number in range(COUNT):
        path = folder / "ab"[number % 2] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
        if number in CORRUPT:
            path.write_bytes((b"", b"text", path.read_bytes()[:60])[CORRUPT.index(number)])
            corrupt.add(str(path))
    return corrupt


def test_a_hundredth_of_corrupt_images_on_two_ranks_with_workers_is_counted_and_stalls_nothing(tmp_path):
    corrupt = write_images(tmp_path / "images")
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace('name = "digits"', f'''
name = "image_folder"
path = "{tmp_path / "images"}"
image_size = 8
validation_fraction = 0.0
num_workers = 2
'''))
    steps = 2 * COUNT // 16 + 1  # two epochs
    run = ForkedRun(
        config, "corrupt", "--training.steps", str(steps), "--sampling.enable", "false", "--validation.enable", "false",
        "--comm.train_timeout_seconds", "30", ranks=2, replicas=2,
    )  # fmt: skip
    outputs = run.finish()
    assert run.points()[-1]["step"] == steps
    assert run.points()[-1]["data/corrupt_images"] == len(CORRUPT)
    listed = [line.split("\t")[0] for line in (run.folder / "corrupt_images.txt").read_text().splitlines()]
    assert sorted(listed) == sorted(corrupt)
    assert not (run.folder / "faults").exists()
    assert sum(output.count("another image takes its place") for output in outputs) <= 2 * len(CORRUPT)
