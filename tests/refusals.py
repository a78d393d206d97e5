"""What a call that is refused says, for tests."""

from collections.abc import Callable
from typing import Any

import pytest


def one_line(error: type[Exception], function: Callable[..., Any], *arguments: Any) -> str:
    """Message of the exception of a call, which is one line."""
    with pytest.raises(error) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
