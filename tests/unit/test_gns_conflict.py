"""Conflict of bins: unbiased products by brute force, moves on quadratic losses, statistics and decision."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from torchtitan.evaluation.offline_gradients import GradientError
from torchtitan_dit.studies import gns_conflict_statistics as statistics
from torchtitan_dit.studies.bin_conflict import BLOCKS, SMALL, measure_bins, measure_moves
from torchtitan_dit.studies.block_products import block_products
from torchtitan_dit.studies.gns_calibration_statistics import UPDATES
from torchtitan_dit.studies.gns_conflict import step_sizes
from torchtitan_dit.studies.gns_conflict_report import PROTOCOL, report_text

DIM = 6


def test_products_are_unbiased_over_all_draws():
    """Every block is one of two gradients, equally likely: the mean over all 2^6 draws is exact."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.randn(2, 2, 3, generator=generator)  # [gradients, choices, P]
    scale = torch.tensor([0.5, 1.0, 3.0])
    draws = torch.tensor(list(itertools.product((0, 1), repeat=6))).view(-1, 2, 3)  # [draws, gradients, blocks]
    found = [
        block_products(torch.stack([choices[k, drawn[k]] for k in range(2)]), scale).values for drawn in draws
    ]
    true = choices.double().mean(1)
    torch.testing.assert_close(torch.stack(found).mean(0), true @ (scale * true).T, rtol=1e-6, atol=1e-9)


def test_standard_errors_are_those_of_repetitions():
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(2, 1, 5, generator=generator)
    found = [block_products(true + 0.3 * torch.randn(2, 8, 5, generator=generator)) for _ in range(600)]
    spread = torch.stack([one.values for one in found]).std(0)
    expected = torch.stack([one.errors.square() for one in found]).mean(0).sqrt()
    # Four standard errors of a standard deviation from 600 repetitions, of nearly normal values.
    torch.testing.assert_close(expected, spread, rtol=4 / (2 * 599) ** 0.5, atol=0.0)


def test_too_few_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks"):
        block_products(torch.ones(2, 2, 3))


class Quadratic:
    """Losses (theta - x)' H (theta - x) / 2 of samples x around a mean."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(DIM, DIM, generator=generator)
        self.hessian = root @ root.T / DIM
        self.theta = torch.linspace(0.2, 1.0, DIM)
        self.x = torch.randn(DIM, generator=generator) + noise * torch.randn(2048, DIM, generator=generator)
        self.taken: list[int] = []

    @property
    def mean_gradient(self):
        return self.hessian @ (self.theta - self.x.mean(0))

    def gradient(self, numbers, step=None):
        self.taken += numbers.tolist()
        theta = self.theta if step is None else self.theta - step
        return self.hessian @ (theta - self.x[numbers]).mean(0)

    def held_losses(self, numbers):
        self.taken += numbers.tolist()
        x, hessian = self.x[numbers].double(), self.hessian.double()

        def losses(step):
            away = self.theta.double() - step.double() - x
            return 0.5 * ((away @ hessian) * away).sum(1)

        return losses


SCALE = torch.linspace(0.5, 2.0, DIM)
STEP_SIZE = 0.05


def test_changes_of_quadratic_losses_are_their_closed_form():
    losses = [Quadratic(seed) for seed in (3, 4, 5)]
    bins = measure_bins(losses, {"plain": None, "adam": SCALE}, 2 * BLOCKS, 4)
    truth = torch.stack([loss.mean_gradient for loss in losses]).double()  # [K, P]
    torch.testing.assert_close(bins.products["adam"].values, truth @ (SCALE * truth).T, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bins.products["plain"].values, truth @ truth.T, rtol=1e-5, atol=1e-6)
    trained = 1
    found = measure_moves(bins, trained, SCALE, STEP_SIZE, 2, 3, 2)
    curved = torch.stack([loss.hessian for loss in losses]).double()  # [K, P, P]
    moved = torch.zeros(DIM, dtype=torch.float64)
    for _ in range(3):
        moved += STEP_SIZE * SCALE * (truth[trained] - curved[trained] @ moved)
    whole = STEP_SIZE * SCALE.double() * truth[trained]
    for move, step in (("small", SMALL * whole), ("whole", whole), ("several", moved)):
        first = -truth @ step
        second = 0.5 * torch.einsum("p,kpq,q->k", step, curved, step)
        torch.testing.assert_close(found[move].values, first + second, rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(found[move].along, first, rtol=1e-4, atol=1e-6)
    predicted = -STEP_SIZE * bins.products["adam"].values[trained]
    torch.testing.assert_close(found["whole"].along, predicted, rtol=1e-4, atol=1e-6)
    assert (found["several"].along - 3 * predicted).abs().max() > 0.05 * predicted.abs().max()  # the gradient changes


def test_standard_error_of_a_change_is_that_of_its_held_samples():
    loss = Quadratic(6, noise=0.5)
    bins = measure_bins([loss], {"plain": None}, 2 * BLOCKS, 40)
    whole = measure_moves(bins, 0, None, STEP_SIZE, 8, 1, 2)["whole"]
    step = STEP_SIZE * loss.gradient(torch.arange(bins.used, bins.used + 8))
    single = -(loss.theta - loss.x[2 * BLOCKS : 2 * BLOCKS + 40]) @ loss.hessian @ step
    assert whole.errors.item() == pytest.approx(single.double().std().item() / 40**0.5, rel=1e-4)


def test_no_sample_serves_two_purposes():
    losses = [Quadratic(seed, noise=0.1) for seed in (7, 8)]
    bins = measure_bins(losses, {"plain": None}, 2 * BLOCKS, 5)
    measure_moves(bins, 0, None, STEP_SIZE, 6, 4, 3)
    assert len(losses[0].taken) == 2 * BLOCKS + 5 + 6 + 4 * 3 and len(set(losses[0].taken)) == len(losses[0].taken)
    assert losses[1].taken == list(range(2 * BLOCKS + 5))


def test_a_move_that_diverges_leaves_the_others_their_answer():
    loss = Quadratic(9)
    bins, own = measure_bins([loss], {"plain": None}, 2 * BLOCKS, 2), loss.gradient

    def gradient(numbers, step=None):
        if step is not None and step.any():
            raise GradientError("the gradient is not finite")
        return own(numbers, step)

    loss.gradient = gradient
    found = measure_moves(bins, 0, None, STEP_SIZE, 2, 3, 2)
    assert found["several"].values.isnan().all() and found["whole"].values.isfinite().all()


def test_plain_steps_have_the_length_of_adams_along_the_objectives_gradient():
    losses = [Quadratic(seed) for seed in (3, 4)]
    bins = measure_bins(losses, {"plain": None}, 2 * BLOCKS, 2)
    found = step_sizes(bins, [0.25, 0.75], SCALE, 1e-3)
    whole = 0.25 * losses[0].mean_gradient + 0.75 * losses[1].mean_gradient
    assert found["adam"] == 1e-3
    assert found["plain"] * whole.norm().item() == pytest.approx(1e-3 * (SCALE * whole).norm().item(), rel=1e-5)


# --- statistics


def rows(slope=1.0, noise=0.0, seeds=4, weak=0, flip=0.0) -> list[dict[str, str]]:
    """Rows of checkpoints with four bins; measured effects are `slope` times the predictions."""
    generator, found = np.random.default_rng(2), []
    for seed in range(seeds):
        vectors = generator.normal(size=(4, 3)) * np.array([[1.0], [2.0], [5.0], [0.1]])
        products = vectors @ vectors.T
        for trained in range(4):
            signals = products.diagonal()
            row = {"data": "digits", "run_seed": str(seed), "checkpoint": f"c{seed}", "step": "60", "bin": str(trained),
                   "status": "ok", "several": "20", "edges": "0 0.25 0.5 0.75 1"}  # fmt: skip
            numbers = {"products": products[trained], "products_se": 0.01 * np.sqrt(signals * signals[trained]),
                       "signals": signals, "signals_se": np.where(np.arange(4) < weak, signals, 0.1 * signals)}  # fmt: skip
            for move, size in (("small", 0.1), ("whole", 1.0), ("several", 20.0)):
                unit = 0.5 * size * np.sqrt(signals * signals[trained])
                signs = np.where((generator.random(4) < flip) & (np.arange(4) != trained), -1.0, 1.0)
                effect = signs * slope * 0.5 * size * products[trained] + noise * unit * generator.normal(size=4)
                numbers |= {f"{move}_change": -effect, f"{move}_change_se": 0.01 * unit,
                            f"{move}_along": -0.5 * size * products[trained]}  # fmt: skip
            texts = {name: " ".join(map(str, values)) for name, values in numbers.items()}
            for update in UPDATES:
                row |= {f"{update}_step_size": "0.5"} | {f"{update}_{name}": text for name, text in texts.items()}
            found.append(row)
    return found


FOUR_SEEDS = replace(PROTOCOL, parts=tuple(("digits", str(seed)) for seed in range(4)), cells=4)


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "_RESAMPLES", 200)


@pytest.mark.parametrize("move", statistics.MOVES)
def test_effects_are_in_units_of_the_prediction(move):
    found = statistics.effects(rows(slope=0.9), "adam", move)
    assert np.allclose(found.changed, 0.9 * found.predicted) and np.allclose(found.along, found.predicted)
    own = found.trained == found.measured
    assert np.allclose(found.predicted[own], 1.0) and (np.abs(found.predicted) < 1 + 1e-9).all()
    one = statistics.finding(found)
    assert one.slope.value == pytest.approx(0.9) and one.own.value == pytest.approx(0.9) and one.signs.value == 1.0
    assert one.correlation.value == pytest.approx(1.0) and one.rank.value == pytest.approx(1.0)
    assert one.pairs == 4 * 12 and one.conflicts == one.harms > 0 and statistics.predicts(one)


def test_bins_without_a_signal_are_left_out():
    found = statistics.effects(rows(weak=1), "adam", "whole")
    assert found.left_out == 4 * 7 and not (found.trained == 0).any() and not (found.measured == 0).any()


def test_what_refutes_the_prediction():
    for changed in ({"slope": 0.5}, {"flip": 0.5}, {"noise": 3.0}):
        one = statistics.finding(statistics.effects(rows(seeds=12, **changed), "adam", "whole"))
        assert statistics.refuted(one) and not statistics.predicts(one), changed
    good = statistics.finding(statistics.effects(rows(seeds=12, noise=0.05), "adam", "whole"))
    assert statistics.predicts(good) and not statistics.refuted(good)


def test_diverged_moves_refute_where_they_are_many(tmp_path):
    for count, diverges in ((1, False), (2, True)):
        made = rows()
        for row in made[:count]:
            row["adam_several_change"] = "nan nan nan nan"
        found = statistics.effects(made, "adam", "several")
        assert (found.diverged, found.cells, found.diverges) == (count, 16, diverges) and np.isfinite(found.changed).all()
    text = report_text(made, tmp_path, FOUR_SEEDS)
    assert "several: refuted (diverges)" in text and "several in 2 of 16 cells" in text and "several: predicted" in text


def test_one_checkpoint_has_no_interval():
    assert statistics.finding(statistics.effects(rows(seeds=1), "adam", "whole")) is None


def test_report_decides_only_when_every_cell_is_there(tmp_path):
    text = report_text(rows(), tmp_path, FOUR_SEEDS)
    assert "digits run_seed 3 4 of 4" in text and "whole: predicted" in text and "Interim" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"conflict_plain.png", "conflict_adam.png", "conflict_points.png"}
    # As many cells in all, of a seed that is not registered instead of one that is.
    others = [row | {"run_seed": row["run_seed"].replace("3", "4")} for row in rows()]
    partly = report_text(others, tmp_path, FOUR_SEEDS)
    assert "run_seed 3 0 of 4, digits run_seed 4 4 of 0 cells" in partly and "predicted;" not in partly
