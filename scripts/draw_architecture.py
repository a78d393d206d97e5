"""Draw which room imports which, on the floors of docs/architecture.md: python scripts/draw_architecture.py

Writes docs/images/architecture.png. A room is a folder or a file directly in torchtitan/ or torchtitan_dit/, or a folder or
file at the top of the repository. tests/unit/test_architecture.py holds the rule itself, on the same graph.
"""

import argparse
import ast
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from PIL import Image

from torchtitan.pictures.colours import COLOURS, LINE, SOFT
from torchtitan.pictures.style import new_figure, save
from torchtitan.processes.command_line import OneLineParser, run_program

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.png"
PACKAGE = "torchtitan"
PROGRAMS = ("torchtitan_dit", "benchmarks", "research", "scripts")  # and every file at the top
_OF_ROOMS = (PACKAGE, "torchtitan_dit")  # packages with rooms inside

_WIDTH, _GAP, _HEIGHT = 100.0, 2.0, 0.56  # of the picture, between rooms, of a room on a floor of height 1
_PER_LINE, _LETTER = 0.0042, 1.0  # width of a line of code, and at least of a letter of the name
_ATTEMPTS, _ROUNDS, _BEHIND_A_BOX = 120, 12, 0.5


@dataclass(frozen=True)
class Import:
    """One import of a module of this repository by another.

    Attributes:
        importer, imported: dotted names.
        place: file and line.
    """

    importer: str
    imported: str
    place: str


@dataclass(frozen=True)
class Floor:
    """Row of the page's table: rooms that import from lower floors only, and their part of the house."""

    rooms: tuple[str, ...]
    part: str


def read_modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name -> file, of every module of the repository but its tests; torchtitan/data is a link to data/."""
    folders = [root / name for name in (PACKAGE, *PROGRAMS)]
    in_folders = (Path(file) for folder in folders for file in glob(f"{folder}/**/*.py", recursive=True))
    files = [*root.glob("*.py"), *in_folders]
    return {_dotted(file.relative_to(root)): file for file in sorted(files)}


def read_imports(modules: dict[str, Path], root: Path = ROOT) -> list[Import]:
    """Every import of one of the modules by another, those in functions and for type checkers included."""
    found = []
    for importer, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                place = f"{file.relative_to(root)}:{node.lineno}"
                found += [Import(importer, imported, place) for imported in _imported(node, importer, file, modules)]
    return found


def room_of(module: str) -> str:
    """Room of a module."""
    first, *rest = module.split(".")
    return rest[0] if first in _OF_ROOMS and rest else first


def read_floors(page: Path = PAGE) -> list[Floor]:
    """Floors of the page's table, from the ground up."""
    rows = re.findall(r"^\| *(\d+) *\|([^|]*)\|([^|]*)\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if [int(number) for number, _, _ in rows] != list(range(1, len(rows) + 1)):
        raise ValueError(f"{page}: its floors are not numbered 1, 2, 3, ...")
    return [Floor(tuple(re.findall(r"`([^`]+)`", rooms)), part.strip()) for _, rooms, part in rows]


def lines_of_rooms(modules: dict[str, Path]) -> Counter[str]:
    """Lines of every room's Python files."""
    lines: Counter[str] = Counter()
    for module, file in modules.items():
        lines[room_of(module)] += len(file.read_text(encoding="utf-8").splitlines())
    return lines


def arrows_between_rooms(imports: Sequence[Import]) -> dict[tuple[str, str], list[Import]]:
    """(importing room, imported room) -> the imports, of rooms that differ."""
    arrows: dict[tuple[str, str], list[Import]] = {}
    for each in imports:
        pair = room_of(each.importer), room_of(each.imported)
        if pair[0] != pair[1]:
            arrows.setdefault(pair, []).append(each)
    return arrows


def _dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(
    node: ast.Import | ast.ImportFrom, importer: str, file: Path, modules: dict[str, Path]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [name.name for name in node.names]
    else:
        package = importer.split(".") if file.name == "__init__.py" else importer.split(".")[:-1]
        parts = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*parts, *([node.module] if node.module else [])])
        names = [f"{source}.{name.name}" if f"{source}.{name.name}" in modules else source for name in node.names]
    for name in dict.fromkeys(names):
        if name in modules and name != importer:
            yield name


def _directly_needed(arrows: set[tuple[str, str]], floors: Sequence[Floor]) -> set[tuple[str, str]]:
    """Arrows that no path of others implies (transitive reduction)."""
    reached: dict[str, set[str]] = {}  # room -> all that it imports, itself or through others
    direct = set()
    for room in (room for floor in floors for room in floor.rooms):
        below = {imported for importer, imported in arrows if importer == room and imported in reached}
        through_others = set().union(*(reached[other] for other in below))
        reached[room] = below | through_others
        direct |= {(room, other) for other in below - through_others}
    return direct


@dataclass
class _Box:
    """Room in the picture: its centre, its floor, and its width."""

    x: float
    y: int
    width: float


def _place(floors: Sequence[Floor], lines: Counter[str], arrows: set[tuple[str, str]]) -> dict[str, _Box]:
    """Boxes in rows, moved along them until few arrows pass behind a box and arrows are short.

    Coordinate descent from random places: the best of some attempts, the same in every run.
    """
    draw, best, least = random.Random(0), {}, math.inf
    for _ in range(_ATTEMPTS):
        boxes = {}
        for y, floor in enumerate(floors):
            rooms = draw.sample(floor.rooms, len(floor.rooms))
            widths = [max(lines[room] * _PER_LINE, _LETTER * len(room) + 2.5) for room in rooms]
            free = (_WIDTH - sum(widths)) / len(rooms)
            left = 0.0
            for room, width in zip(rooms, widths, strict=True):
                boxes[room] = _Box(left + draw.uniform(0, free) + width / 2, y, width)
                left += free + width
        cost = _settle(boxes, arrows)
        if cost < least:
            best, least = boxes, cost
    return best


def _settle(boxes: dict[str, _Box], arrows: set[tuple[str, str]]) -> float:
    """Move each box to its best place along its floor until none is left to improve; returns the cost."""
    touched = {room: [arrow for arrow in sorted(arrows) if room in arrow] for room in boxes}
    cost = sum(_arrow_cost(boxes, arrow) for arrow in arrows)
    for _ in range(_ROUNDS):
        before = cost
        for room, box in boxes.items():
            others = [other for other in boxes.values() if other.y == box.y and other is not box]
            crossing = [arrow for arrow in arrows if boxes[arrow[1]].y < box.y < boxes[arrow[0]].y]
            affected = touched[room] + crossing
            places = {}
            for x in (box.x, *(box.width / 2 + (_WIDTH - box.width) * step / 24 for step in range(25))):
                if x == box.x or all(abs(x - other.x) >= (box.width + other.width) / 2 + _GAP for other in others):
                    box.x, old = x, box.x
                    places[x] = sum(_arrow_cost(boxes, arrow) for arrow in affected)
                    box.x = old
            chosen = min(places, key=places.__getitem__)
            cost += places[chosen] - places[box.x]
            box.x = chosen
        if cost > before - 1e-6:
            break
    return cost


def _arrow_cost(boxes: dict[str, _Box], arrow: tuple[str, str]) -> float:
    """Length of an arrow along the floors, and the distance it would have to move aside for boxes on its way."""
    upper, lower = boxes[arrow[0]], boxes[arrow[1]]
    (start, top), (end, bottom) = _ends(upper, lower)
    cost = abs(upper.x - lower.x) / _WIDTH
    for box in boxes.values():
        if lower.y < box.y < upper.y:
            x = end + (start - end) * (box.y - bottom) / (top - bottom)
            cost += max(0.0, box.width / 2 + _GAP - abs(x - box.x)) * _BEHIND_A_BOX
    return cost


def _ends(importer: _Box, imported: _Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ends of an arrow, on the sides of the boxes that face one another."""
    lean = min(max((imported.x - importer.x) / _WIDTH, -0.45), 0.45)
    start = importer.x + lean * importer.width, importer.y - _HEIGHT / 2
    return start, (imported.x - lean * imported.width, imported.y + _HEIGHT / 2)


def draw(floors: Sequence[Floor], lines: Counter[str], arrows: set[tuple[str, str]]) -> None:
    """Draw rooms on their floors, an arrow from each room to those it imports, and write the picture."""
    size = 10.0, 0.56 * len(floors) + 0.6
    figure, [[panel]] = new_figure("What imports what: arrows run downwards only", 1, 1, size)
    panel.grid(visible=False)
    panel.set_axis_off()
    panel.set(xlim=(-9, _WIDTH + 1), ylim=(-0.6, len(floors) - 0.4))
    direct = _directly_needed(arrows, floors)
    boxes = _place(floors, lines, direct)
    parts = list(dict.fromkeys(floor.part for floor in floors))
    for pair in sorted(arrows, key=lambda pair: pair in direct):
        _draw_arrow(panel, boxes[pair[0]], boxes[pair[1]], pair in direct)
    for number, floor in enumerate(floors):
        tint = COLOURS[parts.index(floor.part) % len(COLOURS)]
        if floor.part not in {other.part for other in floors[:number]}:
            height = sum(other.part == floor.part for other in floors)
            middle = number + (height - 1) / 2
            panel.text(-8.5, middle, floor.part, color=tint, rotation=90, ha="center", va="center", size=9)
            panel.plot([-7, -7], [number - 0.35, number + height - 0.65], color=tint, linewidth=2)
        for room in floor.rooms:
            _draw_room(panel, room, boxes[room], lines[room], tint)
    save(figure, PICTURE)
    Image.open(PICTURE).convert("RGB").quantize(128).save(PICTURE, optimize=True)  # a third of the bytes


def _draw_room(panel: Axes, room: str, box: _Box, lines: int, tint: str) -> None:
    corner = (box.x - box.width / 2, box.y - _HEIGHT / 2)
    panel.add_patch(Rectangle(corner, box.width, _HEIGHT, facecolor="white", zorder=3))
    panel.add_patch(Rectangle(corner, box.width, _HEIGHT, facecolor=tint, alpha=0.16, edgecolor="none", zorder=4))
    panel.add_patch(Rectangle(corner, box.width, _HEIGHT, facecolor="none", edgecolor=tint, linewidth=1, zorder=5))
    panel.text(box.x, box.y + 0.1, room, ha="center", va="center", size=8.5, zorder=6)
    panel.text(box.x, box.y - 0.16, f"{lines:,}", ha="center", va="center", size=6.5, color=SOFT, zorder=6)


def _draw_arrow(panel: Axes, importer: _Box, imported: _Box, direct: bool) -> None:
    start, end = _ends(importer, imported)
    panel.add_patch(FancyArrowPatch(
        start, end, arrowstyle="-|>" if direct else "-", mutation_scale=6, shrinkA=0, shrinkB=0,
        color=SOFT if direct else LINE, linewidth=0.9 if direct else 0.6, zorder=2 if direct else 1,
    ))  # fmt: skip


def main(words: list[str] | None = None) -> int:
    OneLineParser(
        prog="draw_architecture.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(words)
    modules = read_modules()
    lines = lines_of_rooms(modules)
    draw(read_floors(), lines, set(arrows_between_rooms(read_imports(modules))))
    print(f"{PICTURE.relative_to(ROOT)}: {len(lines)} rooms, {sum(lines.values()):,} lines")
    return 0


if __name__ == "__main__":
    run_program(main)
