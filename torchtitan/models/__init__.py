"""The families of networks, by the name that `model.name` selects."""

from torchtitan.models import dit
from torchtitan.models.base import ModelFamily

MODELS: dict[str, ModelFamily] = {
    "dit": dit.FAMILY,
}
