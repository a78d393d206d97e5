"""Decisions, intervals and plans of a critical-batch measurement, and what a branch begins with."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from research import branch_measurement
from research.branch_measurement import HeldOut, _hold_to_settings
from research.branch_training import TRACK, begin_branch, branch_config, run_lr, write_config, write_start
from research.critical_batch_decision import (
    CriticalBatch,
    Excess,
    bin_test,
    critical_batch,
    excesses,
    progress,
    ratio_to_estimate,
)
from research.critical_batch_report import (
    BinFindings,
    Finding,
    NoiseScale,
    _learned_bins_text,
    critical_text,
    interval_text,
    noise_scales,
)
from research.equal_samples import plan_batches
from research.frame import StudyRun
from torchtitan.checkpoint.checkpointer import Checkpointer, checkpoint_path, verify
from torchtitan.checkpoint.comparison import open_checkpoint
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.config.job import JobConfig, load_config
from torchtitan.data import DATASETS
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.statistics.interval import Interval, mean_interval
from torchtitan.training.ema import kept_share

SIZES = [8, 16, 32, 64]


def exact(means: list[float], margin: float = 0.001) -> list[Excess]:
    """Excesses of SIZES with these means and narrow intervals; NaN: missing."""
    return [
        Excess(size, () if math.isnan(mean) else (mean, mean), Interval(mean, mean - margin, mean + margin))
        for size, mean in zip(SIZES, means, strict=True)
    ]


@pytest.mark.parametrize(
    "means, expected",
    [
        ([0, 0.004, 0.006, 0.03], CriticalBatch("equal", 32, 32, 64)),
        ([0, 0.004, 0.006, 0.008], CriticalBatch("at least", 64, 64, None)),
        ([0, 0.02, 0.03, 0.05], CriticalBatch("below", 16, None, 16)),
        # A larger batch that passes after one that failed does not count, but is told.
        ([0, 0.004, 0.03, 0.002], CriticalBatch("equal", 16, 16, 32, larger=64)),
        # Branches that are missing are no reason to fail.
        ([0, 0.004, math.nan, math.nan], CriticalBatch("at least", 16, 16, None)),
        ([0, -0.05, -0.06, -0.07], CriticalBatch("at least", 64, 64, None)),
        ([0, 0.004, math.inf, math.inf], CriticalBatch("equal", 16, 16, 32)),
    ],
)
def test_critical_batch_is_the_last_before_the_first_beyond_the_tolerance(means, expected):
    assert critical_batch(exact(means), 0.01) == expected


def test_wide_intervals_leave_the_decision_open_on_both_sides():
    found = exact([0, 0.004, 0.006, 0.03], margin=0.005)
    assert [excess.verdict(0.01) for excess in found] == ["within", "within", "undecided", "beyond"]
    assert critical_batch(found, 0.01) == CriticalBatch("equal", 32, 16, 64)
    assert critical_batch(exact([0, 0.004, 0.006, 0.03], margin=1.0), 0.01) == CriticalBatch("equal", 32, None, None)


def test_the_tolerance_itself_is_within():
    assert critical_batch(exact([0, 0.01, 0.01, 0.011], margin=0.0), 0.01) == CriticalBatch("equal", 32, 32, 64)


def test_branches_that_learned_less_than_the_tolerance_answer_nothing():
    found = exact([0, 0.001, 0.002, 0.003])
    assert critical_batch(found, 0.01, learned=0.009) == CriticalBatch("unresolved")
    assert critical_batch(found, 0.01, learned=0.011).relation == "at least"
    assert critical_batch(found, 0.01, learned=math.nan) == CriticalBatch("unknown")


def test_excess_is_paired_by_seed_with_the_interval_of_student():
    """Seeds that differ much in level but not in ratio give a narrow interval; by hand with t(0.975, 2) = 4.302653."""
    losses = {8: {0: 1.0, 1: 2.0, 2: 4.0}, 16: {0: 1.01, 1: 2.04, 2: 4.12}}
    reference, other = excesses(losses, [8, 16])
    assert other.mean.value == pytest.approx(0.02)
    assert other.mean.upper - other.mean.value == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-6)
    assert other.mean.value - other.mean.lower == pytest.approx(other.mean.upper - other.mean.value)
    assert reference.mean == Interval(0, 0, 0, count=3)


def test_seeds_without_their_pair_are_left_out():
    losses = {8: {0: 1.0, 1: 2.0, 2: math.inf}, 16: {1: 2.02, 2: 0.5, 3: 9.0}, 32: {}}
    found = excesses(losses, [8, 16, 32])
    assert found[1].by_seed == pytest.approx((0.01,))
    assert (found[1].mean.lower, found[1].mean.upper) == (-math.inf, math.inf)
    assert not found[2].known and found[2].verdict(0.01) == "missing"


def test_one_diverged_branch_puts_its_batch_size_beyond():
    found = excesses({8: {0: 1.0, 1: 1.0}, 16: {0: math.inf, 1: 1.0}}, [8, 16])
    assert found[1].verdict(0.01) == "beyond"
    assert critical_batch(found, 0.01) == CriticalBatch("below", 16, None, 16)


def test_intervals_cover_as_often_as_they_say():
    """Means of three normal values: 95 % of the intervals hold the true one (standard error of the count: 0.5 %)."""
    values = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hits = sum(not mean_interval(three).excludes(0.0) for three in values.tolist())
    assert 0.935 < hits / 2000 < 0.965


def test_progress_is_what_there_was_to_lose():
    assert progress(1.2, [1.0, 1.0, math.inf]) == pytest.approx(0.2)
    assert math.isnan(progress(1.2, [math.inf]))


def test_ratio_to_an_estimate_takes_both_intervals_at_their_worst():
    ratio = ratio_to_estimate(CriticalBatch("equal", 32, 16, 64), Interval(20.0, 10.0, 40.0))
    assert (ratio.value, ratio.lower, ratio.upper) == (1.6, 0.4, 6.4)
    ratio = ratio_to_estimate(CriticalBatch("at least", 64, None, None), Interval(20.0, 10.0))
    assert (ratio.lower, ratio.upper) == (0.0, math.inf)
    assert ratio_to_estimate(CriticalBatch("equal", 32, 16, 64), Interval(math.nan, 10.0)) is None
    assert ratio_to_estimate(CriticalBatch("unresolved"), Interval(20.0, 10.0, 40.0)) is None


@pytest.mark.parametrize(
    "critical, words, interval",
    [
        (CriticalBatch("equal", 32, 16, 64), "32", "[16, 64)"),
        (CriticalBatch("at least", 64, 64, None), "at least 64", "at least 64"),
        (CriticalBatch("below", 16, None, 16), "below 16", "below 16"),
        (CriticalBatch("equal", 16, None, None), "16", "undecided"),
        (CriticalBatch("unresolved"), "no answer: branches learned 0.5 %, no more than the tolerance", ""),
    ],
)
def test_words_say_how_much_is_known(critical, words, interval):
    assert critical_text(Finding([], critical, 0.005)) == words
    assert interval_text(critical) == interval


def test_noise_scales_are_the_last_ones_up_to_the_checkpoint(tmp_path):
    def point(step, **values):
        return json.dumps({"step": step} | {f"gns/plain/sketch/all/{name}": value for name, value in values.items()})

    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([
        point(10, b_simple=5.0, lower=4.0, upper=6.0), point(20, b_simple=7.0, lower=6.0, upper=9.0),
        point(30, b_simple=8.0, lower=7.0, upper=10.0), '{"step": 40, "gns/cut o',
    ]))  # fmt: skip
    (scale,) = noise_scales(path, 25)
    assert scale == NoiseScale("plain", 20, Interval(7.0, 6.0, 9.0))
    path.write_text(point(20, b_simple=70.0, lower=6.0))  # an infinite end is not logged: the value means nothing
    (scale,) = noise_scales(path, 25)
    assert math.isnan(scale.samples.value) and (scale.samples.lower, scale.samples.upper) == (6.0, math.inf)
    assert noise_scales(tmp_path / "none", 25) == []
    path.write_text(point(20, b_simple=70.0, lower=6.0, upper=80.0).replace("sketch", "ranks"))
    assert noise_scales(path, 25) == [NoiseScale("plain, of ranks", 20, Interval(70.0, 6.0, 80.0))]


# ---------------------------------------------------------------------- plans


def a_config(*words: str, ranks: int = 1) -> JobConfig:
    flags = ["--model.flavor", "debug", "--training.global_batch_size", "32", "--training.local_batch_size", "16"]
    return load_config([*flags, "--optimizer.lr", "0.01", "--training.steps", "100", *words], ranks)


def test_accumulation_grows_at_the_microbatch_of_the_run():
    plans, samples = plan_batches(a_config(), [4, 0.25, 1, 0.5, 1], "sqrt", 0.01, None, 1)
    assert [(plan.batch_size, plan.local_batch_size) for plan in plans] == [(8, 8), (16, 16), (32, 16), (128, 16)]
    assert samples == 32 * 128
    assert [plan.steps for plan in plans] == [512, 256, 128, 32]
    assert [plan.lr for plan in plans] == pytest.approx([0.005, 0.01 / math.sqrt(2), 0.01, 0.02])


def test_a_branch_keeps_the_microbatch_of_processes_that_share_tokens(tmp_path):
    """Of 32 images a step on two processes: a pair has all of them, two ranks 16 each; on four, the pairs are no more."""
    config = a_config("--parallelism.context_parallel_degree", "2", "--training.local_batch_size", "32", ranks=2)
    for processes, local, degrees in ((2, 32, (1, 1, 2)), (4, 8, (4, 1, 1))):
        plan = plan_batches(config, [1, 4], "sqrt", 0.01, 4096, processes)[0][0]
        branch = branch_config(config, plan, 0, processes, tmp_path / "branch", 50)
        assert (plan.local_batch_size, tuple(branch.parallelism.degrees)) == (local, degrees)


@pytest.mark.parametrize("rule, factor", [("sqrt", 2.0), ("linear", 4.0), ("const", 1.0)])
def test_lr_rules(rule, factor):
    plans, _ = plan_batches(a_config(), [1, 4], rule, 0.01, None, 1)
    assert plans[1].lr == pytest.approx(0.01 * factor)


def test_a_checkpoint_whose_rate_has_decayed_is_refused_and_those_before_it_are_named(monkeypatch, tmp_path):
    """The run of the README: 900 steps of a cosine, checkpoints at 600 and 900."""
    config = load_config(["--training.steps", "900", "--lr_scheduler.decay_type", "cosine", "--optimizer.lr", "1e-3"], 1)
    monkeypatch.setattr(branch_measurement, "_progress", lambda run, step: step)
    monkeypatch.setattr(branch_measurement, "checkpoint_steps", lambda folder: [600, 900])
    rate = branch_measurement._rate_of_run
    assert rate(tmp_path, config, 600) == run_lr(config, 600) > 1e-4
    with pytest.raises(StudyError, match=r"at step 900, below 1% of its peak, .* \(give --step 600, or --lr\)"):
        rate(tmp_path, config, 900)
    monkeypatch.setattr(branch_measurement, "checkpoint_steps", lambda folder: [900])
    with pytest.raises(StudyError, match=r"\(give --lr\)"):
        rate(tmp_path, config, 900)


def test_results_of_other_settings_are_refused(tmp_path):
    results = ResultsFolder(tmp_path, {"settings.json": b"{"})
    asked = SimpleNamespace(folder=tmp_path, results=results, settings=lambda: {"lr_rule": "const", "samples": 8})
    (tmp_path / "settings.json").write_text('{"lr_rule": "const", "samples": 8}')
    _hold_to_settings(asked)
    (tmp_path / "settings.json").write_text('{"lr_rule": "linear", "samples": 8}')
    with pytest.raises(StudyError, match="holds a measurement with other settings, lr_rule: 'linear' -> 'const'"):
        _hold_to_settings(asked)


def test_every_branch_reads_the_same_number_of_samples():
    plans, samples = plan_batches(a_config(), [0.5, 1, 1.5, 2], "sqrt", 0.01, None, 1)
    assert samples >= 32 * 64
    assert {plan.steps * plan.batch_size for plan in plans} == {samples}


@pytest.mark.parametrize(
    "factors, samples, processes, said",
    [
        ([1, 0.3], None, 1, "--factors: 0.3 x 32 images is no whole batch"),
        ([1, 1.25], None, 1, "no multiple of 1 process x 16"),
        ([1, -1], None, 1, "no whole batch"),
        ([1, math.inf], None, 1, "no whole batch"),
        ([1, 2], None, 3, "cannot be divided among 3 processes"),
        ([1, 2], 63, 1, "--samples: 63 are too few for one step of 64 images"),
        ([1, 2], 96, 1, "try 64, 128"),
    ],
)
def test_what_does_not_divide_is_refused(factors, samples, processes, said):
    with pytest.raises(StudyError, match=said.replace("(", r"\(")) as refused:
        plan_batches(a_config(), factors, "sqrt", 0.01, samples, processes)
    assert "\n" not in str(refused.value)


def test_lr_of_the_run_is_that_of_its_schedule():
    config = a_config("--lr_scheduler.decay_type", "linear", "--lr_scheduler.warmup_steps", "10")
    assert run_lr(config, 5) == pytest.approx(0.005)
    assert run_lr(config, 56) == pytest.approx(0.005)


def test_a_branch_differs_from_its_run_in_batch_rate_length_and_randomness_only(tmp_path):
    measured = ["--gns.enable", "true", "--validation.enable", "true", "--optimizer.weight_decay", "0.1"]
    measured += ["--training.double_batch_after", "[64]"]
    config = a_config(*measured, "--lr_scheduler.decay_type", "cosine", "--lr_scheduler.warmup_steps", "10")
    plan = plan_batches(config, [1, 4], "sqrt", 0.01, 4096, 1)[0][1]
    branch = branch_config(config, plan, 2, 1, tmp_path / "batch-128-seed-2", 100)
    write_config(branch, tmp_path / "branch.toml", 1)
    read = load_config(["--job.config_file", str(tmp_path / "branch.toml")], 1)
    assert (read.training.steps, read.training.global_batch_size, read.training.local_batch_size) == (32, 128, 16)
    assert read.training.double_batch_after == []
    assert (read.optimizer.lr, read.optimizer.weight_decay) == (0.02, 0.1)
    assert read.debug.seed == config.debug.seed + 3
    assert (read.lr_scheduler.decay_type, read.lr_scheduler.warmup_steps) == ("constant", 0)
    assert not (read.gns.enable or read.sampling.enable or read.validation.enable)
    assert [track.name for track in read.ema.tracks] == [TRACK.name]
    assert (read.model, read.data, read.objective) == (config.model, config.data, config.objective)


ENDING = ["--model.num_layers", "6", "--model.routing.name", "tread", "--model.routing.finish_steps", "20",
          "--alignment.teacher", "digits", "--alignment.block", "1", "--alignment.stop_steps", "60"]  # fmt: skip


@pytest.mark.parametrize(("progress", "routed", "aligned"), [(59, True, True), (60, True, False), (80, False, False)])
def test_what_ends_within_the_run_acts_throughout_a_branch_or_not_at_all(tmp_path, progress, routed, aligned):
    config = a_config(*ENDING)
    for plan in plan_batches(config, [0.5, 1], "sqrt", 0.01, 4096, 1)[0]:
        branch = branch_config(config, plan, 0, 1, tmp_path / "branch", progress)
        assert branch.model.routing.finish_steps == (0 if routed else plan.steps)
        wanted = (0, config.alignment.weight) if aligned else (1, 0.0)
        assert (branch.alignment.stop_steps, branch.alignment.weight) == wanted


def test_a_run_that_encodes_its_images_is_refused_where_they_are_read(tmp_path):
    config = SimpleNamespace(autoencoder=SimpleNamespace(encode=True))
    with pytest.raises(StudyError, match=r"encodes its images .* \(train on a store, which scripts/extract_latents.py makes\)"):
        StudyRun(tmp_path, config, [], "none", None, None).dataset("train")


def test_the_average_is_of_the_branch_alone():
    assert kept_share(TRACK, 1, 128) == 0.0


def test_a_branch_begins_with_the_weights_and_optimizer_state_of_the_run_and_new_counters(tmp_path):
    tensors = {"model.w": torch.randn(3), "optimizer.w.exp_avg": torch.randn(3), "optimizer.w.step": torch.tensor(7.0),
               "ema.slow.w": torch.zeros(3)}  # fmt: skip
    state = {"step": 7, "config": {}, "data": {"next_sample": 112}, "timestep_sampler": {}}
    Checkpointer(tmp_path / "run", CheckpointConfig(), 0).save(7, tensors, state)
    start = write_start(checkpoint_path(tmp_path / "run", 7), tmp_path / "start")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        begin_branch(start, tmp_path / name)
    begun = checkpoint_path(tmp_path / "b" / "checkpoint", 0)
    assert verify(begun) is None
    source = open_checkpoint(begun)
    found = source.read(list(source.shapes))
    assert set(found) == {"model.w", "optimizer.w.exp_avg", "optimizer.w.step", f"ema.{TRACK.name}.w"}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors if not name.startswith("ema."))
    assert torch.equal(found[f"ema.{TRACK.name}.w"], tensors["model.w"])
    assert source.state["step"] == 0 and source.state["data"] == {"next_sample": 0, "attempt": 0}
    assert "config" not in source.state


def test_held_out_triples_are_all_different_and_use_every_image_as_often():
    config = a_config()
    held_out = HeldOut(DATASETS[config.data.name](config.data, "validation"), images=50, rounds=3)
    indices = torch.cat([batch["indices"][batch["weights"] > 0] for batch in held_out.batches(config, batch_size=16)])
    assert sorted(indices.tolist()) == list(range(150)) == list(range(held_out.triples))
    images = torch.cat([batch["images"][batch["weights"] > 0] for batch in held_out.batches(config, batch_size=16)])
    assert torch.equal(images[indices.argsort()][:50], images[indices.argsort()][100:])


# --- bins, by what they learned


def losses_of(start: float, learned: float, shares: list[float], wobble: float = 0.0) -> dict[int, dict[int, float]]:
    """Losses of two seeds at SIZES with these excesses as shares of what batch 8 learned."""
    return {
        size: {seed: start - learned + share * learned + sign * wobble for seed, sign in ((0, -1.0), (1, 1.0))}
        for size, share in zip(SIZES, shares, strict=True)
    }


def test_a_bins_batch_is_where_a_fifth_of_what_it_learned_is_missing():
    found = bin_test(3, losses_of(1.0, 0.01, [0.0, 0.1, 0.3, 0.5]), SIZES, 1.0)
    assert found.learned.value == pytest.approx(0.01) and found.place == 3
    assert [share.value for share in found.shares] == pytest.approx([0.0, 0.1, 0.3, 0.5])
    assert found.batch_size == pytest.approx(16 * math.sqrt(2))  # halfway from .1 to .3, on a line in ln B
    # The same losses on top of noise that nothing removes are the same bin.
    assert bin_test(3, losses_of(9.0, 0.01, [0.0, 0.1, 0.3, 0.5]), SIZES, 9.0).batch_size == pytest.approx(found.batch_size)
    assert bin_test(0, losses_of(1.0, 0.01, [0.0, 0.1, 0.1, 0.19]), SIZES, 1.0).batch_size == math.inf
    diverged = losses_of(1.0, 0.01, [0.0, 0.1, 0.1, 0.1]) | {64: {0: math.inf, 1: 0.995}}
    assert bin_test(0, diverged, SIZES, 1.0).batch_size == pytest.approx(math.sqrt(32 * 64))


def test_a_bin_that_did_not_learn_significantly_has_no_share():
    # t(0.975, 1) = 12.7: half of the interval of the mean of two is 12.7 times the wobble.
    for wobble, known in ((0.0007, True), (0.0009, False)):
        found = bin_test(0, losses_of(1.0, 0.01, [0.0, 0.1, 0.3, 0.5], wobble), SIZES, 1.0)
        assert (len(found.shares) == 4, math.isnan(found.batch_size)) == (known, not known)


def test_a_bin_without_a_share_says_why_and_a_diverged_batch_has_none():
    of_bins = [
        {8: {0: 0.5}, 16: {0: 0.6}},  # one seed
        {8: {0: 1.0, 1: 1.1}, 16: {0: 1.1, 1: 1.2}},  # above the checkpoint's loss
        {8: {0: 0.5, 1: 0.501}, 16: {0: 0.6, 1: math.inf}},
    ]
    tests = [bin_test(k, losses, [8, 16], 1.0) for k, losses in enumerate(of_bins)]
    text = _learned_bins_text(SimpleNamespace(batch_sizes=[8, 16]), BinFindings(tests, {}))
    last = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("|")][2:]
    assert last == ["unknown: fewer than two whole seeds", "no significant decrease", "diverged"]
