"""What the stages of a visit share: results, processes, and trainers of synthetic latents.

A dry run (DEVICE=cpu) runs every stage on the CPU with shapes of a few pixels and without the compiler: it shows that the
program of the visit runs, and its figures mean nothing.
"""

import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared import timed
from torchtitan.config.job import JobConfig, load_config
from torchtitan.processes.parent_death import end_with_parent
from torchtitan.trainer import Trainer

DRY_RUN = os.environ.get("DEVICE") == "cpu"
ROOT = Path(__file__).resolve().parent.parent.parent
# Time boxes are of a GPU machine; a dry run on a loaded CPU gets this many times as much.
PATIENCE = 20 if DRY_RUN else 1

Settings = Mapping[str, str]
SYNTHETIC: Settings = {
    "data.name": "synthetic", "data.kind": "noise", "data.shape": "[4, 32, 32]", "data.num_classes": "1000",
    "model.flavor": "DiT-S/2", "training.mixed_precision_param": "bfloat16", "training.steps": "1000000",
    "checkpoint.enable": "false", "sampling.enable": "false", "metrics.enable_tensorboard": "false",
    "ema.tracks": '[{"name": "ema", "decay": 0.9999}]',
}  # fmt: skip
# DiT-XL/2's published training: learned variance on DDPM's steps, no clipping.
XL: Settings = {
    "model.flavor": "DiT-XL/2", "model.learned_variance": "true", "objective.path": "ddpm_linear",
    "objective.prediction": "noise", "objective.preconditioning": "index", "objective.timesteps.name": "uniform",
    "training.max_norm": "0",
}  # fmt: skip
COMPILED: Settings = {"compile.enable": "true"}
LOADED: Settings = {"data.num_workers": "4"}  # or the host draws latents for 21 of the 52 ms of a step of S/2 with 256 images
NOISE: Settings = {"gns.enable": "true", "gns.log_interval": "1000000"}
TINY: Settings = {
    "model.flavor": "debug", "data.shape": "[4, 16, 16]", "model.patch_size": "4", "data.num_classes": "10",
    "data.num_images": "1000",
}  # fmt: skip
_SHALLOW: Settings = {"model.num_layers": "1"}
_GPU_ONLY = ("compile.", "float8.", "training.attention_backend", "data.num_workers")


class Results:
    """Rows of a stage, each a line of JSON in a file of the visit."""

    def __init__(self, path: Path, stage: str) -> None:
        self._path, self._stage = path, stage

    def row(self, name: str, **values: Any) -> None:
        """Append and print a row; one with an exit code other than 0 has failed."""
        if values.get("code"):
            values["failed"] = f"exit code {values['code']}"
        line = json.dumps({"stage": self._stage, "row": name} | {key: _rounded(value) for key, value in values.items()})
        print(f"RESULT {line}", flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

    def attempt(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Append what is measured, or the error in a line; the rows behind it are measured either way."""
        try:
            self.row(name, **measure())
        except Exception as error:  # noqa: BLE001  a visit ends in half an hour: one failed row must not cost the others
            traceback.print_exc()
            self.row(name, failed=error_line(error))
        finally:
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            if device().type == "cuda":
                torch.cuda.empty_cache()


def error_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def device() -> torch.device:
    return torch.device("cpu") if DRY_RUN else torch.device("cuda", 0)


def images_per_step() -> int:
    """Images of XL/2 in a step: as many as the memory of an H200 holds, half of it on an H100."""
    if DRY_RUN:
        return 4
    return 256 if torch.cuda.get_device_properties(0).total_memory > 100e9 else 128


def words(settings: Settings) -> list[str]:
    """Words of a command line; a dry run leaves out what needs a GPU, and takes the smallest network."""
    if DRY_RUN:
        settings = {**{key: value for key, value in settings.items() if not key.startswith(_GPU_ONLY)}, **TINY, **_SHALLOW}
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def build(settings: Settings, batch: int, world_size: int = 1) -> Trainer:
    """Build a trainer of synthetic latents with `batch` images per rank."""
    return Trainer(configuration({"job.dump_folder": tempfile.mkdtemp(), **settings}, batch, world_size))


def configuration(settings: Settings, batch: int, world_size: int = 1, *, elsewhere: bool = False) -> JobConfig:
    """Configure a run on synthetic latents; `elsewhere`: on a GPU that is not here."""
    sizes = {"training.local_batch_size": str(batch), "training.global_batch_size": str(batch * world_size)}
    return load_config(words({**SYNTHETIC, **sizes, **settings}), world_size, elsewhere=elsewhere)


def step(trainer: Trainer) -> float:
    """Train a step; the gradient norm."""
    trainer.state.step += 1
    return float(trainer.train_step()[0])


def windows(work: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of a call in each of three windows of as many calls; the device is waited for once per window."""

    def window() -> None:
        for _ in range(calls):
            work()

    return [timed(window, device()) / calls for _ in range(1 if DRY_RUN else 3)]


def seconds_per_call(work: Callable[[], Any], calls: int) -> float:
    """Median of the windows, after one call of warm-up."""
    work()
    return statistics.median(windows(work, calls))


def in_child(
    work: Callable[..., Any], *arguments: Any, seconds: float, environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Any:
    """Result of a function in a forked process, which ends with all its processes after a time; RuntimeError says why.

    The parent has imported everything and never touches the device, which a forked process could not use then.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, work, arguments, environment or {}, log))
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(seconds) else (False, f"took longer than {seconds:.0f} s")
    except EOFError:
        answer = False, "the process died"
    finally:
        _end(process)
    if not answer[0]:
        raise RuntimeError(answer[1])
    return answer[1]


def _answer(sender: Any, work: Callable[..., Any], arguments: tuple, environment: Mapping[str, str], log: Path | None) -> None:
    end_with_parent(os.getppid())
    os.setsid()
    os.environ.update(environment)
    if log:
        with log.open("a") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
    try:
        answer = True, work(*arguments)
    except BaseException as error:  # noqa: BLE001  the parent reports it
        traceback.print_exc()
        answer = False, error_line(error)
    sender.send(answer)
    sys.stdout.flush()
    os._exit(0)  # a process group of gloo may abort at an ordinary exit


def _end(process: Any) -> None:
    """Kill what is left of a process and of those it started."""
    time.sleep(0.05)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.join()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [_rounded(one) for one in value] if isinstance(value, list) else value
