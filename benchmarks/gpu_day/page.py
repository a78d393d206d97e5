"""Part of docs/speed.md on GPUs, from benchmarks/results/gpu_day.json: what was measured, and what was not."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.stages import BARS, CALLS
from benchmarks.gpu_day.visit import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu_day.json"
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- benchmarks/gpu_day.sh page -->\n", "<!-- end -->\n"  # around the part
CALL_NAMES = {1: "does it run", 2: "is it fast", 3: "what it costs"}
_MACHINE = "machine"
_COLUMNS = {
    "images": "images a step", "images_per_s": "images/s", "mfu_percent": "MFU, %", "memory/max_reserved(GiB)": "memory, GiB",
    "estimated_GiB": "estimated, GiB",
}  # fmt: skip

# Device -> stage -> row -> values; the machine's row of the same call is kept with every stage.
Measured = dict[str, dict[str, dict[str, dict[str, Any]]]]

HEAD = """## On a GPU

`benchmarks/gpu_day.sh` runs this program on a machine with a GPU in three calls of at most eight minutes. All results are in
`benchmarks/results/gpu_day.json`; `benchmarks/gpu_day/cuda_branches.py` lists the code that only CUDA reaches, with the
stage that runs it.

    benchmarks/gpu_day.sh prepare        # with a network: wheels that the machine lacks go to .gpu/
    benchmarks/gpu_day.sh 1              # on the machine: does it run; 2: is it fast; 3: what it costs
    benchmarks/gpu_day.sh page FOLDER    # writes this part from the results in FOLDER

"""


def merge(folder: Path) -> None:
    """Take the rows of a visit into the results; what an earlier visit to such a device measured is replaced by stage."""
    results = load_results()
    for path in sorted(folder.glob("rows-*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        machine = next(row for row in rows if row["row"] == _MACHINE)
        stages: dict[str, dict[str, dict[str, Any]]] = {}
        for row in rows:
            values = {key: value for key, value in row.items() if key not in ("stage", "row")}
            stages.setdefault(row["stage"], {_MACHINE: machine})[row["row"]] = values
        results.setdefault(machine["device"], {}).update(stages)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def load_results() -> Measured:
    """Results so far."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_page() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + part(load_results()) + END + rest.partition(END)[2])


def part(results: Measured) -> str:
    """Text between the marks."""
    lines = []
    for call, stages in CALLS.items():
        names = [stage.name + _goal(stage.name) + _failed(stage.name, results) for stage in stages if stage.name != _MACHINE]
        lines.append(f"- Call {call}, {CALL_NAMES[call]}: {'; '.join(names)}.\n")
    measured = {name for stages in results.values() for name in stages}
    missing = [stage.name for stages in CALLS.values() for stage in stages if stage.name not in {*measured, _MACHINE}]
    if not results:
        lines.append("\nNone of these has been measured on a GPU yet.\n")
    elif missing:
        lines.append(f"\nNot measured yet: {'; '.join(missing)}.\n")
    return HEAD + "".join(lines) + "".join(f"\n{_speeds(device, stages)}" for device, stages in results.items())


def _goal(stage: str) -> str:
    goals = [f"{key.replace('_', ' ')} >= {value:g} on {device}" for device, (key, value) in BARS.get(stage, {}).items()]
    return f" (goal: {', '.join(goals)})" if goals else ""


def _failed(stage: str, results: Measured) -> str:
    """Rows of a stage that failed, by device."""
    rows = {device: [name for name, row in found.get(stage, {}).items() if "failed" in row] for device, found in results.items()}
    failed = [f"{', '.join(names)} on {device}" for device, names in rows.items() if names]
    return f" (failed: {'; '.join(failed)})" if failed else ""


def _speeds(device: str, stages: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Table of all rows that have a speed."""
    names = [stage.name for call in CALLS.values() for stage in call if stage.name in stages and stage.name != _MACHINE]
    visits = sorted({f"{machine['date']}, torch {machine['torch']}" for name in names for machine in [stages[name][_MACHINE]]})
    head = f"| | {' | '.join(_COLUMNS.values())} |\n|{'---|' * (1 + len(_COLUMNS))}"
    lines = [f"### {device}\n", f"{'; '.join(visits)}\n", head]
    for name in names:
        for row, values in stages[name].items():
            if "images_per_s" in values:
                title = row if row == name else f"{name}: {row}"
                lines.append("| " + " | ".join([title, *(_cell(values.get(column)) for column in _COLUMNS)]) + " |")
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
