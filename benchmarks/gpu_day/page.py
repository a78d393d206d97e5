"""Part of docs/speed.md on GPUs, from benchmarks/results/gpu_day.json: what was measured, and what was not."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.cuda_branches import CUDA_BRANCHES
from benchmarks.gpu_day.stages import BARS, CALLS
from benchmarks.gpu_day.visit import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu_day.json"
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- benchmarks/gpu_day.sh page -->\n", "<!-- end -->\n"  # around the part
CALL_NAMES = {1: "does it run", 2: "is it fast", 3: "what it costs"}
_MACHINE = "machine"
_SUMMED = ("features", "tests", "kernels")  # of which the page has counts, and the file of results the rows

# Device -> stage -> row -> values; the machine's row of the same call is kept with every stage.
Measured = dict[str, dict[str, dict[str, dict[str, Any]]]]

HEAD = """## On a GPU

`benchmarks/gpu_day.sh` runs this program on a machine with a GPU in three calls of at most eight minutes; results are in
`benchmarks/results/gpu_day.json`.

    benchmarks/gpu_day.sh prepare        # with a network: wheels that the machine lacks go to .gpu/
    benchmarks/gpu_day.sh 1              # on the machine: does it run; 2: is it fast; 3: what it costs
    benchmarks/gpu_day.sh page FOLDER    # writes this part from the results in FOLDER

"""

BRANCHES = """
### Code that CUDA alone reaches

| file | on CUDA | run by |
|---|---|---|
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
    branches = "".join(f"| `{file}` | {what} | {stage} |\n" for file, (what, stage) in CUDA_BRANCHES.items())
    tables = "".join(f"\n{_tables(device, stages)}" for device, stages in results.items())
    return HEAD + "".join(lines) + tables + BRANCHES + branches


def _goal(stage: str) -> str:
    goals = [f"{key.replace('_', ' ')} >= {value:g} on {device}" for device, (key, value) in BARS.get(stage, {}).items()]
    return f" (goal: {', '.join(goals)})" if goals else ""


def _failed(stage: str, results: Measured) -> str:
    """Rows of a stage that failed, by device."""
    rows = {device: [name for name, row in found.get(stage, {}).items() if "failed" in row] for device, found in results.items()}
    failed = [f"{', '.join(names)} on {device}" for device, names in rows.items() if names]
    return f" (failed: {'; '.join(failed)})" if failed else ""


def _tables(device: str, stages: dict[str, dict[str, dict[str, Any]]]) -> str:
    """One table for what is said in the same words: the arms of train steps are rows of one."""
    groups: dict[tuple[str, str, str], tuple[list[str], dict[str, dict[str, Any]]]] = {}
    for stage in (stage for call in CALLS.values() for stage in call if stage.name in stages and stage.name != _MACHINE):
        machine = stages[stage.name][_MACHINE]
        names, rows = groups.setdefault((stage.about, machine["date"], machine["torch"]), ([], {}))
        names.append(stage.name)
        rows |= {name: values for name, values in stages[stage.name].items() if name != _MACHINE}
    lines = [f"### {device}\n"]
    for (about, date, torch), (names, rows) in groups.items():
        keys = dict.fromkeys(key for values in rows.values() for key in values)
        columns = [column for column in keys if any(values.get(column) not in (None, 0) for values in rows.values())]
        title = names[0] if len(names) == 1 else "train steps"
        lines.append(f"**{title}**: {about} {date}, torch {torch}\n")
        if title in _SUMMED:
            failed = [f"{name}: {values['failed']}" for name, values in rows.items() if "failed" in values]
            lines.append(f"{len(rows) - len(failed)} of {len(rows)} rows; {'; '.join(failed) or 'none failed'}.\n")
            continue
        lines.append("| | " + " | ".join(column.replace("_", " ") for column in columns) + " |\n|" + "---|" * (1 + len(columns)))
        for name, values in rows.items():
            lines.append("| " + " | ".join([name, *(_cell(values.get(column)) for column in columns)]) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
