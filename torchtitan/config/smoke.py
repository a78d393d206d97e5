"""Smoke run: two steps of everything that a configuration does, of a few images each, in a separate folder."""

import json
from typing import Any

from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.settings.sections import section_at

STEPS = 2
_LOCAL_BATCH = 4
_FLOAT8_BATCH = 16  # the multiple that its products need of tokens
_SAMPLING_STEPS = 3
_ROWS = 2  # of the grid
_HELD_OUT = 4
_JUDGED = 20  # samples: two for each split of the Inception score


def smoke_words(argv: list[str], world_size: int) -> tuple[list[str], str]:
    """Command line of a configuration's smoke run, and a line on what it cuts.

    Args:
        argv: command line of the run, as `load_config` takes it; its sizes are cut too.

    Raises:
        ConfigError: the configuration is refused, or one so small is.
    """
    config = load_config(argv, world_size)
    name = f"{config.job.name}-smoke"
    settings = {"job.name": name, "job.allow_config_change": True}
    if config.checkpoint.enable and config.checkpoint.load_step >= 0:
        settings["checkpoint.load_step"] = -1
    cuts = {key: value for key, value in _cuts(config).items() if value != _value(config, key)}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in (settings | cuts).items()}
    words = [*argv, *(f"--{key}={text}" for key, text in texts.items())]
    try:
        load_config(words, world_size)
    except ConfigError as error:
        raise ConfigError([f"--smoke: {problem}" for problem in error.problems]) from error
    cut = ", ".join(f"{key} {_value(config, key)} -> {value}" for key, value in cuts.items())
    return words, f"smoke run in {config.job.dump_folder}/{name}: {cut}"


def _value(config: JobConfig, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(section_at(config, section), name)


def _cuts(config: JobConfig) -> dict[str, Any]:
    training, gns, sampling, layout = config.training, config.gns, config.sampling, config.parallelism
    ranks = layout.data_parallel_replicate_degree * layout.data_parallel_shard_degree
    local = min(training.local_batch_size, _FLOAT8_BATCH if config.float8.enable else _LOCAL_BATCH)
    microbatches = 2 if training.global_batch_size > ranks * training.local_batch_size else 1
    cuts: dict[str, Any] = {
        "training.steps": STEPS, "training.global_batch_size": ranks * local * microbatches,
        "training.local_batch_size": local, "training.double_batch_after": [],
        f"lr_scheduler.warmup_{config.lr_scheduler.unit}": 0, "metrics.log_freq": 1,
    }  # fmt: skip
    if config.profiling.enable_profiling:
        cuts["profiling.enable_profiling"] = False
    if gns.enable:
        cuts["gns.log_interval"] = 1
    if gns.enable and gns.single_pass:
        cuts |= {"gns.interval": 1, "gns.bin_edges": [], "gns.num_bins": min(gns.num_bins, max(1, local // 2))}
    if gns.enable and gns.allocate_timesteps:
        cuts |= {"gns.allocation_warmup": 0, "gns.allocation_interval": 1}
    if sampling.enable or config.evaluation.enable:
        cuts["sampling.num_steps"] = min(sampling.num_steps, _SAMPLING_STEPS)
    if sampling.enable:
        cuts |= {"sampling.images_per_class": 1, "sampling.classes": sampling.classes[:_ROWS]}
    if config.validation.enable:
        least = max(_HELD_OUT, len(config.validation.timesteps))
        cuts["validation.num_images"] = min(config.validation.num_images, least)
    if config.evaluation.enable:
        cuts |= {"evaluation.count": min(config.evaluation.count, _JUDGED), "evaluation.allow_small": True}
    return cuts
