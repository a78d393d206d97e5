"""Counter-based random numbers against published vectors, and the independence that training relies on."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from torchtitan import philox

WORD = 2**32

# kat_vectors of the Random123 distribution, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    """The rounds as in figure 2 of the paper, in Python's unbounded integers."""
    left, right = list(counter), list(key)
    for number in range(10):
        if number:
            right = [(right[0] + 0x9E3779B9) % WORD, (right[1] + 0xBB67AE85) % WORD]
        high_0, low_0 = divmod(0xD2511F53 * left[0], WORD)
        high_1, low_1 = divmod(0xCD9E8D57 * left[2], WORD)
        left = [high_1 ^ left[1] ^ right[0], low_1, high_0 ^ left[3] ^ right[1], low_0]
    return left


def fixed_words(monkeypatch, *words: int) -> None:
    """Let every draw see the given words over and over."""

    def repeated(counter, key):
        shape = torch.broadcast_shapes(*(word.shape for word in counter))
        return tuple(torch.full(shape, words[k % len(words)]) for k in range(4))

    monkeypatch.setattr(philox, "philox_4x32", repeated)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_rounds_give_the_published_vectors(counter, key, answer):
    words = philox.philox_4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word) for word in words) == answer


def test_words_equal_an_integer_implementation_of_the_documented_layout():
    generator = np.random.default_rng(0)
    for _ in range(60):
        seed, index = int(generator.integers(0, 2**64, dtype=np.uint64)), int(generator.integers(0, 2**63))
        attempt, count = int(generator.integers(0, 2**24)), int(generator.integers(1, 14))
        purpose = str(generator.choice(list(philox.PURPOSES)))
        stream = philox.PURPOSES[purpose] + 256 * attempt
        wanted = [
            word
            for block in range(4)
            for word in philox_in_python([block, index % WORD, index // WORD, stream], [seed % WORD, seed // WORD])
        ]
        words = philox.random_words(seed, purpose, torch.tensor([index]), count, attempt)
        assert words.tolist() == [wanted[:count]]


def test_draws_of_several_purposes_in_one_pass_are_those_of_each_alone():
    seed, few, many = 2**63 + 5, torch.tensor([2**40 + 1]), torch.arange(7, 40)
    found = philox.uniform_bits(seed, (("timestep", few), ("stratum", many), ("timestep", many)), attempt=3)
    for bits, (purpose, indices) in zip(found, (("timestep", few), ("stratum", many), ("timestep", many)), strict=True):
        assert torch.equal(philox.middles(bits), philox.uniform(seed, purpose, indices, 3))
    assert philox.uniform(seed, "timestep", many[:0]).shape == (0,)


@pytest.mark.parametrize("shape", [(16, 64, 65), (3, 7, 5), (1,), (3, 32, 32)])
def test_normal_draws_are_the_box_muller_pairs_of_the_words_bit_for_bit(shape):
    indices, count = torch.arange(25) + 2**40, math.prod(shape)
    words = philox.random_words(3, "sampling", indices, count + count % 2, attempt=2).to(torch.float32)
    radius = torch.sqrt(-2.0 * torch.log((words[:, 0::2] + 1.0) * 2.0**-32))
    angle = words[:, 1::2] * (2.0 * math.pi * 2.0**-32)
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1).flatten(1)[:, :count]
    assert torch.equal(philox.normal(3, "sampling", indices, shape, attempt=2), pairs.reshape(-1, *shape))


def test_words_from_a_later_one_on_are_those_of_the_whole():
    indices = torch.tensor([0, 7, 2**40])
    whole = philox.random_words(5, "noise", indices, 30)
    assert torch.equal(philox.random_words(5, "noise", indices, 22, first=8), whole[:, 8:])


def test_no_word_block_repeats_across_seeds_purposes_attempts_and_indices():
    indices = torch.cat((torch.arange(500), torch.arange(500) + 2**32, torch.arange(500) + 2**40))
    blocks = [
        philox.random_words(seed, purpose, indices, 8, attempt).reshape(-1, 4)
        for seed in (0, 1, 2**32, 2**63)
        for purpose in philox.PURPOSES
        for attempt in (0, 1, 2**24 - 1)
    ]
    blocks = torch.cat(blocks)
    # 360,000 blocks of 128 bits: a chance repetition has probability 2e-28.
    assert len(np.unique(blocks.numpy(), axis=0)) == len(blocks)


def test_an_unknown_purpose_names_the_table_and_its_next_number():
    said = f"'jitter' is no purpose of random numbers .append it to PURPOSES in torchtitan/philox.py, as {len(philox.PURPOSES)}"
    for draw in (philox.uniform, partial(philox.normal, shape=(2,)), partial(philox.random_words, count=4)):
        with pytest.raises(ValueError, match=said):
            draw(0, "jitter", torch.arange(3))


@pytest.mark.parametrize("shape", [(1,), (3,), (3, 5, 7), (4, 2, 2)])
def test_draws_of_an_index_do_not_depend_on_its_batch(shape):
    indices = torch.arange(10**9, 10**9 + 67)
    whole, uniform = philox.normal(5, "noise", indices, shape, 2), philox.uniform(5, "timestep", indices, 2)
    assert whole.shape == (67, *shape) and whole.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        chosen = torch.randperm(67, generator=generator)[: int(torch.randint(1, 68, (), generator=generator))]
        assert torch.equal(philox.normal(5, "noise", indices[chosen], shape, 2), whole[chosen])
        assert torch.equal(philox.uniform(5, "timestep", indices[chosen], 2), uniform[chosen])


def test_draws_follow_the_box_muller_formula_in_float64():
    indices = torch.arange(300)
    words = philox.random_words(9, "noise", indices, 14).numpy().astype(np.float64)
    radius, angle = np.sqrt(-2 * np.log((words[:, 0::2] + 1) / WORD)), 2 * np.pi * words[:, 1::2] / WORD
    wanted = np.stack((radius * np.cos(angle), radius * np.sin(angle)), -1).reshape(300, 14)
    found = philox.normal(9, "noise", indices, (13,)).numpy()
    np.testing.assert_allclose(found, wanted[:, :13], rtol=0, atol=5e-6)

    words = philox.random_words(9, "timestep", indices, 2).tolist()
    wanted = [((high >> 6) * 2**26 + (low >> 6) + 0.5) / 2**52 for high, low in words]
    assert philox.uniform(9, "timestep", indices).tolist() == wanted


@pytest.mark.parametrize("purpose", ["timestep", "stratum", "label_drop"])
def test_uniform_draws_pass_kolmogorov_smirnov(purpose):
    draws = philox.uniform(0, purpose, torch.arange(200_000)).numpy()
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    # Neighbouring samples are independent: serial correlation within 4 standard errors.
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / math.sqrt(len(draws))


def test_normal_draws_have_the_distribution_and_moments_of_the_normal():
    draws = philox.normal(0, "noise", torch.arange(2_000), (1, 10, 10)).double().numpy().reshape(2_000, 100)
    flat = draws.ravel()
    assert stats.kstest(flat, "norm").pvalue > 1e-3
    errors = {1: 1, 2: 2, 3: 15, 4: 96}  # variance of the k-th power of a standard normal
    for power, variance in errors.items():
        wanted = {1: 0, 2: 1, 3: 0, 4: 3}[power]
        assert abs((flat**power).mean() - wanted) < 4 * math.sqrt(variance / flat.size), power
    # Pixels of an image, and the same pixel of neighbouring images, are uncorrelated.
    correlation = np.corrcoef(draws.T)[np.triu_indices(100, 1)]
    assert np.abs(correlation).max() < 5 / math.sqrt(2_000)
    assert abs((draws[1:] * draws[:-1]).mean()) < 4 / math.sqrt(flat.size)
    # Both halves of a Box-Muller pair are independent also in size.
    sizes = np.corrcoef(draws[:, 0::2].ravel() ** 2, draws[:, 1::2].ravel() ** 2)[0, 1]
    assert abs(sizes) < 4 / math.sqrt(flat.size / 2)


@pytest.mark.parametrize("words", [(0,), (WORD - 1,), (0, WORD - 1)])
def test_extreme_words_give_finite_normals_and_uniforms_inside_the_interval(monkeypatch, words):
    fixed_words(monkeypatch, *words)
    draws = philox.normal(0, "noise", torch.arange(3), (5,))
    assert torch.isfinite(draws).all() and draws.abs().max() <= math.sqrt(64 * math.log(2)) + 1e-5
    uniform = philox.uniform(0, "timestep", torch.arange(3))
    assert ((uniform > 0) & (uniform < 1)).all()
    assert torch.isfinite(torch.special.ndtri(uniform)).all()
