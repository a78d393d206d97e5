"""The batch-size search in real processes."""

import json

import pytest

from torchtitan.config.job import load_config
from torchtitan.experiments.autotune.probe import ProbeFailed, run_probe
from torchtitan.experiments.autotune.tuning import autotune

CONFIG = """
[model]
flavor = "debug"
num_layers = 1
[data]
name = "synthetic"
kind = "constant"
shape = [4, 16, 16]
"""

# Given to all ranks as sitecustomize: in its first optimizer step rank 1 alone fails.
OF_RANK_1 = """
import os, sys
if os.environ.get("RANK") == "1" and any("train.py" in word for word in sys.orig_argv):
    import torch
    def crash(*arguments, **options):
        raise RuntimeError("a bug of one rank")
    torch.optim.AdamW.step = crash
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Freed buffers are given back at once: where they are kept, the peak differs by up to 0.1 GiB between runs.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return ["--job.config_file", str(path), "--job.dump_folder", str(tmp_path / "outputs")]


def test_largest_is_that_of_a_scan(arguments, tmp_path):
    scan = {}
    for batch_size in (256, 512):
        config = load_config([*arguments, f"--training.local_batch_size={batch_size}"], 1)
        scan[batch_size] = run_probe(config, processes=1, timeout_s=300.0, log=tmp_path / "scan.log").memory_gib
    budget = (scan[256] + scan[512]) / 2
    assert scan[256] + 0.02 < budget, scan

    result = autotune(arguments, 1, memory_gib=budget, headroom=0.0, multiple_of=256, max_batch_size=512)
    assert result.batch_size == max(size for size, memory in scan.items() if memory <= budget) == 256
    assert json.loads(result.record.read_text())["batch_size"] == 256
    assert list((tmp_path / "outputs").iterdir()) == [tmp_path / "outputs/autotune"]  # probes leave no runs behind
    again = autotune(arguments, 1, memory_gib=budget, headroom=0.0, multiple_of=256, max_batch_size=512)
    assert (again.batch_size, again.tried) == (256, 0)


def test_one_rank_that_fails_ends_the_search_with_its_reason(arguments, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(OF_RANK_1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ProbeFailed) as caught:
        autotune(arguments, 2, memory_gib=64.0, max_batch_size=1, timeout_s=240.0)
    assert caught.value.outcome.status == "failed"
    assert "a bug of one rank" in str(caught.value)
    assert not list((tmp_path / "outputs/autotune").glob("*.json"))  # nothing was learned
