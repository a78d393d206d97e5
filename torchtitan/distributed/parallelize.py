"""Parallelise a model in a fixed order, in one function."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan.distributed.activation_checkpoint import WRAPPER_PREFIX, checkpoint_blocks
from torchtitan.distributed.compile import compile_blocks, compile_model, compile_objective
from torchtitan.distributed.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.precision import fsdp_policy

_SCALE = "_precomputed_scale"  # of torchao's wrapper around a weight that is gathered in float8


def parallelize(
    model: nn.Module,
    layout: Layout,
    *,
    checkpointing: ActivationCheckpointConfig | None = None,
    compiling: CompileConfig | None = None,
    objective: Any = None,
    sharding: ParallelismConfig | None = None,
    param_dtype: str = "float32",
    reduce_dtype: str = "float32",
    num_shapes: int = 1,
    cpu_offload: bool = False,
) -> nn.Module:
    """Apply context parallelism, then activation checkpointing, then compile, then FSDP2, HSDP or DDP.

    Args:
        model: an initialised model on the layout's device, with `blocks()` (see torchtitan.models.base); where it is
            sharded, also one with parameters on the meta device, for `place_shards`.
        compiling: choice of compiled modules; None: nothing is compiled.
        objective: of the training, compiled with the model; None: it is not.
        sharding: when FSDP2 gathers and releases weights; None: its defaults.
        param_dtype, reduce_dtype: dtype of compute and of the gradient reduction.
        num_shapes: shapes of the images that it is trained on.
        cpu_offload: keep the shards of weights and gradients in host memory.

    Returns:
        the module whose forward trains: `model` itself, or DistributedDataParallel around it.

    Raises:
        ValueError: a memory budget for blocks that are not compiled; no blocks where some are to be recomputed.
    """
    if layout.context is not None:
        cast(Any, model).split_tokens(layout.context)
    checkpointing, compiling = checkpointing or ActivationCheckpointConfig(), compiling or CompileConfig()
    checkpoint_blocks(model, _blocks(model), checkpointing)
    budgeted = checkpointing.mode == "memory_budget"
    if budgeted and not compiling.enable:
        raise ValueError("activation_checkpoint.mode = memory_budget needs compiled blocks")
    if compiling.enable:
        memory_budget = checkpointing.memory_budget if budgeted else 1.0
        if compiling.scope == "model":
            compile_model(model, memory_budget, num_shapes=num_shapes, mode=compiling.mode)
        else:
            compile_blocks(_blocks(model), memory_budget, num_shapes=num_shapes, mode=compiling.mode)
        if objective is not None:
            compile_objective(objective)
    if layout.sharded:
        _shard(model, layout, fsdp_policy(param_dtype, reduce_dtype), sharding or ParallelismConfig(), cpu_offload)
        return model
    if layout.world_size > 1:
        wrapper = BlockwiseDDP if compiling.enable and compiling.scope == "blocks" else DistributedDataParallel
        with warnings.catch_warnings():
            # torch 2.13 wants another key for it, which would send the buffers at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return wrapper(
                model,
                device_ids=[layout.device.index] if layout.device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )
    return model


class BlockwiseDDP(DistributedDataParallel):
    """DDP of compiled blocks, each one graph.

    torch splits what is compiled under DDP at the ends of DDP's buckets, so that gradients are reduced before the whole
    backward is done. That is right for a model compiled whole; blocks are small enough themselves, and lose fusions.
    """

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with dynamo_config.patch(optimize_ddp=False):
            return super().forward(*inputs, **options)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(cast(Any, model).blocks())


def _shard(
    model: nn.Module, layout: Layout, policy: MixedPrecisionPolicy, sharding: ParallelismConfig, cpu_offload: bool
) -> None:
    when = sharding.fsdp_reshard_after_forward
    kept = CPUOffloadPolicy(pin_memory=layout.device.type == "cuda") if cpu_offload else OffloadPolicy()
    wrap = partial(fully_shard, mesh=layout.mesh, mp_policy=policy, offload_policy=kept)
    for block in _blocks(model):
        wrap(block, reshard_after_forward=when != "never")
    # The layers around the blocks are the last of a forward and the first of its backward: by default they stay gathered.
    wrap(model, reshard_after_forward=when == "always")
    if layout.device.type == "cpu":
        # gloo's own averaging is not to be relied on: sum, then divide.
        for module in fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """List every module that FSDP2 wraps, the root included."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def accumulate_locally(train_module: nn.Module, *, last: bool) -> AbstractContextManager:
    """Context of one microbatch's forward and backward: gradients are reduced in the last one only."""
    if isinstance(train_module, DistributedDataParallel):
        return nullcontext() if last else train_module.no_sync()
    if isinstance(train_module, FSDPModule):
        train_module.set_requires_gradient_sync(last)
    return nullcontext()


def release_unsharded(model: nn.Module) -> None:
    """Release gathered parameters, so that the next forward gathers them from the shards anew.

    FSDP2 keeps the root's parameters gathered after a forward. Code that changes the shards must call this. Scales of the
    shards, by which they are gathered in float8, are those of other values now, and are computed with the gather.
    """
    for module in fsdp_modules(model):
        module.reshard()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and hasattr(parameter.to_local(), _SCALE):
            setattr(parameter._local_tensor, _SCALE, None)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names without any wrapper: the names of checkpoints and parameter groups."""
    return {name.replace(WRAPPER_PREFIX, ""): parameter for name, parameter in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """Local part of a tensor that may be sharded, without the wrapper of weights that are gathered in float8."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return cast(Any, part)._tensor if hasattr(part, _SCALE) else part


def bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, or of this rank's parts of them, on a kind of device: offloaded ones are on another."""
    return sum(local(tensor).nbytes for tensor in tensors if tensor.device.type == device.type)


_ROW = 1024  # elements of a sum of squares in float32


@torch.no_grad()
def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Sum of squares over a list of plain tensors, float64 scalar on their device.

    On the CPU a float32 norm of 25 M elements is off by 0.3 %; rows of 1,024 summed in float64 are off by 1e-8,
    at full speed (1e-6 where all elements are equal, and so all rows round alike). CUDA's norm is a tree of sums.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]  # a rank may hold no row of a small parameter
    if tensors and tensors[0].device.type == "cuda":
        norms = torch.stack(torch._foreach_norm(tensors))
        return norms.to(torch.float64).square().sum()
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    parts = []
    for tensor in tensors:
        flat, rest = tensor.reshape(-1), tensor.numel() % _ROW
        rows = flat[:-rest] if rest else flat
        if len(rows):
            parts.append(torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1))
        if rest:
            parts.append(flat[-rest:])
    return torch.cat(parts).to(torch.float64).square().sum()


@torch.no_grad()
def gradient_norm(parameters: list[nn.Parameter], layout: Layout) -> Tensor:
    """Norm of the reduced gradient over the whole model, float64 scalar, the same on every rank.

    Shards are summed over the shard axis only: replicas hold the same gradient.
    """
    total = sum_of_squares([local(p.grad) for p in parameters if p.grad is not None]).to(layout.device)
    if layout.sharded:
        torch.distributed.all_reduce(total, group=layout.shard_group)
    return total.sqrt()


@torch.no_grad()
def whole_gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Norm of gradients that are whole and equal on every rank, float64 scalar."""
    return sum_of_squares([p.grad for p in parameters if p.grad is not None]).sqrt()


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], layout: Layout) -> None:
    """Average the gradients of parameters that are whole and unwrapped on every rank over the ranks."""
    for parameter in parameters:
        if layout.world_size > 1 and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= layout.world_size


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Clip gradients in place to a norm of at most max_norm; `norm` is the value of gradient_norm."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
    if scale.device.type == "cpu" and scale.item() == 1.0:  # elsewhere the host would wait for the device
        return
    if gradients := [local(p.grad) for p in parameters if p.grad is not None]:
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))  # in host memory if they are offloaded
