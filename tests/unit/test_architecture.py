"""docs/architecture.md is true: imports run downwards through its floors, no circle, every folder is named."""

import graphlib
import re
from functools import cache

import pytest

from scripts.draw_architecture import (
    PACKAGE,
    PAGE,
    PROGRAMS,
    ROOT,
    arrows_between_rooms,
    lines_of_rooms,
    read_floors,
    read_imports,
    read_modules,
    room_of,
)

LARGEST_SHARE = 0.15


@cache
def modules():
    return read_modules()


@cache
def imports():
    return read_imports(modules())


def upward(arrows, floors):
    """Arrows to a room of the same floor or a higher one, by the places of their imports."""
    height = {room: number for number, floor in enumerate(floors) for room in floor.rooms}
    return {pair: each for pair, each in arrows.items() if height[pair[1]] >= height[pair[0]]}


def test_every_room_is_on_one_floor():
    rooms = [room for floor in read_floors() for room in floor.rooms]
    assert sorted(rooms) == sorted({room_of(module) for module in modules()} - {PACKAGE})


def test_no_import_runs_upwards():
    found = upward(arrows_between_rooms(imports()), read_floors())
    assert not [f"{each.place} imports {each.imported}" for places in found.values() for each in places]


def test_no_file_imports_itself_through_others():
    needs = {module: set() for module in modules()}
    for each in imports():
        needs[each.importer].add(each.imported)
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("program", [*PROGRAMS, "train"])
def test_the_library_imports_no_program(program):
    of_library = [each for each in imports() if each.importer.split(".")[0] == PACKAGE]
    assert not [each.place for each in of_library if each.imported.split(".")[0] == program]


def test_no_room_is_too_large():
    library = {module: file for module, file in modules().items() if module.split(".")[0] == PACKAGE}
    lines = lines_of_rooms(library)
    (room, largest), = lines.most_common(1)
    assert largest <= LARGEST_SHARE * sum(lines.values()), f"{room} has {largest} of {sum(lines.values())} lines"


def test_imports_of_every_kind_are_seen(tmp_path):
    (tmp_path / "torchtitan" / "gns").mkdir(parents=True)
    (tmp_path / "torchtitan" / "errors.py").touch()
    (tmp_path / "torchtitan" / "gns" / "pool.py").touch()
    (tmp_path / "torchtitan" / "gns" / "monitor.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "import torch\n"
        "from . import pool\n"
        "if TYPE_CHECKING:\n    from torchtitan import errors\n"
        "def function():\n    import torchtitan.gns.pool\n"
    )
    found = read_imports(read_modules(tmp_path), tmp_path)
    assert [(each.imported, each.place) for each in found] == [
        ("torchtitan.gns.pool", "torchtitan/gns/monitor.py:3"),
        ("torchtitan.errors", "torchtitan/gns/monitor.py:5"),
        ("torchtitan.gns.pool", "torchtitan/gns/monitor.py:7"),
    ]


def tree_of_the_page():
    """Paths in the page's tree, by indentation."""
    lines = PAGE.read_text(encoding="utf-8").partition("## The tree\n\n")[2].partition("\n\n")[0].splitlines()
    paths, parents = [], {}
    for line in lines:
        depth, name = (len(line) - len(line.lstrip())) // 2 - 2, line.split()[0]
        parents[depth] = parents.get(depth - 1, "") + name
        paths.append(parents[depth])
    return paths


def test_the_tree_on_the_page_is_the_one_on_the_disk():
    tree = tree_of_the_page()
    assert not [path for path in tree if not (ROOT / path).exists()]
    folders = {file.parent.relative_to(ROOT) for module, file in modules().items() if module.startswith(PACKAGE)}
    assert sorted(path for path in tree if path.startswith(PACKAGE)) == sorted(f"{folder}/" for folder in folders)


def test_files_named_on_the_page_exist():
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8"))
    files = {str(file.relative_to(ROOT)) for file in (*modules().values(), *(ROOT / "tests" / "unit").glob("*.py"))}
    assert len(named) > 10
    assert not [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]
