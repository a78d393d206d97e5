"""How a configuration section is declared, read, checked, shown and recorded."""

from torchtitan.settings.declare import OneOf, has_key, meets, setting

__all__ = ["OneOf", "has_key", "meets", "setting"]
