"""Console lines of a run at its start and its end."""

import logging
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from torchtitan.conditions import Classes, Unconditional, numbered_otherwise
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import has_latents
from torchtitan.config.smoke import SMOKE_SUFFIX
from torchtitan.data import DATASETS
from torchtitan.diffusion.timesteps.placement import latent_shift
from torchtitan.distributed.mesh import crosses_nodes
from torchtitan.evaluation.targets import described_text
from torchtitan.fidelity.metrics import METRICS
from torchtitan.gns.config import GNS_FOLDER, PICTURE_FILE, few_pairs
from torchtitan.models import flavor_and_changes
from torchtitan.pictures.number_text import counted, significant
from torchtitan.processes.launch import launch_number
from torchtitan.programs import pasted
from torchtitan.runs.previews import PAGE_FILE
from torchtitan.settings.plugins import loaded_plugins
from torchtitan.state.run_state import RunState
from torchtitan.training.corrupt_images import CORRUPT_IMAGES_FILE
from torchtitan.training.hardware import device_name
from torchtitan.training.metrics import METRICS_FILE
from torchtitan.training.schedules import lr_phase, ramp_steps

logger = logging.getLogger(__name__)

_TOWARDS_DATA = "towards clean data"
_MOST_CLASSES = 10  # that a line names
_GRID = re.compile(r"step-(\d{8})\.png")


def introduce(state: RunState) -> None:
    """Introduce the run: log the model, the data, the layout, and the loss weighting over noise levels."""
    config = state.config
    lora, parameters = config.lora, "parameters"
    if lora.enable:
        beside = ", ".join(f"{extra.path} ({extra.weight:g}, in samples {extra.sampling_weight:g})" for extra in lora.extra)
        parameters += f" of adapters (alpha / rank {(lora.alpha or lora.rank) / lora.rank:g})"
        parameters += f", beside {beside}" if beside else ""
    logger.info(
        f"{config.job.name}: {flavor_and_changes(config.model)}, {state.num_parameters:,} {parameters}, on {config.data.name} "
        f"{_shapes(state)}; {config.parallelism.degrees.describe()} on "
        f"{device_name(state.layout.device)}; {config.training.describe_batch(config.parallelism.data_ranks)}"
        + " at first" * bool(config.training.double_batch_after)
    )
    logger.info(_images(state))
    if shifted := _shifted_by_size(state):
        logger.log(logging.WARNING if _TOWARDS_DATA in shifted else logging.INFO, shifted)
    if plugins := loaded_plugins():
        logger.info(f"plugins: {', '.join(f'{name} ({version[:12]})' for name, version in plugins.items())}")
    if config.sampling.enable and (line := _next_grid(state)):
        logger.info(line)
    logger.info(f"page: {pasted('compare')} {shlex.quote(str(state.folder.path))} --watch")
    if advice := crosses_nodes(state.layout, launch_number("LOCAL_WORLD_SIZE", state.layout.world_size)):
        logger.warning(advice)
    if state.gns and (warning := few_pairs(config.gns, config.training.local_batch_size, state.gns.masses)):
        logger.warning(warning)
    for warning in too_short_for(config):
        logger.warning(warning)
    points = torch.linspace(-6.0, 6.0, 121, dtype=torch.float64)
    weights = state.objective.effective_weight(points)
    if weights is not None:
        logger.info(_weighting(points, weights) + "; the learned uncertainty moves these" * state.objective.learns_weights)
    for level, line in _methods(state):
        logger.log(level, line)
    if config.autoencoder.encode:
        logger.info(f"each batch is encoded by {config.autoencoder.name}: {' x '.join(map(str, state.info.image_shape))} latents")
    if config.compile.enable:
        logger.info("compiling before the first step takes tens of seconds, on large models minutes")
    if config.sampling.enable and has_latents(config) and state.decoder is None:
        logger.info(
            "grids show three latent channels as colours; for images give --autoencoder.name and --autoencoder.path"
        )


def _methods(state: RunState) -> Iterator[tuple[int, str]]:
    """Lines on the methods that are on, with logging's level of each."""
    model, training, aligned = state.config.model, state.config.training, state.alignment
    if line := state.objective.introduction():
        yield logging.INFO, line
    if (share := state.objective.intermediate_share) is not None:
        yield logging.INFO, f"intermediate head: behind block {model.intermediate_head} of {model.num_layers}, loss x {share:g}"
    if aligned is not None:
        end = f"{aligned.steps * training.global_batch_size:,} images" if state.batch_grows else f"step {aligned.steps:,}"
        yield logging.INFO, aligned.introduction() + (f", until {end}" if aligned.steps < training.steps else "")
    if state.config.optimizer.name == "AdamW8bit":
        yield logging.INFO, "AdamW8bit compiles its update in the first step, which takes a minute or more"
    yield from state.model.introduction(training.steps)


def method_ends(state: RunState) -> list[tuple[int, str]]:
    """Ends of methods that act in a first part of the run: progress, in steps of the first batch size, and a line."""
    routing, steps = getattr(state.config.model, "routing", None), state.config.training.steps
    found = [(steps - getattr(routing, "finish_steps", 0), "routing ends: every block sees every token")]
    if state.alignment is not None:
        found.append((state.alignment.steps, "alignment ends"))
    return [(end, line) for end, line in found if end < steps]


def too_short_for(config: JobConfig) -> Iterator[str]:
    """Yield a warning for each setting that never acts in a run of so few steps or images."""
    gns, training = config.gns, config.training
    images = training.steps * training.global_batch_size
    steps = ramp_steps(training.double_batch_after, training.global_batch_size, training.steps).total()
    if gns.enable and gns.single_pass and gns.interval > steps:
        yield f"gns.interval: {gns.interval} is more than the run's {counted(steps, 'step')}: no step is measured (lower it)"
    later = {
        "gns.allocation_warmup": (gns.enable and gns.allocate_timesteps, gns.allocation_warmup, "the allocation"),
        "training.double_batch_after": (
            training.double_batch_after, min(training.double_batch_after, default=0), "the batch size",
        ),
    }  # fmt: skip
    for key, (used, start, what) in later.items():
        if used and start >= images:
            yield f"{key}: {start:,} is no less than the run's {images:,} images: {what} never changes (lower it)"


def _images(state: RunState) -> str:
    """Line on the images that were found: to train on, held out where that is known without reading, and their classes."""
    info, data = state.info, state.config.data
    known = info.has_validation and data.name in ("cifar10", "cifar100", "image_folder", "latents")
    held_out = len(DATASETS[data.name](data, "validation")) if known else 0
    moved = [f"{name} is class {number}" for name, number in numbered_otherwise(info.class_names).items()]
    moved = [*moved[:_MOST_CLASSES], "..."] if len(moved) > _MOST_CLASSES else moved
    chosen = f", chosen by name: {', '.join(moved)}" if moved else ""
    conditions = f"in {counted(info.num_classes, 'class', 'es')}{chosen}" if info.num_classes else "without classes"
    if not isinstance(info.condition_kind, Classes | Unconditional):
        conditions = f"with {info.condition_kind.wanted}"
    unknown = ", beside those held out" if info.has_validation and not known else ""
    kept = f" and {held_out:,} held out" if held_out else unknown
    return f"{counted(state.images_per_epoch, 'image')} to train on{kept}, {conditions}"


def _shifted_by_size(state: RunState) -> str:
    """Line on the shift of the times, where it is that of the images' size; "" otherwise."""
    shape, shift = state.info.image_shape, cast(float, state.config.objective.shift)
    if shift == 1 or shift != latent_shift(shape):
        return ""
    kind = "latent" if has_latents(state.config) else "image"
    below = "" if shift > 1 else f", {_TOWARDS_DATA}: {kind}s below 4,096 numbers need none (leave objective.shift out)"
    return f"{kind} of {math.prod(shape):,} numbers: times shifted by {shift:.3g}{below}"


def _next_grid(state: RunState) -> str:
    """Line on the next sample grid; "" after the last step."""
    training, interval = state.config.training, state.config.sampling.interval
    step = min((state.progress // interval + 1) * interval, training.steps)
    drawn = "" if state.step or not state.config.sampling.previews else "sample grid at step 0, "
    which = f"{drawn}next" if state.step or drawn else "first"
    if state.batch_grows:  # its number of steps is not known before
        images = step * training.global_batch_size
        return f"{which} sample grid after {images:,} images, in {state.folder.samples}" if step > state.progress else ""
    return f"{which} sample grid at step {step:,}: {state.folder.samples / f'step-{step:08d}.png'}" if step > state.step else ""


def _weighting(points: Tensor, weights: Tensor) -> str:
    """Line on the training's weight of the noise prediction's error: where it is at least half of the highest, and that place."""
    counted = "how often drawn x weight of the noise's error"
    if weights.min() > 0.99 * weights.max():
        return f"all noise levels weigh the same in training ({counted})"
    if (peak := int(weights.argmax())) in (0, len(points) - 1):  # it has none within 1 : 400
        return f"the {'higher' if peak else 'lower'} a noise level, the more training works on it ({counted})"
    half = points[weights >= 0.5 * weights.max()]
    low, high, highest = (significant(math.exp(value), 2) for value in (half.min(), half.max(), points[peak]))
    return f"training works most on noise levels of sigma = {low} to {high} (noise : data), above all on {highest} ({counted})"


def _shapes(state: RunState) -> str:
    largest = "x".join(map(str, state.info.image_shape))
    return largest if len(state.shapes) == 1 else f"of {len(state.shapes)} shapes up to {largest}"


def closing_lines(
    state: RunState, status: str, results: dict[str, Any], clock: dict[str, Any], held_out: Path, animation: Path,
    noise_points: Sequence[dict],
) -> list[str]:  # fmt: skip
    """Closing lines: end of the run, speed and cost, paths of outputs, sample quality, gradient noise scale."""
    folder, config = state.folder, state.config
    found = grids(folder.samples, state.step)
    previews = folder.samples / PAGE_FILE
    weights = folder.final_weights(state.step)
    noise_scale = folder.path / GNS_FOLDER / PICTURE_FILE
    places = {
        "sample grid": found[-1][1] if found else None,
        "previews": previews if os.path.exists(previews) else None,
        "held-out": held_out if os.path.exists(held_out) else None,
        "noise scale": noise_scale if state.gns and os.path.exists(noise_scale) else None,
        "animation": animation if os.path.exists(animation) else None,
        "metrics": folder.path / METRICS_FILE,
        "TensorBoard": folder.path / "tb" if config.metrics.enable_tensorboard else None,
        "corrupt": folder.path / CORRUPT_IMAGES_FILE if "corrupt_images" in results else None,
        "checkpoints": folder.checkpoints if config.checkpoint.enable else None,
        "weights": weights if os.path.exists(weights) else None,
        "summary": folder.summary if os.path.exists(folder.summary) else None,
    }
    smoke = config.job.name.endswith(SMOKE_SUFFIX) and config.job.allow_config_change  # as --smoke sets both
    again = "begins anew" if smoke else "resumes"
    resumes = f": the same command {again}" if status == "interrupted" and config.checkpoint.enable else ""
    lines = [f"{status} after step {state.step}{resumes}", *_speed(clock)]
    lines += [f"  {name:<12} {path}" for name, path in places.items() if path]
    lines += _metrics(results)
    if state.gns:
        from torchtitan.gns.conclusion import conclusions  # which other runs do not need

        points = [*noise_points, {"step": state.step} | state.gns.metrics()]
        steps, first_batch = config.training.steps, config.training.global_batch_size

        def phase_at(step: int) -> str:  # after a change the measured steps may have had another rate than the schedule gives
            changed = state.config_changes or state.batch_grows
            return "" if changed else lr_phase(config.lr_scheduler, step, steps, first_batch)

        noise = conclusions(points, state.grown_batch_size, first_batch, config.gns.interval, phase_at)
        lines += ["gradient noise:", *(f"  {line}" for line in noise)] if noise else []
    return lines


def grids(samples: Path, last_step: int) -> list[tuple[int, Path]]:
    """Grids in a run's folder of samples up to a step: step and picture, in order; none if the folder cannot be read.

    Later ones are of steps that the run went back from.
    """
    try:
        names = sorted(os.listdir(samples))
    except OSError:
        return []
    return [
        (int(found[1]), samples / name) for name in names if (found := _GRID.fullmatch(name)) and int(found[1]) <= last_step
    ]  # fmt: skip


def _speed(clock: dict[str, Any]) -> list[str]:
    done = f"{counted(clock['steps'], 'step')} in {clock['train_seconds']:.1f} s and {clock['wall_seconds']:.1f} s"
    return [
        f"  {'speed':<12} {clock['steps_per_second_train']:.4g} steps/s of training alone, "
        f"{clock['steps_per_second_wall']:.4g} steps/s in all ({done})"
    ]


def _metrics(results: dict[str, Any]) -> list[str]:
    """Lines of the last measurement of `[evaluation]`: a line per metric, of the values that have a better direction."""
    measured = results.get("evaluation", {})
    if "how" not in measured:  # none, or of an earlier version
        return []
    lines = [f"{measured['how']}, at step {measured['step']}:"]
    for name in filter(METRICS.__contains__, measured["metrics"]):  # of a plugin that is loaded
        values = [
            f"{value} {described_text(measured[value])}" for value, better in METRICS[name].better.items()
            if better and value in measured
        ]
        lines.append(f"  {name:<12} {', '.join(values)}")
    return lines
