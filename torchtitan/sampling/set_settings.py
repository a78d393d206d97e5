"""Settings of a set of samples: all that its images depend on beside seeds and classes, for its record."""

import dataclasses
from typing import Any

from torchtitan.diffusion.guidance import HEAD, PATH_DROP, HeadGuide
from torchtitan.evaluation.config import SamplingConfig
from torchtitan.evaluation.decoding import LatentDecoder
from torchtitan.files.weight_files import named_weights
from torchtitan.files.weight_hash import weights_sha256
from torchtitan.sampling.guides import LoadedGuide
from torchtitan.sampling.method_options import METHOD_KEYS
from torchtitan.settings.sections import choices
from torchtitan.weights.trained_model import TrainedModel

EMBEDDED = "embedded_guidance"
BY_HEAD = ("null_guidance_scale", "null_guidance_interval")


def set_settings(
    trained: TrainedModel, sampling: SamplingConfig, guide: LoadedGuide | None, decoder: LatentDecoder | None,
    image_shape: tuple[int, int, int], dtype: str,
) -> dict[str, Any]:  # fmt: skip
    """Settings of a set, for JSON."""
    sections = {name: dataclasses.asdict(getattr(sampling, name)) for name in choices(sampling)}
    by_head = guide is not None and isinstance(guide.guide, HeadGuide)
    left_out = (EMBEDDED,) if by_head else (EMBEDDED, *BY_HEAD)
    return {
        "weights": _weights(trained), "guide": _guide(guide) if guide else None, "image_shape": list(image_shape),
        "autoencoder": decoder.identity() if decoder else None, "dtype": dtype, **sections,
        **{key: getattr(sampling, key) for key in METHOD_KEYS if key not in left_out},
        **_embedded_guidance(trained, sampling),
    }  # fmt: skip


def _embedded_guidance(trained: TrainedModel, sampling: SamplingConfig) -> dict[str, float]:
    """Scale that the network is given, which is no tensor of its weights; nothing where it is given none."""
    if not trained.config.model.guidance_embedding:
        return {}
    given = sampling.embedded_guidance
    return {EMBEDDED: trained.config.model.guidance if given is None else given}


def _guide(guide: LoadedGuide) -> dict[str, str]:
    if guide.model is not None:
        return _weights(guide.model)
    return {"label": HEAD if isinstance(guide.guide, HeadGuide) else PATH_DROP}


def _weights(trained: TrainedModel) -> dict[str, str]:
    """Origin and hash of the weights, and of what an objective has learned to read them by."""
    learned = {f"objective.{name}": tensor for name, tensor in trained.objective.tensors().items()}
    return {"label": trained.label, "sha256": weights_sha256(named_weights(trained.model) | learned)}
