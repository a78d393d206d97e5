"""Disks and folders that fail under a run which draws and measures all it can.

    python -m tests.faults.disk_faults [NAME ...]

A run that would go on for ever meets a fault, and later is without it; then it is asked to end, and started again. Or
the fault lasts to the last step. Training must go on, at no moment may the last good checkpoint be gone, no point may
be missing, and what went wrong must have been said. Prints a table of faults and outcomes for docs/reliability.md; with
names, only of the faults whose names have one in them.
"""

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.end_to_end.runs import write_config
from tests.faults.cut_disk import CannotMount, CutDisk, cut_disks
from tests.faults.failing_disk import FAILING_DISK, KINDS
from tests.faults.forked import ForkedRun
from torchtitan.checkpoint.checkpointer import checkpoint_path, checkpoint_steps, newest_good
from torchtitan.checkpoint.manifest import MANIFEST
from torchtitan.runs.check import check_run

INTERVAL = 5
LAST = 30  # step, of a run that ends by itself
ALL_IT_CAN = (
    "--checkpoint.interval", str(INTERVAL), "--metrics.log_freq", "1", "--metrics.enable_tensorboard", "true",
    "--sampling.interval", "10", "--sampling.images_per_class", "1", "--gns.enable", "true", "--gns.num_bins", "4",
    "--gns.log_interval", "5", "--gns.picture_interval", "20",
)  # fmt: skip
INTERRUPTED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Fault:
    """What happens to a run's disk or folder.

    Attributes:
        happens: a context in which it is so, of the run and of the disk that it lies on.
        words: what the output must name, if anything.
        kind: of `failing_disk.KINDS`, where that makes the fault.
        fails_saves: whether no checkpoint can be saved while it is so.
        takes: whether it takes good checkpoints, or points, by itself.
        repairable: whether the run can go on as before when it is over.
    """

    happens: Callable[[ForkedRun, CutDisk], AbstractContextManager[None]]
    words: str = ""
    kind: str = ""
    fails_saves: bool = True
    takes: tuple[str, ...] = ()
    repairable: bool = True


# ---------------------------------------------------------------------- faults


@contextmanager
def _switched_on(run: ForkedRun, disk: CutDisk) -> Iterator[None]:
    switch = _switch(disk)
    switch.touch()
    yield
    switch.unlink()


def _switch(disk: CutDisk) -> Path:
    return disk.path.with_name("switch")  # beside the disk, which may be full or gone


@contextmanager
def _full(run: ForkedRun, disk: CutDisk) -> Iterator[None]:
    filler = disk.path / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    yield
    filler.unlink()


@contextmanager
def _read_only(run: ForkedRun, disk: CutDisk) -> Iterator[None]:
    subprocess.run(["mount", "--bind", run.folder, run.folder], check=True)
    while subprocess.run(["mount", "-o", "remount,bind,ro", run.folder], capture_output=True).returncode:
        time.sleep(0.01)
    yield
    subprocess.run(["umount", "-l", run.folder], check=True)


@contextmanager
def _aborted(run: ForkedRun, disk: CutDisk) -> Iterator[None]:
    """The file system finds an error in itself, and allows reading alone from then on, also of files that are open."""
    subprocess.run(["mount", "-o", "remount,abort", disk.path], check=False, capture_output=True)
    yield


@contextmanager
def _no_blocks(run: ForkedRun, disk: CutDisk) -> Iterator[None]:
    """The device below the file system takes no block that it has not had before, as a thin disk that is full."""
    with disk.no_growth():
        yield


def _removed(*names: str) -> Callable:
    """Folders of the run, or all of it, are gone."""

    @contextmanager
    def happens(run: ForkedRun, disk: CutDisk) -> Iterator[None]:
        for name in names:
            _remove(run.folder / name)
        yield

    return happens


def _replaced(*names: str) -> Callable:
    """Files stand in the place of folders of the run, or of all of it."""

    @contextmanager
    def happens(run: ForkedRun, disk: CutDisk) -> Iterator[None]:
        for name in names:
            while not (run.folder / name).is_file():  # the run may make it again in between
                _remove(run.folder / name)
                with suppress(OSError):
                    (run.folder / name).touch()
        yield
        for name in names:
            (run.folder / name).unlink()

    return happens


def _remove(folder: Path) -> None:
    while folder.exists():  # the run writes into it all the while
        with suppress(OSError):
            shutil.rmtree(folder)


def _manifests_changed(newest_alone: bool) -> Callable:
    """A bit is another in manifests that were good."""

    @contextmanager
    def happens(run: ForkedRun, disk: CutDisk) -> Iterator[None]:
        folder = run.folder / "checkpoint"
        for step in checkpoint_steps(folder)[: 1 if newest_alone else None]:
            with suppress(FileNotFoundError), open(checkpoint_path(folder, step) / MANIFEST, "r+b") as file:
                file.seek(40)
                byte = file.read(1)[0]
                file.seek(40)
                file.write(bytes([byte ^ 4]))
        yield

    return happens


def _kind(kind: str, words: str, fails_saves: bool = True) -> Fault:
    return Fault(_switched_on, words, kind=kind, fails_saves=fails_saves)


_IO, _UNTRUSTED = "Input/output error", "not to be trusted"
FAULTS = {
    "disk full": Fault(_full, "No space left on device"),
    "run's folder read-only": Fault(_read_only, "Read-only file system"),
    "file system in error, read-only": Fault(_aborted, "Read-only file system", repairable=False),
    "device takes no more blocks": Fault(_no_blocks, "cannot be written", repairable=False),
    **{kind: _kind(kind, _IO) for kind in KINDS if kind.startswith("EIO") and kind != "EIO in read-back"},
    # What cannot be read back says that it was written to something that is not to be trusted.
    "EIO in read-back": _kind("EIO in read-back", _UNTRUSTED),
    "half writes that seem whole": _kind("half writes that seem whole", _UNTRUSTED),
    "a bit flipped in each shard": _kind("a bit flipped in each shard", _UNTRUSTED),
    "a bit flipped in each manifest": _kind("a bit flipped in each manifest", MANIFEST),
    "clock back three days": _kind("clock back three days", "", fails_saves=False),
    "a bit flipped in the newest manifest between saves": Fault(_manifests_changed(True), fails_saves=False),
    "a bit flipped in every manifest between saves": Fault(
        _manifests_changed(False), fails_saves=False, takes=("checkpoints",)
    ),
    "checkpoint folder removed": Fault(_removed("checkpoint"), fails_saves=False, takes=("checkpoints",)),
    "checkpoint folder a file": Fault(_replaced("checkpoint"), "checkpoint", takes=("checkpoints",)),
    "folders of pictures, noise and TensorBoard files": Fault(
        _replaced("samples", "gns", "tb"), "samples", fails_saves=False
    ),
    "run's folder removed": Fault(_removed(""), fails_saves=False, takes=("checkpoints", "points")),
    "run's folder a file": Fault(_replaced(""), "checkpoint", takes=("checkpoints", "points")),
}


# ---------------------------------------------------------------------- runs


def start(disk: CutDisk, fault: Fault, steps: int) -> ForkedRun:
    """Start the run, or resume it."""
    config = disk.path / "small.toml"
    if not config.exists():
        write_config(disk.path)
    request = f"{fault.kind}|{_switch(disk)}|{disk.path / 'outputs'}" if fault.kind else None
    with patch.dict("os.environ", {FAILING_DISK: request} if request else {}):
        return ForkedRun(config, "run", *ALL_IT_CAN, "--training.steps", str(steps))


def step_of(run: ForkedRun) -> int:
    """Last step that the output names."""
    found = re.findall(r" step +(\d+)/", run.said())
    return int(found[-1]) if found else 0


def alive(run: ForkedRun) -> bool:
    return run.processes[0].poll() is None


def wait_until(run: ForkedRun, happened: Callable[[], bool], seconds: float = 120) -> bool:
    """Whether it happened while the run went on."""
    deadline = time.monotonic() + seconds
    while not happened():
        if not alive(run) or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def saved(run: ForkedRun) -> int:
    return max(checkpoint_steps(run.folder / "checkpoint"), default=0)


class GoodCheckpoints:
    """Looks all the while whether there is a good checkpoint.

    Attributes:
        gone: whether there was none at some moment.
    """

    def __init__(self, folder: Path) -> None:
        self.gone = False
        self._folder, self._over = folder, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "GoodCheckpoints":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            # A second and a third look: one that is deleted while it is read is not what is meant.
            self.gone |= all(self._none() for _ in range(3))

    def _none(self) -> bool:
        try:
            return newest_good(self._folder)[0] is None
        except OSError:
            return True


# ---------------------------------------------------------------------- outcomes


def passing(fault: Fault, disk: CutDisk) -> list[str]:
    """What is not as it should be with a run that meets a fault and goes on after it."""
    wrong: list[str] = []
    run = start(disk, fault, steps=100_000)
    assert wait_until(run, lambda: saved(run) >= 2 * INTERVAL), run.said()
    with GoodCheckpoints(run.folder / "checkpoint") as good, fault.happens(run, disk):
        before = step_of(run)
        if not wait_until(run, lambda: step_of(run) >= before + 3 * INTERVAL):
            return [_ended(run)]
        if fault.fails_saves and fault.repairable:
            wait_until(run, lambda: "the next interval tries again" in run.said(), seconds=20)
    if good.gone and "checkpoints" not in fault.takes:
        wrong.append("no good checkpoint for a time")
    if fault.repairable:
        before = saved(run)
        if not wait_until(run, lambda: saved(run) > before, seconds=30):
            wrong.append(f"saves nothing any more: {_ended(run)}")
    run.processes[0].send_signal(signal.SIGTERM)
    codes, outputs = run.wait()
    wrong += _said_wrong(fault, outputs[0])
    if not fault.repairable:
        return wrong + ([f"exit code {codes[0]}, saved or not"] if codes != [1] else [])
    if codes != [INTERRUPTED]:
        return [*wrong, f"exit code {codes[0]} after SIGTERM: {_last_line(outputs[0])}"]
    wrong += _folder_wrong(run, fault)
    return wrong + _resume_wrong(disk, fault)


def lasting(fault: Fault, disk: CutDisk) -> list[str]:
    """What is not as it should be with a run that meets a fault which lasts to the last step."""
    run = start(disk, fault, steps=LAST)
    assert wait_until(run, lambda: saved(run) >= 2 * INTERVAL), run.said()
    with GoodCheckpoints(run.folder / "checkpoint") as good, fault.happens(run, disk):
        codes, outputs = run.wait()
    wrong = _said_wrong(fault, outputs[0])
    if good.gone and "checkpoints" not in fault.takes:
        wrong.append("no good checkpoint for a time")
    if codes != [1 if fault.fails_saves else 0]:
        wrong.append(f"exit code {codes[0]}: {_last_line(outputs[0])}")
    if not fault.repairable:
        return wrong
    again = start(disk, fault, steps=LAST)
    codes, outputs = again.wait()
    if codes != [0] or "Traceback" in outputs[0]:
        return [*wrong, f"next start: exit code {codes[0]}: {_last_line(outputs[0])}"]
    steps = {point["step"] for point in again.points()}
    if missing := [step for step in range(1, LAST + 1) if step not in steps]:
        wrong += [f"points missing in the end: {missing}"] if "points" not in fault.takes else []
    if newest_good(again.folder / "checkpoint")[0] != LAST:
        wrong.append("the last checkpoint is none")
    return wrong


def _said_wrong(fault: Fault, said: str) -> list[str]:
    wrong = [f"a traceback: {_raised(said)}"] if "Traceback" in said else []
    lines = [line for line in said.splitlines() if " step " not in line or "cannot" in line]
    if fault.words and not any(fault.words in line for line in lines):
        wrong.append(f"nothing said of it ({fault.words})")
    return wrong


def _folder_wrong(run: ForkedRun, fault: Fault) -> list[str]:
    wrong, summary = [], run.summary()
    if summary["status"] != "interrupted":
        wrong.append(f"summary: {summary['status']}")
    if fault.fails_saves and not summary.get("checkpoint_failures"):
        wrong.append("summary counts no failed save")
    if "points" not in fault.takes:
        steps = {point["step"] for point in run.points()}
        missing = [step for step in range(1, summary["step"] + 1) if step not in steps]
        wrong += [f"points missing: {missing}"] if missing else []
    findings = [finding for finding in check_run(run.folder) if finding.problem]
    if "points" in fault.takes:  # and the record of the configuration
        findings = [finding for finding in findings if finding.path.name != "config.toml"]
    return wrong + [f"{finding.path.name}: {finding.problem}" for finding in findings]


def _resume_wrong(disk: CutDisk, fault: Fault) -> list[str]:
    run = start(disk, fault, steps=100_000)
    goes_on = wait_until(run, lambda: step_of(run) > 0)
    resumed = "resumed after step" in run.said()
    run.processes[0].send_signal(signal.SIGTERM)
    codes, outputs = run.wait()
    if not goes_on or not resumed or codes != [INTERRUPTED]:
        return [f"next start: exit code {codes[0]}: {_last_line(outputs[0])}"]
    return []


def _ended(run: ForkedRun) -> str:
    if alive(run):
        said = f"no step after {step_of(run)}"
        run.send(signal.SIGKILL)
        return said
    codes, outputs = run.wait()
    return f"training ended with exit code {codes[0]}: {_last_line(outputs[0])}"


def _raised(said: str) -> str:
    """Where the first traceback ends, and with what."""
    lines = said[said.index("Traceback") :].splitlines()[1:]
    end = next((number for number, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
    return f"{lines[max(end - 2, 0)].strip()}: {lines[end]}"


def _last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "nothing said"


WAYS = {"for a time": passing, "to the end": lasting}


def outcome(name: str, way: str) -> list[str]:
    """What is not as it should be with a fault for a time, or to the end of a run. Raises CannotMount."""
    with cut_disks() as make:
        return WAYS[way](FAULTS[name], make("ext4"))


def main() -> int:
    wanted = [name for name in FAULTS if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    print(f"| fault | {' | '.join(WAYS)} |\n|---|---|---|", flush=True)
    failed = False
    for name in wanted:
        try:
            outcomes = ["; ".join(outcome(name, way)) for way in WAYS]
        except CannotMount as error:
            print(error, file=sys.stderr)
            return 2
        failed |= any(outcomes)
        print(f"| {name} | {' | '.join(text or 'as it should be' for text in outcomes)} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
