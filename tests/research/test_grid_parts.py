"""Parts of studies that train grids: equal samples, bins, and statistics over seeds."""

import argparse
import dataclasses
import math
from pathlib import Path

import pytest

from research import grid_options, trained_grid
from research.branch_training import run_lr
from research.equal_samples import batch_overrides, study_base, whole_samples
from research.grid_statistics import (
    counts_text,
    direction,
    mean_log_loss,
    percent,
    ranking,
    samples_to_target,
    uniform_log_loss,
    verdict,
)
from research.slot_nodes import PUBLISHED_EDGES, timestep_bins
from research.training_grid import configure
from torchtitan.config.job import load_config
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.timesteps.slot_edges import write_slot_edges
from torchtitan.errors import CheckpointError
from torchtitan.experiments.folder import StudyError
from torchtitan.statistics.interval import paired_difference
from torchtitan.training.ema import kept_share

# Student's t at 0.975 in closed form: one and two degrees of freedom.
T1, T2 = math.tan(0.475 * math.pi), 0.95 * math.sqrt(2.0 / (4 * 0.975 * 0.025))
WORDS = [
    "--training.global_batch_size=32", "--training.local_batch_size=32", "--training.steps=200", "--optimizer.lr=1e-3",
    "--lr_scheduler.warmup_steps=20", '--ema.tracks=[{"name": "ema", "decay": 0.99, "warmup_power": 0}]',
    "--objective.path=ddpm_linear", "--objective.timesteps.name=beta", "--objective.timesteps.a=3.0",
    "--objective.spread=stratified",
]  # fmt: skip


@pytest.fixture(scope="module")
def base():
    return study_base(load_config(WORDS, 1))


def test_margin_of_two_seeds_is_the_closed_form_of_their_paired_difference():
    found = paired_difference({0: 1.0, 1: 1.4, 7: 99.0}, {0: 0.9, 1: 1.1})
    deviation = abs(0.3 - 0.1) / math.sqrt(2)
    assert (found.value, found.count) == (pytest.approx(0.2), 2)
    assert found.half_width == pytest.approx(T1 * deviation / math.sqrt(2), rel=1e-6)
    assert direction(found) == "no significant difference"


def test_margin_of_three_seeds_is_the_closed_form():
    found = paired_difference({0: 0.1, 1: 0.2, 2: 0.3}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert found.half_width == pytest.approx(T2 * 0.1 / math.sqrt(3), rel=1e-6)


def test_pairing_by_seed_takes_away_what_a_seed_does_to_all():
    of_seed = {0: 0.0, 1: 5.0, 2: -3.0}
    better = {seed: value - 0.1 + 0.001 * seed for seed, value in of_seed.items()}
    assert direction(paired_difference(better, of_seed)) == "lower"
    assert direction(paired_difference(of_seed, better)) == "higher"
    assert percent(paired_difference(better, of_seed)) == ("-9.43 % [-9.65, -9.20]")


def test_a_single_seed_tells_nothing_apart():
    found = paired_difference({0: 0.0}, {0: 9.0})
    assert found.half_width == math.inf and direction(found) == "no significant difference"
    assert direction(paired_difference({0: 0.0}, {1: 9.0})) == "no significant difference"


def test_ranking_names_what_intervals_do_not_separate():
    losses = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 0.9, 1: 2.1, 2: 3.0}, "c": {0: 0.5, 1: 1.5, 2: 2.501}, "d": {}}
    assert ranking(losses) == [("c", []), ("a", ["b"]), ("b", ["a"])]


def test_ranking_is_over_the_seeds_that_all_share():
    # Of "a" the seed with the largest loss is missing; on those that both have, "b" is better.
    losses = {"a": {0: 1.0, 1: 2.0}, "b": {0: 0.9, 1: 1.9, 2: 9.0}, "none": {}}
    assert [arm for arm, _ in ranking(losses)] == ["b", "a"]
    assert [arm for arm, _ in ranking({"a": {0: 1.0}, "b": {1: 0.0}})] == ["a", "b"]


def test_an_arm_that_lost_seeds_has_no_verdict():
    reference, lower = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 1.0, 2: 2.001}
    assert verdict(lower, reference, 3) == "lower"
    assert verdict(lower, reference, 4) == "3 of 4 seeds; 1 failed"
    assert verdict(lower, {0: 1.0}, 3) == "reference: 1 of 3 seeds; 2 failed"


def test_samples_to_target_have_an_interval_only_if_every_seed_has_a_count():
    assert counts_text([100.0, 120.0], 50, 200) == f"110 [{max(110 - T1 * 10, 0):.0f}, {110 + T1 * 10:.0f}]"
    assert counts_text([100.0, math.inf, 120.0, None, 0.0], 50, 200) == "100, not within 200, 120, failed, before 50"
    assert counts_text([math.inf, math.inf], 50, 200) == "not within 200"


def test_samples_to_target_is_exact_on_a_power_law():
    samples = [1000, 3000, 4000, 9000]
    curve = [2.0 - 0.5 * math.log(n) for n in samples]
    for wanted in (1000.0, 1700.0, 3000.0, 8765.0):
        assert samples_to_target(samples, curve, 2.0 - 0.5 * math.log(wanted)) == pytest.approx(wanted, rel=1e-12)
    assert samples_to_target(samples, curve, curve[0] + 0.1) == 0.0
    assert samples_to_target(samples, curve, curve[-1] - 0.1) == math.inf


def test_samples_to_target_takes_the_first_crossing():
    assert samples_to_target([1, 2, 3, 4], [1.0, 0.0, 1.0, 0.0], 0.5) == pytest.approx(math.sqrt(2))


def test_the_two_sums_of_bins():
    errors, shares = [4.0, 1.0], [0.25, 0.75]
    assert uniform_log_loss(errors, shares) == pytest.approx(math.log(1.75))
    assert mean_log_loss(errors) == pytest.approx(math.log(2.0))


def test_samples_are_whole_steps_and_checkpoints_of_every_batch_size():
    assert whole_samples(40_000, [16, 128], 8) == 39_936
    assert whole_samples(512, [16, 128], 4) == 512
    with pytest.raises(StudyError, match="give 1024"):
        whole_samples(500, [16, 128], 8)


@pytest.mark.parametrize(("wanted", "batches", "line"), [
    (640, [64], "--samples: 640 -> 512 samples (a multiple of 8 checkpoints x 64)\n"),
    (3000, [48, 64], "--samples: 3000 -> 3072 samples (a multiple of 8 checkpoints x 192)\n"), (1024, [64], ""),
])  # fmt: skip
def test_another_number_of_samples_is_said(capsys, wanted, batches, line):
    grid_options.equal_samples(argparse.Namespace(samples=wanted, checkpoints=8), batches)
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("rule", "factors"), [("const", (1, 1)), ("sqrt", (0.5, 2)), ("linear", (0.25, 4))])
def test_equal_samples_warmup_and_lr_rule(base, rule, factors):
    for batch, factor in zip((8, 128), factors, strict=True):
        config = configure(base, batch_overrides(base, batch, 5120, 4, rule, 1), 1, "run")
        assert config.training.steps * config.training.global_batch_size == 5120
        assert config.training.local_batch_size == min(batch, 32)
        assert config.optimizer.lr == pytest.approx(1e-3 * factor, rel=1e-12)
        assert config.lr_scheduler.warmup_steps == config.training.steps / 10
        assert config.checkpoint.interval * 4 == config.training.steps and config.checkpoint.keep_latest_k == 0


def test_runs_of_a_grid_keep_the_microbatch_of_processes_that_share_tokens(base):
    shared = dataclasses.replace(base, parallelism=dataclasses.replace(base.parallelism, context_parallel_degree=2))
    assert shared.parallelism.processes == 2
    for batch, local in ((16, 16), (128, 32), (1, 1)):
        config = configure(shared, batch_overrides(shared, batch, 5120, 4, "const", 2), 2, "run")
        assert (config.training.local_batch_size, tuple(config.parallelism.degrees)) == (local, (1, 1, 2))
    config = configure(shared, batch_overrides(shared, 128, 5120, 4, "const", 4), 4, "run")
    assert (config.training.local_batch_size, tuple(config.parallelism.degrees)) == (32, (4, 1, 1))


def test_an_average_forgets_by_images_at_every_batch_size(base):
    (track,) = base.ema.tracks
    for batch in (8, 32, 128):
        kept = kept_share(track, 10**9, batch)
        assert kept ** (32 / batch) == pytest.approx(0.99, rel=1e-9)


def test_published_slots_are_the_bins_of_a_ddpm_path():
    bins = timestep_bins(build_objective(DenoisingConfig(path="ddpm_linear", prediction="noise"), 0), 7)
    assert [where.low for where in bins] == list(PUBLISHED_EDGES[:-1]) and bins[-1].high == 1000
    assert [where.label for where in bins][:2] == ["0-4", "5-12"]
    assert sum(where.share for where in bins) == pytest.approx(1.0) and bins[0].share == 0.005
    assert bins[0].nodes.index.tolist() == [0, 1, 2, 3, 4]  # fewer indices than nodes
    assert all((n := where.nodes.index).min() >= where.low and n.max() < where.high for where in bins)
    assert (bins[-1].nodes.index.double().mean().item() + 0.5) == pytest.approx(638.5, abs=1.0)


def test_bins_of_other_paths_are_ten_parts_of_t(tmp_path):
    objective = build_objective(DenoisingConfig(), 0)
    bins = timestep_bins(objective, 2)
    assert len(bins) == 10 and bins[3].nodes.t.tolist() == pytest.approx([0.325, 0.375])
    assert {round(where.share, 12) for where in bins} == {0.1}
    write_slot_edges(tmp_path / "edges.json", [0.0, 0.25, 1.0], "t")
    assert [where.share for where in timestep_bins(objective, 2, tmp_path / "edges.json")] == [0.25, 0.75]
    with pytest.raises(ValueError, match="needs 'index'"):
        timestep_bins(build_objective(DenoisingConfig(path="ddpm_linear"), 0), 2, tmp_path / "edges.json")


def test_checkpoints_of_a_batch_that_grows_are_those_of_its_interval_and_the_last(base, monkeypatch):
    """Batch 8, 3 steps apart: due at 24, 48 and 72 images; what a stop saved at 8, 40 and 64 is left out."""
    training = {"global_batch_size": 8, "local_batch_size": 8, "steps": 11, "double_batch_after": [8]}
    checkpoint = dataclasses.replace(base.checkpoint, interval=3)
    config = dataclasses.replace(base, training=dataclasses.replace(base.training, **training), checkpoint=checkpoint)
    seen = {1: 8, 2: 24, 3: 40, 4: 56, 5: 64, 6: 80, 7: 88}
    monkeypatch.setattr(trained_grid, "run_checkpoints", lambda folder: folder)
    monkeypatch.setattr(trained_grid, "checkpoint_steps", lambda folder: list(seen))
    monkeypatch.setattr(trained_grid, "samples_seen", lambda folder, step: seen[step])
    assert trained_grid._samples_at_checkpoints(Path("run"), config) == {2: 24, 4: 56, 6: 80, 7: 88}
    seen.clear()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        trained_grid._samples_at_checkpoints(Path("run"), config)


def test_runs_and_branches_of_a_study_take_a_schedule_in_images():
    words = [
        "--data.name=synthetic", "--model.flavor=debug", "--lr_scheduler.unit=images", "--lr_scheduler.warmup_images=1000",
        "--lr_scheduler.decay_type=inverse_sqrt", "--lr_scheduler.reference_images=4000", "--training.steps=500",
        "--training.global_batch_size=16", "--training.local_batch_size=8", "--optimizer.lr=0.01",
    ]  # fmt: skip
    config = load_config(words, 1)
    overrides = batch_overrides(config, 32, 16_000, 4, "const", 1)
    assert (overrides["lr_scheduler.warmup_images"], overrides["lr_scheduler.reference_images"]) == (2000, 8000)
    assert not {"lr_scheduler.warmup_steps", "lr_scheduler.reference_steps"} & overrides.keys()
    assert "lr_scheduler.epoch_images" not in overrides
    by_epoch = load_config([*words, "--lr_scheduler.epoch_images", "100"], 1)
    assert batch_overrides(by_epoch, 32, 16_000, 4, "const", 1)["lr_scheduler.epoch_images"] == 200
    ending = ["--model.num_layers=6", "--model.routing.name=tread", "--model.routing.finish_steps=50"]
    ending += ["--alignment.teacher=self", "--alignment.block=1", "--alignment.teacher_block=6"]
    ends = batch_overrides(load_config([*words, *ending, "--alignment.stop_images=4000"], 1), 32, 16_000, 4, "const", 1)
    assert (ends["model.routing.finish_steps"], ends["alignment.stop_images"]) == (50, 8000)
    assert run_lr(config, 51) == pytest.approx(0.01 * 800 / 1000)
    assert run_lr(config, 401) == pytest.approx(0.01 / math.sqrt(6400 / 4000))
