"""Weights of the estimated image and the noisy image in the reverse step of a DDPM path, index by index."""

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.diffusion.paths import PATHS, IndexedPath, indexed
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import replace_file
from torchtitan.pictures.markdown import markdown_table
from torchtitan.runs.trained_model import read_config
from torchtitan_dit.studies import curve_plots

COLUMNS = ("index", "t", "log_sigma", "alpha_bar", "snr", "posterior_x0", "posterior_x_t", "posterior_variance")
_SHOWN = (0, 1, 2, 5, 10, 15, 50, 100, 200, 500, 999)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN_FOLDER", type=Path, nargs="?", help="a run's folder, for its objective.path")
    add("--path", choices=("ddpm_linear", "ddpm_cosine"), help="a path, instead of a run")
    add("--output", type=Path,
        help="folder of the results (default: RUN_FOLDER/studies/posterior_coefficients, or "
        "outputs/studies/posterior_coefficients-PATH)")  # fmt: skip


def run_alone(arguments: argparse.Namespace) -> Path:
    """Write coefficients.csv, coefficients.png and summary.md; return the latter. Raises StudyError, ConfigError."""
    name, folder = _path_and_folder(arguments)
    ResultsFolder(folder, {"coefficients.csv": ",".join(COLUMNS).encode()}).refuse_foreign()
    path = indexed(PATHS[name]())
    marks = landmarks(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "coefficients.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for index, values in enumerate(zip(*_columns(path), strict=True)):
                writer.writerow([index, *(f"{value.item():.10g}" for value in values)])
        text = _summary(name, path, marks) + curve_plots.posterior(name, path, marks, folder / "coefficients.png")
        replace_file(folder / "summary.md", text)
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder / "summary.md"


def landmarks(path: IndexedPath) -> dict[str, int]:
    """Landmarks: first index at which each of these conditions holds, by name."""
    snr = path.alphas_cumprod / (1.0 - path.alphas_cumprod)
    return {
        "x0 weighs less than x_t": _first(path.posterior_x0 < path.posterior_x_t),
        "x0 weighs less than 0.1": _first(path.posterior_x0 < 0.1),
        **{f"SNR below {ratio}": _first(snr < ratio) for ratio in (20, 5, 1)},
    }


def _path_and_folder(arguments: argparse.Namespace) -> tuple[str, Path]:
    if (arguments.run is None) == (arguments.path is None):
        raise StudyError("give either a run's folder or --path ddpm_linear|ddpm_cosine")
    if arguments.run is None:
        return arguments.path, arguments.output or Path("outputs/studies") / f"posterior_coefficients-{arguments.path}"
    if not (arguments.run / "config.toml").is_file():
        raise StudyError(f"{arguments.run}: is no run folder (it has no config.toml)")
    name = read_config(arguments.run / "config.toml").objective.path
    if not PATHS[name]().num_indices:
        raise StudyError(f"{arguments.run}: objective.path is {name}: only a DDPM path has these coefficients")
    return name, arguments.output or arguments.run / "studies" / "posterior_coefficients"


def _columns(path: IndexedPath) -> list[Tensor]:
    """Columns of the table, each [T]."""
    index = torch.arange(path.num_indices)
    snr = path.alphas_cumprod / (1.0 - path.alphas_cumprod)
    return [
        path.index_to_t(index), path.index_to_log_sigma(index), path.alphas_cumprod, snr, path.posterior_x0,
        path.posterior_x_t, path.posterior_variance,
    ]  # fmt: skip


def _first(holds: Tensor) -> int:
    return int(holds.nonzero()[0])


def _summary(name: str, path: IndexedPath, marks: dict[str, int]) -> str:
    text = (
        f"# posterior_coefficients\n\nPath {name}, {path.num_indices} indices from 0 (nearly clean data). The mean of "
        "q(x_(k-1) | x_k, x0) is posterior_x0 x0 + posterior_x_t x_k, its variance posterior_variance. These are "
        "closed forms: nothing is estimated. coefficients.csv has every index.\n\n"
    )
    text += markdown_table(["first index at which", "index"], ([mark, str(index)] for mark, index in marks.items()))
    rows = [[f"{values[index].item():.5g}" for values in _columns(path)] for index in _SHOWN]
    return text + markdown_table(COLUMNS, ([str(index), *row] for index, row in zip(_SHOWN, rows, strict=True)))
