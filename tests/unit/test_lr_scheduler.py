"""Schedules counted in images: rates that were published, per epoch and per image, in runs whose batch grows too."""

import math
from pathlib import Path

import pytest

from tests.configurations import problems
from tests.distributed.cases import make_trainer
from torchtitan.config.job import JobConfig, load_config
from torchtitan.experiments.autotune.probe import probe_config
from torchtitan.settings.record import effective
from torchtitan.state.resume import schedule_changes
from torchtitan.training.config import LRSchedulerConfig
from torchtitan.training.schedules import lr_factor, lr_phase

# Warm-up over 200 epochs of CIFAR, decay from epoch 400 on.
PER_EPOCH = LRSchedulerConfig(
    unit="images", decay_type="inverse_sqrt", warmup_images=10_000_000, reference_images=20_000_000, epoch_images=50_000
)
# 512 x 512 latents: warm-up over 10 M images, decay from 70,000 batches of 2048 on.
PER_IMAGE = LRSchedulerConfig(
    unit="images", decay_type="inverse_sqrt", warmup_images=10_000_000, reference_images=70_000 * 2048
)
STEPS = 195_313  # 2,000 epochs in batches of 512


def test_the_jump_of_a_decay_that_is_made_longer_is_said():
    first = 1e-3 * 0.5 * (1 + math.cos(math.pi * 99 / 100))
    second = 1e-3 * 0.5 * (1 + math.cos(math.pi * 100 / 200))
    jump = f"the rate jumps from {first:.2g} to {second:.2g}"
    said = f"training.steps: 100 -> 200: the cosine decay has a new length, {jump}"

    def of(steps: int, *words: str) -> JobConfig:
        schedule = ("--lr_scheduler.decay_type", "cosine", "--lr_scheduler.warmup_steps", "0", "--optimizer.lr", "1e-3")
        return load_config(["digits", "--training.steps", str(steps), *schedule, *words], 1)

    def saved(progress: int, steps: int, *words: str) -> dict:
        return {"progress": progress, "config": effective(of(steps, *words))}

    assert schedule_changes(of(200), saved(100, 100)) == [said]
    assert schedule_changes(of(200), saved(50, 200)) == schedule_changes(of(100), saved(100, 200)) == []
    rising = ("--lr_scheduler.warmup_steps", "50")  # step 11 has the same rate in both
    without = [said.removesuffix(f", {jump}")]
    assert schedule_changes(of(200, *rising), saved(10, 100, *rising)) == without
    other = ("--optimizer.lr", "1e-4")  # the rate before was that of 1e-3
    assert schedule_changes(of(200, *other), saved(100, 100)) == without
    constant = ("--lr_scheduler.decay_type", "constant")
    assert schedule_changes(of(200, *constant), saved(100, 100, *constant)) == []
    (counts,) = schedule_changes(of(100, "--training.global_batch_size", "64"), saved(50, 100))
    assert counts.endswith("takes each of its steps as 64, not 128")


def test_per_epoch_rates_are_the_published_ones_and_constant_within_an_epoch():
    wanted = {0: 1e-4, 99: 0.01, 199: 0.02, 400: 0.02, 800: 0.0141421, 1600: 0.01, 1999: 0.00894651}
    for epoch, rate in wanted.items():
        first, last = -(-epoch * 50_000 // 512) + 1, -(-(epoch + 1) * 50_000 // 512)
        found = {0.02 * lr_factor(PER_EPOCH, step, STEPS, 512) for step in (first, (first + last) // 2, last)}
        assert len(found) == 1 and found.pop() == pytest.approx(rate, rel=5e-6), epoch
        before = lr_factor(PER_EPOCH, max(first - 1, 1), STEPS, 512)
        assert (before != lr_factor(PER_EPOCH, first, STEPS, 512)) == (epoch not in (0, 400))
    assert lr_factor(PER_EPOCH, 100_000, 10**9, 512) == lr_factor(PER_EPOCH, 100_000, STEPS, 512)


@pytest.mark.parametrize(("warmup", "reference"), [(200, 400), (10, 4), (0, 3), (7, 7)])
def test_per_epoch_rates_have_their_closed_form_also_where_the_decay_begins_within_the_warmup(warmup, reference):
    config = LRSchedulerConfig(
        unit="images", decay_type="inverse_sqrt", warmup_images=100 * warmup, reference_images=100 * reference,
        epoch_images=100,
    )  # fmt: skip
    for step in range(1, 4000, 7):
        epoch = (step - 1) * 32 // 100
        rate = (epoch + 1) / warmup if epoch < warmup else 1 / math.sqrt(max(epoch / reference, 1))
        assert lr_factor(config, step, 4000, 32) == pytest.approx(rate, rel=1e-14)


def test_per_image_rates_are_those_of_edm2():
    assert lr_factor(PER_IMAGE, 1, 10**6, 2048) == 0.0
    for batches in (1, 2441, 4882, 4883, 70_000, 70_001, 140_000, 2**20):
        images = 2048 * batches
        rate = 0.012 / math.sqrt(max(images / (70_000 * 2048), 1)) * min(images / 10e6, 1)
        assert 0.012 * lr_factor(PER_IMAGE, batches + 1, 10**6, 2048) == pytest.approx(rate, rel=1e-14)


@pytest.mark.parametrize("shape", ["linear", "cosine", "inverse_sqrt"])
def test_a_schedule_in_images_without_warmup_is_that_in_steps(shape):
    in_steps = LRSchedulerConfig(decay_type=shape, reference_steps=30)
    in_images = LRSchedulerConfig(unit="images", decay_type=shape, reference_images=30 * 48)
    for step in range(1, 101):
        assert lr_factor(in_images, step, 100, 48) == lr_factor(in_steps, step, 100, 48)


def test_a_line_and_a_half_cosine_come_down_in_images():
    config = LRSchedulerConfig(unit="images", decay_type="linear", warmup_images=500, min_lr_factor=0.1)
    assert lr_factor(config, 26, 100, 10) == 0.5  # 250 of 500 images
    assert lr_factor(config, 76, 100, 10) == pytest.approx(0.55)  # the middle of the other 500
    cosine = LRSchedulerConfig(unit="images", decay_type="cosine", epoch_images=100)
    assert lr_factor(cosine, 56, 100, 10) == pytest.approx(0.5) == lr_factor(cosine, 60, 100, 10)


@pytest.mark.parametrize(("unit", "per_step"), [("steps", 1), ("images", 64)])
def test_a_rate_is_held_to_a_step_and_comes_down_to_another(unit, per_step):
    """2e-4 to 2e-5 between epochs 40 and 800, of 100 steps each."""
    config = LRSchedulerConfig(
        unit=unit, warmup_steps=100, warmup_images=100 * 64, decay_type="linear", min_lr_factor=0.1,
        decay_between=[4_000 * per_step, 80_000 * per_step],
    )  # fmt: skip
    wanted = {1: 0.01 if unit == "steps" else 0.0, 101: 1.0, 4_001: 1.0, 42_001: 0.55, 61_001: 0.325, 80_001: 0.1, 99_000: 0.1}
    for step, factor in wanted.items():
        assert lr_factor(config, step, 100_000, 64) == lr_factor(config, step, 200_000, 64) == pytest.approx(factor), step
    assert lr_phase(config, 42_001, 100_000, 64) == "in the linear decay, at 55 % of the peak learning rate"
    assert lr_phase(config, 99_000, 100_000, 64) == "after the decay, at 10 % of the peak learning rate"
    cosine = LRSchedulerConfig(decay_type="cosine", decay_between=[10, 20])
    assert lr_factor(cosine, 16, 100) == pytest.approx(0.5)


def test_the_rate_of_a_grown_batch_follows_the_images(tmp_path):
    trainer = make_trainer(
        str(tmp_path), "run", steps=40, replicas=1, shards=1, accumulation=1,
        overrides=(
            "--training.double_batch_after=[16,48,64]", "--lr_scheduler.unit=images",
            "--lr_scheduler.warmup_images=100", "--lr_scheduler.decay_type=inverse_sqrt",
            "--lr_scheduler.reference_images=128",
        ),
    )  # fmt: skip
    state = trainer.state
    for factor in (1, 2, 4, 8):
        state.step += 1
        images = state.data.next_sample
        _, lr = trainer.train_step()
        rate = 3e-3 * min(images / 100, 1) / math.sqrt(max(images / 128, 1)) * math.sqrt(factor)
        assert lr == pytest.approx(rate, rel=1e-12)
        assert state.optimizer.param_groups[0]["lr"] == lr
    assert state.data.next_sample == 16 * 15
    trainer.close()


# --- keys


@pytest.mark.parametrize(("arguments", "line"), [
    (["--lr_scheduler.warmup_images=100"],
     "--lr_scheduler.warmup_images: has no effect when lr_scheduler.unit = steps; remove it or set "
     "lr_scheduler.unit = images"),
    (["--lr_scheduler.unit=images", "--lr_scheduler.warmup_steps=5"],
     "--lr_scheduler.warmup_steps: has no effect when lr_scheduler.unit = images; remove it or set "
     "lr_scheduler.unit = steps"),
    (["--lr_scheduler.decay_type=linear", "--lr_scheduler.warmup_steps=5", "--lr_scheduler.decay_between=[4,9]"],
     "--lr_scheduler.decay_between: [4, 9] must be two rising numbers of steps, the first at least 5, the warm-up"),
    (["--lr_scheduler.decay_type=cosine", "--lr_scheduler.decay_between=[9]"],
     "--lr_scheduler.decay_between: [9] must be two rising numbers of steps, the first at least 0, the warm-up"),
])  # fmt: skip
def test_mixtures_and_impossible_schedules_are_refused_in_one_line(arguments, line):
    assert problems(arguments=arguments) == [f"command line: {line}"]


WORDS = [
    "--data.name=synthetic", "--model.flavor=debug", "--lr_scheduler.unit=images", "--lr_scheduler.warmup_images=1000",
    "--lr_scheduler.decay_type=inverse_sqrt", "--lr_scheduler.reference_images=4000", "--training.steps=500",
    "--training.global_batch_size=16", "--training.local_batch_size=8", "--optimizer.lr=0.01",
]  # fmt: skip


def test_short_runs_take_a_schedule_in_images(tmp_path: Path):
    probed, _ = probe_config(load_config(WORDS, 1), 1, tmp_path)
    assert probed.training.steps * 16 < 1000  # the warm-up would not fit
    assert (probed.lr_scheduler.unit, probed.lr_scheduler.warmup_steps) == ("steps", 0)


def test_phase_of_the_schedule_is_named_with_its_rate():
    cosine = LRSchedulerConfig(warmup_steps=10, decay_type="cosine")
    assert lr_phase(cosine, 5, 110) == "in warm-up, at 50 % of the peak learning rate"
    assert lr_phase(cosine, 10, 110) == lr_phase(cosine, 11, 110) == "at the peak learning rate"
    assert lr_phase(cosine, 61, 110) == "in the cosine decay, at 50 % of the peak learning rate"
    assert lr_phase(LRSchedulerConfig(), 110, 110) == "at the peak learning rate"
    root = LRSchedulerConfig(decay_type="inverse_sqrt", reference_steps=25)
    assert lr_phase(root, 101, 1000) == "in the inverse square root decay, at 50 % of the peak learning rate"
