"""docs/gpu.md, from benchmarks/results/gpu_day.json: what was measured on GPUs, and what was not."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.cuda_branches import CUDA_BRANCHES
from benchmarks.gpu_day.stages import BARS, CALLS
from benchmarks.gpu_day.visit import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu_day.json"
PAGE = ROOT / "docs" / "gpu.md"
CALL_NAMES = {1: "Does it run", 2: "Is it fast", 3: "What it costs"}
_MACHINE = "machine"

# Device -> stage -> row -> values; the machine's row of the same call is kept with every stage.
Measured = dict[str, dict[str, dict[str, dict[str, Any]]]]

HEAD = """# On a GPU

`benchmarks/gpu_day.sh` runs this program on a machine with a GPU in three calls of at most eight minutes, and this page is made
from what it wrote (`benchmarks/gpu_day.sh page FOLDER`). Rows say "not measured" until a machine has run them.

    benchmarks/gpu_day.sh prepare     # with a network: wheels that the machine lacks go to .gpu/
    benchmarks/gpu_day.sh 1           # on the machine: does it run; 2: is it fast; 3: what it costs
    DEVICE=cpu benchmarks/gpu_day.sh 1    # dry run without a GPU: tiny shapes, figures without meaning
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
    PAGE.write_text(page(load_results()))


def page(results: Measured) -> str:
    """Text of the page."""
    parts = [HEAD]
    for call, stages in CALLS.items():
        parts.append(f"## {CALL_NAMES[call]}\n\n| stage | what it measures | " + " | ".join([*results, "goal"]) + " |")
        parts[-1] += "\n|" + "---|" * (3 + len(results))
        for stage in stages:
            if stage.name != _MACHINE:
                found = [_outcome(results[device].get(stage.name)) for device in results] or []
                cells = [stage.name, stage.about, *found, _goal(stage.name) if results else _goal(stage.name) or "not measured"]
                parts[-1] += "\n| " + " | ".join(cells) + " |"
        parts[-1] += "\n"
    parts.extend(_tables(device, stages) for device, stages in results.items())
    parts.append(_branches())
    return "\n".join(parts)


def _outcome(rows: dict[str, dict[str, Any]] | None) -> str:
    if rows is None:
        return "not measured"
    failed = [name for name, values in rows.items() if "failed" in values]
    return f"failed: {', '.join(failed)}" if failed else "measured"


def _goal(stage: str) -> str:
    return "; ".join(f"{key.replace('_', ' ')} >= {value:g} ({device})" for device, (key, value) in BARS.get(stage, {}).items())


def _tables(device: str, stages: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [f"## {device}\n"]
    for stage in (stage for call in CALLS.values() for stage in call if stage.name in stages and stage.name != _MACHINE):
        machine, rows = stages[stage.name][_MACHINE], {k: v for k, v in stages[stage.name].items() if k != _MACHINE}
        columns = list(dict.fromkeys(key for values in rows.values() for key in values))
        lines.append(f"### {stage.name}\n\n{machine['date']}, torch {machine['torch']}, commit {machine['git_commit']}\n")
        lines.append("| | " + " | ".join(column.replace("_", " ") for column in columns) + " |\n|" + "---|" * (1 + len(columns)))
        for name, values in rows.items():
            lines.append("| " + " | ".join([name, *(_cell(values.get(column)) for column in columns)]) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def _branches() -> str:
    lines = [
        "## Code that only CUDA reaches\n", "| file | what it does | stage that runs it |", "|---|---|---|",
        *(f"| `{file}` | {what} | {stage} |" for file, (what, stage) in CUDA_BRANCHES.items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
