"""Manage checkpoints: list, verify and compare them, and export or import weights in published layouts.

Exit codes: 0; 1: verify found damage, or diff a difference; 2: refused, nothing written.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from torchtitan.checkpoint.checkpointer import CheckpointError, checkpoint_path, checkpoint_steps, newest_good, verify
from torchtitan.checkpoint.comparison import TensorSource, compare, ema_tracks, open_checkpoint, open_weights
from torchtitan.checkpoint.location import location, run_checkpoints
from torchtitan.checkpoint.manifest import MANIFEST
from torchtitan.checkpoint.reading import read_state
from torchtitan.config.job import ConfigError, JobConfig, split_data_words
from torchtitan.config.latent_cache import trained_info
from torchtitan.data.base import DatasetError
from torchtitan.files.regular import read_regular
from torchtitan.files.remote_path import AnyPath, RemotePath
from torchtitan.files.shard_files import write_tensors
from torchtitan.files.weight_files import (
    INDEX_SUFFIX,
    NotTensors,
    WeightsError,
    named_weights,
    read_state_dict,
    refuse_existing,
    saved_buffers,
    written_whole,
)
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapter_files import DTYPES, known_layouts, read_adapter, write_adapter
from torchtitan.models.adapters.adapters import adapter_weights, merged_weights
from torchtitan.models.adapters.layouts import NATIVE, AdapterLayout
from torchtitan.models.base import DiffusionModel
from torchtitan.models.published_layouts import ComputedTensors, ConversionError, PublishedLayout
from torchtitan.processes.command_line import OneLineParser, readable_size, run_program
from torchtitan.runs.check import Finding, check_run
from torchtitan.runs.final_weights import adapter_header
from torchtitan.runs.network import network_on_meta
from torchtitan.runs.portable import header_config
from torchtitan.runs.trained_model import TrainedModel, load_run, read_config

OWN = "safetensors"
LAYOUTS = tuple(name for family in MODELS.values() for name in family.layouts)
KEPT_METADATA = ("step", "weights", "model", "base", "base_sha256", "trigger_word")  # of adapters that are converted
ADAPTER_LAYOUTS = (NATIVE.name, *(name for family in MODELS.values() for name in family.adapter_layouts))


def main(words: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = parse_arguments(sys.argv[1:] if words is None else words)
    try:
        return arguments.command(arguments)
    except (ConfigError, CheckpointError, DatasetError) as error:
        print(error, file=sys.stderr)
        return 2


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse a command line; `--data.KEY VALUE` are words for the configuration's data."""
    words, data_words = split_data_words(words)
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="the checkpoints of a run")
    command.set_defaults(command=list_checkpoints)
    command.add_argument("run", help="a run's folder, or URL of its checkpoints")

    command = commands.add_parser("verify", help="read every byte of runs or checkpoints, and advise on repair")
    command.set_defaults(command=verify_checkpoints)
    command.add_argument("paths", nargs="+", metavar="RUN|CHECKPOINT", help="folder or URL")

    command = commands.add_parser("diff", help="compare two checkpoints, or two files of weights")
    command.set_defaults(command=show_differences)
    for name in ("a", "b"):
        command.add_argument(name, metavar=name.upper(), help="checkpoint, run (its newest) or file")

    command = commands.add_parser("export", help="write a run's weights to a file")
    command.set_defaults(command=export)
    command.add_argument("run", type=Path, help="a run's folder")
    command.add_argument("--step", type=int, help="checkpoint of this step (default: the newest good one)")
    command.add_argument("--ema", metavar="TRACK", help="EMA track, or 'none' (default: sampling.ema_track)")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--format", choices=(OWN, *LAYOUTS), help="layout of the network; adapters are merged into it")
    what.add_argument("--adapter", choices=ADAPTER_LAYOUTS, help="write the adapter alone, in this layout")
    command.add_argument("--approximate", action="store_true",
        help="export even though the layout's network computes another sinusoid of the timestep "
        "(model.timestep_frequencies)")
    add_output(command, "file to write, or folder for diffusers")

    command = commands.add_parser("import", help="turn published weights into a safetensors file of this program")
    command.set_defaults(command=import_)
    command.add_argument("file", type=Path, help=".safetensors or .pt file; for diffusers also its folder")
    command.add_argument("--format", choices=LAYOUTS, required=True)
    command.add_argument("--config", type=Path, required=True,
        help="configuration of the model; --data.KEY VALUE completes its [data]")
    add_output(command, "file to write")

    command = commands.add_parser("convert-adapter", help="write a file of an adapter in another layout")
    command.set_defaults(command=convert_adapter)
    command.add_argument("file", type=Path, help=".safetensors file of an adapter, in any layout that is known")
    command.add_argument("--adapter", choices=ADAPTER_LAYOUTS, required=True, help="layout to write")
    command.add_argument("--config", type=Path, required=True, help="configuration of the model")
    add_output(command, "file to write")
    arguments = parser.parse_args(words)
    if data_words and arguments.command not in (import_, convert_adapter):
        parser.error(f"{data_words[0]}: is for import and convert-adapter alone")
    arguments.data_words = data_words
    return arguments


def add_output(command: argparse.ArgumentParser, description: str) -> None:
    command.add_argument("--output", type=Path, required=True, help=description)
    command.add_argument("--dtype", choices=DTYPES, default="float32")
    command.add_argument("--overwrite", action="store_true", help="replace existing files")


# ---------------------------------------------------------------------- list, verify, diff


def list_checkpoints(arguments: argparse.Namespace) -> int:
    checkpoints = checkpoints_of(location(arguments.run))
    print(f"{'step':>10}  {'size':>10}  {'date':16}  {'state':7}  EMA tracks")
    for path in checkpoints:
        problem = verify(path)
        size = readable_size(sum(file.stat().st_size for file in path.iterdir() if file.is_file()))
        tracks = ", ".join(ema_tracks(open_checkpoint(path))) or "none" if problem is None else problem
        state = "damaged" if problem else "good"
        print(f"{step_of(path):>10}  {size:>10}  {date_of(path):16}  {state:7}  {tracks}")
    return 0


def verify_checkpoints(arguments: argparse.Namespace) -> int:
    damaged = False
    paths = [location(path) for path in arguments.paths]
    runs = [path for path in paths if not is_checkpoint(path)]
    for path in runs:
        if isinstance(path, RemotePath) or not (path / "config.toml").is_file():
            checkpoints_of(path)
    for path in paths:
        for finding in check_run(path) if path in runs else [Finding(path, verify(path) or "")]:
            damaged |= bool(finding.problem)
            advice = f" ({finding.advice})" if finding.advice else ""
            print(f"{finding.path}: {finding.problem or 'good'}{advice}")
    return 1 if damaged else 0


def show_differences(arguments: argparse.Namespace) -> int:
    a, b = open_source(location(arguments.a)), open_source(location(arguments.b))
    result = compare(a, b)
    for title, names in (("only in A", result.only_a), ("only in B", result.only_b)):
        for name in names:
            print(f"{title}: {name}")
    for name in result.reshaped:
        print(f"another shape or dtype: {name}: {described(a, name)} and {described(b, name)}")
    for difference in result.different:
        print(f"{difference.name}: max {difference.largest:.3g}, relative {difference.relative:.3g}")
    for key in result.state_keys:
        print(f"state.json: {key}")
    if result.equal:
        print(f"equal bit for bit: {result.num_equal} tensors")
        return 0
    largest = max((difference.largest for difference in result.different), default=0.0)
    print(
        f"not equal: {result.num_equal} tensors equal bit for bit, {len(result.different)} different "
        f"(max {largest:.3g}), {len(result.reshaped)} of another shape or dtype, {len(result.only_a)} only in A, "
        f"{len(result.only_b)} only in B"
    )
    return 1


def open_source(path: AnyPath) -> TensorSource:
    if is_checkpoint(path):
        return open_checkpoint(path)
    if not path.is_dir() and isinstance(path, Path):
        return open_weights(path)
    checkpoints_of(path)
    step, skipped = newest_good(run_checkpoints(path))
    if step is None:
        raise CheckpointError("\n".join(skipped))
    return open_checkpoint(checkpoint_path(run_checkpoints(path), step))


def is_checkpoint(path: AnyPath) -> bool:
    path = path.resolve() if isinstance(path, Path) else path
    return path.is_dir() and path in {checkpoint_path(path.parent, step) for step in checkpoint_steps(path.parent)}


def checkpoints_of(run: AnyPath) -> list[AnyPath]:
    """Checkpoints of a run, oldest first."""
    if not run.is_dir():
        raise CheckpointError(f"{run}: no such run folder or checkpoint")
    folder = run_checkpoints(run)
    steps = checkpoint_steps(folder)
    if not steps:
        looked = "" if folder in (run, run / "checkpoint") else f" (looked in {folder})"
        raise CheckpointError(f"{run}: is no checkpoint and no run that holds one{looked}")
    return [checkpoint_path(folder, step) for step in reversed(steps)]


def step_of(checkpoint: AnyPath) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def date_of(checkpoint: AnyPath) -> str:
    if isinstance(checkpoint, RemotePath):
        date = (checkpoint / MANIFEST).modified()
    else:
        date = datetime.fromtimestamp(checkpoint.stat().st_mtime)
    return date.strftime("%Y-%m-%d %H:%M") if date else "unknown"


def described(source: TensorSource, name: str) -> str:
    shape, dtype = source.shapes[name]
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


# ---------------------------------------------------------------------- export, import


def export(arguments: argparse.Namespace) -> int:
    refuse_existing(arguments.output, arguments.overwrite)
    checkpoints_of(arguments.run)
    trained = load_run(arguments.run, arguments.ema, arguments.step, torch.device("cpu"))
    for warning in trained.warnings:
        print(warning, file=sys.stderr)
    if arguments.adapter:
        return export_adapter(arguments, trained)
    model, config = trained.model, trained.config
    own: Mapping[str, Tensor] = named_weights(model)
    if config.lora.enable:
        model, own = network_on_meta(config, trained.info), merged_weights(model)
    weights = own
    layout, unrounded = None, frozenset(saved_buffers(model))
    if arguments.format != OWN:
        layout = layout_of(arguments.format, config)
        if not arguments.approximate and (problem := layout.approximation(model)):
            raise WeightsError(f"{arguments.run}: {problem}")
        try:
            weights, notes = layout.export_weights(own, model)
        except ConversionError as error:
            raise WeightsError(prefixed(arguments.run, error)) from error
        unrounded = layout.unrounded
        for note in (*notes, f"{trained_for(config)}; {layout.convention}"):
            print(f"note: {note}", file=sys.stderr)
    metadata = {
        "layout": arguments.format,
        "weights": f"{arguments.run.resolve().name}, {trained.label}",
        "model": config.model.flavor,
        "trained_for": trained_for(config),
    } | header_config(config, trained.info)
    with written_whole(arguments.output, arguments.overwrite) as path:
        if layout and layout.folder_files:
            path.mkdir()
            text = json.dumps(layout.folder_config(model), indent=2) + "\n"
            (path / "config.json").write_text(text, encoding="utf-8")
            path /= layout.folder_files[0]
        write_converted(path, weights, arguments.dtype, unrounded, metadata)
    print(f"{arguments.output}: {trained.label}, {len(weights)} tensors, {arguments.format} layout")
    return 0


def import_(arguments: argparse.Namespace) -> int:
    refuse_existing(arguments.output, arguments.overwrite)
    if arguments.output.suffix != ".safetensors":
        raise WeightsError(f"{arguments.output}: must end in .safetensors, the format of the output")
    config = read_config(arguments.config, arguments.data_words)
    info = trained_info(config)
    model = network_on_meta(config, info)
    layout = layout_of(arguments.format, config)
    source, problems = published_file(arguments.file, model, layout)
    if problems:
        raise WeightsError("\n".join(f"{arguments.file}: {problem}" for problem in problems))
    published, nested = read_published(source, layout)
    try:
        weights, notes = layout.import_weights(published, model)
    except ConversionError as error:
        raise WeightsError(prefixed(source, error)) from error
    notes += [f"taken from {nested!r} of the file"] if nested else []
    for note in (*notes, layout.convention):
        print(f"note: {note}", file=sys.stderr)
    with written_whole(arguments.output, arguments.overwrite) as path:
        metadata = {"layout": OWN, "weights": source.name}
        write_converted(path, weights, arguments.dtype, frozenset(saved_buffers(model)), metadata)
    print(f"{arguments.output}: {len(weights)} tensors")
    return 0


def export_adapter(arguments: argparse.Namespace, trained: TrainedModel) -> int:
    config, model = trained.config, trained.model
    if not config.lora.enable:
        raise WeightsError(f"{arguments.run}: has no adapter, its whole network was trained (give --format)")
    layout = adapter_layout(arguments.adapter, config)
    label = f"{arguments.run.resolve().name}, {trained.label}"
    metadata = adapter_header(config, trained.step, label, read_state(checkpoints_of(arguments.run)[-1]))
    count = write_adapter(
        arguments.output, adapter_weights(model), model, layout,
        dtype=arguments.dtype, metadata=metadata, overwrite=arguments.overwrite,
    )  # fmt: skip
    print(f"{arguments.output}: {trained.label}, {count} tensors, {layout.name} layout of adapters")
    return 0


def convert_adapter(arguments: argparse.Namespace) -> int:
    refuse_existing(arguments.output, arguments.overwrite)
    config = read_config(arguments.config, arguments.data_words)
    model = network_on_meta(config, trained_info(config))
    layout = adapter_layout(arguments.adapter, config)
    found = read_adapter(arguments.file, model, MODELS[config.model.name].adapter_layouts)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    kept = {key: text for key, text in found.metadata.items() if key in KEPT_METADATA}
    count = write_adapter(
        arguments.output, found.weights, model, layout,
        dtype=arguments.dtype, metadata=kept, overwrite=arguments.overwrite,
    )  # fmt: skip
    print(f"{arguments.output}: {count} tensors, from the {found.layout} layout of adapters to {layout.name}")
    return 0


def adapter_layout(name: str, config: JobConfig) -> AdapterLayout:
    known = known_layouts(MODELS[config.model.name].adapter_layouts)
    if name not in known:
        raise WeightsError(f"--adapter {name}: is not of model.name = {config.model.name} (there are {', '.join(known)})")
    return known[name]


def layout_of(name: str, config: JobConfig) -> PublishedLayout:
    known = MODELS[config.model.name].layouts
    if name not in known:
        has = f"its published layouts are {', '.join(known)}" if known else "it has no published layout"
        raise WeightsError(f"--format {name}: is not of model.name = {config.model.name} ({has})")
    return known[name]


def published_file(path: Path, model: DiffusionModel, layout: PublishedLayout) -> tuple[Path, list[str]]:
    """Published file of weights, and the conflicts of a folder's config.json with the model."""
    if not path.is_dir() or not layout.folder_files:
        return path, []
    whole = layout.folder_files
    names = [*whole, *(name.replace(".safetensors", INDEX_SUFFIX) for name in whole if name.endswith(".safetensors"))]
    source = next((path / name for name in names if (path / name).is_file()), None)
    if source is None:
        return path, [f"holds no {' or '.join(names)}"]
    try:
        document = json.loads(read_regular(path / "config.json"))
        return source, layout.folder_config_problems(document, model)
    except (OSError, ValueError, TypeError, RecursionError):
        return source, ["config.json is missing or damaged"]


def read_published(path: Path, layout: PublishedLayout) -> tuple[dict[str, Tensor], str | None]:
    try:
        return read_state_dict(path)
    except NotTensors as error:
        raise WeightsError(f"{error} ({layout.advice})" if layout.advice else str(error)) from error


def write_converted(
    path: Path, weights: Mapping[str, Tensor], dtype: str, unrounded: frozenset[str], metadata: dict[str, str]
) -> None:
    """Write weights in another dtype, all but the `unrounded` tables, one after the other. Raises OSError."""

    def entry(name: str) -> tuple[tuple[int, ...], torch.dtype]:
        shape = weights.shapes[name] if isinstance(weights, ComputedTensors) else tuple(weights[name].shape)
        return shape, weights[name].dtype if name in unrounded else getattr(torch, dtype)

    entries = {name: entry(name) for name in weights}
    entries = dict(sorted(entries.items(), key=lambda item: (-item[1][1].itemsize, item[0])))
    write_tensors(path, entries, (weights[name].to(kept) for name, (_, kept) in entries.items()), metadata)


def trained_for(config: JobConfig) -> str:
    objective = config.objective
    return f"trained for {objective.prediction} on {objective.path} with {objective.preconditioning} preconditioning"


def prefixed(path: Path, error: Exception) -> str:
    return "\n".join(f"{path}: {line}" for line in str(error).splitlines())


def run() -> NoReturn:
    """Run as a program, and end the process."""
    run_program(main)
