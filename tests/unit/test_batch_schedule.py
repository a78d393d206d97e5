"""The batch that doubles after numbers of images: when, and that nothing else of a step changes."""

import math
from collections import Counter

import pytest
import torch

from tests.configurations import problems
from tests.distributed.cases import make_trainer
from torchtitan.gns.pool import Pool
from torchtitan.gns.step_sums import StepSums
from torchtitan.state.run_state import RunState
from torchtitan.training.config import EMATrackConfig
from torchtitan.training.ema import kept_share
from torchtitan.training.schedules import ramp_factor, ramp_steps


@pytest.mark.parametrize(
    ("doublings", "batch_size", "steps"),
    [([], 16, 10), ([64], 16, 10), ([1, 2, 3], 8, 100), ([48, 100], 8, 20), ([7, 500, 900], 8, 101), ([10_000], 16, 10)],
)
def test_steps_of_a_ramp_are_those_counted_one_by_one(doublings, batch_size, steps):
    counted, progress = Counter(), 0
    while progress < steps:  # the trainer's rule
        factor = min(ramp_factor(doublings, progress * batch_size), steps - progress)
        counted[factor] += 1
        progress += factor
    assert ramp_steps(doublings, batch_size, steps) == counted


@pytest.mark.parametrize(
    "track",
    [
        EMATrackConfig(kind="constant", decay=0.99, warmup_power=0.0),
        EMATrackConfig(kind="half_life", half_life=1000.0, rampup_ratio=0.0),
        EMATrackConfig(kind="power", sigma_rel=0.1),
    ],
    ids=lambda track: track.kind,
)
def test_a_step_of_a_batch_n_times_as_large_keeps_what_n_steps_keep(track):
    one_by_one = math.prod(kept_share(track, step, 16) for step in (11, 12, 13))
    assert kept_share(track, 13, 16, 3) == pytest.approx(one_by_one, rel=1e-12)


def _one_step(folder, name: str, **arguments) -> tuple:
    trainer = make_trainer(str(folder), name, steps=20, replicas=1, shards=1, accumulation=1, **arguments)
    trainer.state.step = 1
    norm, lr = trainer.train_step()
    weights = {name: parameter.detach().clone() for name, parameter in trainer.state.parameters.items()}
    numbers = trainer.state.progress, trainer.state.batch_size, trainer.state.data.next_sample
    trainer.close()
    return norm, lr, weights, numbers


@pytest.mark.parametrize("spread", ["none", "stratified"])
def test_a_step_of_the_grown_batch_is_a_step_of_that_batch_at_the_root_of_the_rate(tmp_path, spread, monkeypatch):
    fixed = ("--objective.spread", spread, "--lr_scheduler.warmup_steps", "0")
    plain = _one_step(
        tmp_path, "plain", overrides=(*fixed, "--training.global_batch_size", "48", "--optimizer.lr", str(3e-3 * math.sqrt(3)))
    )
    monkeypatch.setattr(RunState, "grown_factor", 3)
    grown = _one_step(tmp_path, "grown", overrides=fixed)
    assert torch.equal(grown[0], plain[0])
    assert grown[1] == pytest.approx(plain[1], rel=1e-12)
    for name, weight in plain[2].items():
        torch.testing.assert_close(grown[2][name], weight, rtol=0, atol=1e-8)
    assert grown[3] == (3, 48, 48) and plain[3] == (1, 48, 48)


def test_noise_between_bins_does_not_count_where_batches_are_stratified():
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([[3.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    pool = Pool(2, 1, 1e9)
    for _ in range(2000):
        g = means[:, None] + torch.randn(2, 8, 2, generator=generator, dtype=torch.float64)
        sums, count = g.sum(1), torch.full((2,), 8.0, dtype=torch.float64)
        squares, products = g.square().sum((1, 2)), sums @ sums.T
        pairs = torch.outer(count, count) - count.diag()
        parts = torch.zeros(4, 1, 2, dtype=torch.float64), torch.zeros(4, 1, 2, 2, dtype=torch.float64)
        parts[0][0, 0], parts[1][0, 0] = squares, products
        none = torch.zeros(4, 1, 2, 2, dtype=torch.float64)
        pool.add(StepSums(count, squares, pairs, *parts, pairs, parts[1], none))
    mass = torch.tensor([0.5, 0.5], dtype=torch.float64)
    # |G|^2 = 4.5; noise 2 within the bins, and 4.5 between them.
    independent, stratified = (pool.whole("plain", "sketch", mass, stratified) for stratified in (False, True))
    assert stratified.signal.item() == pytest.approx(4.5, rel=0.03)
    assert independent.b_simple.item() == pytest.approx(6.5 / 4.5, rel=0.05)
    assert stratified.b_simple.item() == pytest.approx(2.0 / 4.5, rel=0.05)
    for found in (independent, stratified):
        assert 0.8 * found.b_simple < found.lower < found.b_simple < found.upper < 1.25 * found.b_simple
    # Taken as independent draws, half of whose pairs would be of one bin, the signal comes out too small.
    assert pool.whole("plain", "sketch").signal.item() == pytest.approx((112 * 9) / 240, rel=0.03)


def test_a_run_with_a_fixed_ramp_counts_steps_and_intervals_in_its_first_batch(tmp_path, monkeypatch):
    trainer = make_trainer(
        str(tmp_path), "run", steps=20, replicas=1, shards=1, accumulation=2,
        overrides=("--training.double_batch_after", "[48, 100]", "--checkpoint.enable", "true", "--checkpoint.interval", "5"),
    )  # fmt: skip
    sizes, saved, advance, save = [], [], trainer.reports.advance, trainer._save
    monkeypatch.setattr(trainer.reports, "advance", lambda: (sizes.append(trainer.state.batch_size), advance()))
    monkeypatch.setattr(trainer, "_save", lambda: (saved.append(trainer.state.progress), save()))
    assert trainer.train() == 0
    assert sizes == [16, 16, 16, 32, 32, 64, 64, 64, 16]  # 48, 112 and 304 images passed; then what is left of 320
    assert saved == [5, 11, 15, 20]  # the first step at or after each fifth of the first batch's
    assert (trainer.state.step, trainer.state.data.next_sample) == (9, 320)
    assert (trainer.state.batch_size, trainer.state.grown_batch_size) == (16, 64)  # advice is not about a cut last step
    trainer.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--training.double_batch_after", "[200, 100]"], "each above the one before"),
        (["--training.double_batch_after", "[0]"], "from 1 up"),
        (["--training.double_batch_after", str(list(range(1, 23)))], "has 22 doublings (give 20 at most)"),
        (["--training.double_batch_after", "[100]", "--optimizer.name", "Muon"], "the square-root rule"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(arguments, words):
    found = problems(arguments=["--training.global_batch_size", "64", *arguments])
    assert any("training.double_batch_after: " in line and words in line for line in found)
