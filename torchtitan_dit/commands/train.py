"""Train a diffusion transformer: python train.py CONFIG [--section.key value ...].

    --smoke           try the configuration: two small steps of everything, in the folder NAME-smoke
    --check-only      check the configuration and stop
    --help            list the sections of a configuration
    --help NAME ...   describe the keys of a section (objective), those that one of its names brings (data.webdataset),
                      or one key (optimizer.lr)
"""

import itertools
import logging
import os
import sys
from pathlib import Path

from torchtitan.config.job import ConfigError, JobConfig, help_text, load_config, report_and_exit
from torchtitan.config.smoke import smoke_words
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import OBJECTIVES
from torchtitan.estimate.pixels import pixel_warning
from torchtitan.processes.command_line import refusing
from torchtitan.processes.exit_codes import REFUSED
from torchtitan.processes.importing import uncollected
from torchtitan.processes.launch import CHECKED, launch_number, restart_warning
from torchtitan.runs.ownership import moved_run_warning
from torchtitan.runs.status import forget_earlier_status, write_status
from torchtitan.training.schedules import warmup_problems

_USAGE = """usage: train.py CONFIG [--section.key value ...] [--smoke] [--check-only]
  CONFIG: a TOML file, or the name of a shipped one, as digits (train_configs/ has them all)
  train.py --help lists the sections of a configuration, train.py --help optimizer the keys of one"""


# Where training does not listen to an interruption itself: before its first step, and after its last.
@refusing(stopped="interrupted; the same command starts or resumes the run")
def main(words: list[str] | None = None) -> int:
    """Run one training process.

    Returns:
        its exit code: see `torchtitan.run.run`; 2 also for a refused configuration.
    """
    arguments = sys.argv[1:] if words is None else words
    for place, argument in enumerate(arguments, start=1):
        if argument in ("--help", "-h"):
            topics = [*itertools.takewhile(lambda word: not word.startswith("-"), arguments[place:])]
            return _help(topics, [*arguments[: place - 1], *arguments[place + len(topics) :]])
    if not arguments:
        print(_USAGE, file=sys.stderr)
        return REFUSED
    check_only, smoke = "--check-only" in arguments, "--smoke" in arguments
    arguments = [argument for argument in arguments if argument not in ("--check-only", "--smoke")]
    rank, world_size = launch_number("RANK", 0), launch_number("WORLD_SIZE", 1)
    if check_only:  # before a launcher has set WORLD_SIZE
        world_size = launch_number("NGPU", world_size)
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    forget_earlier_status()
    try:
        note = ""
        if smoke:
            problem = _metrics_problem(load_config(arguments, world_size))  # as of too few samples, which are cut
            if problem is not None:
                raise ConfigError([str(problem)])
            arguments, note = smoke_words(arguments, world_size)
        config = load_config(arguments, world_size)
    except ConfigError as error:
        write_status(None, "refused", REFUSED, error.problems[0])
        report_and_exit(error)
    if rank == 0 and CHECKED not in os.environ:
        if note:
            print(note, file=sys.stderr)
        for warning in filter(None, (restart_warning(), moved_run_warning(config))):
            print(warning, file=sys.stderr)
        for key, text in warmup_problems(config.lr_scheduler, config.training.steps, config.training.global_batch_size):
            print(f"lr_scheduler.{key}: {text}: cut to a tenth of the run", file=sys.stderr)
        if warning := pixel_warning(config, world_size):
            print(warning, file=sys.stderr)
    if not check_only:
        with uncollected():
            from torchtitan.run import run  # the configuration is checked before anything heavy is imported

        return run(config, lambda: load_config(arguments, world_size), anew=smoke)
    if problem := _folder_problem(config) or _start_problem(config) or _decoder_problem(config) or _metrics_problem(config):
        print(problem, file=sys.stderr)
        return REFUSED
    degrees, name = config.parallelism.degrees, config.job.config_file or "configuration"
    print(f"{name}: ok: {degrees.describe()}; {config.training.describe_batch(degrees.data_ranks)}")
    return 0


def _folder_problem(config: JobConfig) -> Exception | None:
    """Problem of the run's folder, which launched processes would each find after seconds; None if there is none."""
    if not Path(config.job.dump_folder, config.job.name).exists():  # nothing heavy is imported
        return None
    from torchtitan.errors import RunFolderError, StoreError
    from torchtitan.runs.folder import RunFolder

    try:
        folder = RunFolder(config)
        folder.check_own()
        if not config.cache.enable:
            folder.check_unchanged()
        elif not config.job.allow_config_change:
            folder.check_cache()
    except (RunFolderError, StoreError, OSError) as error:
        return error
    return None


def _start_problem(config: JobConfig) -> Exception | None:
    """Problem of objective or alignment, or of weights and adapters that a configuration starts from; None without one."""
    attaches = OBJECTIVES[config.objective.name].attach is not Objective.attach or config.alignment.teacher != "none"
    if not (config.checkpoint.initial_weights or config.lora.enable or attaches):  # nothing heavy is imported
        return None
    from torchtitan.data import DatasetError
    from torchtitan.errors import CheckpointError
    from torchtitan.weights.initial_weights import check_start

    try:
        check_start(config)
    except (CheckpointError, ConfigError, DatasetError) as error:
        return error
    return None


def _decoder_problem(config: JobConfig) -> Exception | None:
    """Problem of opening a configuration's autoencoder; None if there is none."""
    used = config.draws_pictures or config.autoencoder.encode
    if config.autoencoder.name == "none" or config.cache.enable or not used:  # an unfilled cache has opened it
        return None
    from torchtitan.autoencoders.base import AutoencoderError
    from torchtitan.config.latent_cache import store_of_latents
    from torchtitan.data import DatasetError
    from torchtitan.evaluation.decoding import run_decoder

    try:
        run_decoder(config.autoencoder, store_of_latents(config))
    except (AutoencoderError, DatasetError) as error:
        return error
    return None


def _metrics_problem(config: JobConfig) -> Exception | None:
    """Problem of the measurements of samples, as of too few or a missing reference; None if there is none."""
    if config.cache.enable or not config.evaluation.enable:
        return None
    import torch

    from torchtitan.config.latent_cache import has_latents
    from torchtitan.data import DatasetError
    from torchtitan.errors import EvaluationError
    from torchtitan.evaluation.sample_metrics import SampleMetrics

    try:
        SampleMetrics.of_run(config.evaluation, config.data, torch.device("cpu"), has_latents(config))
    except (EvaluationError, DatasetError) as error:
        return error
    return None


def _help(topics: list[str], beside: list[str]) -> int:
    try:
        text = help_text(topics, beside)
    except ConfigError as error:
        report_and_exit(error)
    print(text if topics else f"{__doc__}\n{text}", end="")
    return 0
