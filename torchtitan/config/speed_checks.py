"""Checks of the settings that trade speed for memory or rounding: kernels, sharding, reduction, CUDA graphs."""

from collections.abc import Callable, Iterator

from torchtitan.config.view import ConfigView, in_section
from torchtitan.distributed.config import parallelism_problems
from torchtitan.distributed.kernel_choices import kernel_problems
from torchtitan.models import MODELS
from torchtitan.settings.schema import Problem
from torchtitan.training.config import UPDATE_RULES
from torchtitan.training.schedules import largest_growth


def shards_of(checked: ConfigView) -> int:
    """Number of processes that share a replica's parameters, if the degrees give it."""
    shards, replicas = (getattr(checked.parallelism, f"data_parallel_{axis}_degree") for axis in ("shard", "replicate"))
    return shards if shards != -1 else checked.data_ranks // max(replicas, 1)


def needs_plain_weights(checked: ConfigView) -> str:
    """Setting that handles weights without a wrapper only; "" if there is none."""
    if not UPDATE_RULES[checked.optimizer.name].any_weights:
        return f"optimizer.name = {checked.optimizer.name}"
    return "training.enable_cpu_offload" if checked.training.enable_cpu_offload else ""


def _kernels(checked: ConfigView) -> Iterator[Problem]:
    training, width = checked.training, checked.whole("model").head_width
    found = kernel_problems(
        training.attention_backend, training.float32_matmul_precision, training.mixed_precision_param, width,
        checked.has_cuda,
    )  # fmt: skip
    yield from in_section("training", found)


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
    training = checked.training
    wanted, local = training.global_batch_size, training.local_batch_size
    grows = largest_growth(checked) > 1
    if local == -1:
        limit = training.max_local_batch_size
        return grows or 0 < limit < wanted // checked.data_ranks
    return grows or wanted > local * checked.data_ranks


def _offload(checked: ConfigView) -> Iterator[Problem]:
    if not checked.training.enable_cpu_offload:
        return
    reasons = []
    if not checked.has_cuda:
        reasons.append("weights are in host memory anyway, as CUDA is not there (set it to false)")
    elif shards_of(checked) == 1:
        reasons.append("is FSDP2's, which needs shards (set it to false, or parallelism.data_parallel_shard_degree above 1)")
    if not UPDATE_RULES[checked.optimizer.name].any_weights:
        reasons.append(f"optimizer.name = {checked.optimizer.name} does not update weights in host memory (set AdamW)")
    if checked.gns.enable and checked.gns.single_pass:
        reasons.append("gns.single_pass needs the optimizer's state beside the gradients on the GPU (set this to false)")
    if checked.lora.enable:
        reasons.append("adapters have little state to keep elsewhere, and frozen weights stay on the GPU (set it to false)")
    for reason in reasons:
        yield Problem("training.enable_cpu_offload", reason)


def _context(checked: ConfigView) -> Iterator[Problem]:
    degree = checked.parallelism.context_parallel_degree
    if degree == 1:
        return
    model, info = checked.whole("model"), checked.dataset()
    reasons = []
    if not MODELS[model.name].splits_tokens:
        others = " or ".join(name for name, family in MODELS.items() if family.splits_tokens)
        reasons.append(f"model.name = {model.name} does not divide its tokens between processes (set it to 1, or use {others})")
    else:
        _, height, width = info.image_shape
        tokens = height // model.patch_size * (width // model.patch_size)
        if tokens % degree:
            reasons.append(f"{degree} does not divide the {tokens} tokens of an image (set a divisor)")
        wide = ["wide_heads"] if getattr(model, "wide_dim", 0) else []
        for key in (key for key in ("num_heads", *wide) if getattr(model, key) % degree):
            text = f"{degree} does not divide model.{key} = {getattr(model, key)}"
            reasons.append(f"{text}: attention divides its heads among the processes (set a divisor)")
    if getattr(model, "class_tokens", 0):
        reasons.append("model.class_tokens are no tokens of the image, which processes divide (set it to 1, or those to 0)")
    if model.routed_blocks:
        reasons.append("model.routing drops some tokens of each image, which processes divide (set it to 1, or routing to none)")
    if checked.gns.enable:
        text = "a process has the gradient of some tokens of an image, so neither per-sample nor per-rank gradients exist"
        reasons.append(f"gns.enable: {text} (set it to 1, or gns.enable to false)")
    if checked.whole("objective").timesteps.learns or checked.whole("objective").heads_of_network():
        text = "the losses that objective.timesteps or objective.heads learn from would count once per process of a group"
        reasons.append(f"{text} (set it to 1)")
    if checked.whole("compile").cuda_graphs:
        reasons.append(f"compile.mode = {checked.compile.mode} would replay the exchange of tokens in a CUDA graph (set default)")
    for reason in reasons:
        yield Problem("parallelism.context_parallel_degree", reason)


def _cuda_graphs(checked: ConfigView) -> Iterator[Problem]:
    if checked.whole("compile").cuda_graphs and checked.gns.enable and checked.gns.single_pass:
        text = f"{checked.compile.mode} replays CUDA graphs, which overwrite the results that gns.single_pass keeps of a block"
        yield Problem("compile.mode", f"{text} (set default, or gns.single_pass to false with gns.rank_gradients)")


SPEED_CHECKS: list[Callable[[ConfigView], Iterator[Problem]]] = [
    _kernels,
    lambda checked: in_section("parallelism", parallelism_problems(checked.whole("parallelism"), shards_of(checked))),
    _reduction,
    _offload,
    _context,
    _cuda_graphs,
]
