"""Checking a configuration, asking for help or starting a run imports no more than it needs."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "datasets", "diffusers", "fsspec", "matplotlib", "pyarrow", "scipy", "sklearn", "sympy", "tensorboard",
    "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torchao",
    "torchtitan.checkpoint.checkpointer", "torchtitan.distributed.parallelize", "torchtitan.gns.monitor",
    "torchtitan.latents.store", "torchtitan.run", "torchtitan.trainer", "torchvision", "wandb",
)  # fmt: skip
# Whatever torch itself imports is free: it is what start-up is measured against.
PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
from torchtitan_dit.commands import train
codes = [train.main(["--check-only", "train_configs/digits.toml", "--job.dump_folder", "no-runs"]), train.main(["--help"])]
imported = set(sys.modules) - before
import torchtitan.run
print(json.dumps([codes, sorted(imported), sorted(sys.modules)]))
"""


def test_a_check_and_help_import_nothing_heavy_and_a_run_starts_without_matplotlib():
    """Only pictures that a run draws later import it, in their functions."""
    assert all(find_spec(name) for name in HEAVY if name.startswith("torchtitan."))  # or it could not be found below
    process = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    codes, imported, of_a_run = json.loads(process.stdout.splitlines()[-1])
    assert codes == [0, 0]
    assert "torchtitan.config.job" in imported  # the list is of the right process
    assert not set(HEAVY) & set(imported)
    assert {"torchtitan.trainer", "torchtitan.runs.pages"} <= set(of_a_run)
    assert not {"matplotlib", "torchtitan.pictures.style"} & set(of_a_run)
