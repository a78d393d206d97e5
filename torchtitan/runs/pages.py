"""HTML pages from the templates in this folder: every text is escaped."""

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from torchtitan.pictures.colours import COLOURS


def render_page(template: str, **values: Any) -> str:
    """Render a self-contained page.

    Args:
        values: its variables; texts that are not Markup are escaped.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(colours=COLOURS, **values) + "\n"


def png_source(content: bytes) -> str:
    """Encode a PNG as the source of an image."""
    return "data:image/png;base64," + base64.b64encode(content).decode()
