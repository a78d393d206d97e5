"""Runs of TorchDiTan: axes from the folder's name or its config.json, points from TensorBoard events, corrected MFU.

TorchDiTan counts every parameter once per token, though adaLN and the timestep's embedding work once per image and
tables and biases are no matrix products; its MFU is 1.43 to 1.49 times too high for its benchmark's models.
"""

import fnmatch
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from torchtitan.errors import unwrapped
from torchtitan.files.regular import read_regular
from torchtitan.runs.analysis.axes import Axes, axes_of
from torchtitan.runs.analysis.measures import MFU, MFU_REPORTED, measure
from torchtitan.runs.record import RUN_FILES, Series
from torchtitan.settings.sizes import is_count
from torchtitan.statistics.interval import Interval

_LARGEST_FILE = 1 << 22  # bytes
EVENTS = "events.out.tfevents.*"
_SECTIONS = ("model", "training", "dataset")  # of its config.json; other programs, too, write one beside event files

_NAME = re.compile(
    r"(?P<model>.+)_bs(?P<batch>\d+)_ps(?P<patch>\d+)_act(?P<ac>[a-z]+)_c(?P<compile>true|false)"
    r"_d(?P<dtype>\w+?)_p(?P<replicas>\d+),(?P<shards>-?\d+)(?:_(?P<date>\d{8}-\d{4}))?"
)
_FLAVORS = {"dit-l": "TorchDiTan-L", "dit-0.5b": "TorchDiTan-L", "dit-7b": "TorchDiTan-7B"}
_TAGS = {
    "im/s": "throughput(img/s)",
    "mfu(%)": "mfu(%)",
    "memory/max_reserved(GiB)": "memory/max_reserved(GiB)",
    "memory/max_active(GiB)": "memory/max_active(GiB)",
}


@dataclass
class TorchDiTanRun:
    """Run folder of TorchDiTan.

    Attributes:
        axes: as of other runs; model is this program's flavor of the same network, if there is one.
        series: tag of metrics.jsonl -> values.
        planned_steps: of the configuration; None if config.json does not give it.
        image_shape: (C, H, W), if config.json gives it.
        num_classes: of the label table.
        problems: unreadable or known to be wrong; one line each.
    """

    axes: Axes
    series: dict[str, Series] = field(default_factory=dict)
    planned_steps: int | None = None
    image_shape: tuple[int, int, int] | None = None
    num_classes: int = 1000
    problems: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((series.steps[-1] for series in self.series.values() if len(series)), default=0)

    def measure(self, warmup_steps: int) -> dict[str, Interval]:
        """Measure as `measures.measure`; MFU by the correct count where the network and its input are known, else none.
        """
        found = measure(self.series, warmup_steps)
        reported = found.pop(MFU.name, None)
        if reported is not None:
            found[MFU_REPORTED.name] = reported
            if (excess := self.flops_excess()) is not None:
                found[MFU.name] = reported.scaled(1 / excess)
        return found

    def flops_excess(self) -> float | None:
        """Excess of its count of FLOPs over the correct one, as a factor; None where network or input are not known."""
        known = self.image_shape and self.axes["patch"] and str(self.axes["model"]) in _FLAVORS.values()
        if not known:
            return None
        return flops_excess(self.axes["model"], self.axes["patch"], self.image_shape, self.num_classes)


@cache
def flops_excess(flavor: str, patch_size: int, image_shape: tuple[int, int, int], num_classes: int) -> float | None:
    """Excess of TorchDiTan's FLOPs per image, T (6 parameters + 12 layers dim T), over those of matrix products alone.

    Returns:
        the ratio; None where the patch size does not divide the image.
    """
    import torch  # takes seconds; needed for these runs only

    from torchtitan.conditions import class_kind
    from torchtitan.models import MODELS

    family = MODELS["dit"]
    config = replace(family.flavors[flavor], patch_size=patch_size)
    if family.problems(config, image_shape):
        return None
    with torch.device("meta"):
        model = family.build(config, image_shape, class_kind(num_classes))
    tokens = model.tokens_per_image(image_shape)
    counted = tokens * (6 * model.num_parameters() + 12 * config.num_layers * config.dim * tokens)
    return counted / model.flops_per_image(image_shape)


def is_torchditan_run(folder: Path) -> bool:
    """Check whether a folder has a name of its ablation scripts, or its config.json; and what the run wrote."""
    if _NAME.fullmatch(folder.name):
        return (folder / "config.json").is_file() or next(_event_files(folder), None) is not None
    config = _read_config(folder / "config.json", [])
    return all(isinstance(config.get(name), dict) for name in _SECTIONS) and next(_event_files(folder), None) is not None


def read_torchditan_run(folder: Path) -> TorchDiTanRun:
    """Read a run."""
    problems: list[str] = []
    config = _read_config(folder / "config.json", problems)
    run = TorchDiTanRun(_axes(folder.name, config), problems=problems)
    steps = _get(config, "training", "steps")
    run.planned_steps = steps if isinstance(steps, int) else None
    run.image_shape = _image_shape(config)
    if isinstance(classes := _get(config, "dataset", "num_classes"), int):
        run.num_classes = classes
    loaded, counted = _get(config, "dataset", "batch_size"), _get(config, "training", "batch_size")
    if isinstance(loaded, int) and isinstance(counted, int) and loaded not in (-1, counted):
        run.problems.append(
            f"its rates count batches of {counted}, but dataset.batch_size = {loaded} is what was loaded"
        )
    run.series = _read_series(folder, run.axes["world_size"], problems)
    return run


def _event_files(folder: Path) -> Iterator[Path]:
    """Event files in a folder and below, without those of runs of this program."""
    for path, below, files in os.walk(folder):
        if any(name in files for name in RUN_FILES):
            below.clear()
        else:
            yield from (Path(path) / name for name in fnmatch.filter(files, EVENTS))


def _image_shape(config: dict[str, Any]) -> tuple[int, int, int] | None:
    """Shape (C, H, W): `image_size` is [H, W]. None where it is not given."""
    channels, size = _get(config, "model", "input_channels"), _get(config, "dataset", "image_size")
    sides = size if isinstance(size, list) else [size, size]
    if len(sides) != 2 or not all(map(is_count, (channels, *sides))):
        return None
    return channels, sides[0], sides[1]


def _axes(name: str, config: dict[str, Any]) -> Axes:
    match = _NAME.fullmatch(name)
    named: dict[str, Any] = match.groupdict() if match else {}
    flavor = _get(config, "model", "flavor") or named.get("model")
    dtype = named.get("dtype") or _get(config, "training", "mixed_precision_param")
    float8 = str(dtype).endswith("_f8") or _get(config, "float8", "enable_float8_linear")
    compiled = named.get("compile") or _get(config, "training", "compile")
    replicas = _number(named.get("replicas"), _get(config, "training", "data_parallel_replicate_degree"))
    shards = _number(named.get("shards"), _get(config, "training", "data_parallel_shard_degree"))
    batch = _number(_get(config, "training", "batch_size"), named.get("batch"))
    ranks = replicas * shards if replicas and shards and min(replicas, shards) > 0 else None
    return axes_of({
        "model.flavor": _FLAVORS.get(str(flavor).lower(), flavor),
        "model.patch_size": _number(named.get("patch"), _get(config, "model", "patch_size")),
        "training.local_batch_size": batch,
        "training.global_batch_size": batch * ranks if batch and ranks else None,
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": shards,
        "activation_checkpoint.mode": named.get("ac") or _get(config, "activation_checkpoint", "mode"),
        "compile.enable": compiled,
        "dtype": "float8" if float8 else dtype,
    })


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        config = json.loads(read_regular(path, _LARGEST_FILE))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"config.json cannot be read ({unwrapped(error)})")
        return {}
    return config if isinstance(config, dict) else {}


def _read_series(folder: Path, ranks: int | None, problems: list[str]) -> dict[str, Series]:
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for path in sorted(_event_files(folder)):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        try:
            events.Reload()
        except (OSError, ValueError, DecodeError) as error:
            problems.append(f"{path.name} cannot be read ({unwrapped(error)})")
            continue
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    series = {}
    for tag, ours in _TAGS.items():
        if tag in found:
            series[ours] = _series(found[tag])
    if "it/s" in found:
        series["time_metrics/end_to_end(s)"] = _series({step: 1 / rate for step, rate in found["it/s"].items() if rate})
    if "wps" in found and ranks:  # tokens per second and device
        series["throughput(tps)"] = _series({step: ranks * rate for step, rate in found["wps"].items()})
    return series


def _series(values: dict[int, float]) -> Series:
    steps = sorted(values)
    return Series(tuple(steps), tuple(values[step] for step in steps))


def _get(config: dict[str, Any], section: str, key: str) -> Any:
    table = config.get(section)
    return table.get(key) if isinstance(table, dict) else None


def _number(*candidates: Any) -> int | None:
    """Number: the first that is a whole number, or the text of one."""
    for value in candidates:
        if isinstance(value, str) and value.removeprefix("-").isdecimal():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
