"""One run of a training process: build, train, and turn what goes wrong into one line and an exit code."""

import logging
import sys

import torch.distributed as dist

from data.base import DatasetError
from torchtitan.config import JobConfig
from torchtitan.gns.capture import CannotMeasure
from torchtitan.models.float8 import Float8Error
from torchtitan.trainer import Trainer, process_group
from torchtitan.training.checkpoint import CheckpointError
from torchtitan.training.faults import TrainingError, is_out_of_memory
from torchtitan.training.optimizer import OptimizerError
from torchtitan.training.run_folder import RunFolder, RunFolderError

logger = logging.getLogger(__name__)

REFUSED = 2
FAILED = 1


def run(config: JobConfig) -> int:
    """Train as the configuration says.

    Returns:
        0: completed, now or before; 1: failed; 2: refused before anything was written; 128 + signal: interrupted
        and saved.
    """
    if RunFolder(config).is_finished() and config.checkpoint.load_step < 0:
        if _first():
            print(f"{RunFolder(config).path}: this run is finished (give another --job.name to train again)")
        return 0
    with process_group():
        try:
            trainer = Trainer(config)
        except (RunFolderError, CheckpointError, DatasetError, OptimizerError, CannotMeasure, Float8Error) as error:
            if _first():
                print(error, file=sys.stderr)
            return REFUSED
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            logger.error(f"building the run: {_out_of_memory(error)}")
            return FAILED
        try:
            return trainer.train()
        except TrainingError as error:
            return _fail(trainer, "failed", str(error))
        except (CheckpointError, DatasetError, OSError) as error:  # OSError: a disk that is full or gone
            return _fail(trainer, "failed", f"step {trainer.step}: {error}")
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                trainer.profiler.out_of_memory(trainer.step)
                return _fail(trainer, "oom", f"step {trainer.step}: {_out_of_memory(error)}")
            trainer.reports.fail("failed", f"step {trainer.step}: {error}")
            if "DataLoader worker" not in str(error):  # a killed loader may be noticed anywhere in the step
                raise
            return _fail(trainer, "failed", f"step {trainer.step}: {' '.join(str(error).split())}")
        finally:
            trainer.close()


def _out_of_memory(error: BaseException) -> str:
    advice = "a smaller training.local_batch_size or activation_checkpoint.mode = \"full\" needs less"
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"out of memory ({advice}): {said}"


def _fail(trainer: Trainer, status: str, reason: str) -> int:
    logger.error(reason)
    try:
        trainer.reports.fail(status, reason)
    except OSError as error:
        logger.error(f"{trainer.folder.summary}: cannot be written: {error.strerror}")
    return FAILED


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
