"""CONTRIBUTING.md is true: files, registries and commands that it names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("command", [line for line in GUIDE.splitlines() if line.startswith(("| `scripts/", "| `.ci/"))])
def test_commands_of_the_guide_exist(command):
    program = ROOT / command.split("`")[1].split()[0]
    assert program.is_file() and program.stat().st_mode & 0o100
