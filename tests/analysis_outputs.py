"""A folder of runs with known effects, as a sweep leaves it, for the tests of the analysis."""

import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import tomli_w

COMPILE, SELECTIVE, SELECTIVE_MEMORY, COMPILED_SELECTIVE = 1.3, 0.9, 0.6, 0.95
LAYOUT_SPEED = {"ddp": 1.0, "fsdp": 0.97, "hsdp": 0.98}
LAYOUT_MEMORY = {"ddp": 1.0, "fsdp": 0.8, "hsdp": 0.9}
PATCH_SPEED = {2: 1.0, 4: 3.2}
DEGREES = {"ddp": (4, 1), "fsdp": (1, 4), "hsdp": (2, 2)}
MEMORY_LIMIT = 78.0  # GiB
WARM_UP, STEPS, LOG_FREQ = 10, 60, 5
FLOPS_PER_IMAGE, PEAK_TFLOPS = 4.9e11, 989.0


@dataclass(frozen=True)
class Planned:
    patch: int
    layout: str
    ac: str
    compiled: bool
    batch: int

    @property
    def cell(self) -> str:
        words = f"patch={self.patch},layout={self.layout},ac={self.ac},compile={str(self.compiled).lower()}"
        return f"{words},batch={self.batch}"

    @property
    def images_per_second(self) -> float:
        factors = PATCH_SPEED[self.patch] * LAYOUT_SPEED[self.layout] * (COMPILE if self.compiled else 1.0)
        if self.ac == "selective":
            factors *= SELECTIVE * (COMPILED_SELECTIVE if self.compiled else 1.0)
        return 900.0 * factors * self.batch / (self.batch + 12.0)

    @property
    def memory_gib(self) -> float:
        saved = SELECTIVE_MEMORY if self.ac == "selective" else 1.0
        return saved * LAYOUT_MEMORY[self.layout] * (4.0 + 5.0 * self.batch / self.patch**2)

    @property
    def axes(self) -> dict:
        return {
            "model.patch_size": self.patch, "layout": self.layout, "activation_checkpoint.mode": self.ac,
            "compile.enable": self.compiled, "training.local_batch_size": self.batch,
        }

    @property
    def config(self) -> dict:
        replicas, shards = DEGREES[self.layout]
        return {
            "model": {"flavor": "DiT-L/2", "patch_size": self.patch},
            "training": {"local_batch_size": self.batch, "global_batch_size": 4 * self.batch, "steps": STEPS,
                         "mixed_precision_param": "bfloat16"},
            "parallelism": {"data_parallel_replicate_degree": replicas, "data_parallel_shard_degree": shards},
            "compile": {"enable": self.compiled},
            "activation_checkpoint": {"mode": self.ac},
        }


def planned_cells(batches=(16, 32, 64, 128)) -> list[Planned]:
    grid = itertools.product((2, 4), DEGREES, ("none", "selective"), (False, True), batches)
    return [Planned(*values) for values in grid]


def write_points(
    folder: Path, config: dict, images: float, memory: float, seed: int, *, ranks: int = 4, noise: float = 0.004
) -> None:
    """A completed run with log-normal noise, slow in its warm-up: config.toml, metrics.jsonl and summary.json."""
    draw = random.Random(f"{folder.name} {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(tomli_w.dumps(config | {"debug": {"seed": seed}}))
    images *= math.exp(draw.gauss(0, noise / 2))
    lines = []
    for step in (1, *range(LOG_FREQ, STEPS + 1, LOG_FREQ)):
        rate = images * math.exp(draw.gauss(0, noise)) * (0.2 if step <= WARM_UP else 1.0)
        tflops = rate * FLOPS_PER_IMAGE / ranks / 1e12
        lines.append(json.dumps({
            "step": step, "throughput(img/s)": rate, "throughput(tps)": 256 * rate, "tflops": tflops,
            "mfu(%)": 100 * tflops / PEAK_TFLOPS,
            "time_metrics/end_to_end(s)": config["training"]["global_batch_size"] / rate,
            "memory/max_reserved(GiB)": memory * math.exp(draw.gauss(0, 1e-4)),
        }))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_summary(folder, "completed")


def write_summary(folder: Path, status: str, reason: str = "") -> None:
    (folder / "summary.json").write_text(json.dumps({
        "status": status, "reason": reason, "step": STEPS, "device": "NVIDIA H200",
        "versions": {"torch": "2.13.0", "git_commit": "0123456789ab"},
    }))


FAILED = Planned(4, "ddp", "none", False, 16)
TIMED_OUT = Planned(4, "fsdp", "none", True, 32)
SINGLE = Planned(2, "fsdp", "none", False, 16)
DAMAGED = Planned(2, "ddp", "selective", True, 32)
MISSING_ARM = (4, "hsdp", "selective", True)  # patch, layout, ac, compiled


def write_sweep(outputs: Path, repeats: int = 3) -> Path:
    """The whole sweep, with an arm that was never run, and cells out of memory, skipped, failed, timed out, damaged.

    Returns:
        the sweep's folder.
    """
    sweep = outputs / "planted"
    sweep.mkdir(parents=True)
    (sweep / "sweep.toml").write_text(tomli_w.dumps({"name": "planted", "warmup_steps": WARM_UP, "processes": 4}))
    rows, full = [], set()
    for cell in planned_cells():
        arm = (cell.patch, cell.layout, cell.ac, cell.compiled)
        if arm == MISSING_ARM:
            continue
        for repeat in range(1 if cell == SINGLE else repeats):
            name = f"{cell.cell},repeat={repeat}"
            row = {"cell": cell.cell, "name": name, "axes": cell.axes, "repeat": repeat, "status": "ok", "reason": "",
                   "seconds": 60.0, "run": name, "processes": 4, "started": "2026-01-01T00:00:00"}
            row |= _outcome(sweep / name, cell, repeat, arm in full)
            rows.append(row)
        if rows[-1]["status"] == "oom":
            full.add(arm)
    (sweep / "sweep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sweep


def _outcome(folder: Path, cell: Planned, repeat: int, arm_is_full: bool) -> dict:
    if arm_is_full:
        return {"status": "skipped", "reason": "a smaller batch ran out of memory", "run": None}
    if cell.memory_gib > MEMORY_LIMIT:
        folder.mkdir()
        (folder / "config.toml").write_text(tomli_w.dumps(cell.config | {"debug": {"seed": repeat}}))
        write_summary(folder, "oom", "step 0: out of memory")
        return {"status": "oom", "reason": "step 0: out of memory"}
    write_points(folder, cell.config, cell.images_per_second, cell.memory_gib, repeat)
    if cell == FAILED and repeat == 0:
        (folder / "summary.json").unlink()
        return {"status": "failed", "reason": "exit code 1: <script>alert(1)</script>"}
    if cell == TIMED_OUT:
        (folder / "summary.json").unlink()
        return {"status": "timeout", "reason": "not done after 600 s"}
    if cell == DAMAGED and repeat == 0:
        path = folder / "metrics.jsonl"
        path.write_text(path.read_text()[:700] + "\n{garbage\n" + path.read_text()[900:])
    return {}


def write_scaling(outputs: Path, efficiency: dict[int, float] | None = None) -> Path:
    """Runs of one arm on growing numbers of ranks, weak scaling of a planted efficiency; no sweep's record."""
    folder = outputs / "ranks"
    for ranks, share in (efficiency or {1: 1.0, 2: 0.98, 4: 0.95, 8: 0.9}).items():
        for layout in ("ddp", "fsdp"):
            replicas, shards = (ranks, 1) if layout == "ddp" else (1, ranks)
            if ranks == 1 and layout == "fsdp":
                continue
            slower = 0.96 if layout == "fsdp" else 1.0
            config = Planned(2, "ddp", "none", True, 16).config
            config["training"] = config["training"] | {"global_batch_size": 16 * ranks}
            config["parallelism"] = {"data_parallel_replicate_degree": replicas, "data_parallel_shard_degree": shards}
            for seed in range(3):
                run = folder / f"{layout}-{ranks}-{seed}"
                write_points(run, config, 300.0 * ranks * share * slower, 30.0 / shards + 5, seed, ranks=ranks)
    return folder
