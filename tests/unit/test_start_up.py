"""Checking a configuration, or asking for help, imports no more than it needs."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "PIL", "datasets", "diffusers", "fsspec", "matplotlib", "pyarrow", "scipy", "sklearn", "sympy", "tensorboard",
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
code = train.main(sys.argv[1:])
print(json.dumps([code, sorted(set(sys.modules) - before)]))
"""


@pytest.mark.parametrize(
    "words", [["--check-only", "--job.config_file", "train_configs/digits.toml"], ["--help"]], ids=["check", "help"]
)
def test_nothing_heavy_is_imported(words):
    assert all(find_spec(name) for name in HEAVY if name.startswith("torchtitan."))  # or it could not be found below
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    code, imported = json.loads(process.stdout.splitlines()[-1])
    assert code == 0
    assert "torchtitan.config.job" in imported  # the list is of the right process
    assert not set(HEAVY) & set(imported)
