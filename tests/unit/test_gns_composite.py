"""Composite against the sketch on planted gradients: whole models whose noise scale is known, measured in part.

Independent runs are bins. A sample's gradient is a mean and isotropic noise, in the modulation part (seen on every step,
in pairs of one microbatch) and in the token part (seen on measured steps, in all pairs of the step), whose noise is
correlated with the modulation's.
"""

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from torchtitan.gns.capture import PARTS, StepSums
from torchtitan.gns.composite import Composite, FreeSums
from torchtitan.gns.control_variate import ControlledSums
from torchtitan.gns.decayed import BinEstimates, DecayedSums
from torchtitan.gns.statistics import PairSums

RUNS, SAMPLES, DIM, INTERVAL, ENTRIES = 80, 16, 16, 8, 32
MODULATION, TOKEN = PARTS.index("modulation"), PARTS.index("token")


@dataclass(frozen=True)
class Planted:
    """Gradients of a known noise scale; `alike`: correlation of the token part's noise with the modulation part's."""

    b_simple: float
    alike: float
    microbatch: int

    @property
    def signal(self) -> float:
        return 2.0 * DIM / self.b_simple  # of both parts, whose noise is DIM each

    def step(self, generator: torch.Generator, measured: bool) -> StepSums:
        noise = torch.randn(2, RUNS, SAMPLES, DIM, generator=generator, dtype=torch.float64)
        noise[1] = self.alike * noise[0] + (1.0 - self.alike**2) ** 0.5 * noise[1]
        noise[..., 0] += (0.5 * self.signal) ** 0.5
        parts = {MODULATION: noise[0], TOKEN: noise[1]}
        squares = torch.zeros(len(PARTS), 1, RUNS, dtype=torch.float64)
        products, everything = torch.zeros(2, len(PARTS), 1, RUNS, RUNS, dtype=torch.float64)
        for part, gradients in parts.items():
            squares[part, 0] = gradients.square().sum((1, 2))
            of_groups = gradients.unflatten(1, (-1, self.microbatch)).sum(2)  # [RUNS, groups, DIM]
            products[part, 0] = of_groups.square().sum((1, 2)).diag()
            everything[part, 0] = gradients.sum(1).square().sum(1).diag()
        if not measured:
            squares[TOKEN] = products[TOKEN] = torch.nan
        count = torch.full((RUNS,), float(SAMPLES), dtype=torch.float64)
        pairs = count * (self.microbatch - 1)
        whole = (count * (SAMPLES - 1)).diag(), everything, torch.zeros_like(everything)
        return StepSums(count, count, pairs.diag(), squares, products, *(whole if measured else ()))


def controls(
    planted: Planted, generator: torch.Generator, composite: Composite, entries: int
) -> Iterator[tuple[PairSums, torch.Tensor]]:
    """What the composite makes of every entry: the measured step's sums and its control variates."""
    for _ in range(entries):
        steps = [planted.step(generator, measured) for measured in (*[False] * (INTERVAL - 1), True)]
        entry = functools.reduce(operator.add, (FreeSums.of(step, 0) for step in steps))
        found = composite.add(entry, steps[-1])
        assert found is not None
        yield found


def of_planted(planted: Planted, seed: int) -> tuple[BinEstimates, BinEstimates, ControlledSums]:
    """Estimates by the sketch and by the composite of every run, and the sums of the latter."""
    generator = torch.Generator().manual_seed(seed)
    sketch, controlled, composite = DecayedSums(RUNS, math.inf), ControlledSums(RUNS, math.inf), Composite(RUNS, 0, math.inf)
    for found in controls(planted, generator, composite, ENTRIES):
        sketch.add(found[0])
        controlled.add(*found)
    return sketch.estimate(), controlled.estimate(sketch.estimate()), controlled


def error(found: BinEstimates, planted: Planted) -> float:
    """Root mean square relative error of the signal's share of the second moment."""
    share = found.signal / (found.signal + found.noise)
    return (share * (1.0 + planted.b_simple) - 1.0).square().mean().sqrt().item()


# The signal's variance falls by what the proxy explains of it. A weight of 1 was worse than the sketch in the first two, and
# each bin's own coefficient alone hardly better (0.99 and 0.98).
@pytest.mark.parametrize(("b_simple", "alike", "microbatch", "at_most"), [
    (100.0, 0.0, 2, 0.98), (10.0, 0.3, 2, 0.95), (100.0, 0.3, 8, 0.9), (100.0, 0.95, 16, 0.4),
])  # fmt: skip
def test_composite_is_never_worse_than_the_sketch_and_not_biased(b_simple, alike, microbatch, at_most):
    planted = Planted(b_simple, alike, microbatch)
    sketch, composite, _ = of_planted(planted, seed=3)
    assert error(composite, planted) <= at_most * error(sketch, planted)
    assert composite.unbounded.sum() <= sketch.unbounded.sum()
    for name, truth in (("signal", planted.signal), ("noise", 2.0 * DIM)):
        values = getattr(composite, name)
        assert (values.mean() - truth).abs() < 3.0 * values.std() / RUNS**0.5, name
    inside = (composite.lower <= b_simple) & (b_simple <= composite.upper)
    assert inside.double().mean() > 0.88  # 95 % of 100 runs, 3 standard errors


def test_coefficient_is_that_of_the_pairs_where_noise_dominates():
    """With a proxy that is the whole model, beta is 1, as a microbatch's pairs are some of the step's, less the shrinkage."""
    coefficients = of_planted(Planted(1000.0, 1.0, 8), seed=4)[2].coefficients()[..., 1]
    assert 0.9 < coefficients.mean() < 1.0
    assert coefficients.std() < 0.1


def test_coefficient_of_controls_that_tell_nothing_is_zero():
    """Noise of as much spread as the sums: the standard error of beta is (80 * 24)^-1/2 = 0.02, and below two it is 0."""
    generator, sums = torch.Generator().manual_seed(6), ControlledSums(RUNS, math.inf)
    planted = Planted(10.0, 0.3, 16)
    for _ in range(ENTRIES):
        step = planted.step(generator, measured=True)
        pairs = PairSums(step.count, step.squares[MODULATION, 0], step.products[MODULATION, 0], step.pairs)
        scale = (pairs.products.diagonal() - pairs.squares).std()
        sums.add(pairs, scale * torch.randn(RUNS, 2, generator=generator, dtype=torch.float64))
    coefficients = sums.coefficients()[..., 1]
    assert coefficients.abs().max() < 0.05
    assert (coefficients == 0.0).double().mean() >= 0.5


def test_one_coefficient_for_all_bins_is_the_regression_of_the_other_folds_steps():
    """Bins of scales 1, 10 and 1000 count alike; a bin without steps does not count."""
    steps, scales, generator = 12, torch.tensor([1.0, 10.0, 1000.0, 0.0]).double(), torch.Generator().manual_seed(8)
    draws = torch.randn(steps, 4, 4, generator=generator, dtype=torch.float64)
    pairs = 5.0 + 3.0 * torch.rand(steps, 4, generator=generator, dtype=torch.float64) * (scales > 0)
    controls = scales * draws[..., 0]
    signal = scales * (0.7 * draws[..., 0] + 0.2 * draws[..., 1]) + 2.0 * scales * pairs
    sums = ControlledSums(4, math.inf)
    for step in range(steps):
        count = torch.where(scales > 0, 6.0, 0.0)
        of_step = PairSums(count, count, (signal[step] + count).diag(), (pairs[step] * (scales > 0)).diag())
        sums.add(of_step, torch.stack((torch.zeros(4).double(), controls[step]), dim=-1))
    for fold in range(4):
        joint = squares = spread = degrees = 0.0
        others = [step for step in range(steps) if step % 4 != fold]
        for k in range(3):
            n, p, c = signal[others, k], pairs[others, k], controls[others, k]
            rest = n - p * n.sum() / p.sum()
            of_bin = p.sum() ** 2 / (p**2).sum()
            share = of_bin / (rest**2).sum()
            joint, squares, spread = joint + share * (c @ rest), squares + share * (c @ c), spread + share * (rest @ rest)
            degrees = degrees + of_bin - 1.0
        explained = joint**2 / squares
        wanted = joint / squares * (1.0 - 4.0 * (spread - explained) / (degrees * explained))
        found = sums.coefficients()[fold, :, 1]
        assert found[:3].tolist() == pytest.approx([wanted.item()] * 3, rel=1e-9) and 0.3 < wanted < 1.0
        assert found[3] == 0.0


def test_coefficient_of_a_step_does_not_depend_on_the_step():
    planted, generator = Planted(10.0, 0.9, 16), torch.Generator().manual_seed(5)
    composite, sums, other = Composite(RUNS, 0, math.inf), ControlledSums(RUNS, math.inf), ControlledSums(RUNS, math.inf)
    for number, (of_step, control) in enumerate(controls(planted, generator, composite, 12), 1):
        sums.add(of_step, control)
        other.add(of_step, 3.0 * control if number == 5 else control)
    same = (sums.coefficients() == other.coefficients()).flatten(1).all(1)
    assert same.tolist() == [True, False, False, False]  # the fifth step is in the first fold
