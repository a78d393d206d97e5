"""Files of a run that are shared: its weights, a model card and a picture."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchtitan.errors import first_line
from torchtitan.files.regular import read_regular, read_toml
from torchtitan.files.weight_files import WeightsError, named_weights
from torchtitan.models.adapters.adapters import merged_weights
from torchtitan.runs.model_card import PICTURE, WEIGHTS, model_card
from torchtitan.runs.network import network_on_meta
from torchtitan.runs.published import OWN, OwnWeights, write_weights
from torchtitan.runs.trained_model import TrainedModel


def own_weights(run: Path, trained: TrainedModel) -> OwnWeights:
    """Weights of a run as files hold them; adapters are merged into the network."""
    model, config = trained.model, trained.config
    tensors: Mapping[str, Tensor] = named_weights(model)
    if config.lora.enable:
        model, tensors = network_on_meta(config, trained.info), merged_weights(model)
    return OwnWeights(run, config, trained.info, model, tensors, f"{run.resolve().name}, {trained.label}")


def write_model_files(folder: Path, run: Path, trained: TrainedModel, repository: str, dtype: str) -> None:
    """Write weights, model card and the newest picture of a run into an empty folder. Raises WeightsError, OSError."""
    write_weights(own_weights(run, trained), folder / WEIGHTS, OWN, dtype=dtype, overwrite=False)
    pictures = sorted((run / "samples").glob("step-*.png"))
    if pictures:
        shutil.copyfile(pictures[-1], folder / PICTURE)
    card = model_card(trained, _recorded(run), _summary(run), repository, bool(pictures))
    (folder / "README.md").write_text(card, encoding="utf-8")


def _recorded(run: Path) -> dict[str, Any]:
    try:
        return read_toml(run / "config.toml")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{run / 'config.toml'}: cannot be read: {first_line(error)}") from error


def _summary(run: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(run / "summary.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
