"""How a configuration section is declared, read, checked, shown and recorded."""

from torchtitan.settings.declare import has_key, meets, setting

__all__ = ["has_key", "meets", "setting"]
