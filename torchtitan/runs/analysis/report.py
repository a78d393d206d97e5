"""Report of the analysis: tables and pictures from folders of runs."""

import os
from collections.abc import Sequence
from pathlib import Path

from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.runs.analysis.axes import NAMED_AXES
from torchtitan.runs.analysis.batch_pictures import draw_over_batch
from torchtitan.runs.analysis.cells import join_repeats
from torchtitan.runs.analysis.collect import collect
from torchtitan.runs.analysis.effects import all_effects, scaling
from torchtitan.runs.analysis.findings import Results, markdown
from torchtitan.runs.analysis.loss_pictures import draw_loss
from torchtitan.runs.analysis.memory_pictures import draw_memory_parts
from torchtitan.runs.analysis.ranks_pictures import draw_over_ranks
from torchtitan.runs.analysis.results_table import run_rows, write_csv

# The table is written before all else, and is that by which a folder is known.
_TABLE, _TEXT = "results.csv", "analysis.md"
_DRAWN = "*_over_*.png"
_NOTHING = b"\0"  # begins no file of a report


def analyse(folders: Sequence[Path], warmup_steps: int | None = None, progress: bool = False) -> Results:
    """Read the runs below folders and compare them.

    Args:
        folders: each a run's folder, or one above run folders and sweeps.
        warmup_steps: left out at the start of every run; default: its sweep's setting, else a tenth of its steps.

    Raises:
        RunRecordError: a folder is not there, or no run is below any.
    """
    runs, remarks = collect(folders, warmup_steps, progress)
    cells = join_repeats([run for run in runs if run.folder])
    return Results(runs, cells, all_effects(cells), scaling(cells), remarks)


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write results.csv, the pictures and analysis.md.

    Files of these names are replaced where an analysis has written them, and no other file is touched.

    Returns:
        the files written.

    Raises:
        OSError: the folder cannot be written, or holds a file of such a name that is somebody else's.
    """
    refuse_other_files(folder)
    make_folder(folder)
    write_csv(run_rows(results.runs), folder / _TABLE)
    pictures = [
        *draw_over_batch(results.cells, folder, results.remarks), *draw_memory_parts(results.cells, folder),
        *draw_over_ranks(results.curves, results.cells, folder), *draw_loss(results.runs, folder),
    ]  # fmt: skip
    earlier = sorted({*folder.glob(_DRAWN)} - {path for _, path in pictures})
    if earlier:
        results.remarks.append(f"Of an earlier analysis, not of these runs: {', '.join(path.name for path in earlier)}.")
    replace_file(folder / _TEXT, markdown(results, [(name, path.name) for name, path in pictures]))
    return [folder / _TABLE, folder / _TEXT, *(path for _, path in pictures)]


def refuse_other_files(folder: Path) -> None:
    """Check that a report replaces only another report in a folder. Raises OSError."""
    table = folder / _TABLE
    refuse_foreign_file(table, f"name,{','.join(NAMED_AXES)},".encode())
    if not os.path.lexists(table):  # there was no report; what has its names is somebody else's
        for path in (folder / _TEXT, *folder.glob(_DRAWN)):
            refuse_foreign_file(path, _NOTHING)
