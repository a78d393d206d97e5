"""Smoke run: two steps of everything that a configuration does, of a few images each, in a separate folder."""

import json
from typing import Any

from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.settings.record import unmet_condition
from torchtitan.settings.sections import all_sections, keys, section_at
from torchtitan.settings.sources import split_keys

SMOKE_SUFFIX = "-smoke"  # of the run's name

_IMAGES = 4  # of a step
_MOST = {
    "training.steps": 2, "lr_scheduler.warmup_steps": 0, "lr_scheduler.warmup_images": 0, "metrics.log_freq": 1,
    "gns.interval": 1, "gns.log_interval": 1, "gns.num_bins": 2, "gns.allocation_warmup": 0, "gns.allocation_interval": 1,
    "sampling.num_steps": 3, "sampling.images_per_class": 1, "validation.num_images": 16,
    "evaluation.count": 20,  # two for each split of the Inception score
    "model.routing.finish_steps": 1,  # the first step is routed
}  # fmt: skip
_REPLACED: dict[str, Any] = {
    "training.double_batch_after": [], "gns.bin_edges": [], "profiling.enable_profiling": False, "evaluation.allow_small": True,
    "checkpoint.load_step": -1,
}  # fmt: skip


def smoke_words(argv: list[str], world_size: int) -> tuple[list[str], str]:
    """Command line of a configuration's smoke run, and a line on what it cuts.

    Args:
        argv: command line of the run, as `load_config` takes it; its sizes are cut too.

    Raises:
        ConfigError: the configuration is refused, or one so small is.
    """
    config = load_config(argv, world_size)
    training, name = config.training, config.job.name + SMOKE_SUFFIX
    ranks = config.parallelism.data_parallel_replicate_degree * config.parallelism.data_parallel_shard_degree
    local = min(training.local_batch_size, _IMAGES)
    microbatches = min(training.global_batch_size // (ranks * training.local_batch_size), max(2, _IMAGES // (ranks * local)))
    wanted = {"training.global_batch_size": ranks * local * microbatches, "training.local_batch_size": local}
    known = {f"{section}.{key.name}" for section, values in all_sections(config) for key in keys(values)}
    wanted |= {key: min(_value(config, key), most) for key, most in _MOST.items() if key in known} | _REPLACED
    cuts = {key: value for key, value in wanted.items() if value != _value(config, key) and _acts(config, key)}
    settings = {"job.name": name, "job.allow_config_change": True} | cuts
    own, left_out = split_keys(argv, "profiling")
    words = [*own, *(f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items())]
    try:
        load_config(words, world_size)
    except ConfigError as error:
        raise ConfigError([f"--smoke: {problem}" for problem in error.problems]) from error
    cut = ", ".join([*(f"{key} {_value(config, key)} -> {value}" for key, value in cuts.items()), *left_out])
    cut += " left out" if left_out else ""
    return words, f"smoke run in {config.job.dump_folder}/{name}: {cut or 'nothing had to be cut'}"


def _value(config: JobConfig, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(section_at(config, section), name)


def _acts(config: JobConfig, key: str) -> bool:
    """Whether a key acts in the run; those of sampling do in its evaluation too."""
    section, _, name = key.rpartition(".")
    values = section_at(config, section)
    off = section != "sampling" and not getattr(values, "enable", True)
    return not off and unmet_condition(config, section, type(values).__dataclass_fields__[name]) is None
