"""CONTRIBUTING.md and CHANGELOG.md are true: files, registries and keys that they name are there."""

import re
from pathlib import Path

import pytest

from torchtitan.config.job import load_config
from torchtitan.settings.earlier_keys import MOVED

ROOT = Path(__file__).resolve().parents[2]
GUIDE, CHANGES = ((ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "CHANGELOG.md"))


def test_files_and_folders_that_the_guide_names_exist():
    named = {path for path in re.findall(r"`([\w./<>]+/[\w./<>]*)`", GUIDE) if "<" not in path}
    named |= set(re.findall(r"\]\(([\w/.]+)\)", GUIDE))
    assert len(named) > 25
    assert not [path for path in named if not (ROOT / path).exists()]


def test_registries_are_in_the_files_that_the_guide_names():
    found = re.findall(r"`([A-Z]{4,})`(?: and | in |\s)+`([\w/]+\.py)`", GUIDE)
    assert len(found) > 6
    for registry, file in found:
        assert re.search(rf"^{registry}\b.*=", (ROOT / file).read_text(encoding="utf-8"), re.M), f"{registry} in {file}"


def test_every_moved_key_is_in_the_changelog():
    rows = [line for line in CHANGES.splitlines() if line.startswith("  | `")]
    earlier = {name.rpartition(".")[2] for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert not [key for key in MOVED if key.rpartition(".")[2] not in earlier]


@pytest.mark.parametrize("command", [line for line in GUIDE.splitlines() if line.startswith(("| `scripts/", "| `.ci/"))])
def test_commands_of_the_guide_exist(command):
    program = ROOT / command.split("`")[1].split()[0]
    assert program.is_file() and program.stat().st_mode & 0o100


def test_an_earlier_key_of_the_changelog_still_loads():
    config = load_config(["--data.name=digits", "--objective.timestep_sampler=logit_normal", "--objective.logit_mean=0.5"], 1)
    assert config.objective.timesteps.mean == 0.5
