"""The batch that grows with the noise scale: when, how far, and that nothing else of a step changes."""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.cases import make_trainer
from torchtitan.config.job import ConfigError, load_config
from torchtitan.gns.batch_schedule import BatchSchedule
from torchtitan.gns.capture import StepSums
from torchtitan.gns.config import GNSConfig
from torchtitan.gns.pool import Pool
from torchtitan.reports import Reports
from torchtitan.trainer import Trainer
from torchtitan.training.batch_ramp import lr_multiple, ramp_factor, ramp_steps
from torchtitan.training.config import EMATrackConfig
from torchtitan.training.ema import kept_share

GROW = (
    "--gns.enable", "true", "--gns.num_bins", "2", "--gns.sketch_size", "2", "--gns.interval", "2", "--gns.grow_batch", "true",
    "--gns.growth_warmup", "0", "--gns.growth_interval", "1", "--gns.growth_limit", "4",
)  # fmt: skip


def factors(schedule: BatchSchedule, lowers: list[float], samples: int = 10**6) -> list[int]:
    found = []
    for step, lower in enumerate(lowers, start=1):
        schedule.update(step, samples, lower)
        found.append(schedule.factor)
    return found


def test_grows_to_the_lower_end_of_the_interval_by_doubling_at_most():
    schedule = BatchSchedule(64, limit=6, warmup=0, interval=1)
    lowers = [63.0, 127.9, 128.0, 1000.0, 1000.0, 10.0, math.nan]
    assert factors(schedule, lowers) == [1, 1, 2, 4, 6, 6, 6]
    assert factors(BatchSchedule(64, limit=8, warmup=0, interval=1), [64 * 3.5, 64 * 3.5, 64 * 3.5]) == [2, 3, 3]


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


def test_an_unknown_noise_scale_leaves_the_batch_as_it_is():
    assert factors(BatchSchedule(64, limit=8, warmup=0, interval=1), [math.nan, -math.inf, 0.0, math.inf]) == [1, 1, 1, 1]


def test_waits_for_warmup_and_interval():
    schedule = BatchSchedule(10, limit=64, warmup=1000, interval=5)
    schedule.update(1, 999, 1e9)
    assert schedule.factor == 1
    found = []
    for step in range(2, 14):
        schedule.update(step, 1000, 1e9)
        found.append(schedule.factor)
    assert found == [2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 8, 8]


def test_state_goes_on_and_obeys_a_lower_limit():
    schedule = BatchSchedule(10, limit=64, warmup=0, interval=5)
    factors(schedule, [1e9] * 11)
    assert schedule.factor == 8
    resumed = BatchSchedule(10, limit=64, warmup=0, interval=5)
    resumed.load_state_dict(schedule.state_dict())
    for step in range(12, 18):
        schedule.update(step, 10**6, 1e9)
        resumed.update(step, 10**6, 1e9)
        assert resumed.state_dict() == schedule.state_dict()
    lowered = BatchSchedule(10, limit=3, warmup=0, interval=5)
    lowered.load_state_dict(schedule.state_dict())
    assert lowered.factor == 3


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


def _one_step(folder, name: str, factor: int, before: int = 0, **arguments) -> tuple:
    """What a step of a grown batch left, after `before` steps of the first one."""
    trainer = make_trainer(str(folder), name, steps=20, replicas=1, shards=1, **arguments)
    for step in range(1, before + 1):
        trainer.state.step = step
        trainer.train_step()
    if trainer.state.gns:
        trainer.state.gns._batch.factor = factor
    trainer.state.step = before + 1
    norm, lr = trainer.train_step()
    weights = {name: parameter.detach().clone() for name, parameter in trainer.state.parameters.items()}
    ema = trainer.state.ema.tensors()
    numbers = trainer.state.progress, trainer.state.batch_size, trainer.state.data.next_sample
    trainer.close()
    return norm, lr, weights, ema, numbers


@pytest.mark.parametrize("spread", ["none", "stratified"])
def test_a_step_of_the_grown_batch_is_a_step_of_that_batch_at_the_root_of_the_rate(tmp_path, spread):
    fixed = ("--objective.spread", spread, "--lr_scheduler.warmup_steps", "0")
    grown = _one_step(tmp_path, "grown", 3, accumulation=1, overrides=(*GROW, *fixed))
    plain = _one_step(
        tmp_path, "plain", 1, accumulation=1,
        overrides=(*fixed, "--training.global_batch_size", "48", "--optimizer.lr", str(3e-3 * math.sqrt(3))),
    )
    assert torch.equal(grown[0], plain[0])
    assert grown[1] == pytest.approx(plain[1], rel=1e-12)
    for name, weight in plain[2].items():
        torch.testing.assert_close(grown[2][name], weight, rtol=0, atol=1e-8)
    assert grown[4] == (3, 48, 48) and plain[4] == (1, 48, 48)


def test_the_run_ends_after_the_images_that_it_was_to_see(tmp_path, monkeypatch):
    trainer = make_trainer(
        str(tmp_path),
        "run",
        steps=20,
        replicas=1,
        shards=1,
        accumulation=2,
        overrides=(*GROW, "--gns.log_interval", "100"),
    )
    trainer.reports.log_gns = lambda: None
    whole = {name: torch.tensor([1e9]) for name in ("b_simple", "lower", "upper", "lag")}
    certain = SimpleNamespace(**whole)
    monkeypatch.setattr(Pool, "whole", lambda *_: certain)
    trainer.state.gns.draw = lambda points, global_batch_size: None
    sizes, advance = [], trainer.reports.advance
    trainer.reports.advance = lambda: (sizes.append(trainer.state.batch_size), advance())
    assert trainer.train() == 0
    # Measured on every second step; the last one has what is left.
    assert sizes == [16, 16, 32, 32, 64, 64, 64, 32]
    assert (trainer.state.step, trainer.state.progress, trainer.state.data.next_sample) == (8, 20, 320)
    assert trainer.state.folder.is_finished()
    trainer.close()


def test_noise_between_bins_does_not_count_where_batches_are_stratified(monkeypatch):
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
    # A signal that is not positive says nothing, whatever the other way to put bins together says.
    negative = replace(stratified, b_simple=-stratified.b_simple)
    monkeypatch.setattr(pool._whole["plain", "sketch"], "estimate", lambda **_: negative)
    unknown = pool.whole("plain", "sketch", mass, True)
    assert (unknown.lower.item(), unknown.upper.item(), unknown.unbounded.item()) == (0.0, math.inf, True)
    monkeypatch.undo()
    # Taken as independent draws, half of whose pairs would be of one bin, the signal comes out too small.
    assert pool.whole("plain", "sketch").signal.item() == pytest.approx((112 * 9) / 240, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gns.rank_gradients", "true", "--gns.bin_pure_microbatches", "true"], "gns.grow_batch: the rotation"),
        (["--optimizer.name", "Muon"], "gns.grow_batch: the square-root rule"),
        (["--gns.single_pass", "false", "--gns.rank_gradients", "true"], "gns.grow_batch"),
        (["--gns.growth_limit", "1"], "gns.growth_limit"),
    ],
)
def test_what_cannot_grow_is_refused(arguments, words):
    with pytest.raises(ConfigError) as refused:
        load_config([*GROW, "--training.global_batch_size", "64", *arguments], 1)
    assert any(words in line for line in refused.value.problems)


def test_growth_keys_without_growth_are_refused():
    with pytest.raises(ConfigError, match="gns.growth_limit"):
        load_config(["--gns.enable", "true", "--gns.growth_limit", "4"], 1)


def test_a_fixed_ramp_doubles_after_each_number_of_images():
    assert [ramp_factor([100, 300], images) for images in (0, 99, 100, 299, 300, 10**9)] == [1, 1, 2, 2, 4, 4]
    assert ramp_factor([], 10**9) == 1


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
    trainer.close()


def test_a_step_of_a_fixed_ramp_is_one_of_the_measured_growth(tmp_path):
    ramp = _one_step(tmp_path, "ramp", 1, accumulation=1, overrides=("--training.double_batch_after", "[16]"), before=1)
    grown = _one_step(tmp_path, "grown", 2, accumulation=1, overrides=GROW, before=1)
    assert ramp[1] == grown[1] and ramp[4] == grown[4] == (3, 32, 48)
    for name, weight in grown[2].items():
        assert torch.equal(ramp[2][name], weight)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--training.double_batch_after", "[200, 100]"], "each above the one before"),
        (["--training.double_batch_after", "[0]"], "from 1 up"),
        (["--training.double_batch_after", str(list(range(1, 23)))], "has 22 doublings (give 20 at most)"),
        (["--training.double_batch_after", "[100]", *GROW], "gns.grow_batch chooses the batch"),
        (["--training.double_batch_after", "[100]", "--optimizer.name", "Muon"], "the square-root rule"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ConfigError) as refused:
        load_config(["--training.global_batch_size", "64", *arguments], 1)
    assert any("training.double_batch_after: " in line and words in line for line in refused.value.problems)


def test_rate_grows_with_the_square_root():
    assert [lr_multiple(factor) for factor in (1, 4, 9)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("factor", "drawn"), [(1, [10, 20, 30, 40]), (4, [12, 20, 32, 40]), (16, [16, 32, 48])])
def test_pictures_of_the_noise_scale_come_at_the_first_logged_step_of_each_interval(factor, drawn):
    found = []
    config = SimpleNamespace(gns=GNSConfig(log_interval=5, picture_interval=10))
    gns = SimpleNamespace(metrics=dict, draw=lambda points, batch: found.append(state.progress))
    state = SimpleNamespace(gns=gns, step=0, progress=0, last_step=False, grown_batch_size=8 * factor)
    reports = SimpleNamespace(
        _state=state, _config=config, _log=SimpleNamespace(write=lambda *of: None), excluded=nullcontext, _noise_scale="",
        _noise_points=SimpleNamespace(read=list), _outputs=SimpleNamespace(attempt=lambda *of: nullcontext()),
    )  # fmt: skip
    for progress in range(factor, 49, factor):
        state.step, state.progress, state.progress_before = state.step + 1, progress, progress - factor
        if progress // 5 > (progress - factor) // 5:  # logged
            Reports.log_gns(reports)
    assert found == drawn


def test_the_batch_that_advice_is_about_is_not_that_of_a_cut_last_step(tmp_path):
    """Of 10 first batches of 8, one is a step, then 4 pairs, and one is left."""
    trainer = Trainer(load_config([
        "--job.dump_folder", str(tmp_path), "--model.flavor", "debug", "--model.num_layers", "1", "--training.steps", "10",
        "--training.local_batch_size", "8", "--training.double_batch_after", "[8]", "--sampling.enable", "false",
        "--checkpoint.enable", "false", "--validation.enable", "false", "--metrics.enable_tensorboard", "false",
    ], 1))  # fmt: skip
    trainer.train()
    assert (trainer.state.batch_size, trainer.state.grown_batch_size) == (8, 16)
    trainer.close()
