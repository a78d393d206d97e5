"""Show runs on one page: torchtitan_dit/commands/compare.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_dit.cli import run_command

if __name__ == "__main__":
    run_command("compare")
