"""Train steps counted on an imitated CUDA device, for the tests; the process must be new, see `fake_cuda`."""

import json
from pathlib import Path

from benchmarks.step_counts import as_record, count_step, images_words
from torchtitan.estimate.fake_cuda.device import NoFakeCuda


def write_counts(cases: dict[str, tuple[list[str], int, int]], path: str) -> int:
    """Write the counts of cases, name -> (words, ranks, step), as JSON; or why there are none."""
    found = {}
    for name, (words, ranks, step) in cases.items():
        try:
            found[name] = as_record(count_step(words, ranks, step))
        except NoFakeCuda as error:
            found = {"skipped": str(error)}
            break
    Path(path).write_text(json.dumps(found))
    return 0


def shrunk(preset: str, *words: str, images: int = 8, ranks: int = 1) -> list[str]:
    """Words of a shipped configuration with two blocks and few images."""
    size = images_words(images, ranks)
    return ["--job.config_file", f"train_configs/{preset}.toml", "--model.num_layers", "2", *size, *words]
