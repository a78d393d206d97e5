"""Previews of a run: the first sample of each prompt at every interval, kept as pictures, and a page of prompts x steps.

    samples/previews/step-00000250-00.png ...  samples/previews.html  samples/previews.png

Every step draws a prompt from the same noise, so what differs between two steps is training. Step 0 is the network before it.
A resumed run may draw otherwise (another solver, guidance, decoder): pictures of the manner before are not shown beside
those of the present one. A manner is a table of settings, of which those that two have in common count.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchtitan.data.image_decoding import open_image
from torchtitan.data.trigger_words import has_trigger
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_regular
from torchtitan.pictures.grids import image_grid
from torchtitan.runs.pages import png_source, render_page
from torchtitan.training.metric_sinks import as_png

FOLDER, PAGE_FILE, PICTURE_FILE = "previews", "previews.html", "previews.png"
MOST_STEPS = 12  # columns of the page
SHOWN_SIDE = 256  # pixels of the longer side of a picture on the page; the file has all
_PROMPT, _MANNER = "prompt", "drawn"  # keys of texts in a picture's file: a resumed run may have others
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)
_NAME = re.compile(r"step-(\d{8})-(\d{2,4})\.png")


@dataclass(frozen=True)
class Preview:
    """Picture of a prompt after a step.

    Attributes:
        reduced: the picture made small; None where the file is missing, damaged, or of another prompt or manner.
        source: of that, for HTML.
        link: of the whole picture, from the page's folder.
        change: see `pixel_change`, from step 0; None without both pictures.
    """

    reduced: Image.Image | None
    source: str | None
    link: str
    change: float | None


@dataclass(frozen=True)
class PromptRow:
    """Row of the page.

    Attributes:
        drifts: whether the prompt lacks the trigger word that was trained on: its change is drift.
    """

    prompt: str
    drifts: bool
    previews: list[Preview]

    @property
    def change(self) -> float | None:
        """Change from step 0 to the last step."""
        return self.previews[-1].change


def preview_path(samples: Path, step: int, row: int) -> Path:
    return samples / FOLDER / f"step-{step:08d}-{row:02d}.png"


def save_previews(
    samples: Path, step: int, pictures: Sequence[Image.Image], prompts: Sequence[str], manner: Mapping[str, Any]
) -> None:
    """Save the first sample of each row of a step's grid, with its prompt and how it was drawn in the file. Raises OSError."""
    make_folder(samples / FOLDER)
    for row, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        replace_file(preview_path(samples, step, row), as_png(picture, {_PROMPT: prompt, _MANNER: json.dumps(manner)}))


def pixel_change(before: Image.Image, after: Image.Image) -> float:
    """Change between two pictures of one size: mean |difference| over pixels and channels, percent of the range 0..255."""
    a, b = (np.asarray(each.convert("RGB"), dtype=np.float64) for each in (before, after))
    return float(np.abs(a - b).mean() / 255 * 100)


def preview_rows(
    samples: Path, prompts: Sequence[str], trigger_word: str, manner: Mapping[str, Any]
) -> tuple[list[int], list[PromptRow], int]:
    """Read a run's previews: steps, evenly chosen of those that have pictures of these prompts, drawn in this manner; a row per
    prompt; and how many steps have only others.
    """
    written, rows = _written(samples), []
    # Of an earlier version, which did not write manners: as the first that has one.
    earliest = next((drawn for _, drawn in written.values() if drawn), manner)
    fitting = {
        (step, row) for (step, row), (prompt, drawn) in written.items()
        if row < len(prompts) and prompt in (None, prompts[row]) and _alike(drawn or earliest, manner)
    }  # fmt: skip
    found = sorted({step for step, _ in fitting})
    others = len({step for step, _ in written} - {*found})
    steps = found
    if len(found) > MOST_STEPS:
        steps = [found[round(place)] for place in np.linspace(0, len(found) - 1, MOST_STEPS)]
    for row, prompt in enumerate(prompts):
        pictures = {step: _read(preview_path(samples, step, row)) if (step, row) in fitting else None for step in steps}
        previews = [_preview(row, step, picture, pictures.get(0)) for step, picture in pictures.items()]
        rows.append(PromptRow(prompt, not has_trigger(prompt, trigger_word), previews))
    return steps, rows, others


def write_page(
    samples: Path, run: str, prompts: Sequence[str], trigger_word: str, manner: Mapping[str, Any]
) -> dict[str, float]:
    """Write page and picture of a run's previews.

    Args:
        trigger_word: that was trained on; "" where there is none.
        manner: in which pictures are drawn now.

    Returns:
        change of each prompt from step 0 to the last step, in percent; without step 0 nothing.

    Raises:
        OSError: they cannot be written.
    """
    steps, rows, others = preview_rows(samples, prompts, trigger_word, manner)
    if not steps:
        return {}
    page = render_page(
        "previews.html", title=f"Previews of {run}", steps=steps, rows=rows, trigger_word=trigger_word, others=others,
        drift=[row for row in rows if row.drifts and row.change is not None],
    )  # fmt: skip
    replace_file(samples / PAGE_FILE, page)
    replace_file(samples / PICTURE_FILE, as_png(_picture(run, steps, rows)))
    return {row.prompt: round(row.change, 4) for row in rows if row.change is not None}


def _written(samples: Path) -> dict[tuple[int, int], tuple[str | None, dict[str, Any] | None]]:
    """Prompt and manner of every picture by step and row, in this order, as far as its header has them and can be read."""
    found: dict[tuple[int, int], tuple[str | None, dict[str, Any] | None]] = {}
    with suppress(OSError):
        for match in filter(None, map(_NAME.fullmatch, sorted(os.listdir(samples / FOLDER)))):
            with suppress(*_UNREADABLE), Image.open(samples / FOLDER / match[0]) as picture:
                manner = json.loads(picture.info.get(_MANNER, "null"))
                found[int(match[1]), int(match[2])] = picture.info.get(_PROMPT), manner
    return found


def _alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return bool(one == other)
    return all(_alike(value, other[key]) for key, value in one.items() if key in other)


def _preview(row: int, step: int, picture: Image.Image | None, first: Image.Image | None) -> Preview:
    link = f"{FOLDER}/{preview_path(Path(), step, row).name}"
    if picture is None:
        return Preview(None, None, link, None)
    comparable = step > 0 and first is not None and first.size == picture.size
    change = pixel_change(first, picture) if comparable and first is not None else None
    small = picture.copy()
    small.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    return Preview(small, png_source(as_png(small)), link, change)


def _picture(run: str, steps: list[int], rows: list[PromptRow]) -> Image.Image:
    """Picture of prompts x steps."""
    reduced = [[preview.reduced for preview in row.previews] for row in rows]
    size = next((cell.size for line in reduced for cell in line if cell), (SHOWN_SIDE, SHOWN_SIDE))
    grey = Image.new("RGB", size, (44, 48, 56))
    pixels = np.stack([np.asarray(cell if cell and cell.size == size else grey) for line in reduced for cell in line])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1  # [N, 3, H, W]
    captions = [
        f"step {step:,}" if preview.change is None else f"{step:,}: {preview.change:.1f}"
        for row in rows for step, preview in zip(steps, row.previews, strict=True)
    ]  # fmt: skip
    labels = [f"drift: {row.prompt}" if row.drifts else row.prompt for row in rows]
    changes = ", with the mean change of pixels from step 0 in %" if any(row.change is not None for row in rows) else ""
    title = f"{run}: prompts x steps{changes}"
    return image_grid(images, len(rows), len(steps), labels, title, captions)


def _read(path: Path) -> Image.Image | None:
    """Picture of a file; None where it is damaged, as after a disk that was full."""
    try:
        return open_image(read_regular(path)).convert("RGB")
    except _UNREADABLE:
        return None
