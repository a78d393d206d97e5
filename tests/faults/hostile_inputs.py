"""Inputs made by an enemy: python -m tests.faults.hostile_inputs [WORDS...] [--all]

Each is written into a folder of its own and met by the command that reads it, in a process that is watched: it must be
refused with exit code 2 and one plain line, or survived with what is bad named and replaced; without a traceback,
within 10 s (waits for a processor not counted), with at most 1 GiB more memory than the program's imports take,
starting no program, changing nothing outside of the run's folder, printing no control character. Prints a table of
kinds and verdicts, and with --all writes it to tests/faults/hostile_inputs.json.
"""

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

from tests.faults.hostile_case import CASES, Case, attempt
from tests.faults.hostile_process import AttackedPrograms

RESULTS = Path(__file__).with_name("hostile_inputs.json")
FAMILIES = ("images", "tars", "tables", "folders", "stores", "runs", "pages")
for _family in FAMILIES:
    importlib.import_module(f"tests.faults.hostile_{_family}")


EVERY = 7  # of these inputs, in the order of a kind, one is met by the ordinary tests
ALWAYS = (
    "image: PostScript named .png", "image: JPEG of 60,000 by 1", "file: pipe", "file: link to /dev/zero",
    "tar: size -512 in base 256", "tar: a name of 4 TB", "tar: 3,000 long names in a row",
    "tar: a name of escape sequences",
    "pickle: os.system, protocol 0", "pickle: a memo of 2^28 entries in 10 bytes", "pickle: ragged labels",
    "classes: /dev/zero", "store: without labels",
    "run: checkpoint is a link to a folder of the user's", "run: checkpoints among folders of the user's",
    "sweep: a fixed job.dump_folder", "analysis: names of markup", "configuration: 100,000 loader processes",
    "parquet: names that are no list", "parquet: negative labels", "folder: a home that is not there",
)  # fmt: skip


def ordinary() -> list[str]:
    """Names of the inputs that the ordinary tests meet."""
    number: Counter[str] = Counter()
    chosen = []
    for case in CASES.values():
        if not case.long:
            number[case.kind] += 1
            if case.name in ALWAYS or number[case.kind] % EVERY == 1:
                chosen.append(case.name)
    return chosen


def suite(cases: list[Case], show: bool = False) -> tuple[list[dict], list[str]]:
    """Meet the inputs; rows of the table, and what failed."""
    programs = AttackedPrograms()
    counts, failures = Counter(), []
    try:
        for case in cases:
            start = time.monotonic()
            try:
                verdict, outcome = attempt(case, programs)
                told = f"{outcome.seconds:.2f} s, {outcome.more_bytes >> 20} MiB"
            except (AssertionError, FileNotFoundError) as failure:  # what is not there was not written
                verdict, told = "failed", str(failure)
                failures.append(f"{case.name}: {failure}")
            counts[case.kind, verdict] += 1
            if show:
                print(f"{verdict:16} {case.name}: {time.monotonic() - start:.2f} s: {ascii_only(told)}", flush=True)
    finally:
        programs.close()
    verdicts = sorted({verdict for _, verdict in counts})
    kinds = dict.fromkeys(case.kind for case in cases)
    return [{"kind": kind, **{verdict: counts[kind, verdict] for verdict in verdicts}} for kind in kinds], failures


def ascii_only(text: str) -> str:
    """What a terminal shows as it is."""
    return "\n".join(line.encode("unicode_escape").decode() for line in text.splitlines())


def table(rows: list[dict]) -> str:
    verdicts = [key for key in rows[0] if key != "kind"]
    total = {"kind": "**all**", **{verdict: sum(row[verdict] for row in rows) for verdict in verdicts}}
    lines = [f"| hostile | inputs | {' | '.join(verdicts)} |", "|---" * (2 + len(verdicts)) + "|"]
    for row in [*rows, total]:
        counts = [row[verdict] for verdict in verdicts]
        lines.append(f"| {row['kind']} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only inputs whose kind or name holds one of them")
    parser.add_argument("--all", action="store_true", help="those that take seconds, too")
    parser.add_argument("--show", action="store_true", help="a line for each")
    arguments = parser.parse_args()
    chosen = [
        case for case in CASES.values()
        if (arguments.all or not case.long)
        and (not arguments.words or any(word in f"{case.kind} {case.name}" for word in arguments.words))
    ]
    rows, failures = suite(chosen, arguments.show)
    if arguments.all and not arguments.words:
        RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(*map(ascii_only, failures), sep="\n\n", file=sys.stderr)
    print(table(rows))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
