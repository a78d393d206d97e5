"""How a configuration section is declared, read, checked, shown and recorded."""

from torchtitan.settings.declare import Choice, OneOf, choice, chosen, has_key, meets, only_with, section_of, setting

__all__ = ["Choice", "OneOf", "choice", "chosen", "has_key", "meets", "only_with", "section_of", "setting"]
