"""Runs with the same number of samples at any batch size: steps, learning rate, warm-up, averages."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.config.job import JobConfig
from torchtitan.distributed.config import ParallelismConfig
from torchtitan.distributed.degrees import DEGREE_KEYS
from torchtitan.experiments.folder import StudyError
from torchtitan.gns.config import GNSConfig
from torchtitan.pictures.number_text import counted
from torchtitan.settings.sizes import largest_divisor
from torchtitan.training.config import EMAConfig, EMATrackConfig

# Learning rate of a batch that is `factor` times the reference, as a multiple of the reference's.
LR_RULES: dict[str, Callable[[float], float]] = {"const": lambda factor: 1.0, "sqrt": math.sqrt, "linear": float}

# Maximum half-life, as a share of the images seen, of an average that replaces one with a warm-up.
_RAMPUP_RATIO = 0.05


@dataclass(frozen=True)
class BatchPlan:
    """Training plan of one batch size.

    Attributes:
        factor: times the run's global batch size.
        batch_size: global.
        local_batch_size: images per rank in one forward.
        steps: of each branch.
        lr: learning rate, at its peak.
    """

    factor: float
    batch_size: int
    local_batch_size: int
    steps: int
    lr: float


def whole_samples(samples: int, batches: Sequence[int], checkpoints: int) -> int:
    """Number of samples, nearest to the requested one, at which every batch size has a checkpoint.

    Args:
        samples: requested.
        batches: global batch sizes.
        checkpoints: of every run, equally spaced, the last at its end.

    Returns:
        a multiple of checkpoints x the least common multiple of the batch sizes, never 0.

    Raises:
        StudyError: a number is not positive, or even one checkpoint's worth is over twice the request.
    """
    if min([samples, checkpoints, *batches]) < 1:
        raise StudyError("--samples, --checkpoints and batch sizes must be at least 1")
    unit = checkpoints * math.lcm(*batches)
    if unit > 2 * samples:
        raise StudyError(
            f"--samples: {samples} are too few for {checkpoints} checkpoints at batch sizes "
            f"{', '.join(map(str, batches))} (give {unit}, or fewer --checkpoints)"
        )
    return max(round(samples / unit), 1) * unit


def study_base(config: JobConfig) -> JobConfig:
    """Base configuration for runs of a study: no evaluation or pictures, all checkpoints kept.

    An average with a decay per step becomes one with the same half-life in images, at any batch size; its warm-up
    becomes a half-life of at most 5 % of the images seen.
    """
    images_per_step = config.training.global_batch_size
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, allow_config_change=False),
        ema=EMAConfig(tracks=[_in_images(track, images_per_step) for track in config.ema.tracks]),
        gns=GNSConfig(),
        checkpoint=dataclasses.replace(config.checkpoint, enable=True, folder="", keep_latest_k=0, load_step=-1),
        metrics=dataclasses.replace(config.metrics, enable_tensorboard=False, enable_wandb=False),
        sampling=dataclasses.replace(config.sampling, enable=False),
        evaluation=dataclasses.replace(config.evaluation, enable=False),
        validation=dataclasses.replace(config.validation, enable=False),
        profiling=type(config.profiling)(),
    )


def batch_overrides(
    config: JobConfig, batch: int, samples: int, checkpoints: int, lr_rule: str, processes: int
) -> dict[str, Any]:
    """Overrides of a run at another batch size.

    Warm-up, reference and epoch of the schedule, and ends of routing and alignment, are the same shares of the training, so
    that they are of as many samples at every batch size.

    Args:
        config: reference of batch size, learning rate and warm-up.
        batch: global batch size.
        samples: as `whole_samples` returns it.
        checkpoints: of every run.
        lr_rule: a key of LR_RULES.
        processes: of a run.

    Returns:
        dotted key -> value.

    Raises:
        StudyError: the processes do not divide the batch.
    """
    layout = layout_on(config, processes)
    if batch % layout.data_ranks:
        raise StudyError(f"--batches: {batch} images cannot be divided among {_ranks_text(layout)}")
    steps = samples // batch
    schedule, of_run, unit = config.lr_scheduler, config.training.steps, config.lr_scheduler.unit
    done, whole = (steps, of_run) if unit == "steps" else (samples, of_run * config.training.global_batch_size)
    warmup, reference = (getattr(schedule, f"{key}_{unit}") for key in ("warmup", "reference"))
    overrides: dict[str, Any] = {
        "training.steps": steps,
        "training.global_batch_size": batch,
        "training.local_batch_size": largest_divisor(batch // layout.data_ranks, config.training.local_batch_size),
        "optimizer.lr": config.optimizer.lr * LR_RULES[lr_rule](batch / config.training.global_batch_size),
        f"lr_scheduler.warmup_{unit}": round(warmup * done / whole),
        "checkpoint.interval": steps // checkpoints,
        "metrics.log_freq": max(steps // 128, 1),
    }
    if schedule.decay_type == "inverse_sqrt":
        overrides[f"lr_scheduler.reference_{unit}"] = max(round(reference * done / whole), 1)
    if schedule.epoch_images:
        overrides["lr_scheduler.epoch_images"] = max(round(schedule.epoch_images * done / whole), 1)
    if finish := getattr(getattr(config.model, "routing", None), "finish_steps", 0):
        overrides["model.routing.finish_steps"] = max(round(finish * steps / of_run), 1)
    of_images = samples / (of_run * config.training.global_batch_size)
    for key, share in (("stop_steps", steps / of_run), ("stop_images", of_images)):
        if stop := getattr(config.alignment, key):
            overrides[f"alignment.{key}"] = max(round(stop * share), 1)
    if layout is not config.parallelism:
        overrides |= dict(zip(DEGREE_KEYS, layout.degrees, strict=True))
    return overrides


def layout_on(config: JobConfig, processes: int) -> ParallelismConfig:
    """Layout of a configuration on a number of processes: its own where that is their number, else DDP."""
    if config.parallelism.processes == processes:
        return config.parallelism
    return ParallelismConfig(data_parallel_replicate_degree=processes, data_parallel_shard_degree=1)


def plan_batches(
    config: JobConfig, factors: list[float], lr_rule: str, lr: float, samples: int | None, processes: int
) -> tuple[list[BatchPlan], int]:
    """Plan the branches, batch sizes rising.

    The microbatch of the run is kept and accumulation grows, so that only the batch size differs.

    Args:
        config: the run's.
        factors: times its global batch size.
        lr_rule: key of LR_RULES.
        lr: learning rate at factor 1.
        samples: of every branch; None for 32 steps of the largest batch, or the next number that all batches divide.
        processes: of each branch.

    Returns:
        the plans, and the samples of every branch.

    Raises:
        StudyError: a batch size or the samples do not divide.
    """
    base, layout = config.training.global_batch_size, layout_on(config, processes)
    microbatch = largest_divisor(_share(base, layout, 1.0), config.training.local_batch_size)
    sizes = []
    for factor in sorted(set(factors)):
        size = base * factor
        if not (size > 0 and float(size).is_integer()):
            raise StudyError(f"--factors: {factor:g} x {base} images is no whole batch")
        share = _share(int(size), layout, factor)
        local = largest_divisor(share, microbatch) if factor < 1 else microbatch
        if share % local:
            raise StudyError(
                f"--factors: {factor:g} x {base} = {size:g} images are no multiple of {_ranks_text(layout)} x {local} "
                "images, the run's microbatch"
            )
        sizes.append((factor, int(size), local))
    common = math.lcm(*(size for _, size, _ in sizes))
    largest = sizes[-1][1]
    if samples is None:
        samples = -(-32 * largest // common) * common
    if samples < largest:
        raise StudyError(f"--samples: {samples} are too few for one step of {largest} images")
    if samples % common:
        below = samples // common * common
        near = f"{below}, {below + common}" if below else str(common)
        raise StudyError(f"--samples: {samples} are no whole number of steps of every batch size (try {near})")
    rule = LR_RULES[lr_rule]
    plans = [BatchPlan(factor, size, local, samples // size, lr * rule(factor)) for factor, size, local in sizes]
    return plans, samples


def _share(batch_size: int, layout: ParallelismConfig, factor: float) -> int:
    share, rest = divmod(batch_size, layout.data_ranks)
    if rest or not share:
        raise StudyError(f"--factors: {factor:g}: {batch_size} images cannot be divided among {_ranks_text(layout)}")
    return share


def _ranks_text(layout: ParallelismConfig) -> str:
    context = layout.context_parallel_degree
    if context == 1:
        return counted(layout.data_ranks, "process", "es")
    return f"{counted(layout.data_ranks, 'group')} of {context} processes"


def _in_images(track: EMATrackConfig, images_per_step: int) -> EMATrackConfig:
    if track.kind != "constant":
        return track
    half_life = math.log(0.5) / math.log(track.decay) * images_per_step if track.decay > 0 else 1e-9
    ratio = _RAMPUP_RATIO if track.warmup_power > 0 else 0.0
    return EMATrackConfig(name=track.name, kind="half_life", half_life=half_life, rampup_ratio=ratio)


def crossing(before: tuple[float, float], after: tuple[float, float], log_target: float) -> float:
    """Samples at which a learning curve crosses a target between two of its points: a line in ln loss over ln samples.

    Args:
        before, after: (samples, ln loss) of each, the target between them.
        log_target: ln loss.
    """
    share = (before[1] - log_target) / (before[1] - after[1])
    low, high = math.log(before[0]), math.log(after[0])
    return math.exp(low + share * (high - low))
