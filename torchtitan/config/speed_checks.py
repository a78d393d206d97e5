"""Checks of the settings that trade speed for memory or rounding: kernels, sharding, reduction, CUDA graphs."""

from collections.abc import Callable, Iterator

from torchtitan.config.view import ConfigView
from torchtitan.distributed.config import parallelism_problems
from torchtitan.distributed.kernel_choices import kernel_problems
from torchtitan.settings.schema import Problem


def shards_of(checked: ConfigView) -> int:
    """Number of processes that share a replica's parameters, if the degrees give it."""
    shards, replicas = (
        getattr(checked.parallelism, f"data_parallel_{axis}_degree") for axis in ("shard", "replicate")
    )
    return shards if shards != -1 else checked.world_size // max(replicas, 1)


def needs_plain_weights(checked: ConfigView) -> str:
    """Setting that handles weights without a wrapper only; "" if there is none."""
    if checked.optimizer.name != "AdamW":
        return f"optimizer.name = {checked.optimizer.name}"
    return "training.enable_cpu_offload" if checked.training.enable_cpu_offload else ""


def _kernels(checked: ConfigView) -> Iterator[Problem]:
    training, width = checked.training, checked.whole("model").head_width
    found = kernel_problems(
        training.attention_backend, training.float32_matmul_precision, training.mixed_precision_param, width,
        checked.has_cuda,
    )  # fmt: skip
    for key, text in found:
        yield Problem(f"training.{key}", text)


def _sharding(checked: ConfigView) -> Iterator[Problem]:
    depth = checked.whole("model").depth
    for key, text in parallelism_problems(checked.whole("parallelism"), shards_of(checked), depth):
        yield Problem(f"parallelism.{key}", text)


def _reduction(checked: ConfigView) -> Iterator[Problem]:
    if checked.training.mixed_precision_reduce == "float32":
        return
    key = "training.mixed_precision_reduce"
    if shards_of(checked) == 1:
        text = "has no effect without shards: DDP sums gradients in their own dtype, float32"
        yield Problem(key, f"bfloat16 {text} (set float32)")
    if checked.gns.enable and checked.gns.rank_gradients:
        text = "rounds the gradients whose small differences gns.rank_gradients measures"
        yield Problem(key, f"bfloat16 {text} (set float32, or rank_gradients to false)")
    if checked.training.mixed_precision_param == "bfloat16" and _accumulates(checked):
        text = "adds the gradients of microbatches in bfloat16 too, as FSDP2 keeps them in the dtype of their reduction"
        yield Problem(key, f"bfloat16 {text} (set float32, or one microbatch per step)")


def _accumulates(checked: ConfigView) -> bool:
    """Whether a step has several microbatches, or may come to have."""
    training = checked.training
    wanted, local = training.global_batch_size, training.local_batch_size
    grows = checked.gns.enable and checked.gns.grow_batch
    if local == -1:
        limit = training.max_local_batch_size
        return grows or 0 < limit < wanted // checked.world_size
    return grows or wanted > local * checked.world_size


def _offload(checked: ConfigView) -> Iterator[Problem]:
    if not checked.training.enable_cpu_offload:
        return
    reasons = []
    if not checked.has_cuda:
        reasons.append("weights are in host memory anyway, as CUDA is not there (set it to false)")
    elif shards_of(checked) == 1:
        reasons.append("is FSDP2's, which needs shards (set it to false, or parallelism.data_parallel_shard_degree above 1)")
    if checked.optimizer.name != "AdamW":
        reasons.append(f"optimizer.name = {checked.optimizer.name} would multiply matrices on the host (set AdamW)")
    if checked.gns.enable and checked.gns.single_pass:
        reasons.append("gns.single_pass needs the optimizer's state beside the gradients on the GPU (set it to false)")
    if checked.lora.enable:
        reasons.append("adapters have little state to keep elsewhere, and frozen weights stay on the GPU (set it to false)")
    for reason in reasons:
        yield Problem("training.enable_cpu_offload", reason)


def _cuda_graphs(checked: ConfigView) -> Iterator[Problem]:
    if checked.whole("compile").cuda_graphs and checked.gns.enable and checked.gns.single_pass:
        text = f"{checked.compile.mode} replays CUDA graphs, which overwrite the results that gns.single_pass keeps of a block"
        yield Problem("compile.mode", f"{text} (set default, or gns.single_pass to false with gns.rank_gradients)")


SPEED_CHECKS: list[Callable[[ConfigView], Iterator[Problem]]] = [_kernels, _sharding, _reduction, _offload, _cuda_graphs]
