"""Train steps counted on an imitated CUDA device, for the tests; the process must be new, see `fake_cuda`."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.step_counts import as_record, count_step, images_words
from tests.forked import ForkedProcess
from torchtitan.estimate.fake_cuda.device import NoFakeCuda

SYNTHETIC = ["--data.name", "synthetic", "--data.num_classes", "1000"]


def write_counts(cases: dict[str, tuple[list[str], int, int, bool]], path: str) -> int:
    """Write the counts of cases, name -> (words, ranks, step, whether they are compiled), as JSON; or why there are none."""
    found = {}
    for name, (words, ranks, step, compiled) in cases.items():
        try:
            found[name] = as_record(count_step(words, ranks, step, compiled))
        except NoFakeCuda as error:
            found = {"skipped": str(error)}
            break
    Path(path).write_text(json.dumps(found))
    return 0


def shrunk(preset: str, *words: str, images: int = 8) -> list[str]:
    """Words of a shipped configuration with two blocks and few images."""
    size = images_words(images)
    return ["--job.config_file", f"train_configs/{preset}.toml", *SYNTHETIC, "--model.num_layers", "2", *size, *words]


def counts_in_fork(write: Callable[..., None], arguments: tuple, path: Path) -> dict:
    """Counts that a separate process writes to a file, the last argument of `write`; skips the test where there are none."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    process = ForkedProcess(write, (*arguments, str(path)), environment)
    try:
        assert process.wait(600) == 0, process.said()
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    found = json.loads(path.read_text())
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found
