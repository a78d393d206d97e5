"""Report of a grid of trained runs: loss by bin, learning curves, ranking, samples to a target loss."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from research import grid_plots
from research.grid_results import GridResults, Score
from research.grid_statistics import (
    counts_text,
    mean_log_loss,
    percent,
    ranking,
    samples_to_target,
    shared_seeds,
    uniform_log_loss,
    verdict,
)
from research.slot_nodes import TimestepBin
from torchtitan.pictures.markdown import Markdown, inline, markdown_table
from torchtitan.statistics.interval import paired_difference

# What the errors of all bins are summed up to, as ln of a loss.
SCORES: dict[str, Score] = {
    "uniform mean": uniform_log_loss,
    "geometric mean over bins": lambda errors, shares: mean_log_loss(errors),
}


def write(results: GridResults, target: bool, bins: Sequence[TimestepBin], folder: Path) -> str:
    """Draw the pictures into the folder; return the text of the summary.

    Args:
        results: of the grid.
        target: whether to count the samples to the reference's last loss.
        bins: in which the errors were measured.
        folder: of the study.
    """
    if not results.measured:
        return "No run could be measured.\n\n"
    text = _explained(results, bins)
    for place, group in enumerate(results.groups):
        text += f"## {inline(group)}\n\n"
        for name, score in SCORES.items():
            text += _score_table(results, group, name, score, target)
        if results.weights != "none":
            text += _trained_weights(results, group)
        text += _bin_table(results, group, bins)
        text += grid_plots.draw_bins(results, group, bins, folder / f"bins_{place + 1}.png")
    return text + grid_plots.draw_curves(results, SCORES, folder / "curves.png")


def _explained(results: GridResults, bins: Sequence[TimestepBin]) -> str:
    weights = "trained weights" if results.weights == "none" else f"EMA weights ({results.weights})"
    density = "DDPM indices" if bins[0].unit == "index" else "t"
    return (
        f"Held-out squared error of {results.parametrisation} ({weights}, {results.images} images with fixed noise, "
        f"{len(bins)} bins of timesteps), {len(results.seeds)} seeds. Two averages: the mean under uniform "
        f"{density} (uniform mean), dominated by bins of large errors, and the mean of ln error over bins (geometric "
        "mean over bins), in which every bin counts the same. Differences are paired by seed: runs of one seed have "
        "the same initial weights, order of data and noise. Brackets hold 95 % intervals by Student's t over seeds, "
        f"for these {results.images} images, which are the same for all runs; each is for one comparison, not adjusted "
        "for their number. Ranks and losses (geometric means) are over the seeds that all arms share; an arm that lost "
        "seeds has no verdict.\n\n"
    )


def _score_table(results: GridResults, group: str, name: str, score: Score, target: bool) -> str:
    arms = results.labels(group)
    losses = {arm: results.scores(group, arm, score) for arm in arms}
    header = ["rank", "settings", "seeds", "loss", f"against {arms[0]}", "verdict", "no difference from"]
    steps = {arm: results.steps(group, arm) for arm in arms}
    unequal = len({count for of_arm in steps.values() for count in of_arm.values()}) > 1
    reached = _samples_to_target(results, group, score) if target else {}
    shared, count, rows = shared_seeds(losses), len(results.seeds), []
    whole = {arm for arm in arms if len(losses[arm]) == count}
    ranked = ranking(losses)
    for rank, (arm, like) in enumerate(ranked + [(arm, []) for arm in arms if not losses[arm]], 1):
        row = ["-", arm, str(len(losses[arm])), "-"]
        if losses[arm] and shared:
            row[0], row[3] = str(rank), f"{math.exp(fmean(losses[arm][seed] for seed in shared)):.5g}"
        if arm == arms[0]:
            row += ["-", "reference"]
        else:
            pair = losses[arm], losses[arms[0]]
            row += [percent(paired_difference(*pair)), verdict(*pair, count)]
        row.append((", ".join(other for other in like if other in whole) or "none") if arm in whole else "-")
        row += [reached[arm]] if target else []
        row += [f"{fmean(steps[arm].values()):.0f}" if steps[arm] else "-"] if unequal else []
        rows.append(row)
    text = f"### {name[0].upper()}{name[1:]}\n\n"
    if target:
        header.append("samples to target")
        text += (
            f"Samples to target: until the loss is what {inline(arms[0])} reaches at the end with the same seed, ln loss "
            "interpolated over ln samples; the mean over seeds, or every seed's number where one of them has none.\n\n"
        )
    if unequal:
        header.append("steps")
    return text + markdown_table(header, rows)


def _samples_to_target(results: GridResults, group: str, score: Score) -> dict[str, str]:
    arms, last = results.labels(group), results.samples[-1]
    final = {arm: results.scores(group, arm, score) for arm in arms}
    curves = {arm: {n: results.scores(group, arm, score, n) for n in results.samples} for arm in arms}
    found = {}
    for arm in arms:
        counts: list[float | None] = []
        for seed in results.seeds:
            if seed not in final[arm] or seed not in final[arms[0]]:
                counts.append(None)
                continue
            points = [(n, at[seed]) for n, at in curves[arm].items() if seed in at]
            counts.append(samples_to_target([n for n, _ in points], [value for _, value in points], final[arms[0]][seed]))
        first = min((n for n, at in curves[arm].items() if at), default=results.samples[0])  # later where its batch grew early
        found[arm] = "sets the target" if arm == arms[0] else counts_text(counts, first, last)
    return found


def _trained_weights(results: GridResults, group: str) -> str:
    arms = results.labels(group)
    rows = []
    for arm in arms[1:]:
        cells = []
        for score in SCORES.values():
            live, reference = (results.scores(group, one, score, weights="none") for one in (arm, arms[0]))
            cells += [percent(paired_difference(live, reference)), verdict(live, reference, len(results.seeds))]
        rows.append([arm, *cells])
    if not rows:
        return ""
    header = ["settings", *(part for name in SCORES for part in (name, "verdict"))]
    return f"### Trained weights against {inline(arms[0])}\n\n" + markdown_table(header, rows)


def _bin_table(results: GridResults, group: str, bins: Sequence[TimestepBin]) -> str:
    arms = results.labels(group)
    rows = []
    for place, where in enumerate(bins):
        of_reference = results.of_bin(group, arms[0], place)
        row = [where.label, f"{math.exp(fmean(of_reference.values())):.4g}" if of_reference else "-"]
        for arm in arms[1:]:
            row.append(_marked(results.of_bin(group, arm, place), of_reference, len(results.seeds)))
        rows.append(row)
    unit = "indices" if bins[0].unit == "index" else "t"
    text = "### By timestep\n\nChange of the loss in each bin; bold: the interval excludes 0, and no seed was lost.\n\n"
    return text + markdown_table([unit, f"{arms[0]}: loss", *arms[1:]], rows)


def _marked(losses: Mapping[int, float], reference: Mapping[int, float], seeds: int) -> str:
    text = percent(paired_difference(losses, reference))
    return Markdown(f"**{text}**") if verdict(losses, reference, seeds) in ("lower", "higher") else text
