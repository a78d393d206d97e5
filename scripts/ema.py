"""Choose the length of a weight average after training, from a run's snapshots : torchtitan_dit/commands/ema.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_dit.cli import run_command

if __name__ == "__main__":
    run_command("ema")
