"""First call: does it run, and does it compute what the CPU computes?"""

import concurrent.futures
import json
import multiprocessing
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_day import visit
from benchmarks.gpu_day.visit import COMPILED, DRY_RUN, TINY, Results, Settings
from torchtitan import philox
from torchtitan.diffusion.solvers import SOLVERS
from torchtitan.distributed.mesh import process_group
from torchtitan.runs.folder import versions
from torchtitan.training.hardware import device_name
from torchtitan_dit.commands import evaluate, sample, train

FLOAT32: Settings = {"training.mixed_precision_param": "float32"}
MEASURED: Settings = {"gns.enable": "true", "gns.interval": "2", "gns.num_bins": "4", "gns.log_interval": "4"}
_OF_SOLVERS: dict[str, Settings] = {
    "edm_heun": {"sampling.schedule.name": "edm"}, "mean_flow": {"objective.name": "mean_flow"},
}  # fmt: skip

# Name -> what differs from four ordinary steps. Each is the first contact of a branch with a GPU.
FEATURES: dict[str, Settings] = {
    "EDM2's network": {  # of many shapes, so many compilations: it takes longest, and begins first
        **COMPILED, "model.name": "edm2", "model.flavor": "cifar", "model.channels": "32", "model.num_blocks": "1",
        "objective.path": "edm",
        "objective.prediction": "edm", "objective.preconditioning": "edm", "objective.timesteps.name": "lognormal_sigma",
        "objective.learned_uncertainty": "true",
    },
    "eager": {},
    "noise scale": MEASURED,
    "compiled": COMPILED,
    "compiled whole": {**COMPILED, "compile.scope": "model"},
    "CUDA graphs": {**COMPILED, "compile.mode": "reduce-overhead"},
    "CUDA graphs, two microbatches": {
        **COMPILED, "compile.mode": "reduce-overhead", "training.global_batch_size": "32",
    },
    "noise scale, compiled": {**COMPILED, **MEASURED},
    "timesteps by loss": {"objective.timesteps.name": "adaptive_log_snr"},
    "noise scale allocates timesteps": {**MEASURED, "gns.allocate_timesteps": "true"},
    **{f"{name} attention": {"training.attention_backend": name} for name in ("flash", "cudnn", "efficient")},
    "float32": FLOAT32,
    "TF32": {**FLOAT32, "training.float32_matmul_precision": "high"},
    "deterministic": {**MEASURED, "debug.deterministic": "true"},
    "Muon": {"optimizer.name": "Muon"},
    "AdamW8bit": {"optimizer.name": "AdamW8bit"},
    "float8": {**COMPILED, "float8.enable": "true"},
    "float8 by rows": {**COMPILED, "float8.enable": "true", "float8.recipe": "rowwise"},
    "selective recomputation": {"activation_checkpoint.mode": "selective"},
    "full recomputation, compiled": {**COMPILED, "activation_checkpoint.mode": "full"},
    "memory budget": {**COMPILED, "activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": "0.5"},
    "learned variance, compiled": {
        **COMPILED, "model.learned_variance": "true", "objective.path": "ddpm_linear", "objective.prediction": "noise",
        "objective.preconditioning": "index", "objective.timesteps.name": "uniform",
    },
    "RMSNorm, SwiGLU, rotary": {
        **COMPILED, "model.norm": "rmsnorm", "model.mlp": "swiglu", "model.position": "rotary",
    },
    "second output layer, cosine and contrastive terms, compiled": {
        **COMPILED, **MEASURED, "model.intermediate_head": "1", "objective.intermediate_share": "0.25",
        "objective.cosine_weight": "0.5", "objective.contrastive_weight": "0.05",
    },
    "alignment with itself, compiled": {
        **COMPILED, "alignment.teacher": "self", "alignment.block": "1", "alignment.teacher_block": "2",
    },
    "two times in an image, compiled": {
        **COMPILED, "alignment.teacher": "self", "alignment.block": "1", "alignment.teacher_block": "2",
        "alignment.dual_share": "0.25",
    },
    "mean flow, guidance as an input, compiled": {
        **COMPILED, "objective.name": "mean_flow", "objective.guidance_max": "8", "objective.tangent": "head",
        "model.intermediate_head": "1",
    },
    "routed tokens, compiled": {
        **COMPILED, "model.routing.name": "sprint", "model.routing.first_block": "2", "model.routing.last_block": "2",
        "model.routing.keep": "0.5",
    },
    "loader processes": {"data.num_workers": "2"},
    **{f"{name} sampler": {"sampling.solver.name": name, **_OF_SOLVERS.get(name, {})} for name in SOLVERS},
    "profiler": {"profiling.enable_profiling": "true", "profiling.profile_freq": "4"},
    "memory snapshot": {"profiling.enable_memory_snapshot": "true"},
    "pinned checkpoints": {
        "checkpoint.enable": "true", "checkpoint.interval": "2", "checkpoint.async_mode": "async_with_pinned_mem",
    },
}  # fmt: skip
_RANKS_WITH: dict[str, Settings] = {
    "compiled": COMPILED, "offloaded": {"training.enable_cpu_offload": "true", "gns.single_pass": "false"},
}  # fmt: skip
_DRY_FEATURES = ("noise scale",)


def machine(results: Results) -> None:
    """Record what the figures were measured on."""
    memory = None if DRY_RUN else torch.cuda.get_device_properties(0).total_memory / 2**30
    results.row(
        "machine", device=device_name(visit.device()), memory_GiB=memory, cores=os.cpu_count(), date=date.today().isoformat(),
        system=platform.release(), **versions(),
    )  # fmt: skip


def random_numbers(results: Results) -> None:
    """Philox on the device, eager and compiled, against the CPU: the words are equal, Gaussian numbers to rounding."""
    samples, shape = torch.arange(1000, 1064), (4, 32, 32)
    there = samples.to(visit.device())
    draws = (("timestep", samples), ("label_drop", samples))
    reference = philox.normal(7, "noise", samples, shape)

    def measure() -> Mapping[str, Any]:
        compiled = (lambda function: function) if DRY_RUN else torch.compile
        uniform = compiled(lambda i: philox.uniform_bits(7, (("timestep", i), ("label_drop", i))))(there)
        normal = compiled(lambda i: philox.normal(7, "noise", i, shape))(there)
        words = philox.random_words(7, "noise", there, 4096)
        return {
            "words_equal": torch.equal(words.cpu(), philox.random_words(7, "noise", samples, 4096)),
            "uniform_equal": all(map(torch.equal, (one.cpu() for one in uniform), philox.uniform_bits(7, draws))),
            "normal_off": float((philox.normal(7, "noise", there, shape).cpu() - reference).abs().max()),
            "normal_compiled_off": float((normal.cpu() - reference).abs().max()),
        }

    results.attempt("philox", measure)


def parity(results: Results) -> None:
    """Nine steps from the same weights: relative differences of gradient norms, loss, noise and signal from the CPU's."""
    cases: dict[str, Settings] = {
        "float32": FLOAT32, "bfloat16": {}, "float32 compiled": {**FLOAT32, **COMPILED}, "bfloat16 compiled": COMPILED,
    }  # fmt: skip
    if DRY_RUN:
        cases = {name: case for name, case in cases.items() if "compiled" not in name}
    on_cpu = visit.in_child(_nine_steps, FLOAT32, seconds=60 * visit.PATIENCE, environment={"CUDA_VISIBLE_DEVICES": ""})
    for name, case in cases.items():
        results.attempt(name, partial(_compared, case, on_cpu))


def _nine_steps(case: Settings) -> dict[str, Any]:
    trainer = visit.build({**TINY, **MEASURED, "gns.interval": "4", **case}, 8 if DRY_RUN else 32)
    weights = torch.Generator().manual_seed(0)  # drawn on the CPU: a GPU draws others from the same seed
    with torch.no_grad():
        for parameter in trainer.state.model.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=weights))
    norms = [visit.step(trainer) for _ in range(9)]
    assert trainer.state.gns
    found = {
        name.removeprefix("gns/"): value for name, value in trainer.state.gns.metrics().items()
        if "/all/" in name and name.endswith(("/noise", "/signal"))
    }  # fmt: skip
    loss = trainer.state.window.reduce()["loss_metrics/global_avg_loss"]
    trainer.close()
    return {"norms": norms, "loss": loss, **found}


def _compared(case: Settings, there: Mapping[str, Any]) -> Mapping[str, Any]:
    here = _nine_steps(case)
    norm = max(abs(a / b - 1) for a, b in zip(here["norms"], there["norms"], strict=True))
    return {"grad_norm": norm} | {
        name: abs(here[name] / value - 1) for name, value in there.items() if name != "norms" and value
    }


def features(results: Results) -> None:
    """Four steps, a validation, a grid and a save with each feature, by the loop itself; eight processes at a time."""
    names = _DRY_FEATURES if DRY_RUN else tuple(FEATURES)

    def run(name: str) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            code = visit.in_child(_run_feature, name, seconds=150 * visit.PATIENCE)
            return {"code": code, "seconds": time.perf_counter() - began}
        except RuntimeError as error:
            return {"failed": str(error)}

    with concurrent.futures.ThreadPoolExecutor(1 if DRY_RUN else 8) as pool:
        for name, found in zip(names, pool.map(run, names), strict=True):
            results.row(name, **found)


def feature_settings(name: str) -> Settings:
    """Settings of a feature's short run, without those that its network has not."""
    ordinary = {
        **TINY, "training.steps": "4", "metrics.log_freq": "1", "sampling.enable": "true", "sampling.num_steps": "3",
        "sampling.images_per_class": "2", "validation.enable": "true", "validation.interval": "4", "validation.num_images": "32",
    }  # fmt: skip
    settings = {**ordinary, **FEATURES[name]}
    if settings.get("model.name") == "edm2":
        settings.pop("model.patch_size")
    return settings


def _run_feature(name: str) -> int:
    trainer = visit.build(feature_settings(name), 16)
    code = trainer.train()
    trainer.close()
    return code


def interrupt_and_resume(results: Results) -> None:
    """Digits: interrupted by SIGTERM after its first steps, resumed by the same command, completed; sampled, evaluated."""
    folder = Path(tempfile.mkdtemp())
    words = ["--job.config_file", "train_configs/digits.toml", "--job.dump_folder", str(folder)]
    if DRY_RUN:
        words += "--training.steps 20 --training.global_batch_size 16 --gns.num_bins 2 --evaluation.enable false".split()
        words += "--lr_scheduler.warmup_steps 2 --sampling.enable false --model.flavor debug --model.num_layers 1".split()
    metrics = folder / "digits" / "metrics.jsonl"

    def run(interrupted: bool) -> int:
        process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(train.main(words)))
        process.start()
        # The file is there before the first step, and before the process can be asked to end.
        while interrupted and not (metrics.exists() and metrics.stat().st_size) and process.is_alive():
            time.sleep(0.1)
        if interrupted:
            process.terminate()
        process.join()
        return process.exitcode or 0

    def measure() -> Mapping[str, Any]:
        codes = [run(True), run(False)]
        summary = json.loads((folder / "digits" / "summary.json").read_text())
        losses = [json.loads(line).get("loss_metrics/global_avg_loss") for line in metrics.read_text().splitlines()]
        loss = next(value for value in reversed(losses) if value is not None)
        by, reference = ["--extractor", "digits"], str(folder / "digits.npz")
        codes += [
            sample.main([str(folder / "digits"), "--output", str(folder)]),
            evaluate.main(["reference", "digits", "--name", "digits", "--output", reference, *by]),
            evaluate.main([str(folder / "digits"), "--reference", reference, "--metrics", "fd", "--count", "200", *by]),
        ]
        return {"codes": codes, "status": summary["status"], "last_step": summary["step"], "last_loss": loss}

    results.attempt("digits", measure)
    shutil.rmtree(folder)


def two_ranks(results: Results) -> None:
    """DDP and FSDP2 on two processes against one; on a single GPU they share it over gloo, since NCCL refuses that."""
    alone = _ranks("NCCL", 1)[0]
    results.row("NCCL", processes=1)
    for name in ("DDP", "FSDP2") if DRY_RUN else ("DDP", "FSDP2", "FSDP2 offloaded", "DDP compiled", "FSDP2 compiled"):
        results.attempt(name, partial(_compared_ranks, name, alone))


def _compared_ranks(name: str, alone: list[float]) -> Mapping[str, Any]:
    norms = _ranks(name, 2)[0]
    return {"processes": 2, "grad_norm": max(abs(a / b - 1) for a, b in zip(norms, alone, strict=True))}


def _ranks(name: str, world_size: int) -> list[list[float]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(
            lambda rank: visit.in_child(_rank, name, world_size, seconds=100 * visit.PATIENCE, environment={
                "RANK": str(rank), "LOCAL_RANK": "0" if not DRY_RUN else str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }),
            range(world_size),
        ))  # fmt: skip


def _rank(name: str, world_size: int) -> list[float]:
    if world_size > 1:
        join = dist.init_process_group
        dist.init_process_group = lambda backend, **more: join(backend.replace("nccl", "gloo"), **more)
    replicas, shards = ("-1", "1") if name.startswith("DDP") else ("1", "-1")
    layout = {
        "parallelism.data_parallel_replicate_degree": replicas, "parallelism.data_parallel_shard_degree": shards,
        "gns.rank_gradients": "true",
    }  # fmt: skip
    further = _RANKS_WITH.get(name.partition(" ")[2], {})
    measured = {"gns.enable": "true"} if "gns.single_pass" in further else MEASURED
    settings = {**TINY, **FLOAT32, **measured, **further}
    settings |= layout if world_size > 1 else {}
    with process_group():
        trainer = visit.build(settings, 16 // world_size, world_size)
        return [visit.step(trainer) for _ in range(5)]


def tests(results: Results) -> None:
    """Tests that only mean something on a GPU."""
    import pytest

    files = ("test_cuda_kernels", "test_numerical_guard", "test_gns_taps_bfloat16", "test_kernel_choices", "test_hardware")
    words = ["-q", "-p", "no:cacheprovider", "-m", "not long", *(["--collect-only"] if DRY_RUN else [])]
    words += [f"tests/unit/{name}.py" for name in (files[-1:] if DRY_RUN else files)]
    results.attempt("tests", lambda: {"code": int(pytest.main(words))})
