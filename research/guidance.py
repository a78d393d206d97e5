"""Guidance compared at equal evaluations of networks: none, by the null condition, by other weights, judged on samples.

Every method draws the same sets of images: same classes, same starting noise. A guided image costs two evaluations a step,
an unguided one makes twice the steps, so that all images cost the same.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch

from research.cells import Cell, Row
from research.digits_judge import DigitsJudge
from research.frame import StudyRun, checkpoint_name, number, require_at_least
from research.pictures import legend_outside
from torchtitan.config.sampling_checks import data_text
from torchtitan.data import DATASETS
from torchtitan.data.base import Split
from torchtitan.diffusion.guidance import Guidance, Guide
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import MARKERS, error_bar, new_figure, note, save
from torchtitan.programs import program
from torchtitan.sampling.guides import load_guide, read_reference
from torchtitan.statistics.interval import Interval, mean_interval, paired_difference

SPLITS: tuple[Split, ...] = ("train", "validation")
NONE, NULL = "none", "null"
NAMES = {NONE: "no guidance", NULL: "null class"}
# Those of the judge's scores that are recorded.
SCORES = ("accuracy", "variety", "frechet_distance")
TITLES = {"accuracy": "recognised share", "variety": "variety", "frechet_distance": "Fréchet distance"}

COLUMNS = (
    "model", "weights", "guide", "scale", "num_steps", "first_image", "images", "seed", *SCORES, "status", "reason",
    "date", "runtime",
)  # fmt: skip
KEY = COLUMNS[:8]
UNIT = "image"


class Method(NamedTuple):
    """Method of guidance: `none`, `null` or the reference of a guide; and its scale."""

    guide: str
    scale: float

    @property
    def label(self) -> str:
        name = NAMES.get(self.guide, self.guide)
        return name if self.guide == NONE else f"{name} {self.scale:g}"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--guides", nargs="+", required=True, metavar="GUIDE=SCALE", help="methods beside none: null=1.5 (the null "
        f"condition), or a guide as --guide of {program('sample')} has it: @300=2 (the run's weights at step 300), :slow=2 "
        "(another EMA track), RUN@step:track=2")
    add("--num-steps", type=int, default=20, metavar="N", help="solver steps of guided images; unguided ones make twice "
        "as many (default: 20)")
    add("--images", type=int, default=500, metavar="N", help="images of a set, all classes alike (default: 500)")
    add("--sets", type=int, default=5, metavar="K", help="sets with separate noise, over which intervals are taken "
        "(default: 5)")
    add("--batch-size", type=int, default=250, help="images at a time (default: 250)")
    add("--seed", type=int, default=0, help="of the noise (default: 0)")


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    require_at_least(options, {"num_steps": 1, "images": 2, "sets": 2, "batch_size": 1})
    data = run.config.data
    if data.name != "digits" or not data.labels or data.classes:
        raise StudyError(f"{data_text(data)}: has no judge of samples (the study is of digits with all of their classes)")
    methods = read_methods(options.guides)
    if any(method.guide == NULL for method in methods) and not run.config.model.label_dropout:
        raise StudyError("--guides null: the model was trained without a null class (model.label_dropout is 0)")
    for method in methods:
        _guide(run, run.steps[-1], method)  # before hours of drawing
    return [
        {
            "model": checkpoint_name(run, step), "step": step, "weights": run.track, "guide": method.guide,
            "scale": method.scale, "num_steps": options.num_steps * (2 if method.guide == NONE else 1),
            "first_image": first, "images": options.images, "seed": options.seed,
        }
        for step in run.steps
        for first in range(0, options.sets * options.images, options.images) for method in methods
    ]  # fmt: skip


def read_methods(words: list[str]) -> list[Method]:
    """Read methods, the unguided one first. Raises StudyError."""
    methods = [Method(NONE, 1.0)]
    for word in words:
        guide, equals, text = word.rpartition("=")
        try:
            scale = float(text)
        except ValueError:
            scale = -1.0
        if not equals or not guide or guide == NONE or not 0.0 <= scale <= 1000.0:
            raise StudyError(f"--guides: {word!r} is no GUIDE=SCALE (as null=1.5 or @300=2)")
        methods.append(Method(guide, scale))
    return list(dict.fromkeys(methods))


def cost(cell: Cell) -> int:
    """Cost in images."""
    return cell["images"]


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Scores of one set."""
    trained = run.model(cell["step"])
    method = Method(cell["guide"], cell["scale"])
    choices = balanced_choices(cell["images"], trained.model.condition_kind.choices)
    numbers = torch.arange(cell["images"]) + cell["first_image"]
    sampling = run.config.sampling
    sampler = ImageSampler(trained.model, trained.objective, "float32", run.device)
    parts = []
    with sampler.drawing(
        cell["seed"], solver=sampling.solver, num_steps=cell["num_steps"], schedule=sampling.schedule,
        guidance=Guidance(method.scale), embedded_guidance=sampling.embedded_guidance, guide=_guide(run, cell["step"], method),
    ) as draw:  # fmt: skip
        for chunk in torch.arange(cell["images"]).split(run.options.batch_size):
            parts.append(draw(choices[chunk], numbers[chunk]).cpu())
            advance(len(chunk))
    scores = _judge(run).judge(torch.cat(parts).numpy(), choices.numpy())
    return {name: scores[name] for name in SCORES}


def _judge(run: StudyRun) -> DigitsJudge:
    if "judge" not in run.kept:
        run.kept["judge"] = DigitsJudge.from_dataset(*(DATASETS["digits"](run.config.data, split) for split in SPLITS))
    return run.kept["judge"]


def _guide(run: StudyRun, step: int, method: Method) -> Guide | None:
    """Guide of a method, kept until another is asked for. Raises WeightsError, CheckpointError."""
    if method.guide in (NONE, NULL):
        return None
    asked = (step, method.guide)
    if run.kept.get("guide", (None,))[0] != asked:
        reference = read_reference(method.guide)
        run.kept["guide"] = (asked, load_guide(reference, run.folder, None, run.model(step), run.device).guide)
    return run.kept["guide"][1]


# ---------------------------------------------------------------------- report


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    """Write the picture; return the text of summary.md."""
    options = run.options
    text = (
        f"{options.sets} sets of {options.images} images of all classes; the same starting noise for every method. Guided "
        f"images: {options.num_steps} steps of two networks; unguided ones: {2 * options.num_steps} steps of one. "
        "95 % intervals by Student's t over the sets; differences to no guidance are paired by set, one comparison each.\n\n"
    )
    for step in dict.fromkeys(row["model"] for row in rows):
        found = _by_method([row for row in rows if row["model"] == step and row["status"] == "ok"])
        if found:
            text += f"## {step}\n\n" + _table(found) + _draw(run, step, found, folder / f"{step}.png")
    return text


def _by_method(rows: list[Row]) -> dict[Method, dict[str, dict[int, float]]]:
    """Method -> score -> first image of a set -> value."""
    found: dict[Method, dict[str, dict[int, float]]] = {}
    for row in rows:
        of_method = found.setdefault(Method(row["guide"], float(row["scale"])), {name: {} for name in SCORES})
        for name in SCORES:
            of_method[name][int(row["first_image"])] = number(row, name)
    return found


def _table(found: dict[Method, dict[str, dict[int, float]]]) -> str:
    plain = found.get(Method(NONE, 1.0))
    lines = []
    for method, scores in found.items():
        line = [method.label]
        for name in SCORES:
            line.append(_text(mean_interval(list(scores[name].values()))))
            line.append("" if plain is None or method.guide == NONE else _text(paired_difference(scores[name], plain[name])))
        lines.append(line)
    header = ["guidance"]
    for name in SCORES:
        header += [TITLES[name], "against none"]
    return markdown_table(header, lines)


def _text(value: Interval) -> str:
    ends = f" [{value.lower:.3g}, {value.upper:.3g}]" if value.bounded else ""
    return f"{value.value:.3g}{ends}"


def _draw(run: StudyRun, step: str, found: dict[Method, dict[str, dict[int, float]]], path: Path) -> str:
    figure, panels = new_figure(f"{run.folder.resolve().name}, {step}: recognised share and variety", size=(9, 5))
    panel = panels[0][0]
    families = list(dict.fromkeys(method.guide for method in found))
    for place, family in enumerate(families):
        of_family = [method for method in found if method.guide == family]
        across, up = (
            [mean_interval(list(found[method][name].values())) for method in of_family] for name in ("variety", "accuracy")
        )
        panel.errorbar(
            [value.value for value in across], [value.value for value in up],
            xerr=list(zip(*map(error_bar, across), strict=True)), yerr=list(zip(*map(error_bar, up), strict=True)),
            color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)], linewidth=1, capsize=2,
            label=NAMES.get(family, family),
        )  # fmt: skip
        for method, x, y in zip(of_family, across, up, strict=True):
            if family != NONE:
                panel.annotate(f"{method.scale:g}", (x.value, y.value), xytext=(4, 4), textcoords="offset points", fontsize=8)
    panel.set_xlabel("variety (1: as held-out images)")
    panel.set_ylabel("recognised share")
    legend_outside(panel, "guide; numbers: scale")
    note(figure, f"{run.weights}; 95 % intervals over {run.options.sets} sets of {run.options.images} images")
    save(figure, path)
    return f"![recognised share and variety]({path.name})\n\n"
