"""Programs by the names that they have where this runs: scripts of the checkout, or words of the installed command."""

import sys
from pathlib import Path

_INSTALLED = Path(sys.executable).parent / "torchtitan-dit"  # by which a checkout's programs are called from other folders
_CHECKOUT = Path(__file__).resolve().parents[1]
# File of the checkout, without .py -> word after `torchtitan-dit`, where it is another.
_WORDS = {"autotune_batch_size": "autotune", "extract_latents": "extract", "optimization_analysis": "analyse"}


def program(name: str) -> str:
    """Name to call a program by: `scripts/sample.py`, or `torchtitan-dit sample` where the package is installed."""
    for script in (f"scripts/{name}.py", f"scripts/{name}.sh", f"{name}.py"):
        if (_CHECKOUT / script).is_file() and (Path(script).is_file() or not _INSTALLED.is_file()):
            return script
    return f"torchtitan-dit {_WORDS.get(name, name.replace('_', '-'))}"


def pasted(name: str) -> str:
    """Beginning of a command line that calls a program: `.venv/bin/python scripts/sample.py`, `scripts/train.sh`."""
    called = program(name)
    return f".venv/bin/python {called}" if called.endswith(".py") else called
