"""Linear probe: what a linear classifier reads off the blocks of a diffusion network, by block and noise level.

Features are means over places of a block's output for images with noise; one forward gives those of all blocks. The
baseline is the same classifier on the clean images' own values.

Source: Xiang et al., "Denoising diffusion autoencoders are unified self-supervised learners", arXiv 2303.09769; the
multi-GPU port FutureXiang/edm2; `--probe port` is its protocol.
"""

import argparse
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from research import linear_probe_report
from research.block_features import BlockFeatures
from research.cells import Cell, Row
from research.frame import StudyRun, checkpoint_name, require_at_least, results_folder
from research.linear_probe_report import PIXELS
from research.probe_passes import (
    FEATURES,
    IMAGES_PER_PART,
    PORT_BATCH,
    Passes,
    block_source,
    chosen_images,
    pixel_source,
    remove_features,
)
from torchtitan.data import DATASETS
from torchtitan.data.base import DatasetError, Split
from torchtitan.diffusion.paths import Path as NoisePath
from torchtitan.diffusion.paths import has_indices
from torchtitan.diffusion.solvers.schedules import edm_times
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.statistics.interval import binomial_interval
from torchtitan.weights.trained_model import TrainedModel, empty_trained_model

KEY = (
    "model", "weights", "probe", "train_images", "test_images", "passes", "batch", "conditioning", "seed", "block", "sigma",
)  # fmt: skip
COLUMNS = (
    *KEY, "t", "log_snr", "features", "accuracy", "lower", "upper", "correct", "tested", "left_out", "train_accuracy",
    "penalty", "status", "reason", "date", "runtime",
)  # fmt: skip
UNIT = "classifier"

DATA = "data"  # model of the baseline's row
LOGISTIC, PORT = "logistic", "port"
PASSES = {LOGISTIC: 1, PORT: 15}
SCHEDULE_STEPS = 18
_PORT_LEVELS = (3, 4, 5)


@dataclass(frozen=True)
class NoiseLevel:
    """Noise level of a probe.

    Attributes:
        t: in the common time, t = sigma / (1 + sigma) < 1.
    """

    t: float

    @property
    def sigma(self) -> float:
        return self.t / (1.0 - self.t)

    @property
    def log_snr(self) -> float:
        """ln of the signal-to-noise ratio, -2 ln sigma."""
        return -2.0 * math.log(self.sigma) if self.t else math.inf

    @property
    def name(self) -> str:
        """Text of sigma in tables."""
        return f"{self.sigma:.6g}"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--blocks", nargs="+", metavar="BLOCK", help="blocks to probe, as block_3 of a DiT, out_6 of an EDM2 U-Net "
        "(default: all)")
    add("--levels", type=int, nargs="+", metavar="K", help=f"noise levels as indices of the reversed {SCHEDULE_STEPS}-step "
        "schedule of EDM: 0 is no noise, 3 sigma 0.0229, 4 0.0599, 5 0.14 (default, if no level is given otherwise: 3 4 5)")
    add("--sigmas", type=float, nargs="+", metavar="SIGMA", help="noise levels as noise / signal")
    add("--times", type=float, nargs="+", metavar="T", help="noise levels as t of a flow: sigma / (1 + sigma)")
    add("--indices", type=float, nargs="+", metavar="I", help="noise levels as indices of the run's DDPM path")
    add("--probe", choices=tuple(PASSES), default=LOGISTIC, help="logistic: regression on features taken once, its penalty "
        f"chosen on a fifth of the training images; port: Adam on batches of {PORT_BATCH}, features with fresh noise and flips "
        "in every epoch, as the multi-GPU port of EDM2 (default: logistic)")
    add("--passes", type=int, metavar="N", help="passes over the training images, each with fresh noise (default: 1; port: 15)")
    add("--train-images", type=int, metavar="N", help="images to fit classifiers to (default: all of the training split)")
    add("--test-images", type=int, metavar="N", help="images to test them on (default: all of the validation split)")
    add("--conditioning", choices=("null", "uniform"), default="null", help="class that a class-conditional network is given, "
        "never an image's own: the null class, or one drawn for each image (default: null)")
    add("--batch-size", type=int, default=PORT_BATCH, help="images at a time; of port also Adam's batch, with "
        f"a learning rate in proportion: {PORT_BATCH} for each GPU of the port (default: {PORT_BATCH})")
    add("--seed", type=int, default=0, help="of noise and choices of images (default: 0)")


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    require_at_least(options, {"batch_size": 1, "seed": 0})
    for name, least in (("passes", 1), ("train_images", 10), ("test_images", 1)):
        if getattr(options, name) is not None:
            require_at_least(options, {name: least})
    _num_classes(run)
    _require_conditioning(run)
    counts = _image_counts(run)
    shared = {
        "probe": options.probe, "train_images": counts["train"], "test_images": counts["validation"],
        "passes": options.passes or PASSES[options.probe], "batch": options.batch_size if options.probe == PORT else "",
        "seed": options.seed,
    }  # fmt: skip
    levels, blocks = noise_levels(run), _blocks(run)
    return [
        {"model": DATA, "weights": "", **shared, "conditioning": "", "block": PIXELS, "sigma": NoiseLevel(0.0).name},
        *(
            {
                "model": checkpoint_name(run, step), "step": step, "weights": run.track, **shared,
                "conditioning": options.conditioning, "block": block, "sigma": level.name,
            }
            for step in run.steps for level in levels for block in blocks
        ),
    ]  # fmt: skip


def cost(cell: Cell) -> int:
    return 1


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Accuracy of one classifier; the first of a checkpoint makes the passes for all of its classifiers."""
    passes = _passes(run, cell)
    level = _level(run, cell)
    name = f"{cell['sigma']}/{cell['block']}"
    if cell["probe"] == PORT:
        classifier, counts = passes.port(name, run.config.data.horizontal_flip)
    else:
        classifier, counts = passes.logistic(name)
    share = binomial_interval(int(counts["correct"]), int(counts["tested"]))
    return {
        "t": level.t, "log_snr": level.log_snr, "features": classifier.weight.shape[1], "accuracy": share.value,
        "lower": share.lower, "upper": share.upper, "penalty": classifier.penalty, **counts,
    }  # fmt: skip


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    if rows and all(row["status"] == "ok" for row in rows):
        remove_features(folder)
    return _description(run) + linear_probe_report.report(run.folder.resolve().name, run.weights, rows, folder)


# ---------------------------------------------------------------------- levels, blocks, images


def noise_levels(run: StudyRun) -> list[NoiseLevel]:
    """Noise levels of the options, rising, each once; on a discrete path the trained ones nearest to them.

    Raises:
        StudyError: a level that the run does not have.
    """
    if "levels" not in run.kept:
        path = _untrained(run).objective.path
        found = torch.tensor(list(_times(run.options, path)), dtype=torch.float64)
        if path.discrete and has_indices(path):
            found = path.index_to_t(path.t_to_index(found))
        levels = {level.name: level for level in map(NoiseLevel, sorted(found.tolist()))}
        run.kept["levels"] = list(levels.values())
    return run.kept["levels"]


def _times(options: argparse.Namespace, path: NoisePath) -> Iterator[float]:
    """Common times of the levels."""
    given = (options.levels, options.sigmas, options.times, options.indices)
    schedule = edm_times(SCHEDULE_STEPS).flip(0).tolist()
    for index in (_PORT_LEVELS if given == (None,) * 4 else options.levels or ()):
        if not 0 <= index <= SCHEDULE_STEPS:
            raise StudyError(f"--levels: {index} is not in 0..{SCHEDULE_STEPS}")
        yield schedule[index]
    for sigma in options.sigmas or ():
        if not 0.0 <= sigma <= 1e4:
            raise StudyError(f"--sigmas: {sigma:g} is not in 0..10,000")
        yield sigma / (1.0 + sigma)
    for t in options.times or ():
        if not 0.0 <= t < 1.0:
            raise StudyError(f"--times: {t:g} is not in [0, 1)")
        yield t
    for index in options.indices or ():
        if not has_indices(path):
            raise StudyError("--indices: the run's path has none (give --times, --sigmas or --levels)")
        if not 0 <= index <= path.num_indices - 1:
            raise StudyError(f"--indices: {index:g} is not in 0..{path.num_indices - 1}")
        yield path.index_to_t(torch.tensor([index], dtype=torch.float64)).item()


def _blocks(run: StudyRun) -> list[str]:
    known = list(_untrained(run).model.probe_points())
    if not known:
        raise StudyError(f"model.name = {run.config.model.name}: declares no blocks to probe (DiffusionModel.probe_points)")
    for name in run.options.blocks or ():
        if name not in known:
            raise StudyError(f"--blocks: {name!r} is no block of the model (there are: {', '.join(known)})")
    return [name for name in known if run.options.blocks is None or name in run.options.blocks]


def _num_classes(run: StudyRun) -> int:
    """Number of the dataset's classes, whether or not the run was conditioned on them. Raises StudyError."""
    data = dataclasses.replace(run.config.data, labels=True)
    try:
        count = DATASETS[data.name].info(data).num_classes
    except DatasetError as error:
        raise StudyError(str(error)) from error
    if count < 2:
        raise StudyError(f"data.name = {data.name}: {count or 'no'} class{'' if count == 1 else 'es'}, a probe needs 2 at least")
    return count


def _require_conditioning(run: StudyRun) -> None:
    choices = _untrained(run).model.condition_kind.choices
    if run.options.conditioning == "uniform" and not choices:
        raise StudyError("--conditioning uniform: the model takes no classes (leave it out)")
    if run.options.conditioning == "null" and choices and not run.config.model.label_dropout:
        raise StudyError(
            "--conditioning null: the model was trained without a null class, model.label_dropout is 0 (give --conditioning "
            "uniform: a class drawn for each image, whatever it shows)"
        )


def _image_counts(run: StudyRun) -> dict[str, int]:
    found: dict[str, int] = {}
    splits: dict[Split, str] = {"train": "train_images", "validation": "test_images"}
    for split, name in splits.items():
        try:
            there = len(run.dataset(split, labels=True))
        except DatasetError as error:
            raise StudyError(str(error)) from error
        wanted = getattr(run.options, name)
        if wanted is not None and wanted > there:
            raise StudyError(f"--{name.replace('_', '-')}: {wanted}, the {split} split has {there}")
        found[split] = wanted or there
    return found


# ---------------------------------------------------------------------- passes


def _passes(run: StudyRun, cell: Cell) -> Passes:
    """Passes of a cell's checkpoint or of the baseline, kept until those of another are asked for."""
    wanted = (cell["model"], cell["weights"])
    if run.kept.get("passes", (None,))[0] != wanted:
        run.kept.pop("passes", None)
        run.kept["passes"] = (wanted, _new_passes(run, cell))
    return run.kept["passes"][1]


def _new_passes(run: StudyRun, cell: Cell) -> Passes:
    options = run.options
    levels, blocks = noise_levels(run), _blocks(run)
    if cell["block"] == PIXELS:
        names, source = [f"{cell['sigma']}/{PIXELS}"], pixel_source(f"{cell['sigma']}/{PIXELS}")
    else:
        trained = run.model(cell["step"])
        reader = BlockFeatures(
            trained.model, trained.objective, blocks, [level.t for level in levels],
            conditioning=options.conditioning, seed=options.seed,
        )  # fmt: skip
        names = [f"{level.name}/{block}" for level in levels for block in blocks]
        source = block_source(reader, [level.name for level in levels])
    settings = {name: value for name, value in cell.items() if name not in ("block", "sigma")}
    settings |= {"names": names, "images_per_part": IMAGES_PER_PART}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return Passes(
        source, chosen_images(run.dataset("train", labels=True), cell["train_images"], options.seed),
        chosen_images(run.dataset("validation", labels=True), cell["test_images"], options.seed, test=True),
        _num_classes(run), cell["passes"], options.batch_size, options.seed, run.device,
        results_folder("linear_probe", run) / FEATURES / f"{cell['model']}-{digest}",
        f"features of {cell['model']}",
    )  # fmt: skip


def _level(run: StudyRun, cell: Cell) -> NoiseLevel:
    known = {level.name: level for level in [NoiseLevel(0.0), *noise_levels(run)]}
    return known[cell["sigma"]]


def _untrained(run: StudyRun) -> TrainedModel:
    """Model and objective without values."""
    if "untrained" not in run.kept:
        run.kept["untrained"] = empty_trained_model(run.folder, torch.device("cpu"))
    return run.kept["untrained"]


def _description(run: StudyRun) -> str:
    options, counts = run.options, _image_counts(run)
    passes = options.passes or PASSES[options.probe]
    how = {
        LOGISTIC: "Logistic regression on standardised features, its penalty chosen on a fifth of the training images; "
        f"{passes} pass{'es' if passes > 1 else ''} of noise, no flips.",
        PORT: f"One linear layer, Adam, cosine over {passes} epochs, batches of {options.batch_size}, features not "
        "standardised, fresh noise in every epoch"
        f"{', random mirror images' if run.config.data.horizontal_flip else ''}: the port's protocol.",
    }[options.probe]  # fmt: skip
    choices = _untrained(run).model.condition_kind.choices
    given = {"null": "the null class", "uniform": "a class drawn for each image"}[options.conditioning]
    return (
        f"Fitted to {counts['train']:,} images of the training split, tested once on each of {counts['validation']:,} of the "
        f"validation split. {how} Features: block outputs averaged over places"
        f"{f'; the network is given {given}, never the class of an image' if choices else ''}.\n\n"
    )
