"""docs/from_torchtitan.md and docs/from_dit.md: every key and option that they name here is one."""

import re
from pathlib import Path

import pytest

from torchtitan.config.job import JobConfig, help_text
from torchtitan.settings.sections import all_sections, keys
from torchtitan_dit.commands import sample

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("from_torchtitan", "from_dit")}
SECTIONS = {name.partition(".")[0] for name, _ in all_sections(JobConfig())}


def rows(page: str, column: int) -> list[str]:
    lines = [line for line in PAGES[page].splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [line.split(" | ")[column] for line in lines if len(line.split(" | ")) > column]


def exists(key: str) -> bool:
    section, _, name = key.rpartition(".")
    if any(section == each and name in {field.name for field in keys(values)} for each, values in all_sections(JobConfig())):
        return True
    return f"--{key}" in help_text([section.split(".")[0]]) or name in help_text([key])


@pytest.mark.parametrize("page", PAGES)
def test_keys_that_are_named_here_exist(page):
    here = " ".join(rows(page, 1))
    if page == "from_torchtitan":  # "the same" stands for the names on the left
        here += " ".join(left for left, right in zip(rows(page, 0), rows(page, 1), strict=True) if right == "the same")
    named = {word for word in re.findall(r"(?:--|`)((?:[a-z]\w*\.)+[a-z]\w*)", here) if word.split(".")[0] in SECTIONS}
    assert len(named) >= 12
    assert not [key for key in named if not exists(key)]


def test_options_of_sampling_exist(monkeypatch):
    _, _, samples = PAGES["from_dit"].partition("## Samples")
    here = " ".join(line.split(" | ")[1] for line in samples.splitlines() if line.count(" | ") == 1)
    options = {word for word in re.findall(r"--[a-z][\w-]*", here) if word != "--tf32"}
    monkeypatch.setattr("sys.argv", ["sample.py", "run"])
    parsed = {f"--{name.replace('_', '-')}" for name in vars(sample.parse_arguments())}
    assert len(options) > 12 and not options - parsed
