"""CONTRIBUTING.md is true: files, registries and commands that it names are there; so are the links of all pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_files_and_folders_that_the_guide_names_exist():
    named = {path for path in re.findall(r"`([\w./<>]+/[\w./<>]*)`", GUIDE) if "<" not in path}
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


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and docs sites make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_to_a_file_and_a_heading():
    folders = (ROOT, ROOT / "docs", ROOT / "docs" / "research", ROOT / "research" / "results")
    pages = [path for folder in folders for kind in ("md", "ipynb") for path in folder.glob(f"*.{kind}")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", page.read_text("utf-8"))]
    assert len(links) > 100
    broken = []
    for page, link in links:
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or heading and heading not in anchors(target):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken
