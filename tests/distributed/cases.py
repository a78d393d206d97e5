"""What the ranks of the distributed tests run; see tests.launcher."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.config.job import load_config
from torchtitan.distributed import parallelize
from torchtitan.distributed.compile import compile_blocks, compile_model, compile_objective
from torchtitan.trainer import Trainer
from torchtitan.training.metrics import METRICS_FILE

# A small model on real images, every step logged.
BASE = """
[model]
flavor = "debug"
[data]
name = "digits"
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 5
decay_type = "cosine"
[training]
steps = {steps}
global_batch_size = 16
local_batch_size = {local_batch_size}
[parallelism]
data_parallel_replicate_degree = {replicas}
data_parallel_shard_degree = {shards}
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
enable = false
[sampling]
enable = false
"""


def make_trainer(
    folder: str, name: str, *, steps: int, replicas: int, shards: int, accumulation: int, overrides: tuple = (), context: int = 1
):
    """Build a trainer in the existing process group; where it measures gradient noise, it draws no picture of it.

    context: processes that share the tokens of an image, as the overrides say too.
    """
    ranks = replicas * shards
    config_file = Path(folder) / f"{name}.toml"
    text = BASE.format(steps=steps, local_batch_size=16 // ranks // accumulation, replicas=replicas, shards=shards)
    if not dist.is_initialized() or dist.get_rank() == 0:
        config_file.write_text(text)
    if dist.is_initialized():
        dist.barrier()
    arguments = ["--job.config_file", str(config_file), "--job.dump_folder", folder, *overrides]
    trainer = Trainer(load_config(arguments, ranks * context))
    if trainer.state.gns:
        trainer.state.gns.draw = lambda points, global_batch_size: None  # takes longer than a test's steps
    return trainer


def stop_after(trainer: Trainer, steps: int, saved: int) -> None:
    """Train so many steps, save after one of them, and leave the run as one that was killed is left."""
    while trainer.state.step < steps:
        trainer.state.step += 1
        trainer.train_step()
        if trainer.state.step == saved:
            trainer._save()
            trainer.state.checkpointer.require_saved()
    trainer.close()


def resumed_as_whole(
    folder: Path, overrides: tuple, steps: int, see: Callable[[str, Trainer], None] = lambda name, trainer: None
) -> Trainer:
    """Train a straight run, and one that is stopped after its first step and resumed, which must end bit for bit as it.

    see: called with "whole" or "stopped" and the trainer, after each step.
    """
    states = {}
    for name in ("whole", "stopped", "stopped"):
        checkpoints = ("--checkpoint.enable", "true", "--checkpoint.interval", "4")
        trainer = make_trainer(
            str(folder), name, steps=steps, replicas=1, shards=1, accumulation=1, overrides=(*overrides, *checkpoints)
        )
        while trainer.state.step < steps:
            trainer.state.step += 1
            trainer.train_step()
            see(name, trainer)
            if name == "stopped" and trainer.state.step == 1:
                trainer._save()
                trainer.state.checkpointer.require_saved()
                break
        states[name] = {key: tensor.clone() for key, tensor in trainer.state.tensors().items()}
        trainer.close()
    for key, tensor in states["whole"].items():
        assert torch.equal(states["stopped"][key], tensor), key
    return trainer


# Traces, differentiates, partitions and decomposes as inductor does, and generates no code: a tenth of the time.
WITHOUT_CODE = "aot_eager_decomp_partition"
AS_TRACED = "eager"  # half of that: where layouts differ in what is traced; test_layouts differentiates on ranks too


@contextmanager
def compiler(backend: str, *, objective: bool = False) -> Iterator[None]:
    """What a model and its objective are compiled with, anew, in here.

    Without code the objective stays eager unless it is asked for: its graphs are the same on every layout, and take as long to
    trace as the model's.
    """
    torch.compiler.reset()
    compiles = objective or backend == "inductor"
    with (
        patch.object(parallelize, "compile_blocks", partial(compile_blocks, backend=backend)),
        patch.object(parallelize, "compile_model", partial(compile_model, backend=backend)),
        patch.object(parallelize, "compile_objective", partial(compile_objective, backend=backend) if compiles else Mock()),
    ):
        yield


def by_inductor(cases: dict[str, dict]) -> dict[str, dict]:
    """Cases that are compiled without code, with inductor's."""
    return {
        name: case | {"backend": "inductor"}
        for name, case in cases.items()
        if case.get("backend") in (WITHOUT_CODE, AS_TRACED)
    }


def train_all(cases: dict[str, dict]) -> dict[str, list[list[float]]]:
    """Train each case and return its (loss, gradient norm) of every step."""
    return {name: found["curve"] for name, found in train_and_look(cases).items() if "curve" in found}


def train_and_look(cases: dict[str, dict]) -> dict[str, dict]:
    """Train each case; its curve (first rank), what Python warns of, the mesh, and how one parameter lies on it."""
    folder = shared_folder()
    found = {}
    for name, case in cases.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with compiler(case.pop("backend", "inductor")):
                trainer = make_trainer(folder, name, **case)
            assert trainer.train() == 0
            trainer.close()
        parameter = next(value for key, value in trainer.state.parameters.items() if key.endswith("weight") and value.ndim == 2)
        found[name] = {
            "warnings": [str(each.message) for each in caught if issubclass(each.category, UserWarning | FutureWarning)],
            "wrapper": type(trainer.state.train_module).__name__,
            "placements": [str(placement) for placement in getattr(parameter, "placements", ())],
            "mesh": list(trainer.state.layout.mesh.mesh.shape) if trainer.state.layout.mesh else [],
            "global": list(parameter.shape),
            "local": list(parameter.to_local().shape) if hasattr(parameter, "to_local") else list(parameter.shape),
        }
        if not dist.is_initialized() or dist.get_rank() == 0:
            points = [json.loads(line) for line in (Path(folder) / name / METRICS_FILE).read_text().splitlines()]
            logged = [point for point in points if "grad_norm" in point]  # others are of the noise scale
            found[name]["curve"] = [[point["loss_metrics/global_avg_loss"], point["grad_norm"]] for point in logged]
    remove(folder)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter's values, without gradient: shards together."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shared_folder() -> str:
    box = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def remove(folder: str) -> None:
    if dist.is_initialized():
        dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
