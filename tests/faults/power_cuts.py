"""Runs whose power is cut again and again and that are started anew until they are done.

    python -m tests.faults.power_cuts [--cuts N]

A cut takes more than a kill: what was written and not synced goes as well (tests/faults/cut_disk.py). The whole folder
of a run lies on a disk that is cut at random moments of its start, of a step, around a save, in a resume and at its
end. Then the same command again, until the last step. The run must end with the tensors, points and sums of gradient noise
of one that nobody disturbed, bit for bit where they are not times. Writes tests/faults/power_cuts.json, and
prints its table (--table: that of the last time, without running anything).
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from tests.end_to_end.runs import Run
from tests.faults.cut_disk import CannotMount, CutDisk, cut_disks, known_file_systems
from tests.faults.kills import INTERVAL, LAYOUTS, STEPS, Layout, outcomes, same, saving, start
from torchtitan.checkpoint.checkpointer import checkpoint_steps, newest_good
from torchtitan.gns.raw_sums import RawSumsError, read_sums
from torchtitan.runs.check import check_run

RESULTS = Path(__file__).with_name("power_cuts.json")
MAX_CUTS = 4
_TIMES = ("throughput", "tflops", "mfu", "time_metrics/", "memory/", "clock/")  # of a point, and its like in no other run


@dataclass(frozen=True)
class Trial:
    """A layout, how it saves, where its checkpoints are, and whether it draws and measures all it can."""

    layout: Layout
    mode: str
    apart: bool = False  # checkpoints in a folder of their own
    everything: bool = False  # grids of samples, gradient noise with its picture, TensorBoard

    @property
    def name(self) -> str:
        kind = ["saves beside training"] * (self.mode == "async") + ["checkpoint.folder"] * self.apart
        return ", ".join([self.layout.name, *kind, *(["pictures and noise"] * self.everything)])

    def start(self, folder: Path, name: str) -> Run:
        more = ["--sampling.enable", "false"]
        if self.everything:
            more = [
                "--sampling.interval", "25", "--sampling.images_per_class", "1", "--metrics.enable_tensorboard", "true",
                "--gns.enable", "true", "--gns.num_bins", "4", "--gns.log_interval", "5",
            ]  # fmt: skip
        if self.apart:
            more += ["--checkpoint.folder", str(folder / "checkpoints")]
        return start(folder, name, self.layout, self.mode, tuple(more))


_ONE, _DDP, _FSDP = LAYOUTS[:3]
TRIALS = [
    Trial(_ONE, "disabled"), Trial(_DDP, "async", everything=True), Trial(_FSDP, "disabled", apart=True),
    Trial(_ONE, "async", apart=True, everything=True), Trial(_DDP, "disabled"), Trial(_FSDP, "async"),
    Trial(_ONE, "disabled", everything=True),
]  # fmt: skip


# ---------------------------------------------------------------------- moments


def _in_the_start(run: Run, draw: random.Random) -> None:
    """Before the first point of this start: at once, or from the moment on that the run's folder changes."""
    known, seen = run.folder / "status.json", _last_step(run)
    if draw.random() < 0.7:  # most of a start is before the folder is opened
        before = _state(run.folder)
        _wait(run, lambda: _state(run.folder) != before or known.exists())
    end = time.monotonic() + draw.random() ** 2 * 3
    _wait(run, lambda: time.monotonic() > end or _last_step(run) != seen)


def _in_a_step(run: Run, draw: random.Random) -> None:
    wanted = min(_last_step(run) + draw.randint(1, STEPS // 2), STEPS - 1)
    _wait(run, lambda: _last_step(run) >= wanted)
    time.sleep(draw.random() * 0.05)


def _in_a_save(run: Run, draw: random.Random) -> None:
    _skip_saves(run, draw)
    _wait(run, lambda: saving(run))
    time.sleep(draw.random() * 0.03)


def _after_a_save(run: Run, draw: random.Random) -> None:
    _skip_saves(run, draw)
    before = _saved(run)
    _wait(run, lambda: _saved(run) > before)
    time.sleep(draw.choice([0, 0.1 * draw.random()]))


def _at_the_end(run: Run, draw: random.Random) -> None:
    _wait(run, lambda: _last_step(run) == STEPS)
    end = time.monotonic() + draw.random() * 0.3
    _wait(run, lambda: time.monotonic() > end)


def _after_the_end(run: Run, draw: random.Random) -> None:
    _wait(run, lambda: False)


MOMENTS: dict[str, Callable[[Run, random.Random], None]] = {
    "in the first start": _in_the_start,
    "in a resume": _in_the_start,
    "in a step": _in_a_step,
    "in a save": _in_a_save,
    "after a save": _after_a_save,
    "at the end": _at_the_end,
    "after the end": _after_the_end,
}


def _wait(run: Run, happened: Callable[[], bool]) -> None:
    """Until it has happened or no process of the run is left."""
    deadline = time.monotonic() + 240
    while not happened() and any(process.poll() is None for process in run.processes):
        assert time.monotonic() < deadline, "a run stands still"
        time.sleep(0.001)


def _skip_saves(run: Run, draw: random.Random) -> None:
    wanted = _saved(run) + INTERVAL * draw.randrange(3)
    _wait(run, lambda: _saved(run) >= wanted)


def _last_step(run: Run) -> int:
    """Of the last point; lines may be cut off or hold anything after a cut."""
    try:
        lines = (run.folder / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except ValueError:
            continue
    return 0


def _saved(run: Run) -> int:
    return max(checkpoint_steps(_checkpoints(run)), default=0)


def _checkpoints(run: Run) -> Path:
    apart = run.folder.parent.parent / "checkpoints" / run.folder.name
    return apart if apart.exists() else run.folder / "checkpoint"


def _state(folder: Path) -> list[tuple[str, int]]:
    """Names and times in a folder, as far as they stay for the moment."""
    try:
        return sorted((path.name, path.lstat().st_mtime_ns) for path in folder.iterdir())
    except OSError:
        return []


# ---------------------------------------------------------------------- cuts


def disturbed(trial: Trial, disk: CutDisk, aims: list[str], draw: random.Random) -> tuple[Run, list[dict], str]:
    """Cut and start again until the run is done.

    Returns:
        the last start; of each cut its moment, seconds after the start, and what had been saved; and how the last start
        ended if not well.
    """
    cuts: list[dict] = []
    for aim in [*aims, None]:
        run, started = trial.start(disk.path, "run"), time.monotonic()
        if aim is None:
            return run, cuts, _end(run)
        MOMENTS[aim](run, draw)
        seconds = time.monotonic() - started
        gone = [process.poll() for process in run.processes]
        if any(code not in (None, 0) for code in gone):
            return run, cuts, _end(run)
        promised = _promised(run, beside=trial.mode == "async")
        disk.cut(lambda run=run: _kill(run))
        found, _ = newest_good(_checkpoints(run))
        moment = "after the end" if all(code == 0 for code in gone) else aim
        config = run.folder / "config.toml"
        cuts.append({
            "moment": moment, "seconds": round(seconds, 2), "promised": promised, "kept": found or 0,
            "config_bytes": config.stat().st_size if config.exists() else None,
        })  # fmt: skip
    raise AssertionError("unreachable: the last aim is none")


def _promised(run: Run, beside: bool) -> int:
    """Step of a checkpoint that must outlast a cut now: one that a later one has been begun after, or a later point."""
    steps = checkpoint_steps(_checkpoints(run))
    reached = 0 if beside else _last_step(run)
    return max([step for step in steps if step < max(reached, steps[0])], default=0) if steps else 0


def _kill(run: Run) -> None:
    run.send(signal.SIGKILL)
    for process in run.processes:
        process.communicate(timeout=60)


def _end(run: Run) -> str:
    """Wait for a run; in a few words what is wrong with its end."""
    codes, outputs = run.wait()
    said = "".join(outputs)
    if any(codes):
        lines = said.strip().splitlines() or ["nothing said"]
        return f"exit codes {codes}: {lines[-1][:300]}"
    return "a traceback" if "Traceback" in said else ""


# ---------------------------------------------------------------------- outcomes


def differences(run: Run, straight: Run, layout: Layout) -> list[str]:
    """In what a run that was disturbed differs from one that was not: nothing of what is logged once may be missing."""
    try:
        steps, expected = ([point["step"] for point in one.points()] for one in (run, straight))
    except ValueError:
        return ["metrics.jsonl holds a line that is no point"]
    found = same(run, straight)
    if missing := len(expected) - len(steps):
        found.append(f"{missing} of {len(expected)} points are missing")
    elif [_untimed(point) for point in run.points()] != [_untimed(point) for point in straight.points()]:
        found.append("points")
    if (straight.folder / "gns").exists():
        found += _noise_differences(run.folder / "gns", straight.folder / "gns")
    drawn, wanted = ({path.name for path in (one.folder / "samples").glob("*")} for one in (run, straight))
    found += [f"samples/{name} is missing" for name in sorted(wanted - drawn)]
    found += [f"{finding.path.name} {finding.problem}" for finding in check_run(run.folder) if finding.problem]
    return found


def _untimed(point: dict) -> dict:
    return {tag: value for tag, value in point.items() if not tag.startswith(_TIMES)}


def _noise_differences(folder: Path, straight: Path) -> list[str]:
    try:
        rows, expected = (list(read_sums(path)) for path in (folder, straight))
    except RawSumsError as error:
        return [f"sums of gradient noise: {error}"]
    if missing := len(expected) - len(rows):
        return [f"sums of gradient noise of {missing} of {len(expected)} steps are missing"]
    for (step, sums), (other, others) in zip(rows, expected, strict=True):
        one, two = vars(sums), vars(others)
        if step != other or not all(_equal(one[key], two[key]) for key in one):
            return [f"sums of gradient noise of step {step}"]
    return []


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def runs(cuts: int, seed: int, trials: list[Trial] = TRIALS, progress: bool = False) -> Iterator[dict]:
    """Yield a row per run: trial, file system, cuts, and in what it differs from the undisturbed run.

    Raises:
        CannotMount.
    """
    draw, number, taken, file_systems = random.Random(seed), 0, Counter(), known_file_systems()
    with tempfile.TemporaryDirectory() as place, cut_disks() as make, tqdm(
        total=cuts, disable=not progress, unit="cut"
    ) as bar:
        straight: dict[tuple[Layout, bool], Run] = {}
        while taken.total() < cuts:
            trial, system = trials[number % len(trials)], file_systems[number % len(file_systems)]
            kind = trial.layout, trial.everything
            if kind not in straight:
                whole = Trial(trial.layout, "disabled", everything=trial.everything)
                straight[kind] = whole.start(Path(place), f"straight_{len(straight)}")
                straight[kind].finish()
            aims = _aims(draw, taken, min(draw.randint(1, MAX_CUTS), cuts - taken.total()))
            disk = make(system)
            (disk.path / "small.toml").write_bytes((Path(place) / "small.toml").read_bytes())
            disk.sync()
            run, made, problem = disturbed(trial, disk, aims, draw)
            taken.update(cut["moment"] for cut in made)
            different = [problem] if problem else differences(run, straight[kind], trial.layout)
            lost = [cut["promised"] for cut in made if cut["kept"] < cut["promised"]]
            different += [f"step {step} was saved, and is gone" for step in lost]
            disk.remove()
            number += 1
            bar.update(len(made))
            yield {"trial": trial.name, "file_system": system, "cuts": made, "different": different}


def _aims(draw: random.Random, taken: Counter, count: int) -> list[str]:
    """Moments for a run's cuts, those first that were taken least often; a first start comes first."""
    aims: list[str] = []
    while len(aims) < count:
        possible = [moment for moment in MOMENTS if (moment == "in the first start") <= (not aims)]
        possible = [moment for moment in possible if (moment == "in a resume") <= bool(aims)]
        aims.append(min(draw.sample(possible, len(possible)), key=lambda moment: taken[moment] + aims.count(moment)))
        if aims[-1] == "after the end":
            break
    return aims


def table(rows: list[dict]) -> str:
    """Moments x file systems: how many cuts there were, and how the runs ended."""
    counts = Counter((row["file_system"], cut["moment"]) for row in rows for cut in row["cuts"])
    return outcomes(rows, "file_system", counts, MOMENTS, "power cut", "bit-equal, nothing lost")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the table of the last time")
    arguments = parser.parse_args()
    if not arguments.table:
        try:
            rows = []
            for row in runs(arguments.cuts, arguments.seed, progress=True):
                rows.append(row)
                RESULTS.write_text(json.dumps({"seed": arguments.seed, "rows": rows}, indent=1) + "\n")
                for text in row["different"]:
                    moments = ", ".join(cut["moment"] for cut in row["cuts"])
                    tqdm.write(f"{row['trial']}; {row['file_system']}; {moments}: {text}")
        except CannotMount as error:
            print(error, file=sys.stderr)
            return 2
    rows = json.loads(RESULTS.read_bytes())["rows"]
    print(table(rows))
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
