"""Sample grids of several runs side by side, by step."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.data.image_decoding import open_image
from torchtitan.files.regular import read_regular
from torchtitan.pictures.number_text import counted
from torchtitan.runs.compare.tables import Name
from torchtitan.runs.pages import png_source
from torchtitan.runs.record import RunRecord

MOST_GRIDS = 40  # steps of sample grids on the page, per run
MOST_OF_ONE_RUN = 12  # where all of them are in view
WIDEST_GRID = 800  # pixels; larger ones are made smaller


@dataclass(frozen=True)
class Samples:
    """Grids of chosen steps; the page shows the one of `first` at the start."""

    names: Sequence[Name]
    runs: Sequence[RunRecord]
    steps: Sequence[int]
    first: int
    note: str

    def grids(self, step: int) -> Iterator[tuple[Name, str, str]]:
        """Sources: each run's name and the source of its grid, or the reason why there is none."""
        for name, run in zip(self.names, self.runs, strict=True):
            try:
                yield (name, picture_source(run.samples[step]), "") if step in run.samples else (
                    name, "", f"no grid at step {step:,}",
                )  # fmt: skip
            except (OSError, SyntaxError, ValueError):
                yield name, "", f"{run.samples[step].name} cannot be read"


def samples_of(names: Sequence[Name], runs: Sequence[RunRecord]) -> Samples | None:
    steps = sorted({step for run in runs for step in run.samples})
    if not steps:
        return None
    shown, note = steps, f"Grids of {counted(len(steps), 'step')}"
    if len(steps) > (most := MOST_GRIDS if len(runs) > 1 else MOST_OF_ONE_RUN):
        shown = sorted({steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)})
        note = f"Grids of {len(shown)} steps, evenly chosen of {len(steps)}"
    first = max(shown, key=lambda step: (sum(step in run.samples for run in runs), step))
    return Samples(names, runs, shown, first, note)


def picture_source(path: Path) -> str:
    """Source of a picture, reduced to the width of a grid. Raises OSError, SyntaxError or ValueError: it cannot be read."""
    content = read_regular(path)
    with open_image(content) as picture:
        picture.load()
        if picture.width > WIDEST_GRID:
            height = round(picture.height * WIDEST_GRID / picture.width)
            smaller = io.BytesIO()
            picture.convert("RGB").resize((WIDEST_GRID, max(height, 1))).save(smaller, "PNG", optimize=True)
            content = smaller.getvalue()
    return png_source(content)
