"""The commands of the README and of docs/index.md are accepted as they stand, and the index is complete."""

import io
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from safetensors.torch import save_file

from benchmarks.documented_commands import documented
from tests.forked import run_script
from tests.launcher import ROOT
from tests.unit.test_latent_cache import write_pictures
from torchtitan.config.job import load_config
from torchtitan.data import dataset_info
from torchtitan.files.weight_files import named_weights
from torchtitan.runs.network import network_on_meta

README, INDEX = (ROOT / "README.md").read_text(), (ROOT / "docs" / "index.md").read_text()
COMMANDS = sorted(documented())


@pytest.fixture
def folder(tmp_path) -> Path:
    """A CIFAR-10 folder of twenty blank images."""
    content = io.BytesIO()
    Image.new("RGB", (32, 32)).save(content, "PNG")
    rows = [{"img": {"bytes": content.getvalue(), "path": ""}, "label": i % 10} for i in range(20)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet")
    return tmp_path


def test_tables_are_read_whole():
    assert len([row for row in README.split("## Results")[0].splitlines() if row.startswith("| ") and "`" in row]) <= 12
    assert len(COMMANDS) >= 40 and not [command for command in COMMANDS if "|" in command]


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if "scripts/train.sh" in command or command.startswith("--")]
)
def test_training_command_passes_the_check(command, folder, tmp_path):
    if "PICTURES" in command:
        command = command.replace("PICTURES", str(write_pictures(tmp_path / "pictures", enlarged=2)))
    if "dit.safetensors" in command:
        command = command.replace("dit.safetensors", str(tmp_path / "dit.safetensors"))
        config = load_config(["--job.config_file", str(ROOT / "train_configs" / "digits.toml")], 1)
        network = network_on_meta(config, dataset_info(config.data)).to_empty(device="cpu")
        save_file(named_weights(network), tmp_path / "dit.safetensors")
    words = shlex.split(command.replace("FOLDER", str(folder)))
    environment = {}
    if "=" in words[0] and not words[0].startswith("--"):
        environment = dict([words.pop(0).split("=")])
    if words[0] == "scripts/train.sh":
        words.pop(0)
    config = words.pop(0) if words and not words[0].startswith("--") else "train_configs/digits.toml"
    result = run_script("train.py", "--check-only", "--job.config_file", config, *words, **environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:scripts|docs|benchmarks|train_configs)/[\w./]+\w", README + INDEX))))
def test_named_file_exists(path):
    assert (ROOT / path).exists()


def test_index_names_every_page_script_and_benchmark():
    pages = {path.name for kind in ("md", "ipynb") for path in (ROOT / "docs").glob(f"*.{kind}")} - {"index.md"}
    assert pages == set(re.findall(r"^\| \[([\w.]+)\]\(\1\)", INDEX, re.MULTILINE))
    programs = {f"{path.parent.name}/{path.name}" for folder in ("scripts", "benchmarks") for path in (ROOT / folder).glob("*.*")}
    assert programs == set(re.findall(r"`((?:scripts|benchmarks)/[\w.]+)`", INDEX))
