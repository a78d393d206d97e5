"""Speed and memory of every model size on this device: python benchmarks/flavors.py [--flavors DiT-S/2 ...]

The grid of train_configs/sweeps/flavors.toml, precision x compile x activation checkpointing, each cell in a separate
process; a cell that runs out of memory is a row too. Started again, it resumes. Medians over the steps after the
warm-up with the interval between two order statistics (five steps: 93.75 %). Adds to benchmarks/results/flavors.json
and prints its table.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import shared
from torchtitan.experiments.grid import read_sweep
from torchtitan.experiments.launchers.choice import Launching
from torchtitan.experiments.record import SweepFolder
from torchtitan.experiments.runner import plan_sweep, run_sweep
from torchtitan.runs.analysis.measures import measure_run
from torchtitan.runs.record import read_run

SWEEP = shared.ROOT / "train_configs" / "sweeps" / "flavors.toml"
QUANTITIES = ("images_per_second", "step_seconds", "mfu_percent", "memory_gib")


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--flavors", nargs="+", help="some of the file's (default: all)")
    parser.add_argument("--batches", nargs="+", default=["4"], help="some of the file's, per rank (default: 4)")
    parser.add_argument("--output", type=Path, default=shared.ROOT / "outputs" / "flavors", help="folder of the runs")
    parser.add_argument("--memory-limit", type=float, help="of a process on the CPU, in GiB; above it, a cell is oom")
    arguments = parser.parse_args()
    sweep, folder = read_sweep(SWEEP), SweepFolder(arguments.output)
    sweep.settings.memory_limit_gib = arguments.memory_limit
    only = {"training.local_batch_size": arguments.batches}
    if arguments.flavors:
        only["model.flavor"] = arguments.flavors
    plan = plan_sweep(sweep, folder, only=only)
    run_sweep(plan, Launching())
    found, measured = shared.read_results("flavors"), shared.conditions()
    for task in plan.tasks:
        row = plan.rows[task.key]
        run = arguments.output / row["run"]
        medians = measure_run(read_run(run), sweep.settings.warmup_steps) if row["status"] == "ok" else {}
        values = {
            name: [medians[name].value, medians[name].lower, medians[name].upper]
            for name in QUANTITIES
            if name in medians
        }
        found[row["name"]] = {"axes": row["axes"], "status": row["status"], "reason": row["reason"]} | values | measured
    shared.write_results("flavors", found)
    print_table(found)


def print_table(rows: dict[str, dict]) -> None:
    print("| model | images per step | precision | compile | activation checkpointing | images/s | MFU, % | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows.values():
        axes = row["axes"]
        cells = [
            axes["model.flavor"], str(axes["training.local_batch_size"]), axes["dtype"],
            "yes" if axes["compile.enable"] else "no", axes["activation_checkpoint.mode"],
        ]  # fmt: skip
        if row["status"] == "ok":
            low, high = row["images_per_second"][1:]
            cells.append(f"{row['images_per_second'][0]:.3g} [{low:.3g}, {high:.3g}]")
            cells += [f"{row['mfu_percent'][0]:.1f}" if "mfu_percent" in row else "", f"{row['memory_gib'][0]:.2f}"]
        else:
            cells += [row["status"], "", ""]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
