"""Loss curves as files: curve.csv for readers, errors.safetensors with the errors of every image."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from research.result_table import as_text
from research.timestep_errors import TimestepNodes, in_parametrisation
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.paths import has_indices
from torchtitan.experiments.folder import StudyError
from torchtitan.files.durable import replacing
from torchtitan.files.regular import check_regular

COLUMNS = (
    "weights", "step", "index", "t", "log_sigma", "training_density", "images", "error", "stderr", "noise_error",
    "noise_stderr", "optimum",
)  # fmt: skip
ERRORS = "errors.safetensors"
_LARGEST_TABLE = 1 << 28  # bytes


@dataclass(frozen=True)
class LossCurve:
    """Loss curve of one set of weights by timestep; every tensor float64 [N], by rising noise.

    Attributes:
        weights: "none" for the trained weights, or an EMA track.
        step: training steps of the checkpoint.
        index: the DDPM's index: whole numbers on a discrete path, real ones on a continuous one, else None.
        t, log_sigma: the timestep.
        training_density: density of the training timesteps, per unit of ln sigma.
        images: number of images behind the mean errors.
        error, stderr: mean squared error of the run's prediction, and its standard error over images (nan for one).
        noise_error, noise_stderr: those of the noise that follows from the same estimate of the image.
        optimum: the smallest possible error of the run's prediction; None where it is not known.
    """

    weights: str
    step: int
    index: Tensor | None
    t: Tensor
    log_sigma: Tensor
    training_density: Tensor
    images: int
    error: Tensor
    stderr: Tensor
    noise_error: Tensor
    noise_stderr: Tensor
    optimum: Tensor | None = None

    @property
    def discrete(self) -> bool:
        """True if its timesteps are integer indices."""
        return self.index is not None and bool((self.index == self.index.round()).all())

    @property
    def name(self) -> str:
        """Name of the curve's weights, in words."""
        return f"step {self.step}, {'trained weights' if self.weights == 'none' else f'EMA ({self.weights})'}"

    @property
    def noise_factor(self) -> Tensor:
        """Noise factor: converts an error of the prediction to one of the noise at each timestep; 0 where there is no
        error.
        """
        return torch.where(self.error > 0, self.noise_error / self.error, 0.0)


def curve_of(
    errors: Tensor, objective: Objective, nodes: TimestepNodes, weights: str, step: int,
    optimal_noise: Tensor | None = None,
) -> LossCurve:  # fmt: skip
    """Loss curve from a model's errors.

    Args:
        errors: squared errors of the objective's prediction, of every image at every node, [K, N].
        objective: of the errors.
        nodes: N timesteps.
        weights: "none" or an EMA track.
        step: of the checkpoint.
        optimal_noise: smallest possible error of the noise [N], where known.
    """
    errors = errors.to(torch.float64)
    error, stderr = errors.mean(0), errors.std(0) / math.sqrt(len(errors))
    noise = in_parametrisation(torch.ones_like(error), objective, nodes, "noise")
    index = nodes.index
    if index is None and has_indices(objective.path):
        index = objective.path.log_sigma_to_index(nodes.log_sigma)
    return LossCurve(
        weights, step, None if index is None else index.to(torch.float64), nodes.t, nodes.log_sigma,
        objective.timestep_sampler.density.log_sigma_density(nodes.log_sigma), len(errors), error, stderr,
        error * noise, stderr * noise, None if optimal_noise is None else optimal_noise / noise,
    )  # fmt: skip


def write_curves(path: Path, curves: Sequence[LossCurve]) -> None:
    """Write curve.csv, whole or not at all."""
    with replacing(path) as unfinished, open(unfinished, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for curve in curves:
            columns = [getattr(curve, name) for name in COLUMNS]
            for place in range(len(curve.t)):
                values = (column[place].item() if isinstance(column, Tensor) else column for column in columns)
                writer.writerow(map(_as_text, values))


def read_curves(path: Path) -> list[LossCurve]:
    """Read curve.csv.

    Raises:
        StudyError: it cannot be read, is no such table, or a value is wrong: the message names the row.
    """
    try:
        if check_regular(path).st_size > _LARGEST_TABLE:
            raise StudyError(f"{path}: is too large for a curve.csv of loss_curve")
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            rows = [] if missing else list(reader)
    except OSError as error:
        raise StudyError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise StudyError(f"{path}: is no table (give a curve.csv that loss_curve wrote)") from error
    if missing or not rows:
        wrong = f"it has no column {missing[0]}" if missing else "it has no rows"
        raise StudyError(f"{path}: is no curve.csv of loss_curve: {wrong}")
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number, row in enumerate(rows, 2):  # row 1 is the header
        groups.setdefault((row["weights"], row["step"]), []).append(_values(path, number, row))
    return [_curve(weights, step, group) for (weights, step), group in groups.items()]


def write_errors(path: Path, errors: dict[tuple[str, int], Tensor]) -> None:
    """Write the errors [K, N] of every image behind the curves, by (weights, step), whole or not at all."""
    tensors = {f"{weights}.{step}": values.to(torch.float32) for (weights, step), values in errors.items()}
    with replacing(path) as unfinished:
        save_file(tensors, unfinished)  # measured in float32: nothing is lost


def read_errors(path: Path, weights: str, step: int) -> Tensor | None:
    """Read the errors of every image behind a curve, float64 [K, N]; None if there is no such file or curve in it.

    Raises:
        StudyError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            name, there = f"{weights}.{step}", list(file.keys())
            return file.get_tensor(name).to(torch.float64) if name in there else None
    except (SafetensorError, OSError) as error:
        raise StudyError(f"{path}: is damaged (remove it, and run loss_curve again)") from error


def _as_text(value: float | int | str | None) -> str:
    return f"{value:.17g}" if isinstance(value, float) else as_text(value)


def _values(path: Path, number: int, row: dict[str, str | None]) -> dict[str, float]:
    """Values of a row as numbers; empty ones are nan where a curve may lack them."""
    values = {}
    for name in COLUMNS[2:]:
        try:
            values[name] = float(row[name] or math.nan)
        except ValueError as error:
            raise StudyError(f"{path}: row {number}: {name} is {row[name]!r}, not a number") from error
    for name in ("t", "log_sigma", "training_density", "images", "error", "noise_error"):
        if not math.isfinite(values[name]):
            raise StudyError(f"{path}: row {number}: {name} is {row[name] or 'empty'}")
    return values


def _curve(weights: str, step: str, rows: list[dict[str, float]]) -> LossCurve:
    columns: dict[str, Any] = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in COLUMNS[2:]}
    images = int(columns.pop("images")[0])
    for name in ("index", "optimum"):
        columns[name] = columns[name] if columns[name].isfinite().all() else None
    return LossCurve(weights=weights, step=int(step), images=images, **columns)
