"""Counts of a train step on a GPU, without one: python benchmarks/step_counts.py [CONFIG.toml] [--images N] [--ranks R]

Runs `Trainer.train_step` as rank 0 of R on an imitated CUDA device: tensors have shapes and no values. Counts by
phase: operations on the device (kernels, nearly), bytes of their inputs and outputs, FLOPs by dtype, copies between host
and device, times that the host waits for the device, and live memory. Eager, by CUDA's autocast policy. Needs a C++
compiler once. Further words are of the configuration: `--gns.enable true`. With --json, one JSON object.

Without a configuration it counts the rows of docs/benchmarks.md, each in a separate process, and writes them as a section
(--section, such as "before") of benchmarks/results/step_counts.json, with the time of a step derived from them by a roofline.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.config.job import ConfigError, load_config
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.distributed.config import CompileConfig
from torchtitan.distributed.precision import DTYPES
from torchtitan.estimate.fake_cuda.compiled_parts import as_trained, count_both, replace_eager
from torchtitan.estimate.fake_cuda.counter import PhaseCounts, StepCounter
from torchtitan.estimate.fake_cuda.device import NoFakeCuda, fake_cuda
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan.gns.capture import GradientTaps
from torchtitan.gns.config import bin_edges
from torchtitan.gns.of_run import build_taps
from torchtitan.models import build_model
from torchtitan.models.base import DiffusionModel
from torchtitan.models.float8 import Float8Config, converted_share
from torchtitan.processes.command_line import OneLineParser, run_program
from torchtitan.processes.exit_codes import REFUSED
from torchtitan.runs.folder import versions
from torchtitan.state.run_state import RunState
from torchtitan.supervision.phases import Phases
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import PEAK_TFLOPS_BF16, PEAK_TFLOPS_FLOAT8

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "step_counts.json"
# Left out: work beside the step, and what needs a real device.
_ALONE = [
    "--data.num_workers", "0", "--checkpoint.enable", "false", "--sampling.enable", "false", "--validation.enable", "false",
    "--evaluation.enable", "false", "--metrics.enable_tensorboard", "false", "--cache.enable", "false",
]  # fmt: skip
PHASES = (
    "batch", "draws", "objective", "model", "blocks", "backward", "backward blocks", "gns", "gradients", "optimizer", "ema",
)  # fmt: skip
_NAMES = {"data": "batch", "forward": "objective"}


def main(arguments: list[str] | None = None) -> int:
    known, words = parse_arguments(arguments)
    if known.config is None:
        write_rows(known.section, known.rows)
        return 0
    try:
        counted = count_step(words, known.ranks, known.step, known.compiled)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except NoFakeCuda as error:
        print(f"step_counts: {error}", file=sys.stderr)
        return REFUSED
    print(json.dumps(as_record(counted), indent=1) if known.json else as_text(counted))
    return 0


def parse_arguments(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse arguments; and the words of the configuration."""
    parser = OneLineParser(
        prog="step_counts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("config", nargs="?", help="configuration file")
    parser.add_argument("--images", type=int, help="images per rank and step, in one microbatch; where ranks share the "
                        "tokens of images, of each group of them (default: the configuration's)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the run; those of a sharded one share the model")
    parser.add_argument("--step", type=int, default=9, help="number of the counted step; measurements have an interval")
    parser.add_argument("--section", default="after", help="of the results, without a configuration (default: after)")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only those with this in their name (default: all)")
    parser.add_argument("--compiled", action="store_true", help="count what would be compiled as such")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    known, words = parser.parse_known_args(arguments)
    if not any(known.rows in name for name in ROWS):
        parser.error(f"--rows: {known.rows!r} is in no row's name")
    if known.images is not None:
        words = [*images_words(known.images), *words]
    return known, ["--job.config_file", known.config or "", *words]


def images_words(images: int) -> list[str]:
    """Words of a configuration with that many images per rank and step, in one microbatch."""
    return ["--training.local_batch_size", str(images), "--training.global_batch_size", "-1"]


@dataclass(frozen=True)
class CountedStep:
    """Counts of a train step on one rank.

    Attributes:
        phases: phase, one of PHASES -> counts.
        images: of the step over its ranks; those that share the tokens of an image have a part of it each.
        flops_per_image: of training, without recomputation.
        float8_share: of the training's products, those that the configuration has in float8; counted as of bfloat16.
    """

    phases: dict[str, PhaseCounts]
    images: float
    flops_per_image: int
    float8_share: float = 0.0


def count_step(words: list[str], ranks: int = 1, step: int = 9, compiled: bool = False) -> CountedStep:
    """Count a train step as rank 0, in this process; before its first backward.

    The step before it creates the optimizer's state and is not counted. Linears in float8 are counted as they are in bfloat16,
    without the package that converts them: their casts and scales are left out.

    Args:
        words: command line of a configuration.
        ranks: of the run.
        step: number of the counted step, 2 or more.
        compiled: count kernels and bytes of the blocks and of the objective as of compiled ones; memory stays that of eager ones.

    Raises:
        NoFakeCuda: there is a GPU, no C++ compiler, or several ranks without shards.
    """
    counter = StepCounter()
    alike = patch.object(GradientTaps, "_compare", lambda *_: None)  # which few measured steps do
    with tempfile.TemporaryDirectory() as folder, fake_cuda(counter), _fake_ranks(ranks), alike:
        config = load_config([*words, *_ALONE, "--job.dump_folder", folder], ranks, elsewhere=True)
        if ranks > 1 and config.parallelism.data_parallel_shard_degree == 1:
            raise NoFakeCuda("DDP's reduction needs memory (count one rank, or shards)")
        config.compile = CompileConfig()
        float8, config.float8 = config.float8, Float8Config()
        trainer = Trainer(config)
        trainer.phases = _CountedPhases(counter)
        _mark(trainer.state, counter)
        for number in (step - 1, step):
            counter.reset()
            trainer.state.step = number
            trainer.train_step()
        if compiled:
            _compile(trainer.state, counter)
        trainer.close()
    phases = {name: counter.phases[name] for name in PHASES if name in counter.phases}
    share = converted_share(model_on_meta(config), float8)
    return CountedStep(phases, trainer.state.batch_size / ranks, trainer.state.flops_per_image, share)


@contextmanager
def _fake_ranks(ranks: int) -> Iterator[None]:
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with (
            patch.object(dist, "broadcast_object_list", lambda *_, **__: None),
            patch.object(dist, "all_gather_object", _everyone_alike),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _everyone_alike(values: list[Any], value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)


class _CountedPhases(Phases):
    def __init__(self, counter: StepCounter) -> None:
        super().__init__()
        self._counter = counter

    def __call__(self, name: str) -> Any:
        return self._counter.phase(_NAMES.get(name, name))


def _mark(state: RunState, counter: StepCounter) -> None:
    """Mark parts of the train loop's phases as phases of the count."""
    _count_calls(counter, "draws", state.objective, "draw")
    _count_calls(counter, "draws", state, "condition")
    if state.gns:
        for name in ("begin_step", "begin_microbatch", "end_microbatch", "end_step", "conclude"):
            _count_calls(counter, "gns", state.gns, name)
    state.train_module.register_forward_pre_hook(lambda *_: _enter(counter, "model"), prepend=True)
    state.train_module.register_forward_hook(lambda *_: _enter(counter, "objective"))
    for number, block in enumerate(state.model.blocks()):
        block.register_forward_pre_hook(_entering_blocks(counter, first=number == 0), prepend=True)
        block.register_forward_hook(_leaving_block(counter))


def _compile(state: RunState, counter: StepCounter) -> None:
    """Replace the counts of eager blocks, and of the objective's `graphs`, by those of compiled ones.

    What a step does beside them stays: a block with FSDP's copies is the count of an eager one with them, less that of an eager
    block without, plus that of a compiled one.
    """
    one = state.config.model.of_depth(1)
    if one is None:
        raise NoFakeCuda("--compiled: the blocks differ")
    phases, counter.phases = counter.phases, {}  # what is run for the count is none of the step
    inputs, graphs, output = _inputs_of_graphs(state)
    param_dtype = DTYPES[state.config.training.mixed_precision_param]
    autocast = None if state.layout.sharded or param_dtype == torch.float32 else param_dtype
    with torch.device("meta"):
        model = build_model(one, state.info.image_shape, state.model.condition_kind)
    model.to_empty(device="cuda").train()
    if state.gns and state.config.gns.single_pass:
        _tap(state, model)
    block = model.blocks()[0]
    if state.layout.sharded:  # FSDP2 casts the weights, where autocast would
        block.to(param_dtype)
    counts = [(len(state.model.blocks()), "blocks", "backward blocks", *count_both(counter, block, inputs, autocast))]
    for name, arguments in graphs.items():
        phase = "objective" if name in ("noisy", "terms") else "draws"
        counts.append((1, phase, "backward", *count_both(counter, getattr(state.objective, name), arguments, None, output)))
    counter.phases = phases
    for times, forward, backward, eager, compiled in counts:
        replace_eager(phases[forward], eager["forward"].calls, compiled.forward, times)
        replace_eager(phases[backward], eager["backward"].calls, compiled.backward, times)
        phases[forward].kept += compiled.kept * times if forward == "blocks" else 0


def _tap(state: RunState, model: DiffusionModel) -> None:
    """Give a model the taps that the run's has, on as in the counted step."""
    config, layout = state.config, state.layout
    taps = build_taps(config, model, bin_edges(config.gns, config.objective), layout)
    measured = state.step % config.gns.interval == 0
    taps.begin_step(state.step, measured, {}, config.optimizer.beta2, layout)
    taps.begin_microbatch(torch.zeros(config.training.local_batch_size, device="cuda"))


def _inputs_of_graphs(state: RunState) -> tuple[tuple[Any, ...], dict[str, tuple[Any, ...]], Tensor]:
    """Inputs of the first block and of the objective's graphs in a forward, and the network's output."""
    inputs: list[Any] = []
    outputs: list[Tensor] = []
    graphs: dict[str, tuple[Any, ...]] = {}
    hooks = [
        state.model.blocks()[0].register_forward_pre_hook(lambda _, given: inputs.extend(given)),
        state.train_module.register_forward_hook(lambda *given: outputs.append(given[-1])),
    ]
    with ExitStack() as stack:
        for name in state.objective.graphs:
            stack.enter_context(patch.object(state.objective, name, _recording(graphs, name, getattr(state.objective, name))))
        batch = state.to_device(state.data.next_batch())
        with torch.no_grad():
            state.loss_terms(batch, GlobalBatch(0, state.batch_size))
    for hook in hooks:
        hook.remove()
    tables = {id(buffer) for buffer in state.model.buffers()}  # which have no gradient
    of_images = [isinstance(x, Tensor) and id(x) not in tables and x.shape[:1] == inputs[0].shape[:1] for x in inputs]
    block = tuple(as_trained(x) if trained else x for x, trained in zip(inputs, of_images, strict=True))
    return block, graphs, outputs[0]


def _recording(found: dict[str, tuple[Any, ...]], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def recording(*arguments: Any) -> Any:
        found[name] = arguments
        return function(*arguments)

    return recording


def _enter(counter: StepCounter, phase: str) -> None:
    counter.enter(phase)


def _entering_blocks(counter: StepCounter, first: bool) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        counter.enter("blocks")
        if first:  # the gradients of the first block's inputs leave the blocks
            for tensor in inputs:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: _enter(counter, "backward"))

    return hook


def _leaving_block(counter: StepCounter) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: _enter(counter, "backward blocks"))
        counter.enter("model")

    return hook


def _count_calls(counter: StepCounter, phase: str, owner: Any, name: str) -> None:
    function = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter.phase(phase):
            return function(*args, **kwargs)

    setattr(owner, name, counted)


def whole(counts: dict[str, PhaseCounts]) -> PhaseCounts:
    """Counts of the whole step."""
    total = PhaseCounts()
    for phase in counts.values():
        total.add(phase)
    return total


# ---------------------------------------------------------------------- roofline

DEVICE = "H200"
# Rates that an H200 reaches, assumed: FLOP/s of products by dtype and of attention, bytes/s, seconds of the smallest kernel on
# the device, seconds of the host for an eager operation.
PRODUCTS = {"bfloat16": 680e12, "float32": 45e12, "float64": 45e12}
ATTENTION, BANDWIDTH, SMALLEST_KERNEL, HOST_OPERATION = 400e12, 4.0e12, 2.5e-6, 6e-6


def derived(counted: CountedStep) -> dict[str, float]:
    """Times derived from counts by a roofline, eager and without communication: not measured.

    An operation takes the longest of its FLOPs, its bytes and the smallest kernel; a step the longer of device and host.
    Products in float8 have the rate of bfloat16 times the ratio of the peaks, an upper bound.
    """
    device, products = 0.0, PRODUCTS | {"bfloat16": _product_rate(counted)}
    for call, times in whole(counted.phases).calls.items():
        rate = ATTENTION if "dot_product" in call.name else products.get(call.dtype, PRODUCTS["float32"])
        device += times * max(call.flops / rate, call.moved / BANDWIDTH, SMALLEST_KERNEL)
    host = whole(counted.phases).operations * HOST_OPERATION
    rate = counted.images / max(device, host)
    mfu = rate * counted.flops_per_image / (1e12 * PEAK_TFLOPS_BF16[DEVICE])
    return {"device_seconds": device, "host_seconds": host, "images_per_second": rate, "mfu": mfu}


def _product_rate(counted: CountedStep) -> float:
    """Mean rate of the products counted as of bfloat16, some of which are in float8."""
    calls = whole(counted.phases).calls.items()
    flops = sum(times * call.flops for call, times in calls)
    linears = sum(times * call.flops for call, times in calls if "dot_product" not in call.name)
    share = min(counted.float8_share * flops / max(linears, 1), 1.0)
    faster = PEAK_TFLOPS_FLOAT8[DEVICE] / PEAK_TFLOPS_BF16[DEVICE]
    return PRODUCTS["bfloat16"] / (1 - share + share / faster)


_XL = ["train_configs/dit_xl2_256.toml", "--data.name", "synthetic", "--data.num_classes", "1000"]
_B = [*_XL, "--model.flavor", "DiT-B/2", "--images", "256"]
_NOISE = ["--gns.enable", "true", "--step", "16"]
_FREE = ["--gns.enable", "true", "--step", "9"]  # a step between two measured ones
_7B = [
    *_XL, "--model.flavor", "TorchDiTan-7B", "--model.learned_variance", "false", "--data.shape", "[16, 64, 64]", "--ranks", "8",
    "--images", "16",
]  # fmt: skip
ROWS = {
    "DiT-XL/2, 256 images": [*_XL, "--images", "256"],
    "DiT-XL/2, 256 images, compiled": [*_XL, "--images", "256", "--compiled"],
    "DiT-XL/2, 256 images, noise measured": [*_XL, "--images", "256", *_NOISE],
    "DiT-XL/2, 256 images, noise measured, compiled": [*_XL, "--images", "256", *_NOISE, "--compiled"],
    "DiT-XL/2, 256 images, noise, free step, compiled": [*_XL, "--images", "256", *_FREE, "--compiled"],
    "DiT-XL/2, 32 images": [*_XL, "--images", "32"],
    "DiT-XL/2, 32 images, noise measured": [*_XL, "--images", "32", *_NOISE],
    "DiT-XL/2, 32 images, compiled": [*_XL, "--images", "32", "--compiled"],
    "DiT-XL/2, 32 images, noise measured, compiled": [*_XL, "--images", "32", *_NOISE, "--compiled"],
    "DiT-XL/2, 32 images, noise, free step, compiled": [*_XL, "--images", "32", *_FREE, "--compiled"],
    "DiT-B/2, 256 images": _B,
    "DiT-B/2, 256 images, compiled": [*_B, "--compiled"],
    "DiT-B/2, 256 images, noise measured": [*_B, *_NOISE],
    "DiT-B/2, 256 images, noise measured, compiled": [*_B, *_NOISE, "--compiled"],
    "DiT-B/2, 256 images, noise, free step, compiled": [*_B, *_FREE, "--compiled"],
    "7B, FSDP x 8, 16 images a rank": _7B,
    "7B, FSDP x 8, 16 images a rank, compiled": [*_7B, "--compiled"],
    "7B, FSDP x 8, 16 images a rank, noise measured": [*_7B, *_NOISE],
    "7B, FSDP x 8, 16 images a rank, noise measured, compiled": [*_7B, *_NOISE, "--compiled"],
    "7B, FSDP x 8, 16 images a rank, noise, free step, compiled": [*_7B, *_FREE, "--compiled"],
}


def write_rows(section: str, containing: str = "") -> None:
    """Count the rows with a text in their names, and write them into a section of the results.

    All rows of a section are counted at one commit: a part of the rows does not replace those of another commit, and the
    program exits with one line.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    results["rates"] = {
        "device": DEVICE, "products_flops_per_second": PRODUCTS, "attention_flops_per_second": ATTENTION,
        "bytes_per_second": BANDWIDTH, "smallest_kernel_seconds": SMALLEST_KERNEL, "host_operation_seconds": HOST_OPERATION,
    }  # fmt: skip
    known_section = results.get(section, {"commit": commit, "rows": {}})
    if containing and known_section["commit"] != commit:
        sys.exit(
            f"step_counts: --rows: the rows of section {section!r} are of commit {known_section['commit']}, not of {commit}"
            " (leave --rows out, or name a new --section)"
        )
    rows: dict[str, Any] = known_section["rows"] if containing else {}
    results[section] = {"commit": commit, "date": date.today().isoformat(), "versions": versions(), "rows": rows}
    for name, words in ((name, words) for name, words in ROWS.items() if containing in name):
        command = [sys.executable, str(Path(__file__).resolve()), *words, "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr.strip()}")
        known, of_config = parse_arguments(words)
        config = load_config([*of_config, *_ALONE], known.ranks, elsewhere=True)
        rows[name] = json.loads(done.stdout) | {"estimated_peak_bytes": estimate_memory(config, known.ranks, on_gpu=True).total}
        operations, rate = rows[name]["step"]["operations"], rows[name]["derived"]["images_per_second"]
        print(f"{name}: {operations:,} operations, {rate:.0f} images/s", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


# ---------------------------------------------------------------------- output


def as_record(counted: CountedStep) -> dict[str, Any]:
    """Record of the counts, for machines: by phase, of the whole step, and the times derived from them."""
    counts = counted.phases
    of_phases = {name: _record(phase) for name, phase in (counts | {"step": whole(counts)}).items()}
    return of_phases | {"derived": derived(counted)}


def _record(phase: PhaseCounts) -> dict[str, Any]:
    waiting = [copy for copy in phase.copies if copy.waits]
    return {
        "operations": phase.operations,
        "bytes_moved": phase.moved,
        "flops": dict(phase.flops),
        "collective_bytes": dict(phase.collectives),
        "copies_to_device": sum(copy.to_device for copy in phase.copies),
        "copies_to_host": sum(not copy.to_device for copy in phase.copies),
        "synchronising_copies": len(waiting),
        "waits": dict(phase.waits),
        "peak_bytes": phase.peak,
    } | ({"kept_bytes": phase.kept} if phase.kept else {})


def as_text(counted: CountedStep) -> str:
    """Format the counts as a table for readers, with the copies that make the host wait."""
    counts, times = counted.phases, derived(counted)
    lines = [f"{'':16}{'operations':>11}{'GB moved':>10}{'TFLOP':>8}{'to device':>11}{'to host':>9}{'waits':>7}{'peak GB':>9}"]
    for name, record in as_record(counted).items():
        if name == "derived":
            continue
        lines.append(
            f"{name:16}{record['operations']:11,}{record['bytes_moved'] / 1e9:10.2f}{sum(record['flops'].values()) / 1e12:8.2f}"
            f"{record['copies_to_device']:11}{record['copies_to_host']:9}"
            f"{record['synchronising_copies'] + sum(record['waits'].values()):7}{record['peak_bytes'] / 1e9:9.2f}"
        )
    total = whole(counts)
    lines += [f"FLOPs in {dtype}: {flops / 1e12:.2f} T" for dtype, flops in total.flops.items()]
    for name, phase in counts.items():
        for copy in phase.copies:
            if copy.waits:
                where = "to the device" if copy.to_device else "to the host"
                lines.append(f"{name}: the host waits for a copy {where} of {list(copy.shape)} {copy.dtype}")
        lines += [f"{name}: the host waits in {reason}, {times} x" for reason, times in phase.waits.items()]
    lines.append(
        f"derived for one {DEVICE} by a roofline: device {times['device_seconds']:.3f} s, host {times['host_seconds']:.3f} s, "
        f"{times['images_per_second']:.0f} images/s, MFU {times['mfu']:.1%}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main)
