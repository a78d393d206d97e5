"""Roofline estimate of a training step's time at stated efficiencies."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import images_only, stored_section
from torchtitan.data import DATASETS
from torchtitan.data.base import images_of_shapes
from torchtitan.diffusion.objectives import build_objective
from torchtitan.distributed.context_parallel import context_bytes
from torchtitan.distributed.precision import DTYPES
from torchtitan.estimate.devices import Device
from torchtitan.estimate.encoding import encoding_flops_per_image, estimated_info
from torchtitan.estimate.memory import MemoryEstimate
from torchtitan.models.adapters.flops import training_flops
from torchtitan.models.base import DiffusionModel
from torchtitan.training.schedules import ramp_steps
from torchtitan.training.utilisation import mfu_percent, products_of


@dataclass(frozen=True)
class Efficiency:
    """Efficiencies: shares of a device's peaks reached in a step, each in (0, 1].

    Attributes:
        compute: of the peak of matrix products, forward and backward; tuned transformers reach 0.4 to 0.5 in bfloat16.
        memory: of the memory's bandwidth, in the optimizer and the averages.
        overlap: share of communication that can be hidden behind compute; the rest is always exposed.
        measured: shares that were measured, by name, and where; all others are assumed.
    """

    compute: float = 0.45
    memory: float = 0.8
    link: float = 0.8
    overlap: float = 0.9
    measured: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of the first batch size, and rates derived from them.

    Attributes:
        compute: forward, backward and recomputation of all microbatches; without the recomputation chosen by a compiler
            with a memory budget (at most a third more).
        communication: all collectives, hidden or not.
        encoding: of images that are encoded in every step, in the autoencoder's dtype; 0 where it is not known.
        optimizer: reading and writing weights, state and averages.
        step: max(compute, overlap x communication) + (1 - overlap) x communication + optimizer + encoding.
        mfu: as of `training/utilisation.py`, but a share.
        hours, device_hours: of the run with its batch ramp, without sampling, validation and checkpoints.
    """

    compute: float
    communication: float
    optimizer: float
    step: float
    images_per_second: float
    mfu: float
    hours: float
    device_hours: float
    encoding: float = 0.0


def untrained_forwards(config: JobConfig) -> int:
    """Calls of the network for each image without a gradient, beside the trained one."""
    return build_objective(config.objective, seed=0).untrained_forwards


def training_flops_per_image(config: JobConfig, model: DiffusionModel) -> int:
    """Floating-point operations of training the model on one image, by the run's objective, and of its alignment.

    Of images of several shapes their mean, as of a run.
    """
    further, steps = untrained_forwards(config), config.training.steps
    flops = _mean_over_shapes(config, model, lambda shape: training_flops(model, shape, further, steps))
    if config.alignment.teacher == "none":
        return flops
    from torchtitan.alignment.plan import Plan

    plan = Plan(config.alignment, model, estimated_info(config))
    return flops + plan.flops_per_image(config.training.steps, config.training.global_batch_size)


def _mean_over_shapes(config: JobConfig, model: DiffusionModel, of: Callable[[tuple[int, int, int]], int]) -> int:
    info = estimated_info(config)
    if not info.bucket_shapes:
        return of(model.image_shape)
    data = (stored_section(config) or images_only(config.data)) if config.cache.enable else config.data
    counts = images_of_shapes(DATASETS[data.name](data, "train"), info)
    return round(sum(count * of(shape) for shape, count in counts.items()) / sum(counts.values()))


def estimate_step_time(
    config: JobConfig, model: DiffusionModel, memory: MemoryEstimate, device: Device, efficiency: Efficiency
) -> StepTime:
    """Estimate a step's time: compute = FLOPs / (peak x efficiency), communication = bytes / (link x efficiency)."""
    training, world_size = config.training, config.parallelism.processes
    compute, communication, optimizer = _parts_of_step(config, model, memory, device, efficiency)
    encoding = _encoding_seconds(config, device, efficiency)
    step = _overlapped(compute, communication, optimizer, efficiency) + encoding
    seconds = 0.0
    for factor, steps in ramp_steps(training.double_batch_after, training.global_batch_size, training.steps).items():
        grown = replace(config, training=replace(training, global_batch_size=factor * training.global_batch_size))
        seconds += steps * _overlapped(*_parts_of_step(grown, model, memory, device, efficiency), efficiency)
        seconds += steps * factor * encoding
    hours = seconds / 3600
    flops = training.global_batch_size / world_size * training_flops_per_image(config, model)
    mfu = mfu_percent(flops / step / 1e12, device.peak_tflops(products_of(vars(training)))) / 100
    return StepTime(
        compute, communication, optimizer, step, training.global_batch_size / step, mfu, hours, world_size * hours, encoding
    )


def _parts_of_step(
    config: JobConfig, model: DiffusionModel, memory: MemoryEstimate, device: Device, efficiency: Efficiency
) -> tuple[float, float, float]:
    """Seconds of compute, communication and optimizer in a step of the configuration's batch."""
    layout, training = config.parallelism, config.training
    peak = device.peak_tflops(products_of(vars(training)))
    images = training.global_batch_size / layout.processes  # of each rank; where ranks share tokens, parts of images
    flops = images * training_flops_per_image(config, model)
    # Float8 products count at bfloat16's rate: no measurement shows that whole steps gain.
    compute = (1 + recomputed_share(config, model)) * flops / (1e12 * peak) / efficiency.compute
    trained, gathered = model.num_parameters(), sum(parameter.numel() for parameter in model.parameters())
    communication = _communication_seconds(config, model, trained, gathered, device) / efficiency.link
    # Gradients are read; everything that trains, and only that, is read and written.
    frozen = config.lora.enable or config.autoencoder.encode or config.alignment.teacher != "none"
    weights = 4 * trained / layout.degrees.copies_and_shards[1] if frozen else memory.parameters
    moved = 2 * (weights + memory.optimizer + memory.ema) + memory.all_gradients
    return compute, communication, moved / (1e9 * device.memory_gb_per_s * efficiency.memory)


def _encoding_seconds(config: JobConfig, device: Device, efficiency: Efficiency) -> float:
    """Seconds of encoding a rank's images of a step, which overlap with nothing."""
    dtype = config.autoencoder.dtype or "float32"
    peak = device.peak_tflops(products_of(vars(config.training) | {"mixed_precision_param": dtype}))
    images = config.training.global_batch_size / config.parallelism.data_ranks
    return images * encoding_flops_per_image(config) / (1e12 * peak) / efficiency.compute


def _overlapped(compute: float, communication: float, optimizer: float, efficiency: Efficiency) -> float:
    return max(compute, efficiency.overlap * communication) + (1 - efficiency.overlap) * communication + optimizer


def recomputed_share(config: JobConfig, model: DiffusionModel) -> float:
    """Recomputed share: FLOPs of recomputation over the training FLOPs, products alone; at most 1/3, a whole forward again, or
    nearly 1/2 with a frozen network and adapters.

    Mode `selective` keeps all products. With a memory budget the compiler chooses, and 0 is the least.
    """
    if config.activation_checkpoint.mode != "full":
        return 0.0
    blocks = len(model.blocks())
    wrapped = math.ceil(blocks / config.activation_checkpoint.every) / blocks
    steps = config.training.steps
    forward = 2 * _mean_over_shapes(config, model, lambda shape: model.training_macs_per_image(shape, steps))
    return wrapped * forward / training_flops_per_image(config, model)


def communication_bytes(config: JobConfig, num_parameters: int, gathered: int | None = None) -> dict[str, float]:
    """Communicated bytes of each rank in one step, by group: "shard" and "replicate".

    Ring collectives over n ranks send (n - 1) / n of the whole for a gather or a reduce-scatter, twice that for an
    all-reduce. FSDP2 gathers the weights in the dtype of compute in every forward and, where they were released, every
    backward, and reduces gradients in the dtype of the reduction once a step; HSDP then sums the shards over the copies, DDP
    the whole gradient.

    Args:
        num_parameters: that train, and so have gradients.
        gathered: parameters that are sharded, frozen ones too; default: those that train. Quantised weights are not.
    """
    layout, training = config.parallelism, config.training
    replicas, shards = layout.degrees.copies_and_shards
    count = microbatches(config)
    times = 1 if layout.fsdp_reshard_after_forward == "never" else 2
    gathers = times * count * DTYPES[training.mixed_precision_param].itemsize
    gradients = DTYPES[training.mixed_precision_reduce].itemsize * num_parameters
    return {
        "shard": (shards - 1) / shards * (gathers * (gathered or num_parameters) + gradients) if shards > 1 else 0.0,
        "replicate": 2 * (replicas - 1) / replicas * gradients / shards,
    }


def exchanged_bytes(config: JobConfig, model: DiffusionModel) -> float:
    """Bytes that each rank sends in one step to those with the other tokens of its images."""
    checkpointing = config.activation_checkpoint
    degree, tokens = config.parallelism.context_parallel_degree, model.tokens_per_image(model.image_shape)
    if degree == 1:
        return 0.0
    of_microbatch = context_bytes(
        config.training.local_batch_size, tokens, config.model.dim, len(model.blocks()), degree,
        DTYPES[config.training.mixed_precision_param], recomputed=checkpointing.mode not in ("none", "memory_budget"),
    )  # fmt: skip
    return microbatches(config) * of_microbatch


def microbatches(config: JobConfig) -> int:
    """Forwards and backwards of a rank in a step."""
    return config.training.global_batch_size // (config.training.local_batch_size * config.parallelism.data_ranks)


def _communication_seconds(
    config: JobConfig, model: DiffusionModel, num_parameters: int, gathered: int, device: Device
) -> float:
    layout = config.parallelism
    replicas, shards = layout.degrees.copies_and_shards
    sent = communication_bytes(config, num_parameters, gathered) | {"context": exchanged_bytes(config, model)}
    # Ranks that share tokens, or a copy, are neighbours; copies of one shard are `shards` ranks apart.
    reach = {"context": (layout.context_parallel_degree, 1), "shard": (shards, 1), "replicate": (shards * replicas, shards)}
    return sum(count / (1e9 * _link(*reach[group], device)) for group, count in sent.items() if count)


def _link(ranks: int, apart: int, device: Device) -> float:
    """GB/s of each member of a ring over `ranks`, of which every `apart`-th is a member.

    Between nodes a ring's members in one node share its traffic, each with its own port, as NCCL spreads rings over ports.
    """
    if ranks <= device.per_node:
        return device.node_gb_per_s
    return min(device.node_gb_per_s, max(device.per_node // apart, 1) * device.network_gb_per_s)
