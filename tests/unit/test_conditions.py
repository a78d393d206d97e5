"""Kinds of condition: what a batch has of them, the null condition, guidance's stack, and the choices of grids."""

import torch

from torchtitan.conditions import Classes, Embeddings, Unconditional

NULLS = {"embeddings": torch.full((3, 2), -1.0), "mask": torch.zeros(3, dtype=torch.bool)}
PROMPTS = {"embeddings": torch.arange(12.0).view(2, 3, 2), "mask": torch.ones(2, 3, dtype=torch.bool)}
TEXT = Embeddings(NULLS, PROMPTS, names=("a cat", "a dog"))


def batch_of(count: int) -> dict[str, torch.Tensor]:
    return {
        "images": torch.zeros(count, 1, 2, 2),
        "class": torch.arange(count) % 4,
        "embeddings": torch.arange(6.0 * count).view(count, 3, 2),
        "mask": torch.arange(3 * count).view(count, 3) % 2 == 0,
    }


def test_a_condition_is_the_entries_of_its_kind_in_a_batch():
    batch = batch_of(5)
    assert Unconditional().of(batch) is None
    assert Classes(4).of(batch) is batch["class"]
    assert Embeddings({"embeddings": NULLS["embeddings"]}).of(batch) is batch["embeddings"]
    found = TEXT.of(batch)
    assert set(found) == {"embeddings", "mask"} and all(found[name] is batch[name] for name in found)


def test_dropped_conditions_are_null_and_the_others_untouched():
    batch, dropped = batch_of(5), torch.tensor([True, False, False, True, False])
    assert Unconditional().drop(None, dropped) is None
    assert Classes(4).drop(batch["class"], dropped).tolist() == [4, 1, 2, 4, 0]
    found = TEXT.drop(TEXT.of(batch), dropped)
    for name, null in NULLS.items():
        assert found[name].dtype == null.dtype
        for row, gone in enumerate(dropped):
            assert torch.equal(found[name][row], null if gone else batch[name][row])


def test_guidance_has_the_conditions_given_first_and_as_many_null_ones():
    batch = batch_of(3)
    assert Unconditional().with_null(None) is None
    assert Classes(4).with_null(batch["class"]).tolist() == [0, 1, 2, 4, 4, 4]
    found = TEXT.with_null(TEXT.of(batch))
    for name, null in NULLS.items():
        assert torch.equal(found[name], torch.cat((batch[name], null.expand(3, *null.shape))))


def test_grids_choose_classes_and_prompts_by_number():
    numbers = torch.tensor([1, 0, 1])
    assert Unconditional().choices == 0 and Unconditional().choose(numbers) is None
    assert Classes(4, ("a", "b", "c", "d")).choices == 4 and Classes(4).choose(numbers).tolist() == [1, 0, 1]
    assert (TEXT.choices, TEXT.choice_names) == (2, ("a cat", "a dog"))
    found = TEXT.choose(numbers)
    for name, values in PROMPTS.items():
        assert torch.equal(found[name], values[[1, 0, 1]])
    without = Embeddings(NULLS)
    assert without.choices == 0
    for name, value in without.choose(numbers).items():
        assert torch.equal(value, NULLS[name].expand(3, *NULLS[name].shape))
