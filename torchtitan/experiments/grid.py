"""Grid of a sweep's TOML file: its cells."""

import dataclasses
import itertools
import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config.toml_file import read_toml, shipped, shown_file
from torchtitan.distributed.degrees import DEGREE_KEYS
from torchtitan.experiments.folder import ExperimentError
from torchtitan.experiments.process import RETRIES
from torchtitan.files.regular import read_text
from torchtitan.settings import setting
from torchtitan.settings.schema import nearest, quoted, validate_section
from torchtitan.settings.sections import flattened
from torchtitan.settings.sizes import is_count

BATCH_KEY = "training.local_batch_size"
LAYOUTS = ("ddp", "fsdp", "hsdp")
DTYPES = ("float32", "bfloat16", "float8")
CHECKPOINTING: dict[str, dict[str, Any]] = {  # value of that axis -> configuration keys
    "none": {"activation_checkpoint.mode": "none"},
    "selective": {"activation_checkpoint.mode": "selective"},
    "every_second_block": {"activation_checkpoint.mode": "full", "activation_checkpoint.every": 2},
    "full": {"activation_checkpoint.mode": "full"},
}
_NAMED = {"layout": LAYOUTS, "dtype": DTYPES, "checkpointing": tuple(CHECKPOINTING)}
_CONTEXT = DEGREE_KEYS[2]
_TABLES = ("fixed", "axes", "exclude")
# Words of a run's name, where the dotted key is long.
_SHORT = {
    BATCH_KEY: "batch",
    "activation_checkpoint.mode": "ac",
    "compile.enable": "compile",
    "model.patch_size": "patch",
    "model.flavor": "flavor",
}
# What a sweep, unless it says otherwise, and a probe switch off: a run is there to be measured.
MEASURED_ALONE = {f"{name}.enable": False for name in ("checkpoint", "sampling", "evaluation", "validation")}
MEASURED_ALONE["metrics.enable_tensorboard"] = False


class SweepError(ExperimentError):
    """Sweep that cannot be run as requested; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """`needs`: what a machine must have to run a cell."""

    gpus: int = setting(0, "CUDA devices of the machine", ge=0)


@dataclass(kw_only=True)
class SweepSettings:
    """Keys of a sweep's file outside of its tables."""

    name: str = setting("", "name of the folder outputs/<name>; default: the file's name")
    base: str = setting("", "configuration that all cells start from, relative to this file; default: none")
    processes: int = setting(1, "processes of every cell, unless they are an axis", ge=1)
    repeats: int = setting(1, "runs of each cell; repeat r has debug.seed + r", ge=1)
    timeout_s: float = setting(1800.0, "seconds after which a run is ended", gt=0)
    retries: int = setting(RETRIES, "times that a run killed from outside is started again at once", ge=0)
    needs: Needs = setting(Needs(), "what a machine must have to run a cell")
    warmup_steps: int = setting(0, "first steps, left out of all medians", ge=0)
    order: str = setting(BATCH_KEY, "axis of rising memory: cells above a value that is out of memory are skipped")
    hsdp_shard: int = setting(2, "shard degree of layout hsdp", ge=2)
    memory_limit_gib: float | None = setting(None, "memory of a process on the CPU, in GiB; Linux only", gt=0)
    autotune: bool = setting(False, "search the largest batch size of every cell instead of having it as an axis")
    autotune_multiple_of: int = setting(1, "divisor of the batch size", ge=1, applies={"autotune": (True,)})
    autotune_memory_gib: float | None = setting(
        None, "memory of a process, in GiB; needed on the CPU", gt=0, applies={"autotune": (True,)}
    )


@dataclass(frozen=True)
class Cell:
    """One point of the grid; id: `axis=value` of all, a unique file name; values: dotted key -> value."""

    id: str
    axes: dict[str, Any]
    values: dict[str, Any]
    processes: int

    def arm(self, order: str) -> str:
        """Arm: the part shared by cells that differ along the axis `order` only."""
        return json.dumps({axis: value for axis, value in self.axes.items() if axis != order})


@dataclass
class Sweep:
    """Sweep: its file, read and expanded."""

    path: Path
    text: str
    table: dict[str, Any]
    settings: SweepSettings
    base: Path | None
    cells: list[Cell] = field(default_factory=list)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's file, or a shipped one by name, and expand its grid, unchecked. Raises SweepError."""
    if not path.is_file():
        path = Path(shipped(str(path)) or shipped(f"sweeps/{path}") or path)
    document, unreadable = read_toml(str(path))
    if unreadable:
        raise SweepError(unreadable[0].replace("give a TOML file", "give a sweep's TOML file"))
    plain = {key: value for key, value in document.items() if key not in _TABLES}
    known = [each.name for each in dataclasses.fields(SweepSettings)]
    if "axes" not in document and any(isinstance(plain[key], dict) for key in plain.keys() - known):
        raise _error(path, "is the configuration of one run, no grid (a grid's file names it as base, and what varies in [axes])")

    def advise(key: str) -> str:
        guess = nearest(key, [*known, *_TABLES])
        advice = f"keys of runs belong in [fixed] and [axes]; here: {', '.join(known)}"
        return f"did you mean {guess}?" if guess else advice

    settings, problems = validate_section("sweep", SweepSettings(), plain, advise)
    _refuse(path, [f"{problem.key.removeprefix('sweep.')}{problem.within}: {problem.text}" for problem in problems])
    settings.name = settings.name or path.stem
    if not re.fullmatch(r"[\w.+-]{1,100}", settings.name) or settings.name in (".", ".."):
        raise _error(path, f"name: {quoted(settings.name)} is no folder name (use letters, digits, '.', '_', '-')")
    base = path.parent / settings.base if settings.base else None
    if base is not None and not base.is_file() and (found := shipped(settings.base)):
        base = Path(found)
    if base is not None and not base.is_file():
        raise _error(path, f"base: {base}: no such file (it is relative to the sweep's file)")
    for said in read_toml(str(base))[1] if base is not None else []:
        raise _error(path, f"base: {said}")
    if not settings.autotune and (given := [key for key in plain if key.startswith("autotune_")]):
        raise _error(path, f"{given[0]}: has no effect while autotune is false (remove it, or set autotune = true)")
    sweep = Sweep(path, read_text(path), _tables(path, document), settings, base)
    sweep.cells = _expand(sweep)
    return sweep


def _tables(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Content of the file, flattened to dotted keys below each table."""
    table = {key: value for key, value in document.items() if key not in _TABLES}
    table |= {name: _flat_table(path, name, document.get(name, {})) for name in ("fixed", "axes")}
    table["exclude"] = _excluded(path, document.get("exclude", []), table["axes"])
    return table


def _points(path: Path, table: dict[str, Any], order: str) -> list[dict[str, Any]]:
    """Points of the grid: the product of the axes, less the excluded."""
    axes = table["axes"]
    names = sorted(axes, key=lambda axis: axis == order)  # stable: the batch comes last, so it changes fastest
    rising = [sorted(axes[axis]) if axis == order and _are_numbers(axes[axis]) else axes[axis] for axis in names]
    products = (dict(zip(names, values, strict=True)) for values in itertools.product(*rising))
    points = [{axis: point[axis] for axis in axes} for point in products]  # in the file's order, for names
    return [point for point in points if not any(_matches(point, exclude) for exclude in table["exclude"])]


_LONGEST_NAME = 200  # bytes of a cell's: its files add a repeat, a step and endings, 48 at most, and disks take 255


def _expand(sweep: Sweep) -> list[Cell]:
    if not sweep.table["axes"]:
        raise _error(sweep.path, "the grid is empty ([axes] is missing; give it a key and its values)")
    _check_axes(sweep)
    of_base = dict(flattened(read_toml(str(sweep.base))[0])) if sweep.base else {}
    context = sweep.table["fixed"].get(_CONTEXT, of_base.get(_CONTEXT, 1))
    cells = [_cell(sweep, point, context) for point in _points(sweep.path, sweep.table, sweep.settings.order)]
    if not cells:
        raise _error(sweep.path, "the grid is empty ([[exclude]] leaves nothing)")
    names_in_use: dict[str, Cell] = {}
    for cell in cells:
        if len(cell.id.encode()) > _LONGEST_NAME:
            text = f"axes: a run would have a name of {len(cell.id.encode())} bytes, {cell.id[:60]}..."
            raise _error(sweep.path, f"{text} ({_LONGEST_NAME} at most: fewer axes, or keys of one value in [fixed])")
        other = names_in_use.setdefault(cell.id.lower(), cell)
        if other is not cell:
            raise _error(sweep.path, f"axes: {other.axes} and {cell.axes} would have one folder, {cell.id}")
    return cells


def _check_axes(sweep: Sweep) -> None:
    axes, fixed, path, settings = sweep.table["axes"], sweep.table["fixed"], sweep.path, sweep.settings
    _refuse(path, [f"axes.{axis}: {text}" for axis, values in axes.items() if (text := _axis_problem(sweep, axis, values))])
    if settings.order not in axes and "order" in sweep.table:
        raise _error(path, f"order: {quoted(settings.order)} is no axis (there are: {', '.join(axes)})")
    if settings.order in axes and not _are_numbers(axes[settings.order]):
        raise _error(path, f"order: the values of axis {settings.order} are no numbers")
    if settings.autotune and (BATCH_KEY in axes or BATCH_KEY in fixed):
        raise _error(path, f"{BATCH_KEY}: is searched where autotune = true (remove one)")
    if settings.repeats > 1 and "debug.seed" in axes:
        raise _error(path, "axes.debug.seed: repeats > 1 choose seeds already (remove one)")


def _axis_problem(sweep: Sweep, axis: str, values: Any) -> str:
    names = (*_NAMED, "processes")
    if "." not in axis and axis not in names and (guess := nearest(axis, names)):
        return f"is no axis (did you mean {guess}?)"
    if not isinstance(values, list) or not values:
        return f"must be a list of one or more values, is {quoted(values)}"
    texts = [json.dumps(value, default=str) for value in values]
    if len(set(texts)) < len(texts):
        return f"has a value twice, {quoted(values)}"
    if axis in sweep.table["fixed"]:
        return "is in [fixed] too (remove one)"
    if axis in _NAMED and (others := [value for value in values if value not in _NAMED[axis]]):
        return f"must be one of {', '.join(_NAMED[axis])}, is {quoted(others[0])}"
    if axis == "processes" and (others := [value for value in values if not is_count(value)]):
        return f"must be whole numbers from 1 on, is {quoted(others[0])}"
    return f"{axis} is set for all cells too (remove one)" if axis == "processes" and axis in sweep.table else ""


def _cell(sweep: Sweep, point: dict[str, Any], context: Any) -> Cell:
    """Cell of a point of the grid; context: degree of the cells that have no other one on an axis, unchecked."""
    processes, context = point.get("processes", sweep.settings.processes), point.get(_CONTEXT, context)
    if not is_count(context) or processes % context:
        context = 1  # which the check of the configuration refuses
    values = MEASURED_ALONE | sweep.table["fixed"]
    for axis, value in point.items():
        for key, set_value in _meaning(sweep, axis, value, processes // context, context).items():
            if key in sweep.table["fixed"] or (key != axis and key in sweep.table["axes"]):
                raise _error(sweep.path, f"axes.{axis}: sets {key}, which is set a second time (remove one)")
            values[key] = set_value
    return Cell(_name(point), point, values, processes)


def _name(point: dict[str, Any]) -> str:
    return "_".join(f"{_SHORT.get(axis, axis)}={_file_safe(value)}" for axis, value in point.items())


def _meaning(sweep: Sweep, axis: str, value: Any, ranks: int, context: int) -> dict[str, Any]:
    """Configuration keys set by a value of an axis, for ranks with images of their own, each of `context` processes."""
    if axis == "processes":
        return {}
    if axis == "checkpointing":
        return CHECKPOINTING[value]
    if axis == "dtype":
        if value == "float8":
            return {"training.mixed_precision_param": "bfloat16", "float8.enable": True}
        return {"training.mixed_precision_param": value}
    if axis != "layout":
        return {axis: value}
    shard = {"ddp": 1, "fsdp": ranks, "hsdp": sweep.settings.hsdp_shard}[value]
    needed = "processes" if context == 1 else f"groups of {context} processes"
    if value == "fsdp" and ranks == 1:
        raise _error(sweep.path, f"axes.layout: fsdp needs 2 {needed} or more (exclude it, or raise processes)")
    if value == "hsdp" and (ranks % shard or ranks == shard):
        text = f"hsdp needs a multiple of hsdp_shard = {shard} {needed}, twice or more, not {ranks}"
        raise _error(sweep.path, f"axes.layout: {text} (exclude it, or change either)")
    return dict(zip(DEGREE_KEYS[:2], (ranks // shard, shard), strict=True))


def _excluded(path: Path, tables: Any, axes: dict[str, Any]) -> list[dict[str, list]]:
    """Tables `[[exclude]]`: axis -> values."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _error(path, "exclude: must be tables (write [[exclude]] and axis = value lines)")
    found = []
    for table in tables:
        flat = {axis: value if isinstance(value, list) else [value] for axis, value in flattened(table)}
        if not flat:
            raise _error(path, "exclude: an empty table excludes everything (name an axis, or remove it)")
        for axis, values in flat.items():
            if axis not in axes:
                raise _error(path, f"exclude.{axis}: is no axis (there are: {', '.join(axes)})")
            there = axes[axis] if isinstance(axes[axis], list) else [axes[axis]]
            if missing := [value for value in values if value not in there]:
                raise _error(path, f"exclude.{axis}: {quoted(missing[0])} is not in the axis, {quoted(there)}")
        found.append(flat)
    return found


def _matches(point: dict[str, Any], exclude: dict[str, list]) -> bool:
    return all(point[axis] in values for axis, values in exclude.items())


def _flat_table(path: Path, name: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise _error(path, f"{name}: must be a table, is {quoted(table)} (write [{name}] and its keys)")
    return dict(flattened(table))


def _are_numbers(values: list) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _file_safe(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
    safe = re.sub(r"[^A-Za-z0-9.+-]+", "-", text)
    return safe if _are_numbers([value]) else safe.strip("-") or "none"  # -1 is not 1


def _refuse(path: Path, problems: list[str]) -> None:
    if problems:
        raise SweepError("\n".join(str(_error(path, text)) for text in problems))


def _error(path: Path, text: str) -> SweepError:
    return SweepError(f"{shown_file(str(path))}: {text}")


def saved_table(text: str) -> dict[str, Any]:
    """Saved content of a sweep's file, flat: dotted key -> value. Raises tomllib.TOMLDecodeError."""
    return dict(flattened(tomllib.loads(text)))
