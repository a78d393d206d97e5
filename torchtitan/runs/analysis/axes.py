"""Axes that distinguish runs: model, patch, batch, layout and switches, read from their configurations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtitan.distributed.degrees import DEGREE_KEYS, Degrees, degrees_of
from torchtitan.settings.record import value_text
from torchtitan.settings.schema import quoted
from torchtitan.settings.sizes import is_count

Axes = dict[str, Any]

BATCH = ("local_batch", "global_batch")
NAMED_AXES = (
    "model", "patch", *BATCH, "layout", "mesh", "world_size", "ac", "compile", "dtype", "device",
)
SWITCHES = ("compile", "ac", "layout", "dtype", "patch")

# Where the values of a switch have an order, the first that there is is what the others are compared with.
_ORDER = {
    "compile": ("false", "true"),
    "ac": ("none", "selective", "full", "memory_budget"),
    "layout": ("single", "ddp", "fsdp", "hsdp"),
    "dtype": ("float32", "bfloat16", "float8"),
}
_SOURCES = {
    "model.flavor", "model.patch_size", "training.local_batch_size", "training.global_batch_size", "debug.seed",
    *DEGREE_KEYS, "compile.enable", "activation_checkpoint.mode", "training.mixed_precision_param", "float8.enable",
}
# None of these counts in a step's time: how long and where a run goes, what the stopwatch leaves out, and numbers that are
# multiplied whatever they are.
_NOT_SPEED = (
    "job.", "metrics.", "checkpoint.", "sampling.", "validation.", "evaluation.", "comm.", "profiling.", "training.steps",
    "optimizer.lr", "optimizer.beta", "optimizer.eps", "optimizer.weight_decay", "lr_scheduler.",
    "objective.timesteps", "objective.weighting", "data.path", "data.validation_path",
)
DATA = "data"  # axis of runs of different data: they are no arms of one experiment
_LONGEST_VALUE = 32  # characters, in a label
_FOLDED = {
    "data": DATA,
    "model": "model", "activation_checkpoint": "ac", "compile": "compile", "float8": "dtype", "parallelism": "layout",
}


def axes_of(settings: Mapping[str, Any]) -> Axes:
    """Axes of a run.

    Args:
        settings: dotted key -> value of its configuration; or of a sweep's cell, where `layout` and `dtype` stand for
            the keys behind them. Missing ones are None in the axes.
    """
    degrees = degrees_of(settings)
    layout = _layout(degrees) if degrees else word(settings.get("layout"))
    context = settings.get(DEGREE_KEYS[2])
    if layout and context and context > 1:
        layout = f"{layout} (context={context})"
    keys = ("model.patch_size", "training.local_batch_size", "training.global_batch_size")
    patch, local, all_ranks = (size if is_count(size := settings.get(key)) else None for key in keys)
    flavor = word(settings.get("model.flavor"))
    stem, _, suffix = (flavor or "").rpartition("/")
    named_patch = stem and suffix.isdecimal()
    if patch is None and named_patch:
        patch = int(suffix)
    dtype = "float8" if settings.get("float8.enable") else settings.get("training.mixed_precision_param")
    compiled = settings.get("compile.enable")
    return {
        "model": stem if named_patch else flavor,
        "patch": patch,
        "local_batch": local,
        "global_batch": all_ranks,
        "layout": layout,
        "mesh": _mesh(degrees) if degrees else None,
        "world_size": degrees.processes if degrees else None,
        "ac": word(settings.get("activation_checkpoint.mode")),
        "compile": None if compiled is None else str(word(compiled)).lower(),
        "dtype": word(settings.get("dtype", dtype)),
        "device": None,
    }


def add_further_axes(runs: Sequence[tuple[Axes, Mapping[str, Any]]]) -> list[str]:
    """Add an axis for every other key of which two runs have different values, so that they are never mixed up.

    Keys of a section that has an axis of its own go into that axis' value, as `selective (interval=2)`. Keys that the
    model alone decides are none.

    Returns:
        names of the new axes.
    """
    keys = dict.fromkeys(key for _, settings in runs for key in settings)
    added = []
    if len({settings.get("data.name") for _, settings in runs} - {None}) > 1:
        added.append(DATA)
        for axes, settings in runs:
            axes[DATA] = word(settings.get("data.name"))
    for key in keys:
        if key in _SOURCES or "." not in key or key.startswith(_NOT_SPEED) or (key == "data.name" and DATA in added):
            continue
        values = [_text(settings[key]) if key in settings and not _switched_off(key, settings) else None for _, settings in runs]
        if len(set(values) - {None}) < 2 or _decided_by_model(runs, values):
            continue
        section, _, name = key.partition(".")
        folded = _FOLDED.get(section)
        if folded == DATA and DATA not in added:
            folded = None
        for (axes, _), value in zip(runs, values, strict=True):
            if folded is None:
                axes[key] = value
            elif value is not None and axes[folded] is not None and (folded != DATA or _differs_within(runs, key, axes)):
                axes[folded] = f"{axes[folded]} ({name}={value})"
        if folded is None:
            added.append(key)
    _name_meshes([axes for axes, _ in runs])
    return added


def values_in_order(switch: str, values: Iterable[Any]) -> list[Any]:
    """Order the values of a switch, the reference value first; unknown ones are left out."""
    order = _ORDER.get(switch, ())

    def place(value: Any) -> tuple:
        stem = str(value).partition(" ")[0]
        number = value if isinstance(value, (int, float)) else 0
        return order.index(stem) if stem in order else len(order), number, str(value)

    return sorted({value for value in values if value is not None}, key=place)


def varying(all_axes: Sequence[Axes]) -> list[str]:
    """Names of the axes with several values."""
    names = dict.fromkeys(name for axes in all_axes for name in axes)
    return [name for name in names if len({axes.get(name) for axes in all_axes}) > 1]


def value_label(name: str, value: Any) -> str:
    """Label of one axis value in words."""
    if value is None:
        return f"{name} unknown"
    text = str(value)
    if name == "compile":
        return text.replace("true", "compiled", 1).replace("false", "eager", 1)
    if name == "ac":
        return "no AC" if text == "none" else f"AC {text}"
    words = {"patch": "patch {}", "local_batch": "local batch {}", "global_batch": "global batch {}"}
    words["world_size"] = "1 rank" if value == 1 else "{} ranks"
    words["layout"] = "one process" if text == "single" else "{}"
    if name in ("model", "mesh", "dtype", "device", DATA) or name in words:
        return words.get(name, "{}").format(text)
    return f"{name}={text[:_LONGEST_VALUE]}"


def label(axes: Axes, names: Iterable[str]) -> str:
    """Label of several axes in words; a key that a run lacks, as of a feature switched off or a patch, is left out."""
    kept = [name for name in names if axes.get(name) is not None or not ("." in name or name == "patch")]
    return ", ".join(value_label(name, axes.get(name)) for name in kept)


def _layout(degrees: Degrees) -> str:
    copies, shards = degrees.copies_and_shards
    if copies * shards == 1:
        return "single"
    if shards == 1:
        return "ddp"
    return "fsdp" if copies == 1 else "hsdp"


def _mesh(degrees: Degrees) -> str:
    return "x".join(str(degree) for degree in (degrees if degrees.context > 1 else degrees[:2]))


def word(value: Any) -> str | None:
    """Convert a value to the text that represents it in an axis; None for a missing one."""
    return None if value is None else quoted(value) if not isinstance(value, str) else value


def _decided_by_model(runs: Sequence[tuple[Axes, Mapping[str, Any]]], values: Sequence[str | None]) -> bool:
    seen: dict[Any, str] = {}
    for (axes, _), value in zip(runs, values, strict=True):
        if value is not None and seen.setdefault(axes["model"], value) != value:
            return False
    return True


def _switched_off(key: str, settings: Mapping[str, Any]) -> bool:
    """Whether a key belongs to a feature that is off, and says nothing."""
    section = key.rpartition(".")[0]
    return not key.endswith(".enable") and settings.get(f"{section}.enable") is False


def _differs_within(runs: Sequence[tuple[Axes, Mapping[str, Any]]], key: str, axes: Axes) -> bool:
    """Whether runs of the same dataset have different values of a key of it."""
    name = str(axes[DATA]).partition(" ")[0]
    same = [settings for _, settings in runs if settings.get("data.name") == name]
    return len({_text(settings[key]) for settings in same if key in settings}) > 1


def _name_meshes(all_axes: Sequence[Axes]) -> None:
    """Name meshes: several HSDP meshes of one number of ranks are separate layouts."""
    meshes: dict[Any, set[str]] = {}
    sharded_copies = [axes for axes in all_axes if axes["mesh"] and axes["layout"].partition(" ")[0] == "hsdp"]
    for axes in sharded_copies:
        meshes.setdefault((axes["world_size"], axes["layout"]), set()).add(axes["mesh"])
    for axes in sharded_copies:
        if len(meshes[axes["world_size"], axes["layout"]]) > 1:
            axes["layout"] = axes["layout"].replace("hsdp", f"hsdp {axes['mesh']}", 1)


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):  # as ema.tracks
        return ", ".join(str(each.get("name", number)) for number, each in enumerate(value))
    return value_text(value)
