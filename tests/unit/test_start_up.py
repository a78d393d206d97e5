"""Checking a configuration, asking for help or starting a run imports no more than it needs."""

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.draw_architecture import read_imports, read_modules

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
code = train.main(sys.argv[1:])
print(json.dumps([code, sorted(set(sys.modules) - before)]))
"""


@pytest.mark.parametrize(
    "words", [["--check-only", "train_configs/digits.toml", "--job.dump_folder", "no-runs"], ["--help"]], ids=["check", "help"]
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


def test_a_run_starts_without_matplotlib():
    """Only pictures that a run draws later import it, in their functions."""
    modules = read_modules()
    statements = {name: ast.parse(file.read_text(encoding="utf-8")).body for name, file in modules.items()}
    at_import = {f"{modules[name].relative_to(ROOT)}:{node.lineno}" for name, body in statements.items() for node in body}
    imports = [each for each in read_imports(modules) if each.place in at_import]
    started, seen = {"torchtitan.run"}, set()
    while started - seen:
        seen |= started
        started |= {each.imported for each in imports if each.importer in seen}
    assert {"torchtitan.trainer", "torchtitan.runs.pages"} <= started and "torchtitan.pictures.style" not in started
    named = {
        (name, imported.split(".")[0])
        for name in started for node in statements[name] if isinstance(node, ast.Import | ast.ImportFrom)
        for imported in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }  # fmt: skip
    assert ("torchtitan.trainer", "torch") in named and not {name for name, imported in named if imported == "matplotlib"}
