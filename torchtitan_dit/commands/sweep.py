"""Run a grid of configurations, each cell in fresh processes: scripts/sweep.py SWEEP.toml [options].

Results lie in outputs/<sweep>: a run folder per cell and repeat, and sweep.jsonl, which says how each of them ended. A
sweep that was stopped, in any way, resumes when it is started again. See docs/sweeps.md.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

from torchtitan.estimate.devices import DEVICES
from torchtitan.experiments.command_lines import run_name
from torchtitan.experiments.cost import cost_table, device_of, estimate_cost
from torchtitan.experiments.folder import ExperimentError
from torchtitan.experiments.grid import SweepError, read_sweep
from torchtitan.experiments.launchers import JOBS
from torchtitan.experiments.launchers.choice import add_launcher_options, launching_of, pair, positive
from torchtitan.experiments.record import SweepFolder
from torchtitan.experiments.runner import SweepPlan, plan_sweep, run_sweep
from torchtitan.experiments.table import sweep_table
from torchtitan.pictures.number_text import counted
from torchtitan.processes.command_line import OneLineParser, interrupt_by_signals, run_program

_UNSUCCESSFUL = ("failed", "timeout", "killed")  # nothing is known of the cell; oom, refused and skipped are results


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    launching = launching_of(arguments)
    try:
        sweep = read_sweep(arguments.sweep, arguments.extended)
        sweep.settings.repeats = arguments.repeats or sweep.settings.repeats
        folder = SweepFolder(arguments.output or Path("outputs") / sweep.settings.name)
        plan = plan_sweep(
            sweep, folder, only=_by_axis(arguments.only), retry_failed=arguments.retry_failed,
            elsewhere=launching.elsewhere,
        )  # fmt: skip
        if arguments.dry_run:
            device = device_of(sweep, arguments.device)
            show(plan)
            if device is None:
                print(f"no estimate of hours (name a device: --device {', '.join(DEVICES)})")
            else:
                print(cost_table(estimate_cost(plan, folder.path, device), device, launching.concurrent))
            return 0
        if arguments.device:
            raise SweepError("--device: is the device that --dry-run estimates for (add --dry-run, or remove it)")
        run_sweep(sweep, folder, plan, launching)
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command resumes", file=sys.stderr)
        return 130
    rows = [plan.rows[task.key] for task in plan.tasks]
    print(sweep_table(rows, folder.path, sweep.settings.warmup_steps))
    counts = Counter(row["status"] for row in rows)
    print(f"{folder.path}: {counted(len(rows), 'run')}: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    return 0 if counts["ok"] and not any(counts[status] for status in _UNSUCCESSFUL) else 1


def show(plan: SweepPlan) -> None:
    """Print every run and its planned action."""
    missing = {task.key for task in plan.missing}
    for task in plan.tasks:
        state = plan.rows[task.key]["status"] if task.key not in missing else "to run"
        if task.cell.id in plan.refused and state == "to run":
            state = f"refused ({plan.refused[task.cell.id]})"
        print(f"{run_name(task.cell, task.repeat)}  {counted(task.cell.processes, 'process', 'es')}  {state}")
    print(f"{counted(len(plan.tasks), 'run')}, {len(missing)} to run")


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("sweep", metavar="SWEEP.toml", type=Path, help="a file as those in train_configs/sweeps")
    add("--only", type=axis_value, action="append", default=[], metavar="AXIS=VALUE", help="run these cells only; "
        "may be given several times")
    add("--extended", action="store_true", help="run the cells of the file's [extended] too")
    add("--repeats", type=positive, metavar="N", help="runs of each cell with different seeds (default: the file's)")
    add("--retry-failed", action="store_true", help="repeat runs that failed, timed out, were killed or refused")
    add("--dry-run", action="store_true", help="check everything and list the runs; nothing is written")
    add("--device", metavar="NAME", help=f"with --dry-run: estimate hours for {', '.join(DEVICES)} (default: the file's)")
    add("--output", type=Path, metavar="FOLDER", help="of the results (default: outputs/<sweep>)")
    defaults = ", ".join(f"{name} {jobs}" for name, jobs in JOBS.items())
    text = f"concurrent runs; on this machine with CUDA each has separate devices (default: {defaults})"
    add_launcher_options(parser, jobs=text, gpus=False)
    return parser.parse_args(words)


def axis_value(text: str) -> tuple[str, str]:
    return pair(text, "AXIS=VALUE")


def _by_axis(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for axis, value in pairs:
        found.setdefault(axis, []).append(value)
    return found


def run() -> NoReturn:
    """Run as a program, and end the process."""
    interrupt_by_signals()
    run_program(main)
