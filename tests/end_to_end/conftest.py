"""What tests of several commands share."""

import pytest

from tests.end_to_end.tools import caller, load_tool


@pytest.fixture
def study(capsys):
    """scripts/study.py in this process: words of a command line -> (exit code, output, errors)."""
    return caller(load_tool("study"), capsys)
