"""Run of a training process: build, train, and turn failures into one line and an exit code."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.config.job import ConfigError, JobConfig
from torchtitan.data.base import DatasetError
from torchtitan.distributed.collectives import Interrupted, interruptible, on_all_ranks, requests_ignored_at_the_end
from torchtitan.distributed.failures import is_lost_rank, is_out_of_memory
from torchtitan.distributed.kernel_choices import KernelError
from torchtitan.distributed.mesh import init_process_group, process_group
from torchtitan.errors import (
    CheckpointError,
    EvaluationError,
    RunFolderError,
    StoreError,
    TrainingError,
    first_line,
    unwrapped,
)
from torchtitan.extraction.cache_filling import fill_cache
from torchtitan.files.run_lock import Busy, RunLock
from torchtitan.gns.config import CannotMeasure
from torchtitan.models.float8 import Float8Error
from torchtitan.models.flops import MiscountedModel
from torchtitan.pictures.number_text import counted
from torchtitan.processes.exit_codes import BUSY, FAILED, REFUSED
from torchtitan.processes.launch import LaunchError, launch_number
from torchtitan.runs.folder import RunFolder
from torchtitan.runs.status import write_status
from torchtitan.trainer import Trainer
from torchtitan.training.clock import BEFORE_FIRST_STEP, RunClock, process_start
from torchtitan.training.optimizer import OptimizerError
from torchtitan.weights.initial_weights import check_start

logger = logging.getLogger(__name__)

_REFUSALS = (
    AutoencoderError, ConfigError, RunFolderError, CheckpointError, DatasetError, OptimizerError, CannotMeasure,
    Float8Error, LaunchError, MiscountedModel, EvaluationError, KernelError,
)  # fmt: skip
_CLOSING_SECONDS = 60.0


def run(config: JobConfig, reload: Callable[[], JobConfig] | None = None, anew: bool = False) -> int:
    """Run the training of a configuration.

    Args:
        config: resolved.
        reload: reads the same configuration again; needed where it has a cache that is to be filled first.
        anew: start at step 0 in the folder of an earlier smoke run, its checkpoints deleted.

    Returns:
        0: completed, now or before; 1: failed; 2: refused before anything was written; 75: another
        process writes into the folder, nothing was written; 128 + signal: interrupted
        and saved, or with its cache partly filled.
    """
    with _bounded_end() as deadline, process_group():
        try:
            if anew:
                init_process_group(config.comm)
                on_all_ranks(RunFolder(config).begin_anew if _first() else lambda: None, (*_REFUSALS, Busy, OSError), None)
            elif _is_finished(config):
                return 0
            clock = RunClock(started=process_start())
            if config.cache.enable and reload:
                init_process_group(config.comm)
                on_all_ranks(lambda: _check_before_filling(config), _REFUSALS, None)
                clock.switch("encode", clock.now())
                with interruptible():
                    fill_cache(config)
                clock.switch("start_up", clock.now())
                config = reload()
            trainer = Trainer(config, clock, folder=RunFolder(config))  # open until the status of a failure is written
        except Interrupted as request:
            write_status(None, "requeue", 128 + request.number, f"{request} while the cache was filled")
            return 128 + request.number
        except StoreError as error:  # it may answer when the run is started again
            logger.error(f"rank {_rank()}: {error}")
            write_status(None, "failed", FAILED, str(error))
            return FAILED
        except Busy as error:
            write_status(None, "busy", BUSY, str(error))  # the folder is another run's
            if _speaks_for_its_machine():
                print(error, file=sys.stderr)
            return BUSY
        except _REFUSALS as error:
            write_status(_own_folder(config), "refused", REFUSED, str(error))
            if _speaks_for_its_machine():
                print(error, file=sys.stderr)
            return REFUSED
        except Exception as error:  # of any code, a plugin's too
            if isinstance(error, OSError) and config.cache.enable:  # of the cache: everything else says its own
                said = f"{error.filename2 or error.filename or 'cache.folder'}: {error.strerror}"
                logger.error(f"rank {_rank()}: {said}; the same command resumes")
                write_status(None, "failed", FAILED, said)
                return FAILED
            known = is_out_of_memory(error) or is_lost_rank(error)
            said = f"{type(error).__name__}: {error}"
            if known:
                said = _out_of_memory(error, config) if is_out_of_memory(error) else f"lost another rank: {first_line(error)}"
                logger.error(f"rank {_rank()}: building the run: {said}")
            write_status(_own_folder(config), "failed", FAILED, f"building the run: {said}")
            if known:
                return FAILED
            raise
        with requests_ignored_at_the_end():
            try:
                return _train(trainer, deadline)
            finally:
                trainer.close()


def _own_folder(config: JobConfig) -> Path | None:
    """Folder of the run once this process has opened it: until then it may be another run's."""
    folder = RunFolder(config).path
    return folder if RunLock.is_ours(folder) else None


def _check_before_filling(config: JobConfig) -> None:
    """Check what a run starts from, and that it has trained on the cache that is to be filled.

    Raises:
        CheckpointError, ConfigError, DatasetError, RunFolderError.
    """
    check_start(config)
    if not config.job.allow_config_change:
        RunFolder(config).check_cache()


def _is_finished(config: JobConfig) -> bool:
    """Check whether this run is finished, and say so. Raises RunFolderError: the folder's run has another training."""
    folder = RunFolder(config)
    if not folder.is_finished():
        return False
    if config.cache.enable:  # it is not filled, or was removed
        if not config.job.allow_config_change:
            folder.check_cache()
    else:
        folder.check_unchanged()
    if _first():
        folder.restore_record()
        more = "more --training.steps extend it; " if config.checkpoint.enable else ""
        if not folder.has_checkpoints():
            more = "no checkpoint is left to extend it, or to write final weights, from; "
        print(f"{folder.path}: this run is finished ({more}another --job.name trains again)")
    write_status(None, "completed", 0)
    return True


@contextmanager
def _bounded_end() -> Iterator[threading.Timer]:
    """Timer to start when the run has failed: closing may hang on the lost part."""
    deadline = threading.Timer(_CLOSING_SECONDS, os._exit, (FAILED,))
    deadline.daemon = True
    try:
        yield deadline
    finally:
        deadline.cancel()


def _train(trainer: Trainer, deadline: threading.Timer) -> int:
    try:
        code = trainer.train()
    except TrainingError as error:
        return _fail(trainer, deadline, "failed", str(error))
    except (CheckpointError, DatasetError, OSError) as error:  # OSError: a disk that is full or gone
        return _fail(trainer, deadline, "failed", f"step {trainer.state.step}: {error}", lost=is_lost_rank(error))
    except Exception as error:  # of any code, a plugin's too: kept as the run's reason, and raised again
        if is_out_of_memory(error):
            trainer.profiler.out_of_memory(trainer.state.step)
            where = trainer.phases.where
            step = "before step 1" if where == BEFORE_FIRST_STEP and not trainer.state.step else f"step {trainer.state.step}"
            return _fail(trainer, deadline, "oom", f"{step}: {_out_of_memory(error, trainer.config, where)}")
        if is_lost_rank(error):
            reason = f"step {trainer.state.step}: lost another rank in {trainer.phases.where}: {first_line(error)}"
            return _fail(trainer, deadline, "failed", reason, lost=True)
        if "DataLoader worker" in str(error):  # a killed loader may be noticed anywhere in the step
            reason = trainer.state.data.lost_loader() or unwrapped(error)
            return _fail(trainer, deadline, "failed", f"step {trainer.state.step}: {reason}")
        _fail(trainer, deadline, "failed", f"step {trainer.state.step}: {type(error).__name__}: {error}")
        raise
    status, reason = "completed", ""
    if code:
        saved = trainer.config.checkpoint.enable
        status, ending = ("requeue", "and saved") if saved else ("failed", "and not saved: checkpoint.enable is false")
        reason = f"{Interrupted(code - 128)}, {ending}"
    write_status(trainer.state.folder.path if _first() else None, status, code, reason)
    return code


def _out_of_memory(error: BaseException, config: JobConfig, where: str = "") -> str:
    if where in ("sampling", "validation", "evaluation"):
        section = config.validation if where == "validation" else config.sampling
        key = f"{'validation' if where == 'validation' else 'sampling'}.batch_size"
        advice = f"give a {key} below {section.batch_size}" if section.batch_size > 1 else f"{key} is 1: smaller images"
        return f"out of memory in {where} ({advice}): {first_line(error)}"
    local = config.training.local_batch_size
    half = next((size for size in range(local // 2, 0, -1) if local % size == 0), 0)
    smaller = f"--training.local_batch_size {half} --training.global_batch_size {config.training.global_batch_size}"
    remedies = [f"{smaller} accumulates the same batch"] if half else ["a smaller model"]
    remedies += ["activation_checkpoint.mode = full needs less"] if config.activation_checkpoint.mode != "full" else []
    advice = f"{counted(local, 'image')} at a time; {', or '.join(remedies)}"
    return f"out of memory ({advice}): {first_line(error)}"


def _fail(trainer: Trainer, deadline: threading.Timer, status: str, reason: str, lost: bool = False) -> int:
    """Close a failed run; lost: this rank fails since another one has ended."""
    deadline.start()  # the watchdog has gone
    trainer.supervision.failed(status, reason, lost)
    return FAILED


def _first() -> bool:
    return _rank() == 0


def _speaks_for_its_machine() -> bool:
    """True if this process reports a refusal: one of all, or one of each machine while they are not joined."""
    return _first() if dist.is_initialized() else os.environ.get("LOCAL_RANK", "0") == "0"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else launch_number("RANK", 0)
