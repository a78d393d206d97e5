"""Report of the analysis: tables, pictures and a page from folders of runs."""

import os
from collections.abc import Sequence
from pathlib import Path

from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.runs.analysis.axes import NAMED_AXES
from torchtitan.runs.analysis.bar_pictures import NAME as BARS
from torchtitan.runs.analysis.bar_pictures import draw_bars
from torchtitan.runs.analysis.batch_pictures import draw_over_batch
from torchtitan.runs.analysis.cells import join_repeats
from torchtitan.runs.analysis.collect import collect
from torchtitan.runs.analysis.effect_pictures import draw_effects, draw_interactions, draw_pareto
from torchtitan.runs.analysis.effects import all_effects, interactions, scaling
from torchtitan.runs.analysis.findings import Results, markdown
from torchtitan.runs.analysis.page import report_page
from torchtitan.runs.analysis.scaling_picture import draw_scaling
from torchtitan.runs.analysis.tables import cell_rows, run_rows, write_csv, write_parquet

# The first table is written before all else, and is that by which a folder is known.
_TEXTS = ("runs.csv", "runs.parquet", "cells.csv", "analysis.md", "report.html")
_PICTURES = ("effects.png", "interactions.png", "scaling.png", "pareto.png")
_DRAWN = ("*_over_batch*.png", BARS.format("*"))
_NOTHING = b"\0"  # begins no file of a report


def analyse(folders: Sequence[Path], warmup_steps: int | None = None, progress: bool = False) -> Results:
    """Read the runs below folders and compare them.

    Args:
        folders: each a run's folder, or one above run folders and sweeps.
        warmup_steps: left out at the start of every run; default: its sweep's setting, else a tenth of its steps.
        progress: whether to show it.

    Raises:
        NoRuns: a folder is not there, or no run is below any.
    """
    runs, remarks = collect(folders, warmup_steps, progress)
    cells = join_repeats(runs)
    return Results(runs, cells, all_effects(cells), interactions(cells), scaling(cells), remarks)


def write_report(results: Results, folder: Path, title: str) -> list[Path]:
    """Write runs.csv, runs.parquet, cells.csv, the pictures, analysis.md and report.html.

    Files of these names are replaced where an analysis has written them, and no other file is touched.

    Args:
        folder: of the report; created if missing.
        title: of the page.

    Returns:
        the files written.

    Raises:
        OSError: the folder cannot be written, or holds a file of such a name that is somebody else's.
    """
    refuse_other_files(folder)
    make_folder(folder)
    rows = run_rows(results.runs)
    write_csv(rows, folder / "runs.csv")
    write_parquet(rows, folder / "runs.parquet")
    write_csv(cell_rows(results.cells), folder / "cells.csv")
    pictures = draw_all(results, folder)
    text = markdown(results, [(name, path.name) for name, path in pictures])
    replace_file(folder / "analysis.md", text)
    replace_file(folder / "report.html", report_page(results, pictures, title))
    return [*(folder / name for name in _TEXTS), *(path for _, path in pictures)]


def refuse_other_files(folder: Path) -> None:
    """Check that a report replaces only another report in a folder. Raises OSError."""
    table = folder / _TEXTS[0]
    refuse_foreign_file(table, f"name,{','.join(NAMED_AXES)},".encode())
    if not os.path.lexists(table):  # there was no report; what has its names is somebody else's
        drawn = (path for pattern in _DRAWN for path in folder.glob(pattern))
        for path in (*(folder / name for name in (*_TEXTS, *_PICTURES)), *drawn):
            refuse_foreign_file(path, _NOTHING)


def draw_all(results: Results, folder: Path) -> list[tuple[str, Path]]:
    """Draw every picture with data; return title and file of each."""
    pictures = draw_over_batch(results.cells, folder)
    if results.effects:
        pictures.append(("Effect of each switch", draw_effects(results.effects, folder / "effects.png")))
    pictures += draw_bars(results.effects, folder)
    if results.interactions:
        path = draw_interactions(results.interactions, folder / "interactions.png")
        pictures.append(("Interaction of switches", path))
    if results.curves:
        pictures.append(("Scaling over ranks", draw_scaling(results.curves, folder / "scaling.png")))
    if front := draw_pareto(results.cells, folder / "pareto.png"):
        pictures.append(("Memory against throughput", front))
    return pictures
