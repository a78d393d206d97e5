"""Findings in words and tables, each number with its interval."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan.pictures.markdown import bullet, inline, markdown_table
from torchtitan.pictures.number_text import MISSING, counted, ends_text, first_named, significant
from torchtitan.runs.analysis.axes import BATCH, DATA, label, value_label, varying
from torchtitan.runs.analysis.cells import Cell, arms, best_cell, what_limits
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.effects import Effect, ScalingCurve
from torchtitan.runs.analysis.measures import IMAGES, MEMORY, MFU, STEP
from torchtitan.statistics.interval import Interval

_MOST_NAMED = 5  # runs in a line

HOW_MEASURED = (
    "A run's value is the median over its logged points after the warm-up, with the interval between two order "
    "statistics (of memory the highest of all its points, without an interval); a cell's is the geometric mean over its "
    "repeats with Student's "
    "95 % interval over their logarithms. A cell of a single repeat is "
    "marked †: its interval comes from that run's points alone and says nothing about how runs differ."
)
HOW_PAIRED = (
    "An effect is the geometric mean of the ratios of cells that are equal in all other axes, with Student's 95 % "
    "interval over the logarithms of the ratios: how much it differs between these conditions, not between repeats. "
    "From one pair alone (‡) the interval is that of its two cells, if they have one. At equal batch, cells that did not "
    "run in both arms have no part; at best batch each arm stands at the batch of its most images/s, which may differ."
)


@dataclass(frozen=True)
class Results:
    """Results of the analysis."""

    runs: list[Run]
    cells: list[Cell]
    effects: list[Effect]
    curves: list[ScalingCurve]
    remarks: list[str]


def headlines(results: Results) -> list[str]:
    """Headlines: the findings, one sentence each."""
    counts = Counter(run.status for run in results.runs)
    told = ", ".join(f"{n} {status}" for status, n in sorted(counts.items(), key=lambda item: (item[0] != "ok", item)))
    singles = sum(cell.single for cell in results.cells)
    measured = sum(cell.ok for cell in results.cells)
    runs, cells = counted(len(results.runs), "run"), counted(len(results.cells), "cell")
    devices = {str(run.axes["device"]) for run in results.runs if run.ok and run.axes.get("device")}
    where = f", all on {devices.pop()}" if len(devices) == 1 else ""
    without = len(results.runs) - sum(len(cell.runs) for cell in results.cells)
    beside = f"; {counted(without, 'run')} without a folder in no cell" if without else ""
    lines = [f"{runs} ({told}), {measured} of {cells} measured{where}{beside}."]
    kinds = Counter(cell.axes[DATA] for cell in results.cells if cell.axes.get(DATA))
    if len(kinds) > 1:
        names = ", ".join(f"{name}: {count}" for name, count in kinds.most_common())
        lines.append(f"The runs are of different data, and are compared with those of the same alone (cells: {names}).")
    if singles:
        lines.append(f"Measured cells with a single ok repeat: {singles}.")
    several = len({cell.axes["device"] for cell in results.cells}) > 1
    groups = _by_model(results.cells).values()
    lines += [_best_line(of_model, several) for of_model in groups if any(cell.ok for cell in of_model)]
    effects = [effect for effect in results.effects if IMAGES.name in effect.ratios]
    unclear = [effect for effect in effects if effect.ratios[IMAGES.name].lower <= 1 <= effect.ratios[IMAGES.name].upper]
    lines += [_effect_line(effect) for effect in effects if effect not in unclear]
    if unclear:
        which = ", ".join(f"{_change(effect)} at {effect.at}" for effect in unclear)
        lines.append(f"No difference of images/s is shown, the intervals contain 0: {which}.")
    lines += [_scaling_line(curve, results.curves) for curve in results.curves]
    return [*lines, *_unequal_threads(results)]


def cautions(results: Results) -> list[str]:
    """Cautions about the findings: versions, damage, what memory is."""
    lines = list(dict.fromkeys(results.remarks))
    kinds = {"torch": "versions of torch", "git_commit": "commits", "cpu": "processors", "plugins": "files of plugins"}
    for key, word in kinds.items():
        found = sorted({str(run.versions[key]) for run in results.runs if run.ok and run.versions.get(key)})
        if len(found) > 1:
            lines.append(f"The runs are of several {word}, which are not distinguished: {', '.join(found)}.")
    if lacking := [run.name for run in results.runs if run.ok and not run.measures.get(MFU.name)]:
        text = "have no MFU, as their device's peak is not known (metrics.peak_tflops gives it)"
        lines.append(f"Some runs, and their cells, {text}: {first_named(lacking, _MOST_NAMED)}.")
    if any(str(run.axes.get("device")).startswith("CPU") for run in results.runs):
        lines.append("Memory of runs on a CPU: peak resident memory of the first process, the interpreter included.")
    lines += [f"{run.name}: {note}." for run in results.runs for note in run.notes]
    return lines


def _unequal_threads(results: Results) -> list[str]:
    """Line on runs with several numbers of processes on a CPU that show no scaling, as their threads differ; else none."""
    devices = {(cell.axes["world_size"], str(cell.axes["device"])) for cell in results.cells if cell.ok}
    on_cpu = sorted((ranks, device) for ranks, device in devices if ranks and device.startswith("CPU"))
    if results.curves or len({ranks for ranks, _ in on_cpu}) < 2 or len({device for _, device in on_cpu}) < 2:
        return []
    found = ", ".join(f"{ranks} on {device}" for ranks, device in on_cpu)
    return [f"No scaling over processes is shown, as their devices differ ({found}); OMP_NUM_THREADS=1 makes threads equal."]


def markdown(results: Results, pictures: Iterable[tuple[str, str]]) -> str:
    """Markdown text of analysis.md; pictures are (title, file name)."""
    parts = ["# Analysis\n", "## Findings\n", *map(bullet, headlines(results)), ""]
    if cautious := cautions(results):
        parts += ["## Notes\n", *map(bullet, cautious), ""]
    parts += [HOW_MEASURED, ""]
    parts += [*_best_table(results.cells), *_effect_table(results.effects), *_scaling_table(results.curves)]
    parts += [*_trouble_table(results.runs), *_cell_table(results.cells)]
    drawn = list(pictures)
    parts += ["## Pictures\n"] if drawn else []
    parts += [f"![{inline(title)}]({name})\n" for title, name in drawn]
    return "\n".join(parts).rstrip() + "\n"


def _table(heading: str, note: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Table under its heading, with a line of explanation; nothing without rows."""
    explained = [inline(note), ""] if note else []
    return [f"## {heading}\n", *explained, markdown_table(columns, rows).removesuffix("\n")] if rows else []


def _cell_table(cells: Sequence[Cell]) -> list[str]:
    """Table of every cell with its measurements, or the reason for missing ones."""
    names = _names(cells)
    shown = (IMAGES, MFU, STEP, MEMORY)
    metrics = [metric for metric in shown if any(metric.name in cell.measures for cell in cells)]
    columns = (*(name.replace("_", " ") for name in names), "status", "runs", *(metric.title for metric in metrics))
    rows = []
    for cell in cells:
        mark = "†" if cell.single else ""
        status = cell.status + (f" ({cell.not_ok} besides)" if cell.ok and cell.not_ok else "")
        texts = [ends_text(cell.shown(metric)) for metric in metrics]
        axes = [MISSING if cell.axes.get(name) is None else str(cell.axes[name]) for name in names]
        rows.append((*axes, status, f"{len(cell.runs)}{mark}", *texts))
    return _table("All cells", _common(cells, names), columns, rows)


def change_text(ratio: Interval | None) -> str:
    """Format a factor as a change: `+30.1 % [+29.0, +31.2]`."""
    if ratio is None:
        return MISSING
    mark = "‡" if ratio.count == 1 else ""
    ends = f" [{percent(ratio.lower)}, {percent(ratio.upper)}]" if ratio.bounded else ""
    return f"{percent(ratio.value)} %{ends}{mark}"


def percent(factor: float) -> str:
    """Format a factor as a change in per cent, without the unit: `+30.1`."""
    text = f"{100 * (factor - 1):+.1f}"
    return "0.0" if float(text) == 0 else text


def _change(effect: Effect) -> str:
    return f"{value_label(effect.switch, effect.before)} → {value_label(effect.switch, effect.after)}"


def _best_line(cells: list[Cell], devices: bool) -> str:
    best = best_cell(cells) or cells[0]
    names = [name for name in _names(cells) if name not in ("model", "patch", "global_batch")]
    where = label(cells[0].axes, ("model", "patch", "device") if devices else ("model", "patch"))
    mfu = f", MFU {ends_text(best.shown(MFU))} %" if MFU.name in best.measures else ""
    memory = f", {ends_text(best.measures[MEMORY.name])} GiB" if MEMORY.name in best.measures else ""
    mark = " †" if best.single else ""
    conditions = label(best.axes, names)
    with_ = f" with {conditions}" if conditions else ""
    return f"{where}: most images/s{with_}: {ends_text(best.measures[IMAGES.name])}{mfu}{memory}{mark}."


def _effect_line(effect: Effect) -> str:
    images = effect.ratios[IMAGES.name]
    memory = f", memory {change_text(effect.ratios[MEMORY.name])}" if MEMORY.name in effect.ratios else ""
    batches = [tuple(cell.axes["local_batch"] for cell in pair) for pair in effect.pairs]
    unequal = [f"{before} → {after}" for before, after in batches if before != after]
    of_all = f" in {len(unequal)} of {len(batches)} pairs" if len(unequal) < len(batches) else ""
    at = f"{effect.at} ({', '.join(dict.fromkeys(unequal))} images a process{of_all})" if unequal else effect.at
    return f"{_change(effect)}, at {at}: images/s {change_text(images)}{memory}, {counted(images.count, 'pair')}."


def _scaling_line(curve: ScalingCurve, curves: Sequence[ScalingCurve]) -> str:
    last = curve.points[-1]
    e = last.efficiency.scaled(100)
    ends = f" [{significant(e.lower, 3)}, {significant(e.upper, 3)}]" if e.bounded else ""
    return (
        f"{curve.kind.capitalize()} scaling, {_curve_label(curve, curves)}: {last.ranks} ranks do "
        f"{significant(e.value, 3)} %{ends} of "
        f"{significant(last.ranks / curve.points[0].ranks, 3)} times what {curve.points[0].ranks} "
        f"{'does' if curve.points[0].ranks == 1 else 'do'}."
    )


def _best_table(cells: Sequence[Cell]) -> list[str]:
    names = [name for name in _names(cells) if name not in BATCH]
    columns = ("arm", "best batch", "images/s", "MFU, %", "memory, GiB", "larger batches")
    rows = []
    for arm in arms(cells).values():
        name, best = label(arm[0].axes, names) or "all", best_cell(arm)
        if best is None:
            statuses = ", ".join(dict.fromkeys(cell.status for cell in arm))
            rows.append((name, MISSING, MISSING, MISSING, MISSING, f"none ran ({statuses})"))
            continue
        speed, mfu, memory = (ends_text(best.shown(metric)) for metric in (IMAGES, MFU, MEMORY))
        mark = "†" if best.single else ""
        rows.append((name, f"{best.axes['local_batch']}{mark}", speed, mfu, memory, what_limits(arm, best)))
    note = "The local batch (images of a forward on a process) with the most images/s."
    return _table("Best batch of each arm", note, columns, rows)


def _effect_table(effects: Sequence[Effect]) -> list[str]:
    rows = []
    for effect in effects:
        alone = ", ".join(f"{n} {status}" for status, n in effect.alone.items()) or "none"
        texts = [change_text(effect.ratios.get(metric.name)) for metric in (IMAGES, MFU, MEMORY)]
        rows.append((_change(effect), effect.at, str(len(effect.pairs)), *texts, alone))
    columns = ("switch", "paired at", "pairs", "images/s", "MFU", "memory", "unpaired cells, by the partner's status")
    return _table("Effect of each switch", HOW_PAIRED, columns, rows)


def _scaling_table(curves: Sequence[ScalingCurve]) -> list[str]:
    rows = [
        (curve.kind, _curve_label(curve, curves), str(point.ranks), ends_text(point.cell.measures[IMAGES.name]),
         "100" if point is curve.points[0] else ends_text(point.efficiency.scaled(100)))
        for curve in curves for point in curve.points
    ]
    note = "Weak: equal images a process and step; strong: equal global batch. Efficiency: against the curve's fewest ranks."
    return _table("Scaling over ranks", note, ("scaling", "arm", "ranks", "images/s", "efficiency, %"), rows)


def _trouble_table(runs: Sequence[Run]) -> list[str]:
    alike: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        if not run.ok:
            alike.setdefault((run.cell or run.name, run.status, run.reason or MISSING), []).append(run.name)
    rows = [
        (names[0] + (f" and {len(names) - 1} more of the cell" if len(names) > 1 else ""), status, reason)
        for (_, status, reason), names in alike.items()
    ]
    return _table("Runs without a result", "", ("run", "status", "reason"), rows)


def _by_model(cells: Sequence[Cell]) -> dict[tuple, list[Cell]]:
    found: dict[tuple, list[Cell]] = {}
    for cell in cells:
        found.setdefault(tuple(cell.axes.get(name) for name in ("model", "patch", "device")), []).append(cell)
    return found


def _names(cells: Sequence[Cell]) -> list[str]:
    """Names of axes with several values, and the batch; not the mesh, which layout and ranks determine."""
    found = varying([cell.axes for cell in cells])
    names = dict.fromkeys(name for cell in cells for name in cell.axes)
    return [name for name in names if (name in found or name == "local_batch") and name != "mesh"]


def _common(cells: Sequence[Cell], names: Sequence[str]) -> str:
    if not cells:
        return ""
    same = [name for name in cells[0].axes if name not in names and name != "mesh" and cells[0].axes[name] is not None]
    return f"All: {label(cells[0].axes, same)}." if same else ""


def _curve_label(curve: ScalingCurve, curves: Sequence[ScalingCurve]) -> str:
    named = ("model", "patch", "layout", "compile", "ac", "dtype")
    others = [name for name in varying([each.axes for each in curves]) if name not in (*named, *BATCH, "world_size", "mesh")]
    return f"{label(curve.axes, (*named, *others))}, {curve.batch}"
