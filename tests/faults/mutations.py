"""Damaged files of every kind that the program reads: python -m tests.faults.mutations [--runs N] [--seed S]

A small run is made and cut off; then, N times, a file of it or beside it is damaged at random, and what reads it is
called as by a user who starts the command again, up to the point where training would begin. It must go on from the
same state, from the checkpoint before, or from another value that is a legal one, or be refused with exit code 2 and
plain lines: no exception, no time beyond 60 s, no memory beyond 500 MB, no write outside of the dump folder. Prints a
table of kinds and outcomes, and writes it to tests/faults/mutations.json.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from safetensors.torch import save_file
from tqdm import tqdm

from tests.faults.confinement import Output, TooLong, WriteWatch, bounded, peak_bytes
from tests.faults.damage import (
    Damage,
    damage_bytes,
    damage_json,
    damage_lines,
    damage_safetensors,
    damage_text,
    make_sums_fit,
)
from tests.unit.test_config_fuzz import VALID
from tests.unit.test_sweep_runner import SWEEP
from torchtitan.checkpoint.checkpointer import BRANCHED_FROM
from torchtitan.config.job import ConfigError, load_config
from torchtitan.experiments.autotune.record import RecordError, SearchRecord
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.experiments.grid import SweepError, read_sweep
from torchtitan.experiments.record import ResultTable, SweepFolder
from torchtitan.run import run as run_program
from torchtitan.runs.check import check_run
from torchtitan.runs.record import RunRecordError, read_run
from torchtitan.trainer import Trainer
from torchtitan_dit.studies.critical_batch import _hold_to_settings

RESULTS = Path(__file__).with_name("mutations.json")
SECONDS, MORE_MAPPED, MORE_RESIDENT = 60, 4 << 30, 500 << 20
SAME, BEFORE, OTHER, REFUSED = "means the same", "the checkpoint before", "another legal value", "refused"
OUTCOMES = (SAME, BEFORE, OTHER, REFUSED)

CONFIG = """
[model]
flavor = "debug"
num_layers = 1
dim = 16
num_heads = 2
mlp_hidden_dim = 16
[data]
name = "synthetic"
shape = [1, 8, 8]
num_classes = 3
[lr_scheduler]
warmup_steps = 1
[training]
steps = 6
local_batch_size = 2
[metrics]
enable_tensorboard = false
log_freq = 1
[checkpoint]
interval = 2
[sampling]
enable = false
[validation]
enable = false
"""


class Failed(AssertionError):
    """The program did what it must not."""


class Place:
    """A folder with a run that was cut off after step 4, and what a user may have beside it; restored at every turn."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._kept = folder, folder / "kept"
        self.outputs = folder / "outputs"
        (folder / "small.toml").write_text(CONFIG)
        self.start()
        shutil.rmtree(self.run / "checkpoint" / "step-00000006")
        summary = json.loads((self.run / "summary.json").read_bytes())
        (self.run / "summary.json").write_text(json.dumps(summary | {"status": "interrupted", "step": 4}))
        (self.run / "status.json").write_text(json.dumps({"status": "requeue", "exit_code": 143}))
        _write_records(self.outputs)
        shutil.copytree(self.outputs, self._kept)
        self.states = {step: self._state_at(step) for step in (2, 4)}

    @property
    def run(self) -> Path:
        return self.outputs / "run"

    @property
    def weights(self) -> Path:
        return self.folder / "weights.safetensors"

    def restore(self) -> None:
        shutil.rmtree(self.outputs)
        shutil.copytree(self._kept, self.outputs)

    def start(self, *more: str, seen: Callable[[Trainer], None] | None = None) -> int:
        """The program's exit code; `seen` is called in place of the training."""
        config = load_config(
            ["--job.config_file", str(self.folder / "small.toml"), "--job.dump_folder", str(self.outputs), "--job.name",
             "run", *more], world_size=1,
        )  # fmt: skip
        if seen is None:
            return run_program(config)

        def begin(trainer: Trainer, deadline: object) -> int:
            seen(trainer)
            return 0

        with patch("torchtitan.run._train", begin):
            return run_program(config)

    def _state_at(self, step: int) -> str:
        found = []

        def keep(trainer: Trainer) -> None:
            found.append(state_of(trainer))
            model = {name: parameter.detach() for name, parameter in trainer.state.parameters.items()}
            save_file(model, self.weights)

        assert self.start("--checkpoint.load_step", str(step), seen=keep) == 0
        self.restore()
        return found[0]


def _write_records(outputs: Path) -> None:
    (outputs / "grid.toml").write_text(SWEEP)
    sweep = SweepFolder(outputs / "grid")
    with sweep.held(read_sweep(outputs / "grid.toml")):
        for cell in ("a", "b"):
            sweep.add({"cell": cell, "repeat": 0, "status": "ok", "reason": "", "seconds": 1.5})
    record = SearchRecord(outputs, {"question": 1})
    record.batch_size = 8
    record.write()
    table = ResultTable(outputs / "results.csv", ["step", "seed", "loss"], ["step", "seed"])
    for seed in range(3):
        table.add({"step": 2, "seed": seed, "loss": 0.5})
    (outputs / "settings.json").write_text(json.dumps({"checkpoint": "run", "seeds": 2, "batch_sizes": [1, 2]}))


def state_of(trainer: Trainer) -> str:
    """Everything that training would go on from, as a digest."""
    # The command that a run was started by, and what the disk may not hold yet of its reports, are not trained from.
    state = {
        name: part
        for name, part in trainer.state.state_dict(trainer.reports.state_dict()).items()
        if name not in ("config", "reports", BRANCHED_FROM)
    }
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    for name, tensor in sorted(trainer.state.tensors().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- what reads the files


def started(place: Place, *more: str, untrusted: bool = False) -> str:
    """Start the run's command again; untrusted: nothing of a damaged checkpoint may be believed."""
    states: list[str] = []
    output = Output()
    with output.kept():
        code = place.start(*more, seen=lambda trainer: states.append(state_of(trainer)))
    if code == 2:
        return plain_lines(output.stderr)
    if code or output.stderr:
        raise Failed(f"exit code {code}: {output.stderr}")
    if not states:
        if "this run is finished" not in output.stdout:
            raise Failed(f"neither trained nor refused: {output.stdout}")
        return OTHER
    if states[0] == place.states[4]:
        return SAME
    if states[0] == place.states[2]:
        if not any("; skipped" in message for message in output.messages):
            raise Failed("a checkpoint was passed over without a word")
        return BEFORE
    if untrusted:
        raise Failed("a damaged checkpoint was believed")
    return OTHER


def run_folder(place: Place) -> str:
    """As `started`, and read by the tools."""
    for finding in check_run(place.run):
        plain_lines(finding.problem or "good")
    try:
        read_run(place.run)
    except RunRecordError as error:
        plain_lines(str(error))
    return started(place)


def new_run(place: Place) -> str:
    shutil.rmtree(place.run)
    return started(place, "--checkpoint.initial_weights", str(place.weights))


def configuration(place: Place) -> str:
    before = load_config(["--job.config_file", str(place.folder / "valid.toml")], 1)
    try:
        found = load_config(["--job.config_file", str(place.outputs / "valid.toml")], 1)
    except ConfigError as error:
        return plain_lines("\n".join(error.problems))
    found.job, before.job = before.job, before.job
    return SAME if found == before else OTHER


def record_reader(read: Callable[[Path], object], *errors: type[Exception]) -> Callable[[Place], str]:
    """Compare what is read of a damaged record with what was written."""

    def outcome(place: Place) -> str:
        try:
            return SAME if repr(read(place.outputs)) == repr(read(place._kept)) else OTHER
        except errors as error:
            return plain_lines(str(error))

    return outcome


def _search(outputs: Path) -> object:
    record = SearchRecord(outputs, {"question": 1})
    record.read()
    return record.probes, record.batch_size


def _settings(outputs: Path) -> None:
    asked = {"checkpoint": "run", "seeds": 2, "batch_sizes": [1, 2]}
    results = ResultsFolder(outputs, {"settings.json": b"{"})
    _hold_to_settings(SimpleNamespace(folder=outputs, results=results, settings=lambda: asked))


def _table(outputs: Path) -> object:
    return ResultTable(outputs / "results.csv", ["step", "seed", "loss"], ["step", "seed"])._rows


def plain_lines(text: str) -> str:
    lines = text.strip().splitlines()
    for line in lines:
        if not line.isprintable() or "Traceback" in line or len(line) > 6000:
            raise Failed(f"not a plain line: {line[:300]!r}")
    if not lines:
        raise Failed("refused without a word")
    return REFUSED


# ---------------------------------------------------------------------- kinds

CHECKPOINT = "run/checkpoint/step-00000004"
SHARD = f"{CHECKPOINT}/shard-00001.safetensors"
Read = Callable[[Place], str]


def _unbelieved(place: Place) -> str:
    return started(place, untrusted=True)


def _sums_fit(name: str) -> Read:
    def read(place: Place) -> str:
        make_sums_fit(place.outputs / CHECKPOINT, name)
        return started(place)

    return read


def _search_file(outputs: Path) -> str:
    return SearchRecord(outputs, {"question": 1}).path.name


KINDS: dict[str, tuple[str, Damage, Read]] = {
    "configuration file": ("valid.toml", damage_text, configuration),
    "file of initial weights": ("../weights.safetensors", damage_safetensors, new_run),
    "shard of a checkpoint": (SHARD, damage_safetensors, _unbelieved),
    "shard, checksums made to fit": (SHARD, damage_safetensors, _sums_fit(Path(SHARD).name)),
    "manifest.json": (f"{CHECKPOINT}/manifest.json", damage_json, _unbelieved),
    "state.json": (f"{CHECKPOINT}/state.json", damage_json, _unbelieved),
    "state.json, checksums made to fit": (f"{CHECKPOINT}/state.json", damage_json, _sums_fit("state.json")),
    "config.toml of a run": ("run/config.toml", damage_text, run_folder),
    "summary.json": ("run/summary.json", damage_json, run_folder),
    "metrics.jsonl": ("run/metrics.jsonl", damage_lines, run_folder),
    "status.json": ("run/status.json", damage_json, run_folder),
    "lock of a run": ("run/.lock", damage_bytes, run_folder),
    "sweep.jsonl": (
        "grid/sweep.jsonl", damage_lines, record_reader(lambda at: SweepFolder(at / "grid").rows(), SweepError)
    ),
    "sweep.toml": ("grid/sweep.toml", damage_text, record_reader(
        lambda at: SweepFolder(at / "grid").check(read_sweep(at / "grid.toml")), SweepError
    )),
    "file of a sweep": ("grid.toml", damage_text, record_reader(lambda at: read_sweep(at / "grid.toml").cells, SweepError)),
    "record of a batch-size search": (_search_file(Path()), damage_json, record_reader(_search, RecordError)),
    "settings.json of a study": ("settings.json", damage_json, record_reader(_settings, StudyError)),
    "results.csv of a study": ("results.csv", damage_bytes, record_reader(_table, StudyError)),
}  # fmt: skip


def mutate(place: Place, watch: WriteWatch, kind: str, seed: str) -> tuple[str, str]:
    """Damage one file and read it: the outcome, and what was wrong with it ("" if nothing)."""
    name, damage, read = KINDS[kind]
    place.restore()
    (place.outputs / "valid.toml").write_text(VALID)
    target, original = place.outputs / name, (place.outputs / name).read_bytes()
    target.write_bytes(damage(random.Random(seed), original))
    before = peak_bytes()
    try:
        with watch.inside(place.outputs), bounded(SECONDS, MORE_MAPPED):
            outcome = read(place)
    except TooLong:
        return "hung", f"no end after {SECONDS} s"
    except Failed as error:
        return "wrong", str(error)
    except BaseException:  # noqa: BLE001 (it is what a user would have seen)
        return "raised", traceback.format_exc()
    finally:
        if place.weights.parent / Path(name).name == place.weights:
            target.write_bytes(original)
    if watch.outside:
        return "wrote elsewhere", ", ".join(watch.outside)
    if peak_bytes() - before > MORE_RESIDENT:
        return "took memory", f"{(peak_bytes() - before) >> 20} MB more"
    return outcome, ""


def suite(runs: int, seed: int, progress: bool = False) -> tuple[list[dict], list[dict]]:
    """Rows of kind, number and outcomes; and what failed, with the seed of each."""
    counts: Counter[tuple[str, str]] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "place"
        folder.mkdir()
        (folder / "valid.toml").write_text(VALID)
        with Output().kept():
            place = Place(folder)
        watch, around = WriteWatch(), sorted(Path(name).iterdir())
        for number in tqdm(range(runs), disable=not progress, unit="file"):
            kind = list(KINDS)[number % len(KINDS)]
            outcome, problem = mutate(place, watch, kind, f"{seed} {number}")
            counts[kind, outcome] += 1
            if problem:
                failures.append({"number": number, "kind": kind, "outcome": outcome, "problem": problem})
        if sorted(Path(name).iterdir()) != around:
            failures.append({"kind": "all", "outcome": "wrote elsewhere", "problem": str(sorted(Path(name).iterdir()))})
    seen = list(dict.fromkeys([*OUTCOMES, *(outcome for _, outcome in counts)]))
    rows = [{"kind": kind, **{outcome: counts[kind, outcome] for outcome in seen}} for kind in KINDS]
    return rows, failures


def table(rows: list[dict]) -> str:
    outcomes = [key for key in rows[0] if key != "kind"]
    total = {"kind": "**all**", **{outcome: sum(row[outcome] for row in rows) for outcome in outcomes}}
    lines = [f"| damaged | files | {' | '.join(outcomes)} |", "|---" * (2 + len(outcomes)) + "|"]
    for row in [*rows, total]:
        counts = [row[outcome] for outcome in outcomes]
        lines.append(f"| {row['kind']} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows, failures = suite(arguments.runs, arguments.seed, progress=True)
    RESULTS.write_text(json.dumps({"runs": arguments.runs, "seed": arguments.seed, "rows": rows}, indent=1) + "\n")
    for failure in failures:
        print(failure.pop("problem").strip(), failure, "", sep="\n", file=sys.stderr)
    print(table(rows))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
