"""The commands of the README are accepted as they stand."""

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.launcher import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\|[^|]+\| `([^`]+)`\s*(?:\([^|]*\))?\s*\|$", README, re.MULTILINE)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A CIFAR-10 folder of twenty blank images."""
    content = io.BytesIO()
    Image.new("RGB", (32, 32)).save(content, "PNG")
    rows = [{"img": {"bytes": content.getvalue(), "path": ""}, "label": i % 10} for i in range(20)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet")
    return tmp_path


def test_the_table_is_read_whole():
    assert len(COMMANDS) == len([line for line in README.splitlines() if line.startswith("| ") and "`" in line]) >= 10


@pytest.mark.parametrize("command", [command for command in COMMANDS if "scripts/train.sh" in command or command.startswith("--")])
def test_training_command_passes_the_check(command, folder):
    words = shlex.split(command.replace("FOLDER", str(folder)))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if "=" in words[0] and not words[0].startswith("--"):
        environment |= [words.pop(0).split("=")]
    if words[0] == "scripts/train.sh":
        words.pop(0)
    config = words.pop(0) if words and not words[0].startswith("--") else "train_configs/digits.toml"
    result = subprocess.run(
        [sys.executable, "train.py", "--check-only", "--job.config_file", config, *words],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:scripts|docs|benchmarks|train_configs)/[\w./]+\w", README))))
def test_named_file_exists(path):
    assert (ROOT / path).exists()
