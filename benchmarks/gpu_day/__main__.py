"""One call of a visit to a GPU machine: python -m benchmarks.gpu_day CALL FOLDER [STAGE ...], or page [FOLDER].

Runs the stages of a call one after another, each in a process with a time limit: a stage that fails, hangs or kills its
process costs the others nothing. benchmarks/gpu_day.sh prepares the machine and starts it.
"""

import os
import sys
import time
from pathlib import Path

from benchmarks.gpu_day.page import merge, write_page
from benchmarks.gpu_day.stages import CALLS
from benchmarks.gpu_day.visit import PATIENCE, Results, in_child

# Seconds that a stage needs to mean something.
_LEAST = 8


def main() -> int:
    if sys.argv[1] == "page":
        for results in sys.argv[2:]:
            merge(Path(results))
        write_page()
        return 0
    call, folder, chosen = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + float(os.environ["LIMIT"]), 0
    rows = folder / f"rows-{call}.jsonl"
    rows.unlink(missing_ok=True)
    for stage in CALLS[call]:
        if chosen and stage.name not in chosen:
            continue
        room, began = min(stage.seconds * PATIENCE, end - time.monotonic() - _LEAST), time.monotonic()
        if room < _LEAST:
            outcome = "no time left"
        else:
            try:
                in_child(stage.run, Results(rows, stage.name), seconds=room, log=folder / f"log-{call}.txt")
                outcome = "done"
            except RuntimeError as error:
                outcome = f"FAILED: {error}"
        failed += outcome != "done"
        print(f"{stage.name:42} {time.monotonic() - began:5.0f} of {room:4.0f} s  {outcome}", flush=True)
        if outcome != "done":
            Results(rows, stage.name).row("stage", failed=outcome)
    print(rows.read_text() if rows.exists() else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
