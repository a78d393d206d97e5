"""Report of an estimate as text and as a JSON object."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from torchtitan.config.job import JobConfig
from torchtitan.distributed.config import ActivationCheckpointConfig
from torchtitan.estimate.devices import Device
from torchtitan.estimate.encoding import encoding_flops_per_image
from torchtitan.estimate.measured import waiting_step
from torchtitan.estimate.memory import PARTS, MemoryEstimate, estimate_memory
from torchtitan.estimate.roofline import (
    Efficiency,
    StepTime,
    microbatches,
    training_flops_per_image,
    untrained_forwards,
)
from torchtitan.models import DiffusionModel, flavor_and_changes
from torchtitan.models.quantized import QuantizationError, quantized_weights
from torchtitan.pictures.number_text import counted, significant
from torchtitan.settings.sizes import largest_divisor
from torchtitan.training.schedules import largest_growth

# Left for the CUDA context, libraries' workspaces and buffers, and gaps between tensors.
_USABLE = 0.9
_SHARES = {
    "compute": "the compute peak", "memory": "memory bandwidth", "link": "link bandwidth",
    "overlap": "communication overlapped",
}  # fmt: skip


def as_record(
    config: JobConfig, model: DiffusionModel, memory: MemoryEstimate, time: StepTime, device: Device,
    efficiency: Efficiency,
) -> dict[str, Any]:
    """Record of all estimates, for machines: bytes, seconds, FLOPs."""
    return {
        "num_parameters": model.num_parameters(), "flops_per_image": training_flops_per_image(config, model),
        "encoding_flops_per_image": encoding_flops_per_image(config),
        "memory": dataclasses.asdict(memory) | {"total": memory.total, "needed": memory.needed},
        "fits": fits(memory, device), "time": dataclasses.asdict(time), "device": dataclasses.asdict(device),
        "efficiency": dataclasses.asdict(efficiency),
    }  # fmt: skip


def fits(memory: MemoryEstimate, device: Device) -> bool | None:
    """Check whether the run's peak is at most nine tenths of the device's memory; None: it depends on the compiler."""
    usable = _USABLE * device.memory_gib * 2**30
    if memory.needed <= usable:
        return True
    undecided = memory.least is not None and max(memory.least, memory.start_up) <= usable
    return None if undecided else False


def as_text(
    config: JobConfig, model: DiffusionModel, memory: MemoryEstimate, time: StepTime, device: Device,
    efficiency: Efficiency,
) -> str:
    """Format the same as text for readers."""
    layout = config.parallelism
    ranks, degree = layout.processes, layout.context_parallel_degree
    tokens = f" x {degree} parts of each image's tokens" if degree > 1 else ""
    further = untrained_forwards(config)
    calls = f", with {counted(further, 'call')} without a gradient" if further else ""
    notes = {
        "gradients": f" ({_gib(memory.all_gradients).strip()} at the update{_accumulated(config)})",
        "activations": f" (checkpointing: {_checkpointing(config.activation_checkpoint)}; as an eager step has them)",
    }
    lines = [
        f"{flavor_and_changes(config.model)} on {ranks} x {device.name}: "
        f"{counted(layout.data_parallel_replicate_degree, 'replica')} x "
        f"{counted(layout.data_parallel_shard_degree, 'shard')}{tokens}, "
        f"{counted(config.training.local_batch_size, 'image')} per rank and forward, "
        f"{config.training.global_batch_size} per step, {config.training.mixed_precision_param}"
        + (", products in float8 (their smaller inputs are not counted below)" if config.float8.enable else ""),
        f"parameters            {model.num_parameters():,}{_frozen(config, model)}",
        f"FLOPs per image       {training_flops_per_image(config, model):.4g} (training{calls})"
        + (f", {encoding_flops_per_image(config):.4g} (encoding)" if time.encoding else ""),
        f"memory per rank, at the peak of a step ({memory.phase}):",
        *(f"  {part:20}{_gib(getattr(memory, part))}{notes.get(part, '')}" for part in PARTS),
        f"  {'total':20}{_gib(memory.total)}",
        *([f"  {'in host memory':20}{_gib(memory.host)} (updated there, in time not counted below)"] if memory.host else []),
        *_range_lines(memory),
        f"  {'at the start':20}{_gib(memory.start_up)} ({_start_up(config)})",
        f"  {'the device has':20}{device.memory_gib:9.2f} GiB: {_verdict(config, model, memory, device)}",
    ]
    if config.gns.enable:
        lines.append("  gns.enable: memory of the gradient noise scale's measurement is not counted")
    if config.lora.enable and config.lora.extra:
        lines.append("  lora.extra: further adapters are not counted")
    if memory.least is not None:
        lines.append("the compiler's recomputation is not in the times below: up to a third more compute")
    return "\n".join(lines + _time_lines(time, efficiency, config.float8.enable, device, microbatches(config)))


def _accumulated(config: JobConfig) -> str:
    """Where the gradients of a step's earlier microbatches are, in words."""
    _, shards = config.parallelism.degrees.copies_and_shards
    if microbatches(config) * largest_growth(config) == 1 or config.parallelism.processes == 1:
        return ""
    where = "whole on every rank" if shards > 1 else "beside DDP's buckets"
    return f"; those of several microbatches accumulate {where}"


def _start_up(config: JobConfig) -> str:
    if config.lora.quantized_kind and config.checkpoint.initial_weights:
        return "the whole model is read on every rank, weight by weight"
    if config.parallelism.data_parallel_shard_degree == 1 or config.lora.quantized_kind:
        return "the whole model is drawn on every rank"
    return "the rank's shards and one whole parameter"


def _checkpointing(config: ActivationCheckpointConfig) -> str:
    if config.mode == "memory_budget":
        return f"memory_budget = {config.memory_budget:g} is not known before compiling, none counted"
    kept = ", keeps matmul and attention" if config.mode == "selective" else ""
    every = f", every {config.every} blocks" if config.mode != "none" and config.every > 1 else ""
    return config.mode + kept + every


def _frozen(config: JobConfig, model: DiffusionModel) -> str:
    if not config.lora.enable:
        return ""
    count = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    count += sum(weight.shape.numel() for weight in quantized_weights(model).values())
    return f" of adapters, {count:,} frozen in {config.lora.base_dtype}"


def _range_lines(memory: MemoryEstimate) -> list[str]:
    if memory.least is None:
        return []
    return [
        f"  {'at least':20}{_gib(memory.least)} (every block recomputed)",
        "  the true peak lies between the two, and is known once the blocks are compiled",
    ]


def _time_lines(
    time: StepTime, efficiency: Efficiency, float8: bool, device: Device, passes: int
) -> list[str]:  # fmt: skip
    known = efficiency.measured
    shares = {name: share for name, share in _SHARES.items() if name not in known}
    if float8 and "compute" in shares:
        shares["compute"] += " (float8 counts as bfloat16: no measured step was faster)"
    of_visit = [f"{getattr(efficiency, name):.0%} of {_SHARES[name]} ({place})" for name, place in known.items()]
    speed = "link and overlap assumed" if "compute" in known else "assumed"
    waiting, where = waiting_step() if device.name != "CPU" else (0.0, "")
    if passes > 1 and waiting:
        waiting, where = passes * waiting, f"{where}, and this step is {passes} forwards and backwards"
    most = f"; with such a host up to {significant(time.hours * waiting / time.step)} hours" if time.step < waiting else ""
    return [
        "time of a step, at " + "".join(f"{share}, " for share in of_visit) + "assumed "
        + ", ".join(f"{getattr(efficiency, name):.0%} of {share}" for name, share in shares.items()) + ":",
        f"  compute             {time.compute:9.4f} s",
        f"  communication       {time.communication:9.4f} s, hidden or not",
        *([f"  encoding            {time.encoding:9.4f} s, of images to latents"] if time.encoding else []),
        f"  optimizer and EMA   {time.optimizer:9.4f} s",
        f"  step                {time.step:9.4f} s: {significant(time.images_per_second)} images/s, MFU {time.mfu:.1%} ({speed})",
        *([f"  not counted           the host, which starts kernels: {where}"] if time.step < waiting else []),
        f"the run               {significant(time.hours)} hours, {significant(time.device_hours)} device hours ({speed}){most}",
    ]  # fmt: skip


def _verdict(config: JobConfig, model: DiffusionModel, memory: MemoryEstimate, device: Device) -> str:
    known = fits(memory, device)
    if known is None:
        return f"whether {_USABLE:.0%} of it are enough is known once the blocks are compiled"
    if known:
        return "fits"
    smaller = ", ".join(_smaller(config, model, memory, device))
    return f"does not fit into {_USABLE:.0%} of it" + (f" (less with {smaller})" if smaller else "")


def _smaller(config: JobConfig, model: DiffusionModel, memory: MemoryEstimate, device: Device) -> Iterator[str]:
    """What makes the run need less memory and is not chosen yet."""
    layout = config.parallelism
    lora, local = config.lora, config.training.local_batch_size
    quantised_is_less = lora.quantized_kind or layout.data_parallel_shard_degree < (2 if lora.base_dtype == "bfloat16" else 4)
    if lora.enable and quantised_is_less and lora.base_dtype != "int4":
        kinds: list[Literal["int8", "int4"]] = ["int4"] if lora.quantized_kind else ["int8", "int4"]
        of_kind = {kind: dataclasses.replace(config, lora=dataclasses.replace(lora, base_dtype=kind)) for kind in kinds}
        otherwise = "" if lora.quantized_kind else "int8"  # less, if not enough
        if kind := next((kind for kind in kinds if _fits_with(of_kind[kind], local, device)), otherwise):
            yield f"--lora.base_dtype {kind}"
    excess = memory.needed - _USABLE * device.memory_gib * 2**30
    of_activations = memory.activations > excess  # or else the state alone is too much
    if config.activation_checkpoint.mode == "none" and of_activations:
        yield "--activation_checkpoint.mode full"
    if (batch := config.training.local_batch_size) > 1 and of_activations:
        share = config.training.global_batch_size // layout.data_ranks
        smaller = largest_divisor(share, batch - 1)
        # Microbatches then accumulate whole gradients, which one alone does not.
        once = microbatches(config) * largest_growth(config) == 1
        added = sum(4 * p.numel() for p in model.parameters() if p.requires_grad) if once else 0
        while smaller > 1 and (batch - smaller) * memory.activations / batch < excess + added:
            smaller = largest_divisor(share, smaller - 1)
        while not (fitting := _fits_with(config, smaller, device)) and smaller > 1:  # not all shrinks with the batch
            smaller = largest_divisor(share, smaller - 1)
        if fitting:
            yield f"--training.local_batch_size {smaller}"
    if config.lora.quantized_kind:  # whole on every rank
        if not config.checkpoint.initial_weights and memory.start_up > memory.total:
            yield "checkpoint.initial_weights, which are read weight by weight"
        return
    larger = "a larger --parallelism.data_parallel_shard_degree"
    if layout.processes == 1:
        yield f"more devices and {larger}"
    elif layout.data_parallel_shard_degree < layout.data_ranks:
        yield f"--parallelism.data_parallel_replicate_degree -1 with {larger}"
    elif memory.total - memory.activations >= excess:  # or else more shards alone cannot do it
        yield "more devices"


def _fits_with(config: JobConfig, local_batch_size: int, device: Device) -> bool:
    training = dataclasses.replace(config.training, local_batch_size=local_batch_size)
    smaller = dataclasses.replace(config, training=training)
    try:
        memory = estimate_memory(smaller, config.parallelism.processes, device.name != "CPU")
    except QuantizationError:  # int4 takes widths of its groups alone
        return False
    return fits(memory, device) is not False


def _gib(count: int) -> str:
    return f"{count / 2**30:9.2f} GiB"
