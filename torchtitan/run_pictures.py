"""Pictures in a run's folder: grids of samples with their page and animation, held-out images, the noise scale.

A failing disk loses a picture, never the run.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from torchtitan.config.job import JobConfig
from torchtitan.console import grids
from torchtitan.evaluation.config import OF_NO_PICTURE
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file
from torchtitan.files.optional import OptionalOutputs
from torchtitan.gns.config import GNS_FOLDER, PICTURE_FILE
from torchtitan.pictures.grids import save_animation
from torchtitan.runs.folder import RunFolder
from torchtitan.runs.previews import PAGE_FILE, save_previews, write_page
from torchtitan.training.metric_sinks import as_png


def manner_of(config: JobConfig) -> dict[str, Any]:
    """Settings that decide which samples of given prompts a run's checkpoint has, as JSON gives them back."""
    drawn = {key: value for key, value in asdict(config.sampling).items() if key not in OF_NO_PICTURE}
    decoder, seed = config.autoencoder, config.debug.seed
    drawn |= {"decoder": [decoder.name, Path(decoder.path).name], "dtype": config.training.mixed_precision_param, "seed": seed}
    return json.loads(json.dumps(drawn, default=str))


class RunPictures:
    """Pictures of a run; of the first rank alone."""

    def __init__(self, folder: RunFolder, config: JobConfig, outputs: OptionalOutputs) -> None:
        self._samples, self._name, self._outputs, self._manner = folder.samples, config.job.name, outputs, manner_of(config)
        self.held_out = folder.samples / "held-out.png"
        self.animation = folder.samples / "training.gif"
        self.noise_scale = folder.path / GNS_FOLDER / PICTURE_FILE

    def remove_unfinished(self) -> None:
        """Remove what a killed process has left half written."""
        for folder in (self._samples, self.noise_scale.parent):
            with self._outputs.attempt("unfinished pictures", folder):
                remove_unfinished(folder)

    def save_grid(self, step: int, picture: Image.Image) -> None:
        """Save the grid of samples of a step."""
        path = self._samples / f"step-{step:08d}.png"
        with self._outputs.attempt("the grid of samples", path):
            _write(path, picture)

    def save_previews(self, step: int, first: Sequence[Image.Image], row_names: Sequence[str], trigger: str) -> None:
        """Save the first sample of each row, and the page that shows their changes."""
        with self._outputs.attempt("the previews", self._samples / PAGE_FILE):
            save_previews(self._samples, step, first, row_names, self._manner)
            write_page(self._samples, self._name, row_names, trigger, self._manner)

    def preview_changes(self, row_names: Sequence[str], trigger: str) -> dict[str, float]:
        """Change of each prompt's sample since the start in percent, and the page of previews; empty if it cannot be written."""
        with self._outputs.attempt("the previews", self._samples / PAGE_FILE):
            return write_page(self._samples, self._name, row_names, trigger, self._manner)
        return {}

    def save_held_out(self, picture: Image.Image) -> bool:
        """Save the decoded held-out images; return whether they are saved."""
        with self._outputs.attempt("the picture of held-out images", self.held_out):
            _write(self.held_out, picture)
            return True
        return False

    def save_noise_scale(self, draw: Callable[[], Image.Image | None]) -> Image.Image | None:
        """Draw and save the picture of the gradient noise scale; return it if there is one and it is saved."""
        with self._outputs.attempt("the picture of the noise scale", self.noise_scale):
            picture = draw()
            if picture:
                _write(self.noise_scale, picture)
            return picture
        return None

    def animate(self, last_step: int) -> None:
        """Make an animation of the grids up to a step."""
        with self._outputs.attempt("the animation", self.animation, consequence="the grids are in the same folder"):
            if len(frames := grids(self._samples, last_step)) > 1:
                save_animation(frames, self.animation)


def _write(path: Path, picture: Image.Image) -> None:
    make_folder(path.parent)
    replace_file(path, as_png(picture))
