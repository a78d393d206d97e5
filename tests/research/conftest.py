"""What tests of several studies share."""

import pytest

from research import command_line
from tests.end_to_end.tools import caller


@pytest.fixture
def study(capsys):
    """`python -m research` in this process: words of a command line -> (exit code, output, errors)."""
    return caller(command_line, capsys)
