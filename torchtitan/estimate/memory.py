"""Memory estimate of each rank of a run, without running it."""

import dataclasses
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from torchtitan.config.job import JobConfig
from torchtitan.distributed.config import ActivationCheckpointConfig, CheckpointMode
from torchtitan.estimate.encoding import estimated_info
from torchtitan.estimate.live_storages import ACCUMULATED, ACTIVATIONS, COMMUNICATION, GRADIENTS, PARAMETERS
from torchtitan.estimate.simulation import SimulatedStep, Window, simulate_step
from torchtitan.models import MODELS, build_model
from torchtitan.models.adapters.adapters import is_adapter_parameter
from torchtitan.models.adapters.frozen_network import freeze_and_adapt
from torchtitan.models.base import DiffusionModel
from torchtitan.models.quantized import quantized_tensors, quantized_weights

# Prefetching of parameters reaches from one block to the next, or farther, so the first and the last differ from those between.
_EDGE = 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate: bytes on the fullest rank, tensors alone: no allocator gaps, CUDA context or library workspace.

    The first six are the parts at the step's peak and sum to `total`. Not all gradients need exist then, nor
    activations in the optimizer's step.

    Attributes:
        parameters: weights, or this rank's shards, float32, and the model's fixed tables; with `[lora]` the frozen ones
            as lora.base_dtype stores them, quantised ones as codes, scales and zeros, whole on every rank.
        gradients: gradients, or their shards, float32; DDP's buckets, which exist throughout; those that microbatches
            accumulate before the last, whole on every rank.
        all_gradients: gradients, or their shards, at the update.
        activations: the batch, the tensors kept for the backward (fewer under activation checkpointing), and the
            temporaries of that moment. Eager: compiled blocks usually keep less.
        communication: gathered parameters and collectives' buffers (FSDP2, HSDP); none with DDP: buckets are gradients.
        phase: "encode" (of images that are encoded in the step), "forward", "backward" or "optimizer": the phase of the peak.
        start_up: peak of initialisation: this rank's shards and one whole parameter, and adapters whole; with DDP, or quantised
            weights, the whole model.
        least: peak of a step in which every block is recomputed whole, where the compiler chooses the kept tensors
            (activation_checkpoint.mode = memory_budget): the other numbers are then those of a step without
            recomputation, and the true peak, known after compiling, lies between. None in other modes.
        host: bytes in host memory instead: with training.enable_cpu_offload parameters, gradients, optimizer, averages.
    """

    parameters: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    communication: int
    phase: str
    all_gradients: int
    start_up: int
    least: int | None = None
    host: int = 0

    @property
    def total(self) -> int:
        """Peak of a training step."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def needed(self) -> int:
        """Peak of the run: of a step, or of start-up."""
        return max(self.total, self.start_up)


_OFFLOADED = (PARAMETERS, GRADIENTS, "optimizer", "ema")
PARTS = (PARAMETERS, GRADIENTS, "optimizer", "ema", ACTIVATIONS, COMMUNICATION)


def estimate_memory(config: JobConfig, world_size: int, on_gpu: bool | None = None) -> MemoryEstimate:
    """Estimate the memory of each rank.

    The real model, sharding, activation checkpointing and objective make one step on fake tensors of the real batch,
    and every storage is counted at every operation. Where blocks are alike (`ModelConfig.of_depth`), the peak of the step
    around a given block, counted from the first or from the last, is linear in their number: two shallow models give
    that of a deep one. A model of different blocks is simulated whole.
    Measurement of the gradient noise scale, sampling and validation are not part of the step.

    Args:
        config: a resolved configuration (`load_config`) of that many processes.
        on_gpu: whether the run is on GPUs, where RMS norms keep less than on a CPU; None: whether this machine has one.

    Raises:
        RuntimeError: this process belongs to a process group.
    """
    if config.activation_checkpoint.mode == "memory_budget":
        most, least = (_estimate(_recomputing(config, mode), world_size, on_gpu) for mode in ("none", "full"))
        return dataclasses.replace(most, least=least.total)
    return _estimate(config, world_size, on_gpu)


def _recomputing(config: JobConfig, mode: CheckpointMode) -> JobConfig:
    return dataclasses.replace(config, activation_checkpoint=ActivationCheckpointConfig(mode=mode))


def _estimate(config: JobConfig, world_size: int, on_gpu: bool | None) -> MemoryEstimate:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of a view, which nothing here changes in place
        step = _of_full_depth(config, world_size, on_gpu)
    return _at_the_peak(step, _start_up_bytes(config), config.training.enable_cpu_offload)


def _at_the_peak(step: SimulatedStep, start_up: int, offloads: bool) -> MemoryEstimate:
    host = 0
    if offloads:
        host = step.held.total()
        for held in (*step.windows.values(), step.held):
            for part in _OFFLOADED:
                held[part] = 0
    window, peak = max(step.windows.items(), key=lambda entry: entry[1].total())
    return MemoryEstimate(
        parameters=peak[PARAMETERS], gradients=peak[GRADIENTS] + peak[ACCUMULATED],
        optimizer=step.held["optimizer"], ema=step.held["ema"],
        activations=peak[ACTIVATIONS], communication=peak[COMMUNICATION], phase=window[1],
        all_gradients=step.held[GRADIENTS], start_up=start_up, host=host,
    )  # fmt: skip


def model_on_meta(config: JobConfig) -> DiffusionModel:
    """Configured model, whole and without values; with `[lora]` frozen and with the adapter that trains."""
    info = estimated_info(config)
    with torch.device("meta"):
        model = build_model(config.model, info.image_shape, info.condition_kind)
        return freeze_and_adapt(model, config.lora, MODELS[config.model.name].adapter_sets)


def _start_up_bytes(config: JobConfig) -> int:
    """Bytes of the model when it has its first values: parameters of a sharded one are drawn one at a time, adapters whole;
    quantised weights read one at a time, or else drawn whole.
    """
    model, drawn = model_on_meta(config), not config.checkpoint.initial_weights
    _, shards = config.parallelism.degrees.copies_and_shards
    if shards > 1 and not config.lora.quantized_kind:
        parameters = dict(model.named_parameters())
        adapters = [parameters.pop(name).nbytes for name in list(parameters) if is_adapter_parameter(name)]
        rows = [-(-tensor.shape[0] // shards) * tensor[0].nbytes for tensor in parameters.values()]
        largest = max(tensor.nbytes for tensor in parameters.values())
        return sum(rows) + max(largest, sum(adapters))
    weights = quantized_weights(model).values()
    before = sum(2 * weight.shape.numel() for weight in weights) if drawn else 0  # bfloat16, with the codes of one
    codes = max((weight.codes.nbytes for weight in weights), default=0) if drawn else sum(
        tensor.nbytes for tensor in quantized_tensors(model).values()
    )
    return sum(tensor.nbytes for tensor in model.parameters()) + before + codes


def _of_full_depth(config: JobConfig, world_size: int, on_gpu: bool | None) -> SimulatedStep:
    """Memory of the step at the configured depth, from those of two models of fewer blocks.

    Blocks repeat with period n where every n-th recomputes. The shallow models end at the same place of the period as
    the deep one, and both their ends have windows for a whole period beyond the edge.
    """
    depth, period = config.model.depth or 0, config.activation_checkpoint.every
    end = _EDGE + period
    shallow_depth = 2 * end + (depth - 2 * end) % period
    deeper_depth = shallow_depth + period
    some_blocks = config.lora.enable and config.lora.patterns  # the pattern may name a block
    if depth <= deeper_depth or config.model.of_depth(depth) is None or some_blocks:
        return simulate_step(config, world_size, on_gpu)
    shallow, deeper = (
        simulate_step(dataclasses.replace(config, model=config.model.of_depth(blocks)), world_size, on_gpu)
        for blocks in (shallow_depth, deeper_depth)
    )
    periods = (depth - shallow_depth) // period

    def farther(window: Window) -> Window:
        """Window of the deeper model at the same distance from the first or the last block."""
        microbatch, phase, block = window
        return microbatch, phase, block if block < end else block + period

    windows = {key: _extrapolate(peak, deeper.windows[farther(key)], periods) for key, peak in shallow.windows.items()}
    return SimulatedStep(_extrapolate(shallow.held, deeper.held, periods), windows)


def _extrapolate(shallow: Counter, deeper: Counter, times: int) -> Counter:
    return Counter({part: shallow[part] + times * (deeper[part] - shallow[part]) for part in shallow | deeper})
