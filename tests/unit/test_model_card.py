"""Facts of a model card."""

from types import SimpleNamespace

import pytest

from torchtitan.conditions import Classes
from torchtitan.config.job import load_config
from torchtitan.data import DatasetInfo
from torchtitan.runs.model_card import _facts


@pytest.mark.parametrize(("grown", "said"), [
    ({}, "9 steps of 8 images, float32"), ({"training": {"double_batch_after": [16]}}, "9 steps of 8 images and more, float32"),
])  # fmt: skip
def test_the_images_of_a_step_are_those_of_a_batch_that_stayed(grown, said):
    info, model = DatasetInfo((1, 8, 8), Classes(10)), SimpleNamespace(parameters=list)
    trained = SimpleNamespace(config=load_config([], 1), info=info, model=model, step=9)
    recorded = grown | {"training": {"global_batch_size": 8, "mixed_precision_param": "float32"} | grown.get("training", {})}
    assert dict(_facts(trained, recorded, {}))["training"] == said
