"""The estimate of a run as text and as a JSON object."""

import dataclasses
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.estimate.devices import Device
from torchtitan.estimate.memory import PARTS, MemoryEstimate
from torchtitan.estimate.roofline import Efficiency, StepTime
from torchtitan.models.base import DiffusionModel

# Left for the CUDA context, libraries' workspaces and buffers, and gaps between tensors.
_USABLE = 0.9


def as_record(
    model: DiffusionModel, memory: MemoryEstimate, time: StepTime, device: Device, efficiency: Efficiency
) -> dict[str, Any]:
    """Everything that is known, for machines: bytes, seconds, FLOPs."""
    return {
        "num_parameters": model.num_parameters(),
        "flops_per_image": model.flops_per_image(model.image_shape),
        "memory": dataclasses.asdict(memory) | {"total": memory.total, "needed": memory.needed},
        "fits": fits(memory, device),
        "time": dataclasses.asdict(time),
        "device": dataclasses.asdict(device),
        "efficiency": dataclasses.asdict(efficiency),
    }


def fits(memory: MemoryEstimate, device: Device) -> bool:
    """Whether the run's peak is at most nine tenths of the device's memory."""
    return memory.needed <= _USABLE * device.memory_gib * 2**30


def as_text(
    config: JobConfig, model: DiffusionModel, memory: MemoryEstimate, time: StepTime, device: Device,
    efficiency: Efficiency,
) -> str:
    """The same for readers."""
    layout, mode = config.parallelism, config.activation_checkpoint.mode
    ranks = layout.data_parallel_replicate_degree * layout.data_parallel_shard_degree
    notes = {
        "gradients": f" (all of them: {_gib(memory.all_gradients)})",
        "activations": f" (checkpointing: {mode}; eager)",
    }
    lines = [
        f"{config.model.flavor} on {ranks} x {device.name}: {layout.data_parallel_replicate_degree} replicas x "
        f"{layout.data_parallel_shard_degree} shards, {config.training.local_batch_size} images per rank and forward, "
        f"{config.training.global_batch_size} per step, {config.training.mixed_precision_param}",
        f"parameters            {model.num_parameters():,}",
        f"FLOPs per image       {model.flops_per_image(model.image_shape):.4g} (training)",
        f"memory per rank, at the highest moment of a step ({memory.phase}):",
        *(f"  {part:20}{_gib(getattr(memory, part))}{notes.get(part, '')}" for part in PARTS),
        f"  {'total':20}{_gib(memory.total)}",
        f"  {'at the start':20}{_gib(memory.start_up)} (the whole model is drawn on every rank)",
        f"  {'the device has':20}{device.memory_gib:9.2f} GiB: {_verdict(memory, device)}",
    ]
    if config.gns.enable:
        lines.append("  gns.enable: what the measurement of the gradient noise scale needs is not counted")
    return "\n".join(lines + _time_lines(time, efficiency))


def _time_lines(time: StepTime, efficiency: Efficiency) -> list[str]:
    return [
        f"time of a step, at {efficiency.compute:.0%} of the compute peak, {efficiency.memory:.0%} of memory "
        f"bandwidth, {efficiency.link:.0%} of link bandwidth, {efficiency.overlap:.0%} of communication overlapped:",
        f"  compute             {time.compute:9.4f} s",
        f"  communication       {time.communication:9.4f} s, hidden or not",
        f"  optimizer and EMA   {time.optimizer:9.4f} s",
        f"  step                {time.step:9.4f} s: {time.images_per_second:.4g} images/s, MFU {time.mfu:.1%}",
        f"the run               {time.hours:.4g} hours, {time.device_hours:.4g} device hours",
    ]


def _verdict(memory: MemoryEstimate, device: Device) -> str:
    return "fits" if fits(memory, device) else f"does not fit into {_USABLE:.0%} of it"


def _gib(count: int) -> str:
    return f"{count / 2**30:9.2f} GiB"
