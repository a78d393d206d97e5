"""Third call: what do measuring, sampling, saving and loading cost, and how do others' networks compare?"""

import functools
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import shared
from benchmarks.gns_cost import in_turns
from benchmarks.gpu_day import visit
from benchmarks.gpu_day.visit import COMPILED, DRY_RUN, TINY, XL, Results
from benchmarks.shared import timed
from benchmarks.step_speed import FACEBOOK, train_step
from benchmarks.step_speed import build as build_network
from torchtitan.config.job import load_config
from torchtitan.gns.config import GNSConfig
from torchtitan.state.resume import resume
from torchtitan.trainer import Trainer

LATENTS, CLASSES = (4, 32, 32), 1000


def networks(results: Results) -> None:
    """The same bfloat16 step (fused AdamW, squared error) with this DiT, diffusers' and facebookresearch's, compiled by block."""
    for flavor, images in (("DiT-XL/2", visit.images_per_step()), ("DiT-S/2", 256)):
        for mode in ("compiled",) if DRY_RUN else ("compiled", "eager"):
            for kind in ("ours", "diffusers", "facebook"):
                if kind == "facebook" and not FACEBOOK.exists():
                    results.row(f"{flavor} {mode}, {kind}", failed="not measured: its models.py is not in .gpu/")
                    continue
                results.attempt(f"{flavor} {mode}, {kind}", functools.partial(_network, kind, flavor, mode, images))
                gc.collect()
        if DRY_RUN:
            return


def _network(kind: str, flavor: str, mode: str, images: int) -> Mapping[str, Any]:
    if DRY_RUN:
        flavor, mode, images = "debug", "eager", 2
    shape = (4, 16, 16) if DRY_RUN else LATENTS
    network = build_network(kind, flavor, mode, visit.device(), shape, CLASSES)
    work = train_step(network, images, visit.device(), shape, CLASSES, torch.bfloat16)
    for _ in range(1 if DRY_RUN else 4):
        work()
    windows = visit.windows(work, 4)
    peak = {} if DRY_RUN else {"peak_GiB": torch.cuda.max_memory_allocated() / 2**30}
    return {
        "images_per_s": images / statistics.median(windows), "ms_of_windows": [1e3 * each for each in windows],
        "parameters": sum(parameter.numel() for parameter in network.parameters()), **peak,
    }  # fmt: skip


def noise_scale(results: Results) -> None:
    """Steps without measurement, between measured ones and measured, in turns, as benchmarks/gns_cost.py has them."""
    interval = GNSConfig().interval

    def measure(flavor: str, images: int) -> Mapping[str, Any]:
        settings = {
            **XL, **visit.NOISE, **COMPILED, **visit.LOADED, "model.flavor": flavor,
            **({"gns.num_bins": "4"} if DRY_RUN else {}),
        }  # fmt: skip
        trainer = visit.build(settings, images)
        off, free, measured = (statistics.median(arm) for arm in zip(*in_turns(trainer, 1 if DRY_RUN else 10), strict=True))
        trainer.close()
        return {
            "off_ms": 1e3 * off, "free": free / off, "measured": measured / off,
            "default_percent": 100 * (((interval - 1) * free + measured) / interval / off - 1),
        }  # fmt: skip

    for flavor, images in (("DiT-XL/2", visit.images_per_step()), ("DiT-XL/2", 32), ("DiT-B/2", 256)):
        results.attempt(f"{flavor}, {images} images", functools.partial(measure, flavor, 8 if DRY_RUN else images))
        if DRY_RUN:
            return


def kernels(results: Results) -> None:
    """Thirty longest kernels of a compiled step of XL/2, their number, and torch's own count of the FLOPs."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    trainer = visit.build({**XL, **COMPILED}, visit.images_per_step())
    for _ in range(4):
        visit.step(trainer)
    kinds = [ProfilerActivity.CPU, *([] if DRY_RUN else [ProfilerActivity.CUDA])]
    kind = DeviceType.CPU if DRY_RUN else DeviceType.CUDA
    with profile(activities=kinds) as profiler:
        visit.step(trainer)
    rows = [
        (event.self_cpu_time_total if DRY_RUN else event.self_device_time_total, event.count, event.key)
        for event in profiler.key_averages() if event.device_type == kind and not getattr(event, "is_user_annotation", False)
    ]  # fmt: skip
    total = sum(spent for spent, _, _ in rows)
    for spent, count, name in sorted(rows, reverse=True)[: 2 if DRY_RUN else 30]:
        results.row(name[:110], share=spent / total, ms=spent / 1e3, count=count)
    results.row("all kernels", ms=total / 1e3, count=sum(count for spent, count, _ in rows if spent))
    trainer.close()
    torch._dynamo.reset()
    trainer = visit.build(XL, 4)
    with FlopCounterMode(display=False) as counter:
        visit.step(trainer)
    results.row("TFLOP per image", formula=trainer.state.flops_per_image / 1e12, counted=counter.get_total_flops() / 4e12)
    trainer.close()


def sampling(results: Results) -> None:
    """A grid of 64 images in 50 steps of DDIM with guidance."""

    def measure() -> Mapping[str, Any]:
        settings = {
            **XL, **COMPILED, "sampling.enable": "true", "sampling.num_steps": "3" if DRY_RUN else "50",
            "sampling.guidance_scale": "1.5", "sampling.solver.name": "ddim", "sampling.schedule.name": "ddpm",
            "sampling.classes": str(list(range(8))), "sampling.images_per_class": "1" if DRY_RUN else "8",
            "sampling.batch_size": "64",
        }  # fmt: skip
        trainer = visit.build(settings, 4)
        visit.step(trainer)
        first, *later = (timed(trainer.reports.sample_grid, visit.device()) for _ in range(3))
        trainer.close()
        images = 8 if DRY_RUN else 64
        return {"images": images, "first_s": first, "s": min(later), "images_per_s": images / min(later)}

    results.attempt("DiT-XL/2, DDIM, 50 steps, guidance 1.5", measure)


def checkpoints(results: Results) -> None:
    """A save of XL/2 with Adam's state and one average: seconds that block training, and until it counts; reading it back."""
    for mode in ("disabled", "async", *([] if DRY_RUN else ["async_with_pinned_mem"])):
        results.attempt(mode, functools.partial(_save, mode))


def _save(mode: str) -> Mapping[str, Any]:
    settings = {
        **XL, "checkpoint.enable": "true", "checkpoint.async_mode": mode, "checkpoint.interval": "1000000",
    }  # fmt: skip
    trainer = visit.build(settings, 4)
    blocked, whole = 0.0, 0.0
    for _ in range(2):  # the first makes the buffers
        visit.step(trainer)
        began = time.perf_counter()
        trainer._save()
        blocked = time.perf_counter() - began
        trainer.state.checkpointer.wait()
        whole = time.perf_counter() - began
    found = {
        "GB": sum(tensor.nbytes for tensor in trainer.state.tensors().values()) / 1e9, "blocked_s": blocked, "whole_s": whole,
    }  # fmt: skip
    if mode == "disabled":
        found["read_s"] = timed(lambda: resume(trainer.state, trainer.state.step), visit.device())
    trainer.close()
    shutil.rmtree(trainer.config.job.dump_folder)
    return found


def loader(results: Results) -> None:
    """JPEG files of 512 x 384 to 256 x 256 on the device beside steps of a small network, by loader processes."""
    folder = Path(tempfile.mkdtemp())
    draw, size = np.random.default_rng(0), 32 if DRY_RUN else 256
    for number in range(8 if DRY_RUN else 1024):
        place = folder / f"class{number % 4}"
        place.mkdir(exist_ok=True)
        small = Image.fromarray(draw.integers(0, 256, (24, 32, 3), np.uint8))
        small.resize((512, 384), Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=90)

    def measure(workers: int) -> Mapping[str, Any]:
        images = 4 if DRY_RUN else 128
        settings = {
            **{key: value for key, value in visit.SYNTHETIC.items() if not key.startswith("data.")},
            "data.name": "image_folder", "data.path": str(folder), "data.image_size": str(size), "model.patch_size": "16",
            "data.num_workers": str(workers), "data.validation_fraction": "0", "training.local_batch_size": str(images),
            "training.global_batch_size": str(images), "job.dump_folder": tempfile.mkdtemp(),
            **({"model.flavor": TINY["model.flavor"]} if DRY_RUN else {}),
        }  # fmt: skip
        trainer = Trainer(load_config([word for key, value in settings.items() for word in (f"--{key}", value)], 1))
        steps = 2 if DRY_RUN else 24
        for _ in range(steps // 4 + 1):
            visit.step(trainer)
        waited, began = trainer.state.data.data_seconds, time.perf_counter()
        for _ in range(steps):
            timed(functools.partial(shared.train_step, trainer), visit.device())
        spent = time.perf_counter() - began
        trainer.close()
        share = (trainer.state.data.data_seconds - waited) / spent
        return {"images_per_s": steps * images / spent, "waited_percent": 100 * share}

    for workers in (0,) if DRY_RUN else (0, 8, (os.cpu_count() or 2) - 1):
        results.attempt(f"{workers} loader processes", functools.partial(measure, workers))
    shutil.rmtree(folder)
