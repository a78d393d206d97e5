"""Second call: how fast is a train step, and what are the device's ceilings?"""

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_day import visit
from benchmarks.gpu_day.visit import COMPILED, DRY_RUN, XL, Results, Settings
from benchmarks.shared import train_step
from torchtitan.estimate.memory import estimate_memory
from torchtitan.training.hardware import memory_metrics, peak_tflops, reset_peak_memory

# Images per step (None: as many as the device's memory holds of XL/2) and settings.
# The first arm pays for the compiler's cache, which the others share.
ARMS: dict[str, tuple[int | None, Settings]] = {
    "XL/2 compiled": (None, {**XL, **COMPILED}),
    "XL/2 eager": (None, XL),
    "XL/2 compiled, noise scale": (None, {**XL, **COMPILED, **visit.NOISE}),
    "XL/2 compiled, 32 images": (32, {**XL, **COMPILED}),
    "XL/2 compiled, 32 images, noise scale": (32, {**XL, **COMPILED, **visit.NOISE}),
    "XL/2 compiled, cuDNN attention": (None, {**XL, **COMPILED, "training.attention_backend": "cudnn"}),
    "XL/2 compiled, float8": (None, {**XL, **COMPILED, "float8.enable": "true"}),
    "XL/2 CUDA graphs, 32 images": (32, {**XL, **COMPILED, "compile.mode": "reduce-overhead"}),
    "XL/2 compiled, recomputed": (None, {**XL, **COMPILED, "activation_checkpoint.mode": "full"}),
    "B/2 compiled": (256, {**XL, **COMPILED, "model.flavor": "DiT-B/2"}),
    "S/2 eager": (256, {**XL, "model.flavor": "DiT-S/2"}),
    "S/2 compiled": (256, {**XL, **COMPILED, "model.flavor": "DiT-S/2"}),
    "S/2 CUDA graphs": (256, {**XL, **COMPILED, "model.flavor": "DiT-S/2", "compile.mode": "reduce-overhead"}),
}  # fmt: skip
DRY_ARMS = ("XL/2 compiled", "XL/2 compiled, noise scale", "XL/2 compiled, recomputed")  # on a CPU the others are the first again
SEVEN_B = "7B, rank 0 of 8, 8 images"
_RANKS = 8


def ceilings(results: Results) -> None:
    """Rates of the parts of a step: memory, products of XL/2's shapes, attention, the least kernel."""
    elements, rows = (2**16, 4) if DRY_RUN else (2**29, 65536)  # a CPU may take seconds for a product in bfloat16
    source = torch.randn(elements, device=visit.device())
    target = torch.empty_like(source)
    results.row("copy", TB_per_s=2 * source.nbytes / visit.seconds_per_call(partial(target.copy_, source), 10) / 1e12)
    for inner, outer in ((1152, 3456), (1152, 1152), (1152, 4608), (4608, 1152)):
        x, weight, dy = (torch.randn(*shape, device=visit.device(), dtype=torch.bfloat16) for shape in (
            (rows, inner), (inner, outer), (rows, outer),
        ))  # fmt: skip
        products = {"forward": (x, weight), "dx": (dy, weight.T), "dw": (x.T, dy)}
        flops = 2 * rows * inner * outer / 1e12
        results.row(f"product {rows} x {inner} x {outer}", **{
            f"{name}_TFLOP_per_s": flops / visit.seconds_per_call(partial(torch.matmul, *pair), 10)
            for name, pair in products.items()
        })  # fmt: skip
    for width in (72, 64, 128):
        results.row(f"attention, heads of {width}", **_attention(width))
    number, began = torch.zeros(1, device=visit.device()), time.perf_counter()
    for _ in range(1000):
        number.add_(1)
    host = (time.perf_counter() - began) / 1000
    results.row("least kernel", kernel_us=1e6 * visit.seconds_per_call(lambda: number.add_(1), 1000), host_us=1e6 * host)


def _attention(width: int) -> dict[str, Any]:
    """TFLOP/s of forward and backward by kernel: 3.5 times the forward's FLOPs, since backward computes the weights again."""
    batch, heads, tokens = shape = (1, 2, 16) if DRY_RUN else (256, 16, 256)
    q, k, v, dy = torch.randn(4, *shape, width, device=visit.device(), dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for each in (q, k, v):
        each.requires_grad_()
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                seconds = visit.seconds_per_call(lambda: F.scaled_dot_product_attention(q, k, v).backward(dy), 10)
            found[f"{backend.name.lower()}_TFLOP_per_s"] = 3.5 * 4 * batch * heads * tokens**2 * width / seconds / 1e12
        except RuntimeError as error:
            found[backend.name.lower()] = visit.error_line(error)
    return found


def arm(name: str, results: Results) -> None:
    """Speed, MFU and memory of one kind of step."""
    images, settings = ARMS[name]
    results.attempt(name, lambda: _measured(settings, images or visit.images_per_step()))


def seven_b(results: Results) -> None:
    """Compute and memory of a rank of the 7B under FSDP2; its collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())
    # Python objects cannot travel over collectives that move nothing.
    dist.broadcast_object_list = lambda object_list, src=None, group=None, device=None, group_src=None: None
    dist.all_gather_object = lambda object_list, obj, group=None: object_list.__setitem__(slice(None), [obj] * len(object_list))
    settings = {
        **COMPILED, "model.flavor": "TorchDiTan-7B", "data.shape": "[16, 64, 64]", "ema.tracks": "[]",
        "parallelism.data_parallel_replicate_degree": "1", "parallelism.data_parallel_shard_degree": "-1",
    }  # fmt: skip
    results.attempt(SEVEN_B, lambda: _measured(settings, 8, _RANKS))


def _measured(settings: Settings, images: int, world_size: int = 1) -> Mapping[str, Any]:
    if DRY_RUN:
        images, settings = 4, {**settings, **({"gns.num_bins": "2"} if "gns.enable" in settings else {})}
    began = time.perf_counter()
    trainer = visit.build({**visit.LOADED, **settings}, images, world_size)
    # A measured step of the noise scale comes every eighth: windows hold whole intervals.
    steps = 8 if not DRY_RUN or "gns.enable" in settings else 1
    for _ in range(steps + 1):
        visit.step(trainer)
    ready = time.perf_counter() - began
    reset_peak_memory(visit.device())
    spent = time.thread_time()
    times = visit.windows(partial(train_step, trainer), steps)
    host = (time.thread_time() - spent) / steps / len(times)
    seconds, flops, peak = statistics.median(times), trainer.state.flops_per_image, peak_tflops(visit.device())
    found = {
        "images": images, "images_per_s": images / seconds, "ms": 1e3 * seconds, "ms_of_windows": [1e3 * each for each in times],
        "mfu_percent": 100 * images * flops / seconds / 1e12 / peak if peak else None, "host_ms": 1e3 * host,
        "start_s": ready, **memory_metrics(visit.device()),
    }  # fmt: skip
    config = trainer.config
    trainer.close()
    if world_size == 1:
        found["estimated_GiB"] = estimate_memory(config, world_size, on_gpu=True).total / 2**30
    return found


STAGES = [(name, 110 if name == "XL/2 compiled" else 60, partial(arm, name)) for name in (DRY_ARMS if DRY_RUN else ARMS)]
