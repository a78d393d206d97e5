"""The Dockerfile, read by a parser of its format: it can only copy what exists and is sent to the builder."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

parser = pytest.importorskip("dockerfile_parse")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def instructions():
    read = parser.DockerfileParser(fileobj=(ROOT / "Dockerfile").open("rb+"))
    return [(each["instruction"], each["value"]) for each in read.structure if each["instruction"] != "COMMENT"]


def values(instructions, name):
    return [value for instruction, value in instructions if instruction == name]


def test_every_instruction_is_one_of_dockers(instructions):
    assert {name for name, _ in instructions} <= {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert [name for name, _ in instructions[:2]] == ["ARG", "FROM"]
    arguments = {value.partition("=")[0] for value in values(instructions, "ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", " ".join(value for _, value in instructions))) == arguments
    assert json.loads(values(instructions, "ENTRYPOINT")[0]) == ["torchtitan-dit"]
    assert json.loads(values(instructions, "CMD")[0]) == ["--help"]


def test_shell_lines_are_shell(instructions):
    for line in values(instructions, "RUN"):
        assert subprocess.run(["bash", "-n", "-c", line], capture_output=True).returncode == 0, line


def test_what_is_copied_is_there_and_not_ignored(instructions):
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for value in values(instructions, "COPY") for name in shlex.split(value)[:-1]}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert any(pattern.startswith("train_configs/") for pattern in package_data["torchtitan"])


def test_torch_is_the_one_of_the_tests(instructions):
    (line,) = [line for line in values(instructions, "RUN") if "torch==" in line]
    pinned = re.search(r"torch==([\d.]+)", line).group(1)
    script = (ROOT / "scripts" / "environment.sh").read_text()
    least, past = re.search(r"\((2, \d+)\) <= .* < \((2, \d+)\)", script).groups()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch=={pinned}" in script
    assert project["dependencies"][0] == f"torch>={least},<{past}".replace(", ", ".")
