"""Previews of a run: the first sample of each prompt at every interval, kept as pictures, and a page of prompts x steps.

    samples/previews/step-00000250-00.png ...  samples/previews.html  samples/previews.png

Every step draws a prompt from the same noise, so what differs between two steps is training. Step 0 is the network before it.
A resumed run may draw otherwise: pictures of the manner before are not shown beside those of the present one.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
        source: of the reduced picture, for HTML; None where the file is missing or damaged.
        link: of the whole picture, from the page's folder.
        change: see `pixel_change`, from step 0; None without both pictures.
    """

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
    samples: Path, step: int, pictures: Sequence[Image.Image], prompts: Sequence[str], manner: str = ""
) -> None:
    """Save the first sample of each row of a step's grid, with its prompt and how it was drawn in the file. Raises OSError."""
    make_folder(samples / FOLDER)
    for row, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        replace_file(preview_path(samples, step, row), as_png(picture, {_PROMPT: prompt, _MANNER: manner}))


def pixel_change(before: Image.Image, after: Image.Image) -> float:
    """Change between two pictures of one size: mean |difference| over pixels and channels, percent of the range 0..255."""
    a, b = (np.asarray(each.convert("RGB"), dtype=np.float64) for each in (before, after))
    return float(np.abs(a - b).mean() / 255 * 100)


def preview_rows(
    samples: Path, prompts: Sequence[str], trigger_word: str, manner: str = ""
) -> tuple[list[int], list[PromptRow], int]:
    """Read a run's previews: steps, evenly chosen of those that have pictures of these prompts, drawn in this manner; a row per
    prompt; and how many steps have only others.
    """
    (steps, others), rows = _shown_steps(samples, prompts, manner), []
    for row, prompt in enumerate(prompts):
        first = _read(preview_path(samples, 0, row), prompt) if steps[:1] == [0] else None
        previews = [_preview(samples, step, row, prompt, first) for step in steps]
        rows.append(PromptRow(prompt, not has_trigger(prompt, trigger_word), previews))
    return steps, rows, others


def write_page(samples: Path, run: str, prompts: Sequence[str], trigger_word: str, manner: str = "") -> dict[str, float]:
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
    replace_file(samples / PICTURE_FILE, as_png(_picture(samples, run, steps, rows)))
    return {row.prompt: round(row.change, 4) for row in rows if row.change is not None}


def _shown_steps(samples: Path, prompts: Sequence[str], manner: str) -> tuple[list[int], int]:
    try:
        names = [match for name in os.listdir(samples / FOLDER) if (match := _NAME.fullmatch(name))]
    except OSError:
        return [], 0
    rows: dict[int, list[int]] = {}
    for match in names:
        if int(match[2]) < len(prompts):
            rows.setdefault(int(match[1]), []).append(int(match[2]))
    found = sorted(
        step for step in rows if any(_is_of(preview_path(samples, step, row), prompts[row], manner) for row in rows[step])
    )
    others = len(rows) - len(found)
    if len(found) <= MOST_STEPS:
        return found, others
    return [found[round(place)] for place in np.linspace(0, len(found) - 1, MOST_STEPS)], others


def _preview(samples: Path, step: int, row: int, prompt: str, first: Image.Image | None) -> Preview:
    path = preview_path(samples, step, row)
    picture = _read(path, prompt)
    link = f"{FOLDER}/{path.name}"
    if picture is None:
        return Preview(None, link, None)
    comparable = step > 0 and first is not None and first.size == picture.size
    change = pixel_change(first, picture) if comparable and first is not None else None
    return Preview(png_source(as_png(_reduced(picture))), link, change)


def _picture(samples: Path, run: str, steps: list[int], rows: list[PromptRow]) -> Image.Image:
    """Picture of prompts x steps."""
    cells = [[_read(preview_path(samples, step, row), each.prompt) for step in steps] for row, each in enumerate(rows)]
    reduced = [[_reduced(cell) if cell else None for cell in line] for line in cells]
    size = next((cell.size for line in reduced for cell in line if cell), (SHOWN_SIDE, SHOWN_SIDE))
    grey = Image.new("RGB", size, (44, 48, 56))
    pixels = np.stack([np.asarray(cell if cell and cell.size == size else grey) for line in reduced for cell in line])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1  # [N, 3, H, W]
    captions = [
        f"step {step:,}" if preview.change is None else f"{step:,}: {preview.change:.1f}"
        for row in rows for step, preview in zip(steps, row.previews, strict=True)
    ]  # fmt: skip
    labels = [f"drift: {row.prompt}" if row.drifts else row.prompt for row in rows]
    title = f"{run}: prompts x steps, with the mean change of pixels from step 0 in %"
    return image_grid(images, len(rows), len(steps), labels, title, captions)


def _is_of(path: Path, prompt: str, manner: str) -> bool:
    """Check by its header whether a file is a picture of a prompt, drawn in a manner: all of a run's are asked at each grid."""
    try:
        with Image.open(path) as picture:
            return (picture.info.get(_PROMPT, prompt), picture.info.get(_MANNER, manner)) == (prompt, manner)
    except _UNREADABLE:
        return False


def _read(path: Path, prompt: str) -> Image.Image | None:
    """Picture of a file; None where it is missing or damaged, as after a disk that was full, or of another prompt."""
    try:
        picture = open_image(read_regular(path))
        return picture.convert("RGB") if picture.info.get(_PROMPT, prompt) == prompt else None
    except _UNREADABLE:
        return None


def _reduced(picture: Image.Image) -> Image.Image:
    small = picture.copy()
    small.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    return small
