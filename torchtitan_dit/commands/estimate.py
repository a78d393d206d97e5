"""Estimate the cost of a run: scripts/estimate.py CONFIG --world-size N --device NAME [--section.key value ...]

Parameters, FLOPs, memory of each rank by part, step time, images per second and hours, without a GPU and without
running anything: a training step on tensors that have no memory. See docs/comparing.md.
"""

import argparse
import json
import sys
from dataclasses import replace

from torchtitan.conditions import Texts
from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.estimate.absent_data import without_data
from torchtitan.estimate.devices import DEVICES, Device
from torchtitan.estimate.encoding import uncounted
from torchtitan.estimate.measured import measured_shares
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan.estimate.report import as_record, as_text
from torchtitan.estimate.roofline import Efficiency, estimate_step_time
from torchtitan.processes.command_line import OneLineParser, at_least, positive, refusing
from torchtitan.programs import program
from torchtitan.training.utilisation import products_of

_LARGE = 1e9  # parameters


@refusing(ConfigError)
def main(words: list[str] | None = None) -> int:
    arguments, overrides = parse_arguments(words)
    words, note, info = without_data(["--job.config_file", arguments.config, *overrides])
    on_gpu = arguments.device.name != "CPU"
    config = load_config(words, arguments.world_size, elsewhere=on_gpu, info=info)
    if note:
        print(note, file=sys.stderr)
    if reason := uncounted(config):
        print(f"autoencoder.encode: its memory and time are not counted ({reason})", file=sys.stderr)
    if config.float8.enable and not config.float8.emulate and arguments.device.tflops_float8 is None:
        print(
            f"float8.enable: {arguments.device.name} has no float8 matrix products (set float8.emulate to true, or"
            " float8.enable to false)", file=sys.stderr,
        )  # fmt: skip
        return 2
    efficiency = _efficiency(arguments, config)
    model = model_on_meta(config)
    if isinstance(model.condition_kind, Texts):
        print("data.text_encoder: its memory and time are not counted", file=sys.stderr)
    if (parameters := model.num_parameters()) > _LARGE:
        print(f"a step of {parameters:,} parameters on tensors without memory: a minute or two ...", file=sys.stderr)
    memory = estimate_memory(config, arguments.world_size, on_gpu)
    time = estimate_step_time(config, model, memory, arguments.device, efficiency)
    if arguments.json:
        print(json.dumps(as_record(config, model, memory, time, arguments.device, efficiency), indent=1))
    else:
        print(as_text(config, model, memory, time, arguments.device, efficiency))
    return 0


def parse_arguments(words: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse arguments, `device` as a Device, and the words of the configuration."""
    parser = OneLineParser(prog=program("estimate"), description=__doc__, allow_abbrev=False)
    add, known = parser.add_argument, Efficiency()
    add("config", metavar="CONFIG", help="TOML file of the run, or the name of a shipped one")
    add("--world-size", type=at_least(1), default=1, metavar="N", help="processes (default: 1)")
    add("--device", required=True, type=_device_name, metavar="NAME",
        help=f"{', '.join(DEVICES)}; or CPU, or another GPU's name, with the numbers below")  # fmt: skip
    add("--memory", type=positive, metavar="GIB", help="memory of each process (default: the device's)")
    add("--tflops", type=positive, help="peak of matrix products in the run's precision, TFLOP/s")
    add("--memory-bandwidth", type=positive, metavar="GB_PER_S", help="of the memory")
    add("--node-bandwidth", type=positive, metavar="GB_PER_S", help="between processes of a node; 8 are one")
    add("--network-bandwidth", type=positive, metavar="GB_PER_S", help="between nodes, per process")
    of_visit = "what benchmarks/gpu_day.sh measured, else"
    add("--compute", type=_share, help=f"share of the compute peak (default: {of_visit} {known.compute})")
    add("--bandwidth", type=_share, help=f"share of the memory's (default: {of_visit} {known.memory})")
    add("--link", type=_share, default=known.link, help=f"share of the links' (default: {known.link})")
    add("--overlap", type=_share, default=known.overlap,
        help=f"share of communication hidden behind compute (default: {known.overlap})")
    add("--json", action="store_true", help="a JSON object: bytes, seconds, FLOPs")
    arguments, overrides = parser.parse_known_args(words)
    arguments.device = _device(parser, arguments)
    return arguments, overrides


def _efficiency(arguments: argparse.Namespace, config: JobConfig) -> Efficiency:
    """Shares of the command line; else measured ones where the device was visited, or assumed."""
    given = {"compute": arguments.compute, "memory": arguments.bandwidth}
    of_visit = measured_shares(arguments.device, products_of(vars(config.training)), config.float8.enable, config.compile.enable)
    measured = {name: found for name, found in of_visit.items() if given[name] is None}
    shares = {name: share for name, (share, _) in measured.items()} | {name: share for name, share in given.items() if share}
    places = {name: place for name, (_, place) in measured.items()}
    return Efficiency(**shares, link=arguments.link, overlap=arguments.overlap, measured=places)


def _device_name(name: str) -> str:
    return next((device for device in (*DEVICES, "CPU") if device.lower() == name.lower()), name)


def _device(parser: OneLineParser, arguments: argparse.Namespace) -> Device:
    own = ["memory", "tflops", "memory_bandwidth", "node_bandwidth", "network_bandwidth"]
    given = [name for name in own if getattr(arguments, name) is not None]
    if device := DEVICES.get(arguments.device):
        if others := [name for name in given if name != "memory"]:
            parser.error(f"--{others[0].replace('_', '-')} is for other devices; {arguments.device} has its own")
        return replace(device, memory_gib=arguments.memory or device.memory_gib)
    on_cpu = arguments.device == "CPU"
    links = (arguments.world_size > 1) + (arguments.world_size > Device.per_node)
    wanted = own[: 3 + links]
    if missing := [f"--{name.replace('_', '-')}" for name in wanted if name not in given]:
        text = "" if on_cpu else f": {arguments.device!r} is none of {', '.join(DEVICES)}, and another GPU"
        parser.error(f"--device{' CPU' * on_cpu}{text} needs {', '.join(missing)}")
    peak = arguments.tflops
    return Device(
        arguments.device, arguments.memory, peak, peak, arguments.memory_bandwidth, arguments.node_bandwidth or 0.0,
        arguments.network_bandwidth or 0.0, tflops_float8=None if on_cpu else peak,
    )  # fmt: skip


def _share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, is {text}")
    return value
