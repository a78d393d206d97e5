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

from torchtitan.gns.composite import Composite, ControlledSums, FreeSums
from torchtitan.gns.decayed import BinEstimates, DecayedSums
from torchtitan.gns.statistics import PairSums
from torchtitan.gns.step_sums import PARTS, StepSums

RUNS, SAMPLES, DIM, INTERVAL, ENTRIES = 80, 16, 16, 8, 32
MODULATION, TOKEN = PARTS.index("modulation"), PARTS.index("token")
ALL_KEPT = torch.ones(1, 1, dtype=torch.float64)  # nothing decays


@dataclass(frozen=True)
class Planted:
    """Gradients of a known noise scale.

    Attributes:
        b_simple: noise scale.
        alike: correlation of the token part's noise with the modulation part's.
        microbatch: samples.
        swing: standard deviation of the logarithm of all of a step's gradients.
        alone: number of runs, the first ones, with no more than one sample in a microbatch.
    """

    b_simple: float
    alike: float
    microbatch: int
    swing: float = 0.0
    alone: int = 0

    @property
    def signal(self) -> float:
        return 2.0 * DIM / self.b_simple  # of both parts, whose noise is DIM each

    def step(self, generator: torch.Generator, measured: bool) -> StepSums:
        noise = torch.randn(2, RUNS, SAMPLES, DIM, generator=generator, dtype=torch.float64)
        noise[1] = self.alike * noise[0] + (1.0 - self.alike**2) ** 0.5 * noise[1]
        noise[..., 0] += (0.5 * self.signal) ** 0.5
        if self.swing:
            noise *= (self.swing * torch.randn(RUNS, 1, 1, generator=generator, dtype=torch.float64)).exp()
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
        pairs = count * (self.microbatch - 1) * (torch.arange(RUNS) >= self.alone)
        products[:, 0] = torch.where(pairs.diag() > 0, products[:, 0], squares[:, 0].diag_embed())
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
    sketch, controlled, composite = DecayedSums(RUNS, math.inf), ControlledSums(RUNS), Composite(RUNS, 0, math.inf)
    for found in controls(planted, generator, composite, ENTRIES):
        controlled.add(*found, sketch.add(found[0]))
    return sketch.estimate(), controlled.estimate(sketch), controlled


def error(found: BinEstimates, planted: Planted, runs: slice = slice(None)) -> float:
    """Root mean square relative error of the signal's share of the second moment."""
    share = found.signal / (found.signal + found.noise)
    return (share * (1.0 + planted.b_simple) - 1.0)[runs].square().mean().sqrt().item()


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


def test_composite_keeps_what_cancels_between_signal_and_second_moment():
    """All gradients of a step twice as large change signal and second moment alike, their share not at all. Corrected one by
    one, the second moment's swing went and the signal's stayed: the error was 1.7 times the sketch's.
    """
    planted = Planted(b_simple=3.0, alike=0.3, microbatch=2, swing=0.4)
    sketch, composite, _ = of_planted(planted, seed=3)
    assert error(composite, planted) <= error(sketch, planted)
    assert composite.unbounded.sum() <= sketch.unbounded.sum()


def test_bins_without_pairs_in_microbatches_have_the_sketch_and_do_not_change_the_others():
    """Their second moments alone took part in the common coefficients: errors were 1.02 and 0.78 times the sketch's."""
    planted = Planted(b_simple=10.0, alike=0.9, microbatch=16, swing=0.4, alone=RUNS // 2)
    sketch, composite, _ = of_planted(planted, seed=3)
    # The sketch once more, added up in folds as the composite is.
    generator, without, sums = torch.Generator().manual_seed(3), ControlledSums(RUNS), DecayedSums(RUNS, math.inf)
    for of_step, control in controls(planted, generator, Composite(RUNS, 0, math.inf), ENTRIES):
        without.add(of_step, torch.zeros_like(control), sums.add(of_step))
    plain = without.estimate(sums)
    for name in ("signal", "noise", "lower", "upper"):
        assert torch.equal(getattr(composite, name)[: planted.alone], getattr(plain, name)[: planted.alone]), name
    others = slice(planted.alone, None)
    assert error(composite, planted, others) < 0.6 * error(sketch, planted, others)


def test_coefficient_is_that_of_the_pairs_where_noise_dominates():
    """With a proxy that is the whole model, beta is 1, as a microbatch's pairs are some of the step's, less the shrinkage."""
    coefficients = of_planted(Planted(1000.0, 1.0, 8), seed=4)[2].coefficients().share[..., 1]
    assert 0.9 < coefficients.mean() < 1.0
    assert coefficients.std() < 0.1


def test_coefficient_of_controls_that_tell_nothing_is_zero():
    """Noise of as much spread as the sums: the standard error of beta is (80 * 24)^-1/2 = 0.02, and below two it is 0."""
    generator, sums = torch.Generator().manual_seed(6), ControlledSums(RUNS)
    planted = Planted(10.0, 0.3, 16)
    for _ in range(ENTRIES):
        step = planted.step(generator, measured=True)
        pairs = PairSums(step.count, step.squares[MODULATION, 0], step.products[MODULATION, 0], step.pairs)
        scale = (pairs.products.diagonal() - pairs.squares).std()
        sums.add(pairs, scale * torch.randn(RUNS, 2, generator=generator, dtype=torch.float64), ALL_KEPT)
    coefficients = sums.coefficients().share[..., 1]
    assert coefficients.abs().max() < 0.05
    assert (coefficients == 0.0).double().mean() >= 0.5


def test_a_correction_larger_than_the_second_moment_is_not_made():
    """Of one bin the controls lie far from 0, by chance, and the coefficient is that of all bins, about 1."""
    steps, bins, generator = 24, 40, torch.Generator().manual_seed(9)
    errors = torch.randn(steps, bins, generator=generator, dtype=torch.float64)
    offset = 6.0 * (torch.arange(bins) == 0)
    count = torch.ones(bins, dtype=torch.float64)
    sketch, sums = DecayedSums(bins, math.inf), ControlledSums(bins)
    for moment, control in zip(9.0 + errors - 7.0 * (offset > 0), errors + offset, strict=True):
        of_step = PairSums(count, moment, (1.1 * moment).diag(), count.diag())
        sums.add(of_step, torch.stack((control, 0.1 * control), dim=-1), sketch.add(of_step))
    found, plain = sums.estimate(sketch), sketch.estimate()
    assert sums.coefficients().moment[:, 0].mean() * 6.0 > 2.0  # which would leave less than nothing
    moments, plain_moments = found.noise + found.signal, plain.noise + plain.signal
    # Both add up the same 24 positive numbers, in other orders: 23 roundings each, and 3 until here.
    assert moments[0] == pytest.approx(plain_moments[0].item(), rel=2 * 26 * 2.0**-53)
    assert found.noise[0] > 0 and found.signal[0] > 0
    assert ((moments - plain_moments)[1:].abs() > 1e-9).all()  # which are corrected, not rounded


def test_coefficients_are_the_regressions_of_the_other_folds_steps():
    """Bins of scales 1, 10 and 1000 count alike; a bin without steps does not count."""
    steps, scales, generator = 24, torch.tensor([1.0, 10.0, 1000.0, 0.0]).double(), torch.Generator().manual_seed(8)
    draws = torch.randn(steps, 4, 4, generator=generator, dtype=torch.float64)
    pairs = (5.0 + 3.0 * torch.rand(steps, 4, generator=generator, dtype=torch.float64)) * (scales > 0)
    count = torch.where(scales > 0, 6.0, 0.0).double()
    of_moment, of_signal = scales * draws[..., 0], scales * (0.5 * draws[..., 0] + draws[..., 1])
    moment = scales * (2.0 * draws[..., 0] + 0.4 * draws[..., 2]) + 8.0 * scales * count
    signal = scales * (0.6 * draws[..., 0] + 0.8 * draws[..., 1] + 0.3 * draws[..., 3]) + 2.0 * scales * pairs
    sums = ControlledSums(4)
    for step in range(steps):
        of_step = PairSums(count, moment[step], (signal[step] + moment[step]).diag(), pairs[step].diag())
        sums.add(of_step, torch.stack((of_moment[step], of_signal[step]), dim=-1), ALL_KEPT)
    found = sums.coefficients()
    for fold in range(4):
        others = [step for step in range(steps) if step % 4 != fold]
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in ("q", "c_q", "x", "both", "c_s")}
        degrees, shares = {"q": 0.0, "x": 0.0}, []
        for k in range(3):
            n, p, q, s, c_q, c_s = (of[others, k] for of in (count.expand(steps, 4), pairs, moment, signal, of_moment, of_signal))
            r = s.sum() / q.sum()
            of_q = q - n * q.sum() / n.sum()
            of_x = s - p * s.sum() / p.sum() - r * of_q
            of_regressions = {"q": (n, of_q, [("q", of_q), ("c_q", c_q)]),
                              "x": (p, of_x, [("x", of_x), ("both", c_s - r * c_q), ("c_s", c_s)])}  # fmt: skip
            for name, (weight, target, columns) in of_regressions.items():
                worth = weight.sum() ** 2 / (weight**2).sum()
                degrees[name] += worth.item() - 1.0
                for column, values in columns:
                    rows[column].append((worth / (target**2).sum()).sqrt() * values)
            shares.append(r)
        q, c_q, x, both, c_s = (torch.cat(values) for values in rows.values())
        rest = c_s - both * (both @ c_s) / (both @ both)
        of_q, of_both = regressed(q, c_q, degrees["q"]), regressed(x, both, degrees["x"])
        of_rest = regressed(x - both * (both @ x) / (both @ both), rest, degrees["x"])
        assert 0.1 < of_q and 0.1 < of_both and 0.01 < abs(of_rest)
        of_both -= of_rest * ((both @ c_s) / (both @ both)).item()
        assert found.moment[fold, :3].tolist() == pytest.approx([of_q] * 3, rel=1e-9)
        assert found.share[fold, :3, 1].tolist() == pytest.approx([of_both + of_rest] * 3, rel=1e-9)
        assert found.share[fold, :3, 0].tolist() == pytest.approx([-of_both * r.item() for r in shares], rel=1e-9)
        assert found.moment[fold, 3] == 0.0 and not found.share[fold, 3].any()


def regressed(target: torch.Tensor, on: torch.Tensor, degrees: float) -> float:
    """Coefficient of a regression, times 1 - 4 / F."""
    beta = (target @ on) / (on @ on)
    explained = beta**2 * (on @ on)
    left = (target - beta * on).square().sum()
    return (beta * (1.0 - 4.0 * left / (degrees * explained)).clamp_min(0.0)).item()


def test_coefficient_of_a_step_does_not_depend_on_the_step():
    planted, generator = Planted(10.0, 0.9, 16), torch.Generator().manual_seed(5)
    composite, sums, other = Composite(RUNS, 0, math.inf), ControlledSums(RUNS), ControlledSums(RUNS)
    for number, (of_step, control) in enumerate(controls(planted, generator, composite, 12), 1):
        sums.add(of_step, control, ALL_KEPT)
        other.add(of_step, 3.0 * control if number == 5 else control, ALL_KEPT)
    for name in ("moment", "share"):
        one, another = (getattr(of.coefficients(), name) for of in (sums, other))
        same = (one == another).flatten(1).all(1)
        assert same.tolist() == [True, False, False, False], name  # the fifth step is in the first fold
