"""Optional packages: the table is that of pyproject.toml, and the command in a message works from any folder."""

import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from torchtitan.extras import EXTRAS, install, install_packages

ROOT = Path(__file__).resolve().parents[2]


def test_extras_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del extras["test"]
    assert {extra: list(packages) for extra, packages in EXTRAS.items()} == extras


@pytest.mark.parametrize("folder", [ROOT, Path("/")])
def test_the_python_of_the_command_is_the_one_that_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    program, *rest = shlex.split(install("lowbit"))
    assert rest == ["-m", "pip", "install", "torchao>=0.18"]
    assert shlex.split(install_packages("a", "b"))[1:] == ["-m", "pip", "install", "a", "b"]
    pip = subprocess.run([program, "-m", "pip", "--version"], capture_output=True, text=True, cwd=folder)
    found = subprocess.run([shlex.split(install("hub"))[0], "-c", "import jinja2"], cwd=folder)
    assert (pip.returncode, found.returncode) == (0, 0)
