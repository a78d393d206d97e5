"""Runs that are killed at random moments and started again until they are done: python -m tests.faults.kills [--runs N]

Each run is one of several layouts, saved synchronously or beside training. SIGKILL goes to all of its processes, or to one,
at a random time; every second kill waits for a save to be under way. Then the same command again, until the last step. The
run must end with the tensors, the losses and the gradient norms of one that nobody disturbed, bit for bit. Prints a table of
moments and outcomes, and writes it to tests/faults/kills.json.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from tests.end_to_end.runs import CONFIG, Run, checkpoint_tensors

RESULTS = Path(__file__).with_name("kills.json")
STEPS, INTERVAL = 100, 5
MAX_KILLS = 6


@dataclass(frozen=True)
class Layout:
    """How many processes, and how they share the model."""

    name: str
    ranks: int
    replicas: int
    shards: int


LAYOUTS = [
    Layout("one process", 1, 1, 1), Layout("DDP x 2", 2, 2, 1), Layout("FSDP x 2", 2, 1, 2), Layout("DDP x 4", 4, 4, 1),
    Layout("HSDP 2 x 2", 4, 2, 2),
]  # fmt: skip
MODES = ("disabled", "async")


def start(folder: Path, name: str, layout: Layout, mode: str) -> Run:
    config = folder / "small.toml"
    if not config.exists():
        config.write_text(CONFIG.replace("interval = 60", "interval = 100000"))
    return Run(
        config, name, "--training.steps", str(STEPS), "--checkpoint.interval", str(INTERVAL), "--checkpoint.async_mode",
        mode, "--metrics.log_freq", "1", ranks=layout.ranks, replicas=layout.replicas, shards=layout.shards,
    )  # fmt: skip


def moment_of(run: Run) -> str:
    """What a killed run had been at, by what it left behind."""
    names = [path.name for path in (run.folder / "checkpoint").glob(".*")] if run.folder.exists() else []
    if any(name.startswith(".deleted-") for name in names):
        return "deleting an old checkpoint"
    if any(name.startswith(".replaced-") for name in names):
        return "replacing a checkpoint"
    partial = [path for path in (run.folder / "checkpoint").glob(".step-*")]
    if any((path / "manifest.json").exists() for path in partial):
        return "naming a checkpoint"
    if partial:
        return "writing a checkpoint"
    return "in a step, or staging" if run.points() else "before the first step"


def wait_to_kill(run: Run, draw: random.Random, while_saving: bool) -> bool:
    """Wait for a random moment; False where the run was faster."""
    seen, wanted = len(run.points()), draw.randint(1, STEPS // 3)
    deadline = time.monotonic() + 240
    while all(process.poll() is None for process in run.processes) and time.monotonic() < deadline:
        enough = len(run.points()) >= min(seen + wanted, STEPS - 1)
        if enough and (not while_saving or any((run.folder / "checkpoint").glob(".step-*"))):
            time.sleep(draw.random() * 0.05)
            return any(process.poll() is None for process in run.processes)
        time.sleep(0.001)
    return False


def disturbed(folder: Path, name: str, layout: Layout, mode: str, draw: random.Random) -> list[str]:
    """Kill and start again until the run is done; the moments of the kills."""
    moments: list[str] = []
    while True:
        run = start(folder, name, layout, mode)
        kill = len(moments) < MAX_KILLS and draw.random() < 0.8
        if not kill or not wait_to_kill(run, draw, while_saving=draw.random() < 0.5):
            codes, outputs = run.wait()
            assert codes == [0] * layout.ranks, "\n".join(outputs)
            assert "Traceback" not in "".join(outputs), outputs
            return moments
        victims = run.processes if draw.random() < 0.7 else [draw.choice(run.processes)]
        for process in victims:
            process.send_signal(signal.SIGKILL)
        if len(victims) < len(run.processes):
            time.sleep(draw.random())  # the others notice, or not
        run.send(signal.SIGKILL)
        for process in run.processes:
            process.communicate()
        moments.append(moment_of(run))


def same(one: Run, other: Run) -> list[str]:
    """In what two finished runs differ."""
    first, second = (checkpoint_tensors(run.folder / "checkpoint" / f"step-{STEPS:08d}") for run in (one, other))
    found = [name for name in first.keys() | second.keys() if name not in first or name not in second]
    found += [name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])]
    return found + (["losses"] if one.losses() != other.losses() else [])


def suite(runs: int, seed: int, progress: bool = False) -> list[dict]:
    """A row per run: layout, mode, moments of the kills, and in what it differs from the undisturbed run."""
    draw, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as place:
        folder, straight = Path(place), {}
        for number in tqdm(range(runs), disable=not progress, unit="run"):
            layout, mode = LAYOUTS[number % len(LAYOUTS)], MODES[number // len(LAYOUTS) % len(MODES)]
            if layout.name not in straight:
                straight[layout.name] = start(folder, f"straight_{len(straight)}", layout, "disabled")
                straight[layout.name].finish()
            name = f"disturbed_{number}"
            moments = disturbed(folder, name, layout, mode, draw)
            run = start(folder, name, layout, mode)  # it is finished, says so, and stays as it is
            run.finish()
            rows.append({
                "layout": layout.name, "async_mode": mode, "moments": moments,
                "different": same(run, straight[layout.name]),
            })  # fmt: skip
    return rows


def table(rows: list[dict]) -> str:
    kills = Counter((row["layout"], moment) for row in rows for moment in row["moments"])
    moments = sorted({moment for _, moment in kills})
    lines = [f"| layout | runs | bit-equal | {' | '.join(moments)} |", "|---" * (3 + len(moments)) + "|"]
    for layout in dict.fromkeys(row["layout"] for row in rows):
        own = [row for row in rows if row["layout"] == layout]
        equal = sum(not row["different"] for row in own)
        lines.append(f"| {layout} | {len(own)} | {equal} | {' | '.join(str(kills[layout, m]) for m in moments)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = suite(arguments.runs, arguments.seed, progress=True)
    RESULTS.write_text(json.dumps({"seed": arguments.seed, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
