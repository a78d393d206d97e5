"""Import a configuration of EDM2's multi-GPU port: torchtitan_dit/commands/import_edm2_config.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_dit.cli import run_command

if __name__ == "__main__":
    run_command("import_edm2_config")
