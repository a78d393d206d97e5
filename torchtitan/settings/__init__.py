"""Settings: how a configuration section is declared, read, checked, printed and recorded."""

from torchtitan.settings.declare import (
    Choice,
    OneOf,
    choice,
    condition_met,
    has_key,
    key_types,
    only_enabled,
    section_of,
    setting,
)
from torchtitan.settings.registry import Registry

__all__ = [
    "Choice", "OneOf", "Registry", "choice", "condition_met", "has_key", "key_types", "only_enabled", "section_of", "setting",
]  # fmt: skip
