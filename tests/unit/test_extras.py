"""Optional packages: the table is that of pyproject.toml, and the command in a message works from any folder."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from torchtitan.extras import EXTRAS, install, install_packages

ROOT = Path(__file__).resolve().parents[2]


def test_extras_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del extras["test"], extras["docs"]  # of this repository
    assert {extra: list(packages) for extra, packages in EXTRAS.items()} == extras


@pytest.mark.parametrize("folder", [ROOT, Path("/")])
def test_the_python_of_the_command_is_the_one_that_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    program, *rest = shlex.split(install("lowbit"))
    assert rest == ["-m", "pip", "install", "torchao>=0.18,<0.19"]
    assert shlex.split(install_packages("a", "b"))[1:] == ["-m", "pip", "install", "a", "b"]
    pip = subprocess.run([program, "-m", "pip", "--version"], capture_output=True, text=True, cwd=folder)
    found = subprocess.run([shlex.split(install("hub"))[0], "-c", "import jinja2"], cwd=folder)
    assert (pip.returncode, found.returncode) == (0, 0)


LACKING = {
    "module": "import pytest\npytest.importorskip('absent.part')",
    "mark": "import pytest\n@pytest.mark.skipif(True, reason=\"could not import 'absent'\")\ndef test_it(): pass",
    "body": "import pytest\ndef test_it(): pytest.importorskip('absent')",
    "machine": "import pytest\ndef test_it(): pytest.skip('needs root')",
}


def test_a_test_that_lacks_a_package_fails_where_all_are_installed(tmp_path, monkeypatch):
    for name, text in LACKING.items():
        (tmp_path / f"test_{name}.py").write_text(text + "\n")
    monkeypatch.setenv("TESTS_WITHOUT", "ray")
    command = [sys.executable, "-m", "pytest", "-rsfE", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "--continue-on-collection-errors", tmp_path], capture_output=True, text=True, cwd=ROOT)
    found = re.findall(r"^(SKIPPED|FAILED|ERROR) .*test_(\w+)\.py", done.stdout, re.MULTILINE)
    assert {name: word != "SKIPPED" for word, name in found} == {name: name != "machine" for name in LACKING}, done.stdout
    assert done.returncode
