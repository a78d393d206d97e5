"""Critical batch size of a checkpoint: branches train on equally many samples at several batch sizes.

From one checkpoint (weights and optimizer state) branches train at several batch sizes, and are compared by held-out loss.
Results lie in RUN_FOLDER/critical_batch/step-N: results.csv, critical_batch.png and summary.md, and a run per branch. More
factors or seeds may be asked for later.
"""

import argparse
from pathlib import Path

from research.branch_measurement import START, open_measurement, run_measurement
from research.critical_batch_report import report
from research.equal_samples import LR_RULES
from research.frame import CellsFailed


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN_FOLDER", type=Path, help="a run's folder, as outputs/digits")
    add("--step", type=int, help="checkpoint to branch from (default: the newest good one)")
    add("--factors", type=float, nargs="+", default=[0.5, 1, 2, 4], metavar="K", help="batch sizes as multiples of "
        "the run's (default: 0.5 1 2 4); the smallest is the reference")
    add("--samples", type=int, help="of every branch, a multiple of every batch size (default: 32 steps of the "
        "largest)")
    add("--seeds", type=int, default=3, help="branches of each batch size (default: 3)")
    add("--tolerance", type=float, default=0.01, help="tolerated excess of held-out loss (default: 0.01)")
    add("--lr", type=float, help="learning rate at factor 1 (default: the run's at that step, at its first batch size)")
    add("--lr-rule", choices=LR_RULES, default="sqrt", help="its growth with the factor (default: sqrt, Adam's)")
    add("--held-out", type=int, default=4096, metavar="TRIPLES", help="held-out (image, timestep, noise) triples "
        "(default: 4096; images are used again with other noise)")
    add("--nproc", type=int, default=1, help="processes of each branch (default: 1)")
    add("--retry-failed", action="store_true", help="train failed branches again")
    add("--output", type=Path, help="folder of the results (default: RUN_FOLDER/critical_batch/step-N)")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train and measure the missing branches; return summary.md.

    Raises:
        StudyError, ConfigError, CheckpointError, WeightsError, DatasetError: it cannot be measured.
        CellsFailed: no branch was measured; the summary is written.
    """
    measurement = open_measurement(arguments)
    rows = run_measurement(measurement)
    branches = [row for row in rows if row["seed"] != START]
    summary = report(measurement, rows)
    if all(row["status"] != "ok" for row in branches):
        text = f"no branch was measured, the first {branches[0]['status']} with: {branches[0]['reason']}"
        raise CellsFailed(f"{text} ({summary} has all; --retry-failed trains them again)")
    print(summary.read_text(encoding="utf-8").split("\n## ")[0].strip())
    return summary
