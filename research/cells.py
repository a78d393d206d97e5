"""Cells that are measured: each is a row of a table, a failed one too, and is not measured again."""

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import torch

from research.offline_gradients import EstimateFailed, GradientError
from research.result_table import ResultTable
from torchtitan.checkpoint.checkpointer import CheckpointError
from torchtitan.data.base import DatasetError
from torchtitan.errors import shortened, unwrapped
from torchtitan.experiments.engine import Advance, settle_cells
from torchtitan.experiments.training import Diverged, TrainingFailed
from torchtitan.weights.trained_model import WeightsError

Row = dict[str, str]
Cell = dict[str, Any]

# Errors that end a cell with a failed row, not the experiment.
CELL_FAILURES = (
    GradientError, EstimateFailed, DatasetError, CheckpointError, WeightsError, TrainingFailed,
    torch.OutOfMemoryError,
)  # fmt: skip


def missing_cells(table: ResultTable, cells: list[Cell], retry_failed: bool) -> list[Cell]:
    """Missing cells: those without a row, and on request those that failed."""
    rows = [(cell, table.find(cell)) for cell in cells]
    return [cell for cell, row in rows if row is None or (retry_failed and row["status"] != "ok")]


def measure_cells(
    table: ResultTable,
    cells: list[Cell],
    missing: list[Cell],
    measure: Callable[[Cell, Advance], dict[str, Any]],
    *,
    cost: Callable[[Cell], int],
    unit: str,
    name: Callable[[Cell], str] = lambda cell: "",
    recorded: Callable[[Cell], object] = lambda cell: None,
) -> None:
    """Measure the missing cells; every one is a row of the table, a failed one with its reason.

    Args:
        table: of the results.
        cells, missing, cost, unit, name: as `settle_cells` takes them.
        measure: the other columns of a cell's row. Raises one of CELL_FAILURES where there is no answer.
        recorded: called when the row of a cell with an answer is on the disk.
    """

    def settle(cell: Cell, advance: Advance) -> None:
        begun = time.perf_counter()
        row = cell | {"status": "ok", "reason": "", "date": datetime.now().isoformat(" ", "seconds")}
        try:
            row |= measure(cell, advance)
        except CELL_FAILURES as error:
            status = "diverged" if isinstance(error, Diverged) else "failed"
            row |= {"status": status, "reason": shortened(unwrapped(error))}
        table.add(row | {"runtime": str(timedelta(seconds=time.perf_counter() - begun))})
        if row["status"] == "ok":
            recorded(cell)

    settle_cells(cells, missing, settle, cost=cost, unit=unit, name=name)
