"""Run a grid of configurations, each cell in fresh processes: scripts/sweep.py SWEEP.toml [options].

Results lie in outputs/<sweep>: a run folder per cell and repeat, and sweep.jsonl, which says how each of them ended. A
sweep that was stopped, in any way, resumes when it is started again. See docs/comparing.md.
"""

import argparse
import shlex
from collections import Counter
from pathlib import Path

from torchtitan.experiments.folder import ExperimentError
from torchtitan.experiments.grid import read_sweep
from torchtitan.experiments.launchers.choice import Launching, add_launcher_options
from torchtitan.experiments.record import SweepFolder
from torchtitan.experiments.runner import RETRIED, SweepPlan, Task, plan_sweep, run_sweep, slurm_commands
from torchtitan.pictures.number_text import counted
from torchtitan.processes.command_line import OneLineParser, assignment, at_least, refusing
from torchtitan.programs import pasted, program
from torchtitan.settings.record import value_text

_MOST_LINES = 38  # of a dry run's list
_UNSUCCESSFUL = ("failed", "timeout", "killed")  # nothing is known of the cell; oom, refused and skipped are results


@refusing(ExperimentError, stopped="stopped; the same command runs those that have not ended")
def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    launching = Launching(arguments.launcher, arguments.jobs, dict(arguments.slurm))
    sweep = read_sweep(arguments.sweep)
    sweep.settings.repeats = arguments.repeats or sweep.settings.repeats
    folder = SweepFolder(arguments.output or Path("outputs") / sweep.settings.name)
    only = {axis: [value for other, value in arguments.only if other == axis] for axis, _ in arguments.only}
    elsewhere = launching.elsewhere or arguments.dry_run
    plan = plan_sweep(sweep, folder, only=only, retry_failed=arguments.retry_failed, elsewhere=elsewhere)
    if arguments.dry_run:
        commands = slurm_commands(plan, launching) if launching.launcher == "slurm" else []
        show(plan)
        print(*commands, sep="\n", end="\n" * bool(commands))
        return 0
    run_sweep(plan, launching)
    rows = [plan.rows[task.key] for task in plan.tasks]
    for row in rows:
        print(f"{row['status']:<8}  {row['name']}  {row['reason']}".rstrip())
    counts = Counter(row["status"] for row in rows)
    place = shlex.quote(str(folder.path))
    print(f"{folder.path}: {counted(len(rows), 'run')}: {', '.join(f'{count} {status}' for status, count in counts.items())}"
          f" (speed and memory: {pasted('optimization_analysis')} {place};"
          f" losses: {pasted('compare')} {place}/*)")  # fmt: skip
    if any(counts[status] for status in RETRIED):
        print("--retry-failed runs those anew that failed, timed out, were killed or refused")
    return 0 if counts["ok"] and not any(counts[status] for status in _UNSUCCESSFUL) else 1


def show(plan: SweepPlan) -> None:
    """Print every run and its planned action; of many runs a line for those that differ in the axis `order` or the seed only."""
    missing, many = {task.key for task in plan.missing}, len(plan.tasks) > _MOST_LINES
    lines: dict[str, list[Task]] = {}
    for task in plan.tasks:
        axes = [f"{axis}={value_text(value)}" for axis, value in task.cell.axes.items() if axis != plan.sweep.settings.order]
        lines.setdefault(" ".join(axes) if many else task.name, []).append(task)
    for name, tasks in list(lines.items())[:_MOST_LINES]:
        states = Counter("to run" if task.key in missing else plan.rows[task.key]["status"] for task in tasks)
        shown = ", ".join(f"{count} {state}" if many else state for state, count in states.items())
        print(f"{name}  {counted(tasks[0].cell.processes, 'process', 'es')}  {shown}")
    if left := list(lines.values())[_MOST_LINES:]:
        print(f"... and {sum(map(len, left))} runs more")
    print(f"{counted(len(plan.tasks), 'run')}, {len(missing)} to run")


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=program("sweep"), description=__doc__)
    add = parser.add_argument
    add("sweep", metavar="SWEEP.toml", type=Path, help="TOML file, or the name of one in train_configs/sweeps")
    add("--only", type=assignment, action="append", default=[], metavar="AXIS=VALUE", help="run these cells only; "
        "may be given several times")
    add("--repeats", type=at_least(1), metavar="N", help="runs of each cell with different seeds (default: the file's)")
    add("--retry-failed", action="store_true", help="repeat runs that failed, timed out, were killed or refused")
    add("--dry-run", action="store_true", help="check everything and list the runs; nothing is written")
    add("--output", type=Path, metavar="FOLDER", help="of the results (default: outputs/<sweep>)")
    add_launcher_options(parser)
    return parser.parse_args(words)
