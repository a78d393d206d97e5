"""Cost of a configuration check and of a help page: python benchmarks/start_up.py [--rounds N]

Processor time, user and system, of `train.py --check-only` and `train.py --help` in separate processes, against that of
a bare `import torch`. Every round runs each once, and ratios are taken round by round. Writes
benchmarks/results/start_up.json.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import shared

TORCH = "import torch"
COMMANDS = {
    TORCH: ["-c", TORCH],
    "import torch, no shutdown": ["-c", f"{TORCH}, os; os._exit(0)"],  # how train.py ends
    "check": ["train.py", "--check-only", "--job.config_file", "train_configs/digits.toml"],
    "help": ["train.py", "--help"],
}


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for command in COMMANDS.values():  # so that every file is compiled and in the cache
        processor_seconds(command)
    times = [{name: processor_seconds(command) for name, command in COMMANDS.items()} for _ in range(rounds)]
    result: dict = {"rounds": rounds}
    for name in COMMANDS:
        result[name] = {"seconds": statistics.median(of_round[name] for of_round in times)}
        if name != TORCH:
            result[name] |= shared.figures("ratio", [of_round[name] / of_round[TORCH] for of_round in times])
    result |= shared.conditions(torch.device("cpu"))
    print(json.dumps(result, indent=1))
    shared.write_results("start_up", result)


def processor_seconds(command: list[str]) -> float:
    """User and system time of one Python process in the repository's folder, which must exit with code 0."""
    before = os.times()
    subprocess.run([sys.executable, *command], cwd=shared.ROOT, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return sum(getattr(after, kind) - getattr(before, kind) for kind in ("children_user", "children_system"))


if __name__ == "__main__":
    main()
