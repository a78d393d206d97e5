"""Transfer of the best learning rate from a narrow network to wide ones, with and without maximal updates.

A row of training.csv is all that is kept of a run: a study resumes in another folder from a copy of that table.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research import grid_options
from research.compare_methods import ended, settings_text
from research.equal_samples import batch_overrides
from research.pictures import save
from research.result_table import ResultTable
from research.training_grid import COLUMNS as TRAINED
from research.training_grid import TABLE, GridRun, RunRecord, plan_grid, train_grid
from torchtitan.config.job import JobConfig
from torchtitan.experiments.folder import StudyError
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import Panel, label_log_axis, new_figure, ordered_colours
from torchtitan.runs.record import HELD_OUT_LOSS, read_run
from torchtitan.statistics.interval import Interval, mean_interval

NAME = "width_transfer"
COLUMNS = ("settings", "loss")  # of a run: what it was trained with, and its held-out loss at the end
HEAD = 16  # channels of a head, at every width
PARAMETRISATIONS = ("plain", "maximal updates")  # one and the same at the first width
TOLERANCE = 0.5  # of the shift, in log2
HIGHEST = 0.7  # loss that the picture shows; that of predicting zero is near 1.25

Rates = Mapping[str, list[float]]  # by optimizer, rising
Losses = Mapping[tuple[str, str, int, int, float], float]  # optimizer, parametrisation, width, seed, rate -> ln loss


@dataclass(frozen=True)
class TransferRun(GridRun):
    """Run of the grid with what it is compared by; parametrisation: plain at the first width."""

    optimizer: str
    parametrisation: str
    width: int
    seed: int
    rate: float


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_grid_options(parser, NAME, seeds=5)
    add = parser.add_argument
    add("--rate", nargs="+", required=True, metavar="OPTIMIZER=RATE", help="middle one of each optimizer's rates, as AdamW=1e-3")
    add("--rates", type=int, default=5, metavar="N", help="rates of each optimizer, in steps of 2 (default: 5)")
    add("--widths", type=int, nargs="+", default=[64, 128, 256], metavar="N", help="multiples of the first, which is the base's")
    add("--report-only", action="store_true", help="train nothing; report on the runs that have ended")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train the missing runs, with another rate where a best one is the last; return summary.md.

    Raises:
        StudyError, ConfigError.
    """
    base = grid_options.read_base(arguments, measured=True)
    folder = grid_options.study_folder(arguments, base, NAME)
    rates = _rates(arguments.rate, arguments.rates)
    losses, left_out = _trained(base, rates, folder, arguments)
    wider = {name: extended(name, of, losses) for name, of in rates.items()}
    if wider != rates:
        losses, left_out = _trained(base, wider, folder, arguments)
    make_folder(folder)
    note = f"\nLeft out, failed or of other settings: {', '.join(left_out)}.\n" if left_out else ""
    replace_file(folder / "summary.md", report(losses, wider, arguments, folder) + note)
    return folder / "summary.md"


def _rates(given: list[str], count: int) -> dict[str, list[float]]:
    found = {}
    for pair in given:
        name, _, middle = pair.partition("=")
        try:
            found[name] = [float(middle) * 2.0 ** (place - count // 2) for place in range(count)]
        except ValueError:
            raise StudyError(f"--rate: {pair!r} is no OPTIMIZER=RATE") from None
    return found


def _trained(base: JobConfig, rates: Rates, folder: Path, options: argparse.Namespace) -> tuple[Losses, list[str]]:
    """Train the missing runs; return the losses, infinite of those that diverged, and names of the others with a row."""
    samples = grid_options.equal_samples(options, [base.training.global_batch_size])
    shared = batch_overrides(base, base.training.global_batch_size, samples, options.checkpoints, "const", options.processes)
    shared |= {"validation.interval": shared["training.steps"], "lr_scheduler.warmup_steps": base.lr_scheduler.warmup_steps}
    runs = list(_runs(base, rates, shared, options))
    if not options.report_only:
        table = _table(folder)
        missing = {run.name: run for run in runs if not ended(table, run)}
        grid = plan_grid(base, [*missing.values()], folder, options.processes)

        def of_run(name: str) -> dict[str, Any]:
            loss = read_run(grid.run_folder(name)).series(HELD_OUT_LOSS).values[-1]
            return {"settings": settings_text(missing[name]), "loss": loss}

        train_grid(grid, options.retry_failed, RunRecord(COLUMNS, of_run))
    table = _table(folder)
    rows = [(run, row) for run in runs if (row := table.find({"run": run.name}))]
    valid = [(run, row) for run, row in rows if row["status"] == "diverged" or ended(table, run)]
    losses = {
        (run.optimizer, each, run.width, run.seed, run.rate): math.log(float(row["loss"] or math.inf))
        for run, row in valid
        for each in (PARAMETRISATIONS if run.width == options.widths[0] else (run.parametrisation,))
    }  # fmt: skip
    return losses, [run.name for run, row in rows if (run, row) not in valid]


def _table(folder: Path) -> ResultTable:
    return ResultTable(folder / TABLE, (*TRAINED, *COLUMNS), ("run",))


def _runs(base: JobConfig, rates: Rates, shared: dict[str, Any], options: argparse.Namespace) -> Iterator[TransferRun]:
    for seed in range(options.seeds):
        for optimizer, of in rates.items():
            for width in options.widths:
                for parametrisation in PARAMETRISATIONS[: 1 if width == options.widths[0] else 2]:
                    updates = {} if parametrisation == "plain" else {"model.mup_base_dim": options.widths[0]}
                    sizes = {"model.dim": width, "model.num_heads": width // HEAD, "model.mlp_hidden_dim": 4 * width}
                    for rate in of:
                        name = f"{optimizer}_{parametrisation.split()[0]}_{width}_{rate:.3g}_s{seed}"
                        chosen = {"optimizer.name": optimizer, "optimizer.lr": rate, "debug.seed": base.debug.seed + seed}
                        keys = shared | sizes | updates | chosen
                        yield TransferRun(name, keys, optimizer, parametrisation, width, seed, rate)


def extended(optimizer: str, rates: list[float], losses: Losses) -> list[float]:
    """Rates of an optimizer, with one more at an end that is the best of some width and seed."""
    curves = [curve for each in PARAMETRISATIONS for curve in _curves(losses, optimizer, each, len(rates)).values()]
    best = {lowest(curve) for curve in curves}
    return [rates[0] / 2] * (rates[0] in best) + rates + [rates[-1] * 2] * (rates[-1] in best)


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Log2 of the best rate, the vertex of the parabola through the lowest loss and its neighbours; None if that is the last.

    Args:
        losses: ln loss by rate, in steps of 2; infinite of runs that diverged.
    """
    rates = sorted(losses)
    place = rates.index(lowest(losses))
    if place in (0, len(rates) - 1) or math.isinf(losses[rates[place]]):
        return None
    left, middle, right = (losses[rates[place + step]] for step in (-1, 0, 1))
    curvature = left - 2 * middle + right
    if not 0 < curvature < math.inf:  # of three equal ones, or beside one that diverged
        return math.log2(rates[place])
    return math.log2(rates[place]) + (left - right) / (2 * curvature)


def lowest(losses: Mapping[float, float]) -> float:
    """Rate with the lowest loss."""
    return min(sorted(losses), key=losses.__getitem__)


def verdict(shift: Interval) -> str:
    """Verdict on the shift of a best rate in log2: its interval within the tolerance, outside of it, or neither."""
    if shift.bounded and -TOLERANCE <= shift.lower and shift.upper <= TOLERANCE:
        return "transfers"
    return "refuted" if shift.bounded and (shift.lower > TOLERANCE or shift.upper < -TOLERANCE) else "undecided"


def report(losses: Losses, rates: Rates, options: argparse.Namespace, folder: Path) -> str:
    """Draw the picture into the folder; return the text of the summary."""
    first, last = options.widths[0], options.widths[-1]
    figure, panels = new_figure(
        "Held-out loss by learning rate and width", len(rates), 2, size=(9, 3.6 * len(rates)), sharey="row", sharex="row"
    )
    rows, uses = [], []
    for optimizer, row in zip(rates, panels, strict=True):
        shifts: dict[str, dict[int, float]] = {}
        for parametrisation, panel in zip(PARAMETRISATIONS, row, strict=True):
            curves = _curves(losses, optimizer, parametrisation, len(rates[optimizer]))
            _draw(panel, curves, options.widths, f"{optimizer}, {parametrisation}")
            best = {key: found for key, curve in curves.items() if (found := best_rate(curve)) is not None}
            seeds = [seed for seed in range(options.seeds) if (first, seed) in best and (last, seed) in best]
            shifts[parametrisation] = {seed: best[last, seed] - best[first, seed] for seed in seeds}
            shift = mean_interval([*shifts[parametrisation].values()])
            wide = [(curves[last, seed], lowest(curves[first, seed])) for seed in seeds]
            excess = mean_interval([100 * math.expm1(curve[rate] - curve[lowest(curve)]) for curve, rate in wide])
            decided = verdict(shift) if len(seeds) == options.seeds else "undecided"
            rows.append([optimizer, parametrisation, str(len(seeds)), _text(shift), decided, _text(excess)])
        plain, transferred = (shifts[each] for each in PARAMETRISATIONS)
        gains = [abs(shift) - abs(transferred[seed]) for seed, shift in plain.items() if seed in transferred]
        uses.append(f"- {optimizer}: |plain shift| - |shift with maximal updates| {_text(mean_interval(gains))}\n")
    panels[0, 0].legend(fontsize=8)
    header = ["optimizer", "parametrisation", "seeds", f"log2 of the best rate, {last} against {first}", "verdict"]
    header.append(f"loss at {last}, best rate of {first} against lowest, %")
    text = "95 % intervals by Student's t over seeds; seeds: those with a best rate between others at both widths.\n\n"
    return f"# {NAME}\n\n{text}{markdown_table(header, rows)}{''.join(uses)}\n{save(figure, folder / 'width_transfer.png')}"


def _curves(losses: Losses, optimizer: str, parametrisation: str, rates: int) -> dict[tuple[int, int], dict[float, float]]:
    """Curves ln loss by rate, by width and seed, of those with all rates."""
    found: dict[tuple[int, int], dict[float, float]] = {}
    for (of_optimizer, of_parametrisation, width, seed, rate), loss in losses.items():
        if (of_optimizer, of_parametrisation) == (optimizer, parametrisation):
            found.setdefault((width, seed), {})[rate] = loss
    return {key: curve for key, curve in found.items() if len(curve) == rates}


def _draw(panel: Panel, curves: Mapping[tuple[int, int], Mapping[float, float]], widths: list[int], title: str) -> None:
    for color, width in zip(ordered_colours(len(widths)), widths, strict=True):
        for number, curve in enumerate(curve for (of, _), curve in sorted(curves.items()) if of == width):
            rates = [rate for rate in sorted(curve) if math.isfinite(curve[rate])]
            label = f"width {width}" if number == 0 else None
            panel.plot(rates, [math.exp(curve[rate]) for rate in rates], "o-", color=color, alpha=0.6, markersize=3, label=label)
    panel.set(title=title, xlabel="learning rate", ylabel="held-out loss", xscale="log", yscale="log")
    low, high = panel.get_ylim()
    if low < HIGHEST < high:
        panel.set_ylim(top=HIGHEST)
        panel.set_ylabel(f"held-out loss, up to {HIGHEST:g}")
    for axis in (panel.xaxis, panel.yaxis):
        label_log_axis(axis)


def _text(found: Interval) -> str:
    if not found.bounded:
        return "-"
    return f"{found.value:+.2f} [{found.lower:+.2f}, {found.upper:+.2f}]"
