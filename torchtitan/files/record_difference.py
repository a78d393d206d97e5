"""First difference of two records as JSON files hold them, for messages."""

from typing import Any

_MOST_SHOWN = 80  # characters of a value


def first_difference(one: Any, other: Any) -> tuple[str, str, str] | None:
    """First place where two records differ, as `origin.encoding.threads`, and its value in each; None if they are equal."""
    place: list[str] = []
    while isinstance(one, dict) and isinstance(other, dict) and one != other:
        key = next(key for key in {**one, **other} if one.get(key, ...) != other.get(key, ...))
        place.append(key)
        one, other = one.get(key), other.get(key)
    return (".".join(place), _shown(one), _shown(other)) if place or one != other else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
