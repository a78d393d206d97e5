"""Half-progress batches of quadratic losses against their closed form, the and the statistics over cells."""

import csv
import math

import numpy as np
import pytest
import torch

from research import gns_calibration_report as report
from research import gns_calibration_statistics as statistics
from research.gns_calibration import noise_scales
from research.gns_calibration_report import statistics_text
from research.half_progress import (
    Progress,
    Replicate,
    SampleNumbers,
    UpdateGeometry,
    WeightsLoss,
    best_step_size,
    measure_progress,
)
from research.half_progress_fit import half_progress
from research.offline_gradients import EstimateFailed, timestep_bin
from research.rank_correlation import spearman
from tests.research.test_gns_offline import gradients
from torchtitan.experiments.folder import StudyError

DIM, BLOCKS = 40, 16


class Quadratic:
    """Losses (theta - x)' H (theta - x) / 2 of normal samples x: mean gradient H theta, covariance H C H."""

    def __init__(self, samples: int = 40_000) -> None:
        generator = torch.Generator().manual_seed(5)
        self.hessian = torch.logspace(0.0, -1.0, DIM)
        self.covariance = torch.linspace(0.5, 1.5, DIM).flip(0)
        self.theta = torch.linspace(0.15, 0.6, DIM)
        self.x = torch.randn(samples, DIM, generator=generator) * self.covariance.sqrt()

    def gradient(self, numbers, step=None):
        theta = self.theta if step is None else self.theta - step
        return self.hessian * (theta - self.x[numbers]).mean(0)

    def held_loss(self, numbers):
        x = self.x[numbers].double()
        return lambda step: (0.5 * self.hessian * (self.theta.double() - step.double() - x) ** 2).sum(1).mean().item()

    def scale(self, power: float):
        """Moments tr(Q Sigma) and G' Q G of Q = H^power."""
        q = self.hessian.double() ** power
        return (q * self.hessian**2 * self.covariance).sum().item(), (q * (self.hessian * self.theta) ** 2).sum().item()

    def slope(self, scale) -> float:
        return (scale * (self.hessian * self.theta) ** 2).sum().item()

    def half_batch(self, scale) -> float:
        curved = scale**2 * self.hessian
        noise = (curved * self.hessian**2 * self.covariance).sum()
        return (noise / (curved * (self.hessian * self.theta) ** 2).sum()).item()


@pytest.fixture(scope="module")
def measured():
    """Quadratic loss, its update geometries, blocks and progress."""
    loss, numbers, batches = Quadratic(), SampleNumbers(), (1, 4, 16, 64)
    blocks = [loss.gradient(numbers.take(512)) for _ in range(BLOCKS)]
    tuning, evaluation = ([Replicate(loss, numbers.take(2)) for _ in range(48)] for _ in range(2))
    scales = [torch.ones(DIM), loss.hessian.reciprocal()]
    geometries = [UpdateGeometry(scale, loss.slope(scale), tuning, evaluation, 1e-4) for scale in scales]
    return loss, scales, geometries, blocks, measure_progress(loss, geometries, blocks, batches, numbers), batches


def test_half_progress_batch_of_a_quadratic_loss_is_its_closed_form(measured):
    loss, scales, _, _, found, batches = measured
    truths = [loss.half_batch(scale) for scale in scales]
    assert abs(math.log(truths[0] / truths[1])) > 0.4  # what exchanged geometries would show
    for truth, progress in zip(truths, found, strict=True):
        fitted = half_progress(batches, 512 * BLOCKS, progress, 0)
        error = math.log(fitted.hyperbola.upper / fitted.hyperbola.lower) / 3.92
        assert error < 0.08 and abs(math.log(fitted.hyperbola.value / truth)) < 4 * error
        assert fitted.interpolated.lower < truth < fitted.interpolated.upper


def test_best_progress_is_that_of_the_quadratic_model(measured):
    loss, scales, _, _, found, _ = measured
    for scale, progress in zip(scales, found, strict=True):
        slope, curved = loss.slope(scale), (scale**2 * loss.hessian**3 * loss.theta**2).sum().item()
        assert progress.values[:, -1].mean().item() == pytest.approx(0.5 * slope**2 / curved, rel=0.05)
        assert progress.step_sizes[-1] == pytest.approx(slope / curved, rel=0.05)
        assert progress.step_sizes == sorted(progress.step_sizes)  # smaller batches take smaller steps


def test_control_variate_leaves_no_noise_of_held_samples_along_the_full_gradient(measured):
    """The Hessian is the same for all samples, so that all of the held samples' noise is linear."""
    for progress in measured[4]:
        assert progress.values[:, -1].std().item() < 1e-5 * progress.values[:, -1].mean().item()


def test_influence_of_a_block_is_the_derivative_of_the_progress(measured):
    _, _, geometries, blocks, found, _ = measured
    full, small = torch.stack(blocks).mean(0).double(), 1e-3
    for geometry, progress in zip(geometries, found, strict=True):
        geometry.step_size = progress.step_sizes[-1]
        for number in (0, 7):
            moved = full + small * (blocks[number].double() - full)
            ends = [geometry.evaluate(0, gradient.float()) for gradient in (full, moved)]
            assert (ends[1] - ends[0]) / small == pytest.approx(progress.of_blocks[number].item(), rel=0.02)


def test_no_sample_is_drawn_twice():
    seen: list[int] = []
    loss = Quadratic()
    numbers = SampleNumbers()
    own = loss.gradient
    loss.gradient = lambda chosen, step=None: (seen.extend(chosen.tolist()) if step is None else None, own(chosen, step))[1]
    blocks = [loss.gradient(numbers.take(4)) for _ in range(2)]
    halves = [[Replicate(loss, numbers.take(3)) for _ in range(2)] for _ in range(2)]
    scale = torch.ones(DIM)
    measure_progress(loss, [UpdateGeometry(scale, loss.slope(scale), *halves, 1e-2)], blocks, [1, 4], numbers)
    assert len(seen) == 8 + 12 + 4 * (1 + 4) and len(set(seen)) == len(seen)


@pytest.mark.parametrize("start", [1e-6, 0.3, 1e4])
def test_best_step_size_is_the_vertex_wherever_the_search_starts(start):
    assert best_step_size(lambda x: 3.0 * x - x * x, start) == pytest.approx(1.5, rel=1e-9)


def test_best_step_size_beside_losses_that_are_not_finite():
    assert best_step_size(lambda x: x if x <= 1.0 else -math.inf, 0.25) == 1.0
    with pytest.raises(EstimateFailed, match="no step size"):
        best_step_size(lambda x: -x, 1.0)


def test_geometry_without_a_signal_is_refused():
    for slope in (0.0, -1.0, math.nan):
        with pytest.raises(EstimateFailed, match="more samples needed"):
            UpdateGeometry(torch.ones(2), slope, [], [], 1.0)


def exact_progress(half: float, sizes: list[int]) -> Progress:
    values = 2.0 / (1.0 + half / torch.tensor(sizes, dtype=torch.float64))
    return Progress(values.expand(4, -1), torch.zeros(BLOCKS, dtype=torch.float64), [])


def test_fit_of_an_exact_hyperbola_is_exact():
    found = half_progress([1, 4, 16, 64], 8192, exact_progress(23.0, [1, 4, 16, 64, 8192]), 0)
    assert found.hyperbola.value == pytest.approx(23.0, rel=2e-4) and found.best == pytest.approx(2.0, rel=1e-4)
    low, high, half = (2 / (1 + 23 / b) for b in (16, 64, 8192))
    crossing = 16 * 4 ** ((half / 2 - low) / (high - low))
    assert found.interpolated.value == pytest.approx(crossing, rel=1e-9)


def test_half_progress_outside_of_the_batches_is_unbounded():
    found = half_progress([16, 64], 8192, exact_progress(2.0, [16, 64, 8192]), 0)
    assert found.interpolated.lower == 0.0 and not found.interpolated.excludes(2.0)
    assert found.hyperbola.value == pytest.approx(2.0, rel=1e-3)
    nothing = half_progress([16, 64], 8192, Progress(-torch.ones(4, 3).double(), torch.zeros(2).double(), []), 0)
    assert math.isnan(nothing.hyperbola.value) and not nothing.hyperbola.bounded and not nothing.interpolated.bounded


def test_noise_scales_of_the_geometries_hold_the_closed_form():
    loss, numbers = Quadratic(), SampleNumbers()
    scales, blocks = noise_scales(loss, loss.hessian.reciprocal(), 16384, numbers, lambda amount: None)
    for name, power in (("b_g", 0), ("b_g_v14", -1), ("b_g_v12", -2)):
        noise, signal = loss.scale(power)
        found = scales[name]
        assert found.lower < noise / signal < found.upper < 1.2 * found.lower
    torch.testing.assert_close(torch.stack(blocks).mean(0), loss.gradient(torch.arange(16384)), rtol=1e-3, atol=1e-5)


def test_loss_around_weights_moves_them_and_gives_them_back():
    source = gradients()
    loss = WeightsLoss(source, timestep_bin(source.objective, 0.2, 0.6), stream=3)
    before = [parameter.detach().clone() for parameter in source.parameters]
    held, numbers = loss.held_loss(torch.arange(20)), torch.arange(20)
    gradient = loss.gradient(numbers)
    small = 1e-2 * gradient
    slope = (held(-small) - held(small)) / 2
    assert slope == pytest.approx((gradient @ small).item(), rel=1e-3)
    assert held(torch.zeros_like(small)) == held(0 * small)  # the same draws
    changed = loss.gradient(numbers, small)
    assert not torch.allclose(changed, gradient, rtol=1e-4) and torch.equal(loss.gradient(numbers), gradient)
    held(small)
    loss.restore()
    assert all(torch.equal(now, then) for now, then in zip(source.parameters, before, strict=True))


# --- statistics over cells


def test_spearman_of_repeated_points_is_that_of_the_points_written_out():
    generator = np.random.default_rng(0)
    x, y = np.round(generator.normal(size=(2, 12)), 1)
    counts = generator.integers(0, 4, size=(5, 12))
    for found, times in zip(spearman(x, y, counts), counts, strict=True):
        ranks = [[(np.sum(each < one) + np.sum(each <= one) + 1) / 2 for one in each]
                 for each in (np.repeat(x, times), np.repeat(y, times))]  # fmt: skip
        assert found == pytest.approx(np.corrcoef(ranks)[0, 1], rel=1e-12)
    assert spearman(x, x, np.ones(12)) == pytest.approx(1.0)


def cells(ratios=(0.5, 0.5), slope=1.0, noise=0.1, unbounded=0) -> list[dict[str, str]]:
    """Cells of two data sets, five ages and ten bins, whose noise scale in the geometry g predicts B_half; others do not."""
    generator, rows = np.random.default_rng(1), []
    for data, ratio in zip(("one", "two"), ratios, strict=True):
        for step in (10, 20, 40, 80, 160):
            for bin_ in range(10):
                scale = math.exp(generator.uniform(1, 6))
                values = {"b_g": scale, "b_g_v14": math.exp(generator.uniform(1, 6)), "b_g_v12": 3 * scale ** 0.5}
                half = ratio * scale**slope * math.exp(noise * generator.normal())
                values |= {f"{update}_{kind}": half for update in ("plain", "adam") for kind in ("half", "interpolated")}
                row = {"data": data, "step": str(step), "bin": str(bin_), "status": "ok"}
                for name, value in values.items():
                    ends = (value, 0.9 * value, 1.1 * value)
                    row |= dict(zip(statistics.interval_columns(name), map(str, ends), strict=True))
                rows.append(row)
    for row in rows[:unbounded]:
        row["adam_half_upper"] = "inf"
    return rows


def test_agreement_finds_slope_ratio_and_rank():
    found = statistics.agreement(cells(ratios=(0.4, 0.6), slope=1.1), "adam")
    one, whole = found.apart["one"]["b_g"], found.together["b_g"]
    assert one.slope.value == pytest.approx(1.1, abs=0.03) and not one.slope.excludes(1.1)
    assert one.rank.lower > 0.97 and found.together["b_g_v14"].rank.upper < 0.5
    # Four standard errors between means of 50: of the cells' noise, and of a tenth of ln B, uniform over a width of 5.
    error = math.sqrt(2 / 50) * math.hypot(0.1, 0.1 * 5 / math.sqrt(12))
    ratios = [found.apart[name]["b_g"].ratio.value for name in ("two", "one")]
    assert abs(math.log(ratios[0] / ratios[1] / 1.5)) < 4 * error and whole.scatter.value > one.scatter.value
    assert whole.slope.lower < whole.slope.value < whole.slope.upper


def test_an_age_that_differs_as_a_whole_widens_the_interval():
    rows = cells()
    plain = statistics.agreement(rows, "adam").together["b_g"].ratio
    for row in rows:
        if row["step"] == "160":
            row["adam_half"] = str(2 * float(row["adam_half"]))
    clustered = statistics.agreement(rows, "adam").together["b_g"].ratio
    width = [math.log(found.upper / found.lower) for found in (plain, clustered)]
    # One age of five is shifted by ln 2 in either data set: of 10 resampled ages 0 to 5 are (2.5 and 97.5 percentiles of the
    # binomial distribution), each a tenth of the mean; the noise of the cells widens that by no more than its own interval.
    assert abs(width[1] - 0.5 * math.log(2)) < width[0] < width[1] / 3


def test_report_has_the_statistics_and_a_cell_counts_once(monkeypatch, tmp_path):
    monkeypatch.setattr(statistics, "_RESAMPLES", 200)
    text = statistics_text(cells(unbounded=11))
    assert "11 of 100 cells left out" in text and "| all | g | " in text
    assert "&lt;" not in text  # a correlation below zero is no upper bound
    needed = dict.fromkeys(report._NEEDED, "1") | {"data": "digits", "step": "30", "bin": "0"}
    for name in "ab":
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "results.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(needed))
            writer.writeheader()
            writer.writerows([needed, needed])  # the later row of a cell counts
    assert len(report._read_tables([tmp_path / "a"])) == 1
    with pytest.raises(StudyError, match=r"a and .*b: both hold digits, step 30, bin 0; a cell counts once"):
        report._read_tables([tmp_path / "a", tmp_path / "b"])
