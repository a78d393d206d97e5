"""Manage checkpoints: list, verify and compare them, and export or import weights in published layouts.

Exit codes: 0; 1: verify found damage, or diff a difference; 2: refused, nothing written.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.checkpointer import CheckpointError, checkpoint_path, checkpoint_steps, newest_good, verify
from torchtitan.checkpoint.comparison import (
    TensorSource,
    compare,
    ema_tracks,
    is_counter,
    open_checkpoint,
    open_weights,
)
from torchtitan.checkpoint.location import location, run_checkpoints
from torchtitan.checkpoint.manifest import MANIFEST, RENAMED
from torchtitan.checkpoint.reading import read_state
from torchtitan.config.job import ConfigError, JobConfig
from torchtitan.config.latent_cache import trained_info
from torchtitan.data.base import DatasetError, DatasetInfo
from torchtitan.estimate.absent_data import without_data
from torchtitan.files.remote_path import AnyPath, RemotePath
from torchtitan.files.weight_files import WeightsError, header_of, named_weights, refuse_existing
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapter_files import DTYPES, known_layouts, read_adapter, write_adapter
from torchtitan.models.adapters.adapters import adapter_weights, merged_weights
from torchtitan.models.adapters.layouts import NATIVE, AdapterLayout
from torchtitan.processes.command_line import OneLineParser, readable_size, refusing
from torchtitan.runs.check import Finding, check_run
from torchtitan.runs.ownership import CONFIG_FILE
from torchtitan.settings.sources import split_keys
from torchtitan.weights.final_weights import adapter_header
from torchtitan.weights.model_record import ModelRecord, record_of
from torchtitan.weights.network import network_on_meta
from torchtitan.weights.published import LAYOUTS, OWN, WRITTEN, OwnWeights, open_published, write_weights
from torchtitan.weights.trained_model import TrainedModel, load_run, no_weights, read_config, record_of_run

MOST_ROWS = 10  # of differences
KEPT_METADATA = ("step", "weights", "model", "base", "base_sha256", "trigger_word")  # of adapters that are converted
ADAPTER_LAYOUTS = (NATIVE.name, *(name for family in MODELS.values() for name in family.adapter_layouts))


@refusing(ConfigError, CheckpointError, DatasetError)
def main(words: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = parse_arguments(sys.argv[1:] if words is None else words)
    return arguments.command(arguments)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse a command line; `--data.KEY VALUE` are words for the configuration's data."""
    words, data_words = split_keys(words, "data")
    parser = OneLineParser(description=__doc__)
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
    command.add_argument("--all", action="store_true", help=f"every difference, not the {MOST_ROWS} worst")

    command = commands.add_parser("export", help="write a run's weights to a file")
    command.set_defaults(command=export)
    command.add_argument("run", type=Path, help="a run's folder, or a file that was exported from one")
    command.add_argument("--step", type=int, help="checkpoint of this step (default: the newest good one)")
    command.add_argument("--ema", metavar="TRACK", help="EMA track, or 'none' (default: sampling.ema_track)")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--format", choices=WRITTEN, help="layout of the network; adapters are merged into it")
    what.add_argument("--adapter", choices=ADAPTER_LAYOUTS, help="write the adapter alone, in this layout")
    add_layout_options(command)
    add_output(command, "file to write, or folder for diffusers")

    command = commands.add_parser("import", help="turn published weights into a safetensors file of this program")
    command.set_defaults(command=import_)
    command.add_argument("file", type=Path, help=".safetensors or .pt file; for diffusers also its folder")
    command.add_argument("config", type=Path, nargs="?", metavar="CONFIG",
        help="configuration of the model, which --data.KEY VALUE completes (default: what the file itself shows)")
    command.add_argument("--format", choices=LAYOUTS, required=True)
    add_output(command, "file to write")

    command = commands.add_parser("convert-adapter", help="write a file of an adapter in another layout")
    command.set_defaults(command=convert_adapter)
    command.add_argument("file", type=Path, help=".safetensors file of an adapter, in any layout that is known")
    command.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the model, or the folder of a run of it")
    command.add_argument("--adapter", choices=ADAPTER_LAYOUTS, required=True, help="layout to write")
    add_output(command, "file to write")
    arguments = parser.parse_args(words)
    if data_words and arguments.command not in (import_, convert_adapter):
        parser.error(f"{data_words[0]}: is for import and convert-adapter alone")
    arguments.data_words = data_words
    return arguments


def add_layout_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--approximate", action="store_true",
        help="write even though the layout's network computes another sinusoid of the timestep "
        "(model.timestep_frequencies)")
    command.add_argument("--vae", type=Path, metavar="FOLDER",
        help="AutoencoderKL of diffusers that a diffusers-pipeline is to have (default: the autoencoder of the training)")


def add_output(command: argparse.ArgumentParser, description: str) -> None:
    command.add_argument("--output", type=Path, required=True, help=description)
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32)")
    command.add_argument("--overwrite", action="store_true", help="replace existing files")


def list_checkpoints(arguments: argparse.Namespace) -> int:
    checkpoints = checkpoints_of(location(arguments.run))
    print(f"{'step':>10}  {'size':>10}  {'date':16}  {'state':7}  EMA tracks")
    for path in checkpoints:
        problem = verify(path)
        if not path.exists():
            continue  # the run has deleted it meanwhile
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
    if (a.state is None) != (b.state is None):
        raise CheckpointError(
            f"{arguments.a} and {arguments.b}: a checkpoint and a file of weights (compare with a file of: export RUN --format "
            "safetensors)"
        )
    result = compare(a, b)
    if result.equal:
        print(f"equal bit for bit: {result.num_equal} tensors")
        return 0
    largest = max((each.largest for each in result.different if not is_counter(each.name)), default=0.0)
    steps = [each.state["step"] for each in (a, b) if each.state and "step" in each.state]
    numbers = f"steps {steps[0]} and {steps[1]}: " if len(set(steps)) == 2 else ""
    of_tensors = result.different or result.reshaped or result.only_a or result.only_b
    verdict = "not equal" if of_tensors else "only state besides tensors differs"
    print(
        f"{numbers}{verdict}: {result.num_equal} tensors equal bit for bit, {len(result.different)} different "
        f"(max {largest:.3g}), {len(result.reshaped)} of another shape or dtype, {len(result.only_a)} only in A, "
        f"{len(result.only_b)} only in B"
    )
    worst = sorted(result.different, key=lambda difference: difference.relative, reverse=True)
    lines = [f"{each.name}: max {each.largest:.3g}, relative {each.relative:.3g}" for each in worst]
    other = [f"only in A: {name}" for name in result.only_a] + [f"only in B: {name}" for name in result.only_b]
    other += [f"another shape or dtype: {name}: {described(a, name)} and {described(b, name)}" for name in result.reshaped]
    other += [f"state.json: {key}" for key in result.state_keys]
    for found in (lines, other):
        print_rows(found, len(found) if arguments.all else MOST_ROWS)
    return 1


def print_rows(lines: list[str], most: int) -> None:
    for line in lines[:most]:
        print(line)
    if len(lines) > most:
        print(f"... and {len(lines) - most:,} more (--all)")


def open_source(path: AnyPath) -> TensorSource:
    if is_checkpoint(path):
        return open_checkpoint(path)
    if not path.is_dir() and isinstance(path, Path):
        if path.name.startswith("step-") and (steps := checkpoint_steps(path.parent)):
            raise CheckpointError(f"{path}: no such checkpoint (there are: {', '.join(map(str, reversed(steps)))})")
        return open_weights(path)
    checkpoints_of(path)
    step, skipped = newest_good(run_checkpoints(path))
    if step is None or skipped:  # an older one might be compared with itself
        raise CheckpointError(f"{skipped[0].removesuffix('; skipped')} (name the folder of another checkpoint to compare that)")
    return open_checkpoint(checkpoint_path(run_checkpoints(path), step))


def is_checkpoint(path: AnyPath) -> bool:
    path = path.resolve() if isinstance(path, Path) else path
    return path.is_dir() and path in {checkpoint_path(path.parent, step) for step in checkpoint_steps(path.parent)}


def is_good(checkpoint: AnyPath) -> bool:
    return verify(checkpoint) is None


def checkpoints_of(run: AnyPath) -> list[AnyPath]:
    """Checkpoints of a run, oldest first; the one that it is itself."""
    if is_checkpoint(run):
        return [run.resolve() if isinstance(run, Path) else run]
    if not run.is_dir():
        raise CheckpointError(f"{run}: no such run folder or checkpoint")
    folder = run_checkpoints(run)
    steps = checkpoint_steps(folder)
    if not steps:
        if (run / MANIFEST).is_file():
            raise CheckpointError(f"{run}: {RENAMED}")
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


def export(arguments: argparse.Namespace) -> int:
    refuse_existing(arguments.output, arguments.overwrite)
    if arguments.run.is_file():
        return export_file(arguments)
    if not (arguments.run / MANIFEST).is_file():
        checkpoints_of(arguments.run)
    trained = load_run(arguments.run, arguments.ema, arguments.step, torch.device("cpu"), base=not arguments.adapter)
    for warning in trained.warnings:
        print(warning, file=sys.stderr)
    if arguments.adapter:
        return export_adapter(arguments, trained)
    weights = own_weights(arguments.run, trained)
    print_notes(write_weights(weights, arguments.output, arguments.format, **write_options(arguments)))
    print(f"{arguments.output}: {trained.label}, {arguments.format} layout")
    return 0


def export_file(arguments: argparse.Namespace) -> int:
    """Export an exported file again, in another layout or dtype; its header names its own layout."""
    for option in ("step", "ema", "adapter"):
        if getattr(arguments, option) is not None:
            advice = "of a file: --format, or convert-adapter" if option == "adapter" else "leave it out"
            raise WeightsError(f"--{option}: is for runs, and {arguments.run} is a file ({advice})")
    if said := no_weights(arguments.run):
        raise WeightsError(f"{arguments.run}: {said}")
    layout = header_of(arguments.run).get("layout", "") if arguments.run.suffix == ".safetensors" else ""
    if layout not in (OWN, *LAYOUTS):
        raise WeightsError(f"{arguments.run}: no header names its layout (use import FILE --format LAYOUT first)")
    weights, _ = open_published(arguments.run, layout, None)
    print_notes(write_weights(weights, arguments.output, arguments.format, **write_options(arguments)))
    print(f"{arguments.output}: {weights.label}, {arguments.format} layout")
    return 0


def own_weights(run: Path, trained: TrainedModel) -> OwnWeights:
    """Weights of a run under the network's own names; adapters are merged into the network."""
    model, config = trained.model, trained.config
    tensors: Mapping[str, Tensor] = named_weights(model)
    if config.lora.enable:
        model, tensors = network_on_meta(config, trained.info), merged_weights(model)
    return OwnWeights(run, trained.record, model, tensors, f"{run.resolve().name}, {trained.label}")


def import_(arguments: argparse.Namespace) -> int:
    refuse_existing(arguments.output, arguments.overwrite)
    if arguments.output.suffix != ".safetensors":
        raise WeightsError(f"{arguments.output}: must end in .safetensors, the format of the output")
    if said := no_weights(arguments.file):
        raise WeightsError(f"{arguments.file}: {said}")
    weights, notes = open_published(arguments.file, arguments.format, configured(arguments))
    print_notes(notes)
    write_weights(weights, arguments.output, OWN, dtype=arguments.dtype, overwrite=arguments.overwrite)
    print(f"{arguments.output}: {len(weights.tensors)} tensors")
    return 0


def configured(arguments: argparse.Namespace) -> ModelRecord | None:
    """Record of the configuration that was given; neither its data nor other files that a training needs have to be here."""
    if not arguments.config:
        return None
    with suppress(ConfigError, DatasetError):
        return record_of(read_config(arguments.config, arguments.data_words))
    config, info, note = described_network(arguments.config, arguments.data_words)
    print_notes([note] if note else [])
    return record_of(config, info)


def write_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("dtype", "overwrite", "approximate", "vae")}


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def export_adapter(arguments: argparse.Namespace, trained: TrainedModel) -> int:
    config, model = trained.config, trained.model
    if arguments.approximate or arguments.vae:
        raise WeightsError(f"--{'approximate' if arguments.approximate else 'vae'}: has no effect on an adapter (leave it out)")
    if not config.lora.enable:
        raise WeightsError(f"{arguments.run}: has no adapter, its whole network was trained (give --format)")
    layout = adapter_layout(arguments.adapter, config)
    label = f"{arguments.run.resolve().name}, {trained.label}"
    paths = checkpoints_of(arguments.run)[::-1]
    good = next((path for path in paths if step_of(path) == trained.step), None) or next(filter(is_good, paths), paths[0])
    metadata = adapter_header(config, trained.step, label, read_state(good))
    count = write_adapter(
        arguments.output, adapter_weights(model), model, layout,
        dtype=arguments.dtype, metadata=metadata, overwrite=arguments.overwrite,
    )  # fmt: skip
    print(f"{arguments.output}: {trained.label}, {count} tensors, {layout.name} layout of adapters")
    print_notes(
        f"the run also draws with {extra.path} at {extra.sampling_weight:g} (lora.extra), which is not in this file"
        for extra in config.lora.extra if extra.sampling_weight
    )  # fmt: skip
    return 0


def convert_adapter(arguments: argparse.Namespace) -> int:
    refuse_existing(arguments.output, arguments.overwrite)
    config, info, _ = described_network(arguments.config, arguments.data_words)
    model = network_on_meta(config, info)
    layout = adapter_layout(arguments.adapter, config)
    found = read_adapter(arguments.file, model, MODELS[config.model.name].adapter_layouts)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    kept = {key: text for key, text in found.metadata.items() if key in KEPT_METADATA}
    count = write_adapter(
        arguments.output, found.weights, model, layout,
        dtype=arguments.dtype, metadata=kept, overwrite=arguments.overwrite,
    )  # fmt: skip
    before = found.metadata.get("layout", found.layout)
    print(f"{arguments.output}: {count} tensors, from the {before} layout of adapters to {layout.name}")
    return 0


def described_network(path: Path, data_words: list[str]) -> tuple[JobConfig, DatasetInfo, str]:
    """Configuration and data of a network by a run, or by a file of one, and what is assumed of data that are not here.

    Raises:
        ConfigError: they cannot be known.
    """
    folder = path.parent if path.name == CONFIG_FILE else path
    if folder.is_dir() and not data_words:
        record, _ = record_of_run(folder, run_checkpoints(folder))
        return record.config, record.info, ""
    words, note, info = without_data(["--job.config_file", str(path), *data_words])
    config = read_config(path, words[2:], elsewhere=True, info=info)
    return config, trained_info(config), note


def adapter_layout(name: str, config: JobConfig) -> AdapterLayout:
    known = known_layouts(MODELS[config.model.name].adapter_layouts)
    if name not in known:
        raise WeightsError(f"--adapter {name}: is not of model.name = {config.model.name} (there are {', '.join(known)})")
    return known[name]
