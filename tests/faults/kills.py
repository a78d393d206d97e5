"""Runs that are killed again and again and started anew until they are done: python -m tests.faults.kills [--runs N]

Each run is one of several layouts, saved synchronously or beside training. The first kill of a run is aimed at a
moment that random timing seldom meets (tests/faults/moments.py): one rank does it to itself, and the others are killed
at once or a little later. The kills after it come at random times, to all processes or first to one, every second one
while a save is under way. Then the same command again, until the last step. The run must end with the tensors, the
losses and the gradient norms of one that nobody disturbed, bit for bit. Writes tests/faults/kills.json, and prints the
table of moments and outcomes (--table: that of the last time, without running anything).
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from tests.end_to_end.runs import CONFIG, Run, checkpoint_tensors
from tests.faults.forked import FAULT, ForkedRun
from tests.faults.moments import KILLED, MOMENTS
from torchtitan.checkpoint.checkpointer import checkpoint_path
from torchtitan.checkpoint.location import run_checkpoints

RESULTS = Path(__file__).with_name("kills.json")
STEPS, INTERVAL = 100, 10
GLOBAL_BATCH_SIZE = 8
MAX_KILLS = 3
TIMED = ("before the first step", "in a step", "while a save is under way")


@dataclass(frozen=True)
class Layout:
    """How many processes, how they share the model, and how much each takes at once."""

    name: str
    ranks: int
    replicas: int
    shards: int
    local_batch_size: int


LAYOUTS = [
    Layout("one process", 1, 1, 1, 4), Layout("DDP x 2", 2, 2, 1, 4), Layout("FSDP x 2", 2, 1, 2, 2),
    Layout("DDP x 4", 4, 4, 1, 2), Layout("HSDP 2 x 2", 4, 2, 2, 2),
]  # fmt: skip
MODES = ("disabled", "async")


def start(
    folder: Path, name: str, layout: Layout, mode: str, more: tuple[str, ...] = ("--sampling.enable", "false")
) -> ForkedRun:
    config = folder / "small.toml"
    if not config.exists():
        config.write_text(CONFIG)
    return ForkedRun(
        config, name, "--training.steps", str(STEPS), "--training.global_batch_size", str(GLOBAL_BATCH_SIZE),
        "--training.local_batch_size", str(layout.local_batch_size), "--checkpoint.interval", str(INTERVAL),
        "--checkpoint.async_mode", mode, "--metrics.log_freq", "2", *more,
        ranks=layout.ranks, replicas=layout.replicas, shards=layout.shards,
    )  # fmt: skip


# ---------------------------------------------------------------------- kills


def aimed_kill(
    folder: Path, name: str, layout: Layout, mode: str, moment: str, draw: random.Random
) -> tuple[Run, str | None]:
    """Start a run of which one rank kills itself at a moment; None where it never came to that."""
    # The first rank alone names and deletes checkpoints, and copies need a save beside training.
    rank = 0 if "rename" in moment or "old one" in moment or "manifest" in moment else draw.randrange(layout.ranks)
    os.environ[FAULT] = f"{rank}:{moment}:{draw.randint(1, 3)}"
    try:
        run = start(folder, name, layout, mode)
    finally:
        del os.environ[FAULT]
    code = run.processes[rank].communicate(timeout=240) and run.processes[rank].returncode
    if code not in (0, *KILLED):  # as of a moment that names what moved
        raise RuntimeError(f"rank {rank} ended with {code} instead of {moment!r}: {run.processes[rank].said()[-500:]}")
    if code in KILLED:
        time.sleep(draw.choice([0, 0, draw.random()]))  # the others notice, or not
        run.send(signal.SIGKILL)
    return run, moment if code in KILLED else None


def random_kill(run: Run, draw: random.Random) -> str | None:
    """Kill a run at a random moment; None where it was faster."""
    seen, wanted, while_saving = len(run.points()), draw.randint(1, STEPS // 3), draw.random() < 0.5
    while all(process.poll() is None for process in run.processes):
        enough = len(run.points()) >= min(seen + wanted, STEPS - 1)
        if enough and (not while_saving or saving(run)):
            break
        time.sleep(0.001)
    time.sleep(draw.random() * 0.05)
    if not any(process.poll() is None for process in run.processes):
        return None
    alone_first = len(run.processes) > 1 and draw.random() < 0.3
    if alone_first:
        draw.choice(run.processes).send_signal(signal.SIGKILL)
    time.sleep(draw.random() if alone_first else 0)
    run.send(signal.SIGKILL)
    for process in run.processes:
        process.communicate(timeout=60)
    return TIMED[2] if saving(run) else TIMED[1] if run.points() else TIMED[0]


def saving(run: Run) -> bool:
    """Whether a save is under way, or was when the run was killed."""
    return any((run.folder / "checkpoint").glob(".*"))


def disturbed(
    folder: Path, name: str, layout: Layout, mode: str, aim: str, draw: random.Random
) -> tuple[Run, list[str]]:
    """Kill and start again until the run is done; the last start, and the moments of the kills."""
    run, moment = aimed_kill(folder, name, layout, mode, aim, draw)
    moments: list[str] = []
    while moment is not None:
        moments.append(moment)
        for process in run.processes:
            process.communicate(timeout=60)
        run = start(folder, name, layout, mode)
        moment = random_kill(run, draw) if len(moments) < MAX_KILLS and draw.random() < 0.7 else None
    codes, outputs = run.wait()
    assert codes == [0] * layout.ranks, "\n".join(outputs)
    assert "Traceback" not in "".join(outputs), outputs
    return run, moments


# ---------------------------------------------------------------------- outcomes


def same(one: Run, other: Run) -> list[str]:
    """In what two finished runs differ."""
    first, second = (checkpoint_tensors(checkpoint_path(run_checkpoints(run.folder), STEPS)) for run in (one, other))
    found = [name for name in first.keys() | second.keys() if name not in first or name not in second]
    found += [name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])]
    return found + (["losses"] if one.losses() != other.losses() else [])


def suite(runs: int, seed: int, progress: bool = False) -> list[dict]:
    """A row per run: layout, mode, moments of the kills, and in what it differs from the undisturbed run."""
    draw, rows, taken = random.Random(seed), [], Counter()
    with tempfile.TemporaryDirectory() as place:
        folder, straight = Path(place), {}
        for number in tqdm(range(runs), disable=not progress, unit="run"):
            layout, mode = LAYOUTS[number % len(LAYOUTS)], MODES[number // len(LAYOUTS) % len(MODES)]
            if layout.name not in straight:
                straight[layout.name] = start(folder, f"straight_{len(straight)}", layout, "disabled")
                straight[layout.name].finish()
            aims = [moment for moment in MOMENTS if mode == "async" or moment != "in the staging"]
            aim = min(draw.sample(aims, len(aims)), key=taken.__getitem__)
            run, moments = disturbed(folder, f"disturbed_{number}", layout, mode, aim, draw)
            taken.update(moments)
            different = same(run, straight[layout.name])
            rows.append({"layout": layout.name, "async_mode": mode, "moments": moments, "different": different})
    return rows


def table(rows: list[dict]) -> str:
    """Layouts x moments: how often runs were killed there, and how they ended."""
    counts = Counter((row["layout"], moment) for row in rows for moment in row["moments"])
    met = [moment for moment in (*TIMED, *MOMENTS) if any(moment == each for _, each in counts)]
    return outcomes(rows, "layout", counts, met, "killed", "bit-equal")


def outcomes(rows: list[dict], key: str, counts: Counter, moments: Sequence[str], what: str, ended: str) -> str:
    """Moments x values of a row's key: counts by (value, moment), and how many runs ended equal."""
    columns = list(dict.fromkeys(row[key] for row in rows))
    lines = [f"| {what} | {' | '.join(columns)} | all |", "|---" * (2 + len(columns)) + "|"]
    for moment in moments:
        numbers = [counts[column, moment] for column in columns]
        lines.append(f"| {moment} | {' | '.join(map(str, numbers))} | {sum(numbers)} |")
    parts = [[row for row in rows if row[key] == column] for column in columns]
    ends = [f"{sum(not row['different'] for row in part)} of {len(part)}" for part in [*parts, rows]]
    return "\n".join([*lines, f"| **runs that ended {ended}** | {' | '.join(ends)} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the table of the last time")
    arguments = parser.parse_args()
    if not arguments.table:
        rows = suite(arguments.runs, arguments.seed, progress=True)
        RESULTS.write_text(json.dumps({"seed": arguments.seed, "rows": rows}, indent=1) + "\n")
    rows = json.loads(RESULTS.read_bytes())["rows"]
    print(table(rows))
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
