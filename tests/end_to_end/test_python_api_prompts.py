"""`torchtitan_dit` in Python with a model of captions: prompts of a call are that call's alone."""

import shutil

import pytest
import torch

from tests.end_to_end.drawing import sample
from tests.unit.test_bucketed_stores import write_folder
from tests.unit.test_online_text import train
from torchtitan_dit import api, load
from torchtitan_dit.api import WeightsError

SHOWN = ["a red house", "a sks dog"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Run with the prompts SHOWN in its grids."""
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


def labels_of_grids(monkeypatch):
    """Rows and their labels of each grid that is made afterwards."""
    labels = []
    monkeypatch.setattr(api, "image_grid", lambda images, rows, columns, names, title: labels.append((rows, list(names))))
    return labels


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
    labels = labels_of_grids(monkeypatch)
    model.grid(prompts="a red house", images_per_class=2)
    assert labels == [(1, ["a red house"])]


def test_the_trigger_is_replaced_in_prompts(model, monkeypatch):
    wanted, labels = drawn(model, prompts=["a sks cat"]), labels_of_grids(monkeypatch)
    assert torch.equal(drawn(model, prompts=["a [trigger] cat"]), wanted)
    assert not torch.equal(drawn(model, prompts=["a trigger cat"]), wanted)
    model.grid(prompts=["a [trigger] cat"], images_per_class=1)
    assert labels == [(1, ["a sks cat"])]


def test_a_set_of_the_command_records_the_texts_that_it_draws(run_folder, tmp_path):
    words = ["--count", "1", "--num-steps", "1", "--prompt", "a [trigger] cat"]
    ((code, said),) = sample(tmp_path / "set", run_folder, *words)
    assert code == 0, said
    records = [path.read_text() for path in (tmp_path / "set").glob("*.json")]
    assert any('"a sks cat"' in text for text in records) and not any("[trigger]" in text for text in records)


def test_the_trigger_without_a_word_is_refused(run_folder, tmp_path):
    untriggered = tmp_path / "one"
    shutil.copytree(run_folder, untriggered)
    config = untriggered / "config.toml"
    text = config.read_text().replace("[trigger]", "sks")  # in data.prompts
    config.write_text(text.replace('trigger_word = "sks"', 'trigger_word = ""'))
    with pytest.raises(WeightsError, match=r"^--prompt: \[trigger\] stands for a trigger word, and there is none"):
        load(untriggered).sample(prompts=["a [trigger] cat"])
