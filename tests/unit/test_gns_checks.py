"""`[gns]` sections that could not give a number, or not a right one, are refused in one line that names the key."""

import pytest
import torch

from tests.configurations import load, problems
from torchtitan.config.job import load_config
from torchtitan.console import too_short_for
from torchtitan.gns.config import GNSConfig, few_pairs
from torchtitan.settings.record import dump_config

DDPM = '[objective]\npath = "ddpm_linear"\nprediction = "noise"\ntimesteps.name = "uniform"\n'
NARROW = '[objective]\ntimesteps.name = "logit_normal"\ntimesteps.std = 0.1\n'
STRATIFIED = '[objective]\nspread = "stratified"\n'

# Objective, lines of [gns], processes, and how the refusal begins.
REFUSED = {
    "nothing to measure by": (
        "", "single_pass = false", 1, "gns.single_pass: without it and without gns.rank_gradients nothing is measured"
    ),
    "bins of nothing": (
        "", "rank_gradients = true\nsingle_pass = false\nnum_bins = 4", 2, "gns.num_bins: has no effect when gns.single_pass"
    ),
    "ranks, stratified": (
        STRATIFIED, "rank_gradients = true", 2,
        "gns.rank_gradients: objective.spread = stratified makes the ranks' timesteps depend on each other",
    ),
    "bin-pure alone": (
        "", "rank_gradients = true\nbin_pure_microbatches = true", 1, "gns.bin_pure_microbatches: one process has no"
    ),
    "allocated and bin-pure": (
        "", "rank_gradients = true\nbin_pure_microbatches = true\nallocate_timesteps = true", 2,
        "gns.allocate_timesteps: microbatches of one bin each leave nothing to allocate",
    ),
    "two numbers of bins": (
        "", "num_bins = 2\nbin_edges = [0.0, 0.5, 1.0]", 1, "gns.num_bins: has no effect with gns.bin_edges"
    ),
    "no geometry to leave out": (
        '[optimizer]\nname = "Muon"\n', "adam_geometry = false", 1, "gns.adam_geometry: has no effect with optimizer.name = Muon",
    ),
    "falling edges": ("", "bin_edges = [0.0, 0.6, 0.5, 1.0]", 1, "gns.bin_edges: must rise"),
    "late begin": ("", "bin_edges = [0.1, 0.5, 1.0]", 1, "gns.bin_edges: must begin at 0 and end at 1,"),
    "empty bin": (NARROW, "bin_edges = [0.0, 0.01, 0.5, 1.0]", 1, "gns.bin_edges: no training timestep falls into bin 0 of"),
    "more bins than images allow": (
        "", "num_bins = 9", 1, "gns.num_bins: 9 bins share 16 images per step: a bin needs 2 or more"
    ),
}  # fmt: skip


def text_of(objective: str, section: str, ranks: int) -> str:
    unbinned = any(words in section for words in ("num_bins", "bin_edges", "single_pass = false"))
    bins = "" if unbinned else "num_bins = 4\n"
    training = f"[training]\nglobal_batch_size = 16\nlocal_batch_size = {16 // ranks}\n"
    layout = f"[parallelism]\ndata_parallel_replicate_degree = {ranks}\ndata_parallel_shard_degree = 1\n"
    return f'[data]\nname = "digits"\n{objective}{training}{layout}[gns]\nenable = true\n{bins}{section}\n'


@pytest.mark.parametrize("name", REFUSED)
def test_section_is_refused_in_one_line_that_names_the_key(name):
    objective, section, ranks, words = REFUSED[name]
    problem, = problems(text_of(objective, section, ranks), world_size=ranks)
    assert words in problem and "\n" not in problem


TEN, TWO, RARE = torch.full((10,), 0.1), torch.tensor([0.5, 0.5]), torch.tensor([0.6, 0.396, 0.004])
GRADIENTS_OF_RANKS = GNSConfig(enable=True, single_pass=False, rank_gradients=True)


@pytest.mark.parametrize(("masses", "size", "enough"), [(TEN, 4, 20), (TEN, 19, 20), (TWO, 3, 4), (RARE, 64, 495)])
def test_few_samples_of_a_bin_in_a_microbatch_are_warned_of(masses, size, enough):
    warning = few_pairs(GNSConfig(enable=True), size, masses)
    assert f"of a microbatch of {size} images the rarest" in warning and f"microbatches of {enough} or more" in warning
    assert few_pairs(GNSConfig(enable=True), enough, masses) is None
    assert few_pairs(GRADIENTS_OF_RANKS, size, masses) is None
    pure = GNSConfig(enable=True, rank_gradients=True, bin_pure_microbatches=True)
    assert few_pairs(pure, size, masses) is None and few_pairs(pure, 1, masses)


TOO_SHORT = {
    "gns.interval": ["--gns.enable", "true", "--gns.interval", "11"],
    "gns.allocation_warmup": ["--gns.enable", "true", "--gns.allocate_timesteps", "true", "--gns.allocation_warmup", "200"],
    "training.double_batch_after": ["--training.double_batch_after", "[200, 400]"],
}


@pytest.mark.parametrize("key", TOO_SHORT)
def test_settings_that_act_after_the_end_of_a_run_are_warned_of(key):
    run = ["--training.local_batch_size", "20", "--training.steps"]
    warning, = too_short_for(load_config([*TOO_SHORT[key], *run, "10"], 1))
    assert warning.startswith(f"{key}: ") and "lower it" in warning
    assert not list(too_short_for(load_config([*TOO_SHORT[key], *run, "11"], 1)))


@pytest.mark.parametrize("interval", [7, 8])
def test_steps_of_a_batch_that_grows_are_counted_for_the_warning(interval):
    run = ["--training.local_batch_size", "8", "--training.steps", "12", "--gns.num_bins", "4"]
    run += ["--training.double_batch_after", "[16]"]  # 2 + 5 steps
    found = list(too_short_for(load_config([*run, "--gns.enable", "true", "--gns.interval", str(interval)], 1)))
    assert found == ["gns.interval: 8 is more than the run's 7 steps: no step is measured (lower it)"] * (interval - 7)


@pytest.mark.parametrize(
    ("objective", "section", "ranks"),
    [
        ("", "num_bins = 8", 1),
        (DDPM, "bin_edges = [0, 0.5, 1.0]", 1),
        (STRATIFIED, "allocate_timesteps = true", 2),
        # Without pairs of samples the number of bins is no matter of the batch.
        ("", "rank_gradients = true\nsingle_pass = false", 2),
        ("", "rank_gradients = true\nbin_pure_microbatches = true", 2),
    ],
)
def test_what_can_be_measured_is_accepted(objective, section, ranks):
    assert load(text_of(objective, section, ranks), world_size=ranks).gns.enable


@pytest.mark.parametrize("section", ["num_bins = 4", "bin_edges = [0, 0.5, 1]"])
def test_recorded_configuration_is_accepted_again(section):
    config = load(text_of("", section, 1))
    assert load(dump_config(config)).gns == config.gns


def test_microbatches_of_a_limited_size_are_gradients_to_compare():
    words = ["--training.global_batch_size", "64", "--training.local_batch_size", "-1", "--training.max_local_batch_size", "16"]
    config = load_config([*words, "--gns.enable", "true", "--gns.rank_gradients", "true"], 1)
    assert config.training.local_batch_size == 16
