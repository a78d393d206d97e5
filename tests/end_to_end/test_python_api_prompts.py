"""`torchtitan_dit` in Python with a model of captions: prompts of a call are that call's alone."""

import pytest
import torch

from tests.unit.test_bucketed_stores import write_folder
from tests.unit.test_online_text import train
from torchtitan_dit import api, load
from torchtitan_dit.api import WeightsError

SHOWN = ["a red house", "a sks dog"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Run whose grids show SHOWN."""
    folder = tmp_path_factory.mktemp("prompted")
    pictures = write_folder(folder / "pictures", [(32, 32)] * 7)
    prompts = '["a red house", "a [trigger] dog"]'
    train(pictures, folder, "--data.prompts", prompts, "--data.trigger_word", "sks", "--sampling.guidance_scale", "2")
    return folder / "one"


@pytest.fixture
def model(run_folder):
    return load(run_folder, num_steps=1)


def drawn(model, *arguments, **options):
    return model.sample(*arguments, output="tensor", **options)


def test_a_call_with_prompts_changes_no_other_call(model):
    before = drawn(model), drawn(model, [1]), drawn(model, prompts=["new", "text"])
    kind = model.network.condition_kind
    assert model.class_names == tuple(SHOWN) and len(before[0]) == 2
    with pytest.raises(TypeError):  # of an option that is none, after the prompts are encoded or before
        drawn(model, prompts=["lost"], cfg=3)
    with pytest.raises(WeightsError):
        drawn(model, prompts=["lost"], solver="dopri5", rtol=-1.0)
    model.grid(prompts=["another"], images_per_class=2)
    after = drawn(model), drawn(model, [1]), drawn(model, prompts=["new", "text"])
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert model.network.condition_kind is kind and model.class_names == tuple(SHOWN)
    assert not torch.equal(before[0], before[2])


def test_a_prompt_of_the_data_draws_what_its_number_draws(model):
    assert torch.equal(drawn(model, prompts=SHOWN), drawn(model, [0, 1]))


def test_a_string_is_one_prompt(model, monkeypatch):
    assert torch.equal(drawn(model, prompts="a red house"), drawn(model, prompts=["a red house"]))
    assert len(drawn(model, prompts="")) == 1
    labels = []
    monkeypatch.setattr(api, "image_grid", lambda images, rows, columns, names, title: labels.append((rows, list(names))))
    model.grid(prompts="a red house", images_per_class=2)
    assert labels == [(1, ["a red house"])]


@pytest.mark.parametrize(("prompts", "text"), [
    ([], "prompts: is empty"), ([3], "prompts: must be a string or strings, has 3"),
    (3.5, "prompts: must be a string or strings, has 3.5"), (b"a dog", "has b'a dog'"),
])  # fmt: skip
def test_prompts_that_are_no_texts_are_refused(model, prompts, text):
    with pytest.raises(WeightsError, match=text):
        model.sample(prompts=prompts)
