"""Families of networks by the name in `model.name`."""

from torchtitan.models import dit
from torchtitan.models.base import ModelFamily

MODELS: dict[str, ModelFamily] = {
    "dit": dit.FAMILY,
}
