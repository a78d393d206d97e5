"""CUDA's autocast policy on CPU tensors, to count what a GPU would keep.

The CPU has another policy: it computes norms and elementary functions in bfloat16 where CUDA widens them to float32.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._pytree import tree_leaves, tree_map

# The lists of torch's ATen/autocast_mode.h, as `name.overload`: computed in float32; given a float32 result; computed in
# the widest dtype of their inputs. What is computed in autocast's dtype is the same on the CPU as far as networks use it.
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor"
    " pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm"
    " nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d"
    " hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss"
    " multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss"
    " binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d"
    " upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d"
    " upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
FLOAT32_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm"
    " linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()

_KEY = "AutocastCPU"


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Have `torch.autocast("cpu")` follow CUDA's policy inside the context, in this process."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # overriding is what is meant
            for names, cast in ((FLOAT32, _to_float32), (FLOAT32_RESULT, _with_float32_result), (WIDEST, _to_widest)):
                for name in names:
                    library.impl(name, _cast_first(name, cast), _KEY, allow_override=True)
        yield
    finally:
        library._destroy()


def _cast_first(name: str, cast: Callable[[Any, tuple, dict], tuple[tuple, dict]]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def autocast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(operation, args, kwargs)
        with torch.autocast("cpu", enabled=False):
            return operation(*args, **kwargs)

    return autocast


def _to_float32(operation: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tree_map(lambda leaf: _as(leaf, torch.float32), (args, kwargs))


def _with_float32_result(operation: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if not _is_narrow(args[0]) or kwargs.get("dtype") is not None:
        return args, kwargs
    named = [argument.name for argument in operation._schema.arguments]
    if "dtype" in named[: len(args)] and args[named.index("dtype")] is not None:
        return args, kwargs
    args = tuple(value for name, value in zip(named, args, strict=False) if name != "dtype")
    return args, kwargs | {"dtype": torch.float32}


def _to_widest(operation: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    narrow = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if torch.float32 not in narrow:
        return args, kwargs
    return tree_map(lambda leaf: _as(leaf, torch.float32), (args, kwargs))


def _as(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if _is_narrow(leaf) else leaf


def _is_narrow(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
