"""Commands of scripts/, run in this process."""

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.launcher import ROOT


def load_tool(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / "torchtitan_dit" / "commands" / f"{name}.py")
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    return tool


def caller(tool: ModuleType, capsys) -> Callable[..., tuple[int, str, str]]:
    """Something that runs the tool with words of a command line; returns its exit code, output and errors."""

    def run(*words) -> tuple[int, str, str]:
        try:
            code = tool.main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            code = stop.code
        output, error = capsys.readouterr()
        assert "Traceback" not in output + error
        return code, output, error

    return run


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
