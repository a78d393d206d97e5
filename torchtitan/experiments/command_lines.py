"""Command lines of a cell's runs, checked before anything is started."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.config.places import place_problems
from torchtitan.config.toml_file import read_toml
from torchtitan.experiments.grid import BATCH_KEY, Cell, Sweep, SweepError
from torchtitan.pictures.number_text import first_named
from torchtitan.settings.record import value_text

SEED_KEY = "debug.seed"
_MOST_NAMES = 20  # of refused cells


def run_name(cell: Cell, repeat: int) -> str:
    """Name of a run, and of its folder below the sweep's."""
    return f"{cell.id}_r{repeat}"


def run_arguments(cell: Cell, repeat: int, folder: Path, base: Path | None) -> list[str]:
    """Arguments of train.py; repeat: number of the run, from 0, added to the seed."""
    values = {"job.dump_folder": str(folder), "job.name": run_name(cell, repeat)} | cell.values
    seed = values.get(SEED_KEY, _seed_of(base))
    values[SEED_KEY] = seed + repeat if isinstance(seed, int) else seed  # another type is refused by the checks
    start = [f"--job.config_file={base}"] if base else []
    return start + words_of(values)


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Words of a command line."""
    return [f"--{key}={value_text(value)}" for key, value in values.items()]


def check_cells(sweep: Sweep, cells: list[Cell], folder: Path, elsewhere: bool = False) -> None:
    """Check the configuration of every cell.

    Args:
        elsewhere: the runs are for other machines: packages and devices of this one refuse none.

    Raises:
        SweepError: cells are refused, a line for each reason; or one would write outside of the sweep's folder.
    """
    refused: dict[str, list[str]] = {}  # reason -> cells
    for cell in cells:
        arguments = run_arguments(cell, 0, folder, sweep.base)
        if sweep.settings.autotune:
            arguments.append(f"--{BATCH_KEY}={sweep.settings.autotune_multiple_of}")
        try:
            config = load_config(arguments, cell.processes, elsewhere=elsewhere)
        except ConfigError as error:
            for problem in error.problems:
                refused.setdefault(problem.removeprefix("command line: --"), []).append(cell.id)
            continue
        _refuse_other_places(sweep, cell, config, folder)
        if sweep.settings.warmup_steps >= config.training.steps:
            text = f"{sweep.settings.warmup_steps} leaves none of training.steps = {config.training.steps}"
            raise SweepError(f"{sweep.path}: warmup_steps: {text} (lower it, or train longer)")
    if refused:
        excludable = len({name for names in refused.values() for name in names}) < len(cells)
        lines = (f"{sweep.path}: {_refusal(reason, names, excludable, len(cells))}" for reason, names in refused.items())
        raise SweepError("\n".join(lines))


def _refusal(reason: str, names: list[str], excludable: bool, of: int) -> str:
    """Line on cells that are refused for one reason; excludable: others are not refused; of: number of all cells."""
    which, it = (f"cell {names[0]}", "it") if len(names) == 1 else (f"cells {first_named(names, _MOST_NAMES)}", "them")
    if len(names) == of > 1:
        return f"{reason} (all {of} cells)"
    return f"{reason} ({which}" + f"; or leave {it} out by [[exclude]]" * excludable + ")"


def _refuse_other_places(sweep: Sweep, cell: Cell, config: JobConfig, folder: Path) -> None:
    for key, text in place_problems(config, folder, folder, run_name(cell, 0)):
        given = next((f"{table}." for table in ("fixed", "axes") if key in sweep.table[table]), f"base: {sweep.base}: ")
        raise SweepError(f"{sweep.path}: {given}{key}: {text}")


def _seed_of(base: Path | None) -> Any:
    section = read_toml(str(base))[0].get("debug", {}) if base else {}
    return section.get("seed", 0) if isinstance(section, dict) else 0
