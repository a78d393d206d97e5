"""Plans of sets of samples, and their files: whole or missing, of no other set."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchtitan.conditions import Classes, Unconditional
from torchtitan.evaluation.config import SamplingConfig
from torchtitan.evaluation.sample_plans import (
    SampleNotFinite,
    SampleSetError,
    SetPlan,
    choices_of,
    read_seeds,
    seeds_text,
)
from torchtitan.evaluation.sample_sets import SampleSet
from torchtitan.fidelity.images import open_images
from torchtitan.files.run_lock import Busy
from torchtitan.models.base import ModelConfig
from torchtitan.models.magnitude import MPFourier
from torchtitan.sampling.set_settings import set_settings
from torchtitan.sampling.setup import chosen_classes
from torchtitan.weights.trained_model import WeightsError

SETTINGS = {"image_shape": [1, 4, 4], "num_steps": 3, "solver": {"name": "heun"}}


def plan(count: int = 5, **changes) -> SetPlan:
    seeds = torch.arange(count)
    return SetPlan(seeds, seeds % 3, 2, SETTINGS | changes)


def images(seeds: torch.Tensor) -> torch.Tensor:
    return (seeds.reshape(-1, 1, 1, 1) / 10 + torch.linspace(-1, 0, 16).reshape(1, 1, 4, 4)).float()


def fill(samples: SampleSet, batches: list[int]) -> None:
    for batch in batches:
        samples.write(batch, images(samples.plan.batch(batch)[0]))


@pytest.mark.parametrize(
    ("text", "count", "seeds"),
    [
        ("0-4", None, [0, 1, 2, 3, 4]), ("7", 1, [7]), ("9,1-3, 5", None, [9, 1, 2, 3, 5]), (None, 3, [0, 1, 2]),
        (f"{2**40 - 1}", None, [2**40 - 1]),
    ],
)  # fmt: skip
def test_seeds_are_read_and_written(text, count, seeds):
    found = read_seeds(text, count)
    assert found.tolist() == seeds and found.dtype == torch.int64
    assert read_seeds(seeds_text(seeds), None).tolist() == seeds


@pytest.mark.parametrize(
    ("text", "count", "line"),
    [
        ("", None, "--seeds: '' is no seed or range of seeds (as 0-49999 or 1,5,10-19)"),
        ("4-2", None, "--seeds: 4-2 runs backwards (give the lower seed first)"),
        ("1-5,3", None, "--seeds: 3 is given twice (leave it out once)"),
        ("0-4", 4, "--count: 4, but --seeds 0-4 are 5 (give one of the two)"),
    ],
)
def test_seeds_that_are_none_are_refused_in_one_line(text, count, line):
    with pytest.raises(SampleSetError) as refusal:
        read_seeds(text, count)
    assert str(refusal.value) == line


def test_choices_are_functions_of_their_seed_and_all_as_likely():
    seeds = torch.arange(30_000)
    drawn = choices_of(seeds, 10, [])
    assert torch.equal(choices_of(torch.tensor([29_999, 5]), 10, []), drawn[[29_999, 5]])
    counts = drawn.bincount(minlength=10).double()
    assert len(counts) == 10 and ((counts - 3000) ** 2 / 3000).sum() < 27.9  # chi square of 9 at 0.1 %
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.025
    assert choices_of(torch.tensor([0, 4, 2]), 10, [7, 1, 3]).tolist() == [7, 1, 3]
    assert choices_of(seeds, 0, []) is None


def test_a_set_is_resumed_finished_and_read(tmp_path):
    samples = SampleSet(tmp_path / "set", plan())
    assert samples.begin() == [0, 1, 2]
    fill(samples, [1])
    with pytest.raises(SampleSetError, match="missing"):
        samples.finish()
    with pytest.raises(Busy):
        SampleSet(tmp_path / "set", plan()).begin()
    del samples
    again = SampleSet(tmp_path / "set", plan())
    assert again.begin() == [0, 2]
    fill(again, [2, 0])
    again.finish()
    drawn = open_images(tmp_path / "set")
    found = drawn.pixels(range(5))
    assert drawn.classes().tolist() == [0, 1, 2, 0, 1]
    wanted = np.rint((images(torch.arange(5)).numpy() + 1) * 127.5).astype(np.uint8).repeat(3, 1).transpose(0, 2, 3, 1)
    assert found.dtype == np.uint8 and np.array_equal(found, wanted)
    later = SampleSet(tmp_path / "set", plan())
    assert later.begin() == []
    names = {path.name for path in (tmp_path / "set").iterdir()} - {".lock", "set.json"}
    assert names == {*(f"00000{n}.png" for n in range(5)), "labels.csv"}


def test_a_batch_of_which_some_images_are_missing_is_drawn_again(tmp_path):
    samples = SampleSet(tmp_path / "set", plan())
    fill(samples, samples.begin())
    samples.finish()
    before = {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    (tmp_path / "set" / "000003.png").unlink()
    again = SampleSet(tmp_path / "set", plan())
    assert again.begin() == [1] and not again.is_written(1)
    with pytest.raises(SampleSetError, match="images are missing"):
        again.finish()
    fill(again, [1])
    again.finish()
    assert {path.name: path.read_bytes() for path in (tmp_path / "set").glob("*.png")} == {
        name: content for name, content in before.items() if name.endswith(".png")
    }


def test_another_plan_a_damaged_record_and_foreign_pictures_are_refused(tmp_path):
    folder = tmp_path / "set"
    samples = SampleSet(folder, plan())
    fill(samples, samples.begin())
    samples.finish()
    lines = {
        "was begun with solver.name 'heun', not 'euler' (give that, or another folder)": plan(solver={"name": "euler"}),
        "was begun with images 5, not 6 (give that, or another folder)": plan(6),
        "was begun with other classes or prompts (give that, or another folder)": replace(plan(), choices=torch.ones(5)),
        "was begun with guide None, not 'x' (give that, or another folder)": plan(guide="x"),
    }
    for line, other in lines.items():
        with pytest.raises(SampleSetError) as refusal:
            SampleSet(folder, other).begin()
        assert str(refusal.value) == f"{folder}: {line}"
    (folder / "mine.png").write_bytes(b"mine")
    with pytest.raises(SampleSetError, match="holds mine.png, which is not of this set"):
        SampleSet(folder, plan()).begin()
    (folder / "mine.png").unlink()
    (folder / "labels.csv").write_text("my,labels")
    with pytest.raises(SampleSetError, match="a file that this command did not write"):
        SampleSet(folder, plan()).begin()
    assert (folder / "labels.csv").read_text() == "my,labels"
    (folder / "set.json").write_text("{\n \"sample_set\": 1,")
    with pytest.raises(SampleSetError, match="is damaged"):
        SampleSet(folder, plan()).begin()
    (folder / "set.json").write_text(json.dumps({"mine": 1}))
    with pytest.raises(SampleSetError, match="which is not a set of samples'; nothing was written"):
        SampleSet(folder, plan()).begin()


def test_the_hash_of_weights_covers_buffers_that_are_saved_with_them():
    waves = MPFourier(4)
    config = SimpleNamespace(model=ModelConfig())
    trained = SimpleNamespace(config=config, model=waves, objective=SimpleNamespace(tensors=dict), label="step 1, ema")
    hashes = []
    for value in (0.0, 1.0):
        waves.freqs.fill_(value)
        waves.phases.fill_(0.0)
        hashes.append(set_settings(trained, SamplingConfig(), None, None, (1, 2, 2), "float32")["weights"]["sha256"])
    assert hashes[0] != hashes[1]


def test_values_that_are_not_finite_are_named_by_their_seed(tmp_path):
    samples = SampleSet(tmp_path / "set", plan())
    samples.begin()
    broken = images(torch.tensor([2, 3]))
    broken[1, 0, 2, 2] = float("nan")
    with pytest.raises(SampleNotFinite, match="the image of seed 3 has values that are not finite"):
        samples.write(1, broken)
    assert not list((tmp_path / "set").glob("*.png"))


def test_classes_are_chosen_by_name_or_number():
    def chosen(given, names):
        kind = Classes(len(names) or 12, tuple(names))
        return chosen_classes(given, SimpleNamespace(info=SimpleNamespace(condition_kind=kind)))

    assert chosen(["fish", "0", "birds"], ["birds", "fish", "other"]) == [1, 0, 0]
    assert chosen(["2", 10, "7", "1"], ["0", "1", "10", "2", "007"]) == [3, 2, 4, 1]  # as folders ordered as text
    with pytest.raises(WeightsError, match=r"^--classes: '3' is no class \(one of 0, 1, 10, 2\)$"):
        chosen(["3"], ["0", "1", "10", "2"])
    with pytest.raises(WeightsError, match=r"\(one of 0 caf\xe9; 'caf\xe9' looks the same, in another Unicode form\)"):
        chosen(["cafe\u0301"], ["caf\xe9"])
    with pytest.raises(WeightsError, match=r"^--classes: 'cat' is no class \(one of 0 birds, 1 fish, 2 other\)$"):
        chosen(["1", "cat"], ["birds", "fish", "other"])
    with pytest.raises(WeightsError, match=r"'cat' is no class \(the classes have no names: give numbers\)"):
        chosen(["cat"], [])
    without = SimpleNamespace(info=SimpleNamespace(condition_kind=Unconditional()))
    assert chosen_classes([], without) == []
    with pytest.raises(WeightsError, match=r"^--classes: the network has no classes \(leave it out\)$"):
        chosen_classes(["0"], without)
    with pytest.raises(WeightsError, match=r"--classes: 3 is not in 0\.\.2"):
        chosen(["3"], ["birds", "fish", "other"])


@pytest.mark.parametrize(("names", "given", "classes"), [
    ((), ["all"], [0, 1, 2]), ((), ["2", "0"], [2, 0]), (("all", "cat", "dog"), ["all"], [0]),
])  # fmt: skip
def test_all_classes_are_chosen_by_a_word_unless_one_has_that_name(names, given, classes):
    trained = SimpleNamespace(info=SimpleNamespace(condition_kind=Classes(3, names)))
    found = chosen_classes(given, trained)
    assert found == classes
    assert choices_of(torch.arange(7), 3, found).tolist() == [classes[seed % len(classes)] for seed in range(7)]
