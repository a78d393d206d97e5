"""The objective of a compiled run: draws and both sides of the network as graphs, few, with the numbers of eager ones."""

import math

import pytest
import torch

from tests.objectives import combine, timesteps, weighting
from torchtitan import philox
from torchtitan.config.checks import _no_compiler
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.distributed.compile import CompileCounter, compile_objective

SHAPE, LARGEST = (2, 3, 5), 8
CASES = {
    "learned variance": {
        "path": "ddpm_linear", "prediction": "noise", "preconditioning": "index", "timesteps": timesteps("uniform"),
    },
    "heads in strata": {
        "heads": ["x0", "noise", "v"], "combine": combine("minimum"), "prediction": "v", "spread": "stratified",
    },
    "edm": {
        "path": "edm", "prediction": "edm", "preconditioning": "edm", "timesteps": timesteps("lognormal_sigma"),
        "weighting": weighting("edm"), "learned_uncertainty": True,
    },
}  # fmt: skip


class Network(torch.nn.Module):
    """Network whose output is a multiple of its input, as often as there are outputs of its width."""

    def __init__(self, outputs):
        super().__init__()
        self.factor, self.outputs = torch.nn.Parameter(torch.tensor(0.7)), outputs

    def forward(self, images, time, condition):
        return (self.factor * images + 1e-3 * time.view(-1, 1, 1, 1)).repeat(1, self.outputs, 1, 1)


def step(objective, number, size, outputs):
    """Draw of one batch, its losses, and the gradient of the network."""
    network, samples = Network(outputs), torch.arange(size) + LARGEST * number
    draw = objective.draw(SHAPE, GlobalBatch(LARGEST * number, LARGEST, attempt=number // 2), samples)
    terms = objective.loss(network, Microbatch(philox.normal(1, "synthetic_data", samples, SHAPE)), draw)
    terms.loss.mean().backward()
    return draw._asdict(), vars(terms), network.factor.grad


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()


@pytest.mark.parametrize("name", CASES)
def test_graphs_of_an_objective_are_whole_and_few_and_give_its_numbers(name):
    config = DenoisingConfig(**CASES[name])
    outputs = 2 if name == "learned variance" else len(config.heads) or 1
    eager, compiled = build_objective(config, 3), build_objective(config, 3)
    counter, graphs = CompileCounter(expected_steps=0), []
    compile_objective(compiled, backend="eager")
    # The same size again, another attempt, a smaller batch; then neither sizes nor attempts are compiled anew.
    sizes = (LARGEST, LARGEST, LARGEST, 5, 3, 6) if name == "learned variance" else (LARGEST, LARGEST)
    for number, size in enumerate(sizes):
        wanted, found = (step(objective, number, size, outputs) for objective in (eager, compiled))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        graphs.append(counter.counts()["graphs"])
    assert graphs[:2] == [3, 3] and graphs[-1] == graphs[min(3, len(sizes) - 1)] <= 3 + 4, graphs
    assert counter.counts()["graph_breaks"] == 0
    with torch.no_grad():  # as in a validation
        compiled.draw(SHAPE, GlobalBatch(0, 2), torch.arange(2))
    assert counter.counts()["graphs"] == graphs[-1]


def test_rounds_of_a_compiler_never_leave_int64_and_give_the_words_of_the_eager_ones():
    """In Python's unbounded integers: the largest product of a round, and every word of the extreme counters."""
    word = 2**32
    for multiplier in philox._ROUND_MULTIPLIERS:
        assert -(2**63) <= (word - 1) * (multiplier - word) < 0
        for w in (0, 1, word - 1, word // 2, 12345):
            product = w * (multiplier - word)
            assert ((product >> 32) + w, product & (word - 1)) == divmod(w * multiplier, word)
    counter = tuple(torch.tensor([0, word - 1, 5, word // 2 + k]) for k in range(4))
    key = (word - 1, 0x299F31D0)
    found = philox._rounds_word_by_word(counter, key)
    assert torch.equal(torch.stack(found), torch.stack(philox.philox_4x32(counter, key)))


@pytest.mark.long
@pytest.mark.skipif(_no_compiler(), reason="no C++ compiler for inductor")
def test_words_of_inductors_code_are_equal_and_its_normal_draws_agree_to_five_roundings():
    """Each library's log and cos are within 1 ulp, so the logarithms differ by 2 and the roots by 1 + 1; cosines by 2, and
    the products by 1 more: 5 ulp of 2^-23 at most in all, relative."""

    def draws(indices, attempt):
        (bits,) = philox.uniform_bits(2**63 + 5, (("timestep", indices),), attempt)
        return bits, philox.random_words(7, "dropout", indices, 42, attempt), philox.normal(7, "noise", indices, SHAPE, attempt)

    compiled = torch.compile(draws, fullgraph=True)
    indices = torch.arange(13) + 2**40 - 5
    (bits, words, normal), found = draws(indices, 2**24 - 1), compiled(indices, 2**24 - 1)
    assert torch.equal(found[0], bits) and torch.equal(found[1], words)
    assert ((found[2] - normal).abs() <= 5 * 2.0**-23 * normal.abs()).all() and math.prod(SHAPE) % 4  # a block in part
