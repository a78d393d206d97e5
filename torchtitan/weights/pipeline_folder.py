"""Folder of a pipeline of diffusers around a network: scheduler, autoencoder, and the index that names them.

Source: what `DiTPipeline.save_pretrained` writes, and the defaults of `DDIMScheduler` (diffusers 0.36).
"""

import json
import shutil
from pathlib import Path
from typing import Any

from torchtitan.files.regular import read_regular
from torchtitan.files.weight_files import WeightsError
from torchtitan.weights.model_record import ModelRecord

PIPELINE = "diffusers-pipeline"
_VAE_FILES = ("config.json", "diffusion_pytorch_model.safetensors")
_SAMPLED = {"path": "ddpm_linear", "prediction": "noise", "preconditioning": "index"}
_SCHEDULER = {
    "_class_name": "DDIMScheduler", "num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02,
    "beta_schedule": "linear", "clip_sample": False, "set_alpha_to_one": True, "steps_offset": 0,
    "prediction_type": "epsilon", "timestep_spacing": "leading",
}  # fmt: skip
_TRAINED = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "prediction_type")


def check_pipeline(source: Path, record: ModelRecord, vae: Path | None) -> Path:
    """Check that a DiTPipeline draws what a model draws; return the autoencoder's folder.

    Args:
        vae: folder of an AutoencoderKL; None: the autoencoder of the training.

    Raises:
        WeightsError: it does not, or there is no such autoencoder.
    """
    config = record.config
    given = {key: getattr(config.objective, key) for key in _SAMPLED}
    if found := [f"objective.{key} = {given[key]} (there {wanted})" for key, wanted in _SAMPLED.items() if given[key] != wanted]:
        raise WeightsError(f"{source}: is no model that DiTPipeline samples: {', '.join(found)}")
    if record.latents is None:
        raise WeightsError(f"{source}: draws images, and DiTPipeline decodes latents (write the layout diffusers)")
    normalization = record.latents.normalization
    if any(normalization.shift) or len(set(normalization.scale)) != 1:
        raise WeightsError(f"{source}: its latents are shifted, or scaled by channel; DiTPipeline knows one factor for all")
    if vae is None and config.autoencoder.name == "diffusers" and config.autoencoder.path:
        vae = Path(config.autoencoder.path)
    if vae is None:
        raise WeightsError(f"{source}: which autoencoder decodes its latents? (add --vae FOLDER)")
    folder = vae / "vae" if (vae / "vae" / "config.json").is_file() else vae
    if missing := next((name for name in _VAE_FILES if not (folder / name).is_file()), None):
        raise WeightsError(f"{folder}: holds no {missing} (give the folder of an AutoencoderKL as diffusers saves it)")
    channels = _document(folder).get("latent_channels", 4)
    if channels != record.info.image_shape[0]:
        raise WeightsError(f"{folder}: its latents have {channels} channels, those of {source} {record.info.image_shape[0]}")
    return folder


def write_around(path: Path, vae: Path, record: ModelRecord) -> None:
    """Write everything of a pipeline but its network, which is in `path`/transformer. Raises OSError.

    The autoencoder's scaling factor becomes the one that the latents were trained with.
    """
    assert record.latents is not None  # by check_pipeline
    (scale, *_) = record.latents.normalization.scale
    (path / "scheduler").mkdir()
    (path / "vae").mkdir()
    _write(path / "scheduler" / "scheduler_config.json", _SCHEDULER)
    _write(path / "vae" / "config.json", _document(vae) | {"scaling_factor": scale})
    shutil.copyfile(vae / _VAE_FILES[1], path / "vae" / _VAE_FILES[1])
    parts = {
        "transformer": ["diffusers", "DiTTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "DDIMScheduler"],
    }  # fmt: skip
    classes = record.info.class_names
    names = {"id2label": {str(number): name for number, name in enumerate(classes)}} if classes else {}
    _write(path / "model_index.json", {"_class_name": "DiTPipeline"} | parts | names)


def is_published_folder(path: Path) -> bool:
    """Whether a folder is one of diffusers, a network or a pipeline, and no run."""
    return not (path / "config.toml").exists() and any((path / name).is_file() for name in ("model_index.json", "config.json"))


def latents_of(path: Path) -> tuple[float, float] | None:
    """Shift and scale of the latents of a pipeline's AutoencoderKL; None for other folders."""
    document = _json(path / "vae" / "config.json")
    if document.get("_class_name") != "AutoencoderKL":
        return None
    return document.get("shift_factor") or 0.0, document.get("scaling_factor", 0.18215)  # as diffusers where nothing is said


def scheduler_problems(path: Path) -> list[str]:
    """Differences between a pipeline's scheduler and DiT's, where it states them: one line each."""
    document = _json(path / "scheduler" / "scheduler_config.json")
    return [
        f"its scheduler has {key} = {document[key]}, this program samples {_SCHEDULER[key]} of its networks"
        for key in _TRAINED if document.get(key, _SCHEDULER[key]) != _SCHEDULER[key]
    ]


def _document(vae: Path) -> dict[str, Any]:
    document = _json(vae / "config.json")
    if document.get("_class_name") != "AutoencoderKL":
        raise WeightsError(f"{vae / 'config.json'}: describes no AutoencoderKL")
    return document


def _json(path: Path) -> dict[str, Any]:
    """Object of a JSON file; empty where there is none."""
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        document = None
    return document if isinstance(document, dict) else {}


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
