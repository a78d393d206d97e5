"""Timesteps shifted by the size of the latent, in training and in sampling: published values and the shift of a normal's mean."""

import math
import tomllib
from types import SimpleNamespace

import pytest
import torch

from tests.configurations import load, problems
from tests.objectives import timesteps
from torchtitan.console import _shifted_by_size
from torchtitan.data import DatasetInfo
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.solvers.schedules import uniform_times
from torchtitan.diffusion.timesteps.placement import latent_shift
from torchtitan.sampling.method_options import sampling_method
from torchtitan.settings.record import dump_config
from torchtitan_dit.commands import sample

BY_SIZE = ["--objective.shift", "latent_size"]


def of_shape(*shape: int) -> list[str]:
    return ["--data.name", "synthetic", "--data.shape", str(list(shape)), "--model.patch_size", "1"]


@pytest.mark.parametrize(("shape", "shift", "log", "half", "tenth"), [
    ((4, 32, 32), 1.0, 0.0, 0.5, 0.1),
    ((32, 16, 16), 1.414214, 0.346574, 0.585786, 0.135796),
    ((768, 16, 16), 6.928203, 1.935601, 0.873868, 0.434965),
    ((1024, 16, 16), 8.0, 2.079442, 0.888889, 0.470588),
])  # fmt: skip
def test_shifts_and_shifted_times_have_their_golden_values(shape, shift, log, half, tenth):
    found = latent_shift(shape)
    times = uniform_times(10, shift=found)
    assert [found, math.log(found), times[5].item(), times[9].item()] == pytest.approx([shift, log, half, tenth], abs=5e-7)


def test_training_times_are_those_of_a_logit_normal_of_another_mean():
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    shift = latent_shift((768, 16, 16))
    configs = DenoisingConfig(shift=shift), DenoisingConfig(timesteps=timesteps("logit_normal", mean=math.log(shift)))
    shifted, moved = (build_objective(config, 0).timestep_sampler.density.quantile(u) for config in configs)
    torch.testing.assert_close(shifted, moved, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("given", "trained", "sampled"), [
    ([], 1.0, 1.0),
    (BY_SIZE, 2**0.5, 2**0.5),
    ([*BY_SIZE, "--sampling.schedule.shift", "0.3"], 2**0.5, 0.3),
    (["--objective.shift", "3"], 3.0, 1.0),
    (["--objective.shift", "3", "--sampling.schedule.shift", "objective"], 3.0, 3.0),
])  # fmt: skip
def test_a_run_trains_and_samples_by_the_size_of_its_latents_unless_told_otherwise(given, trained, sampled):
    config = load(arguments=[*of_shape(32, 16, 16), *given])
    assert (config.objective.shift, config.sampling.schedule.shift) == (trained, sampled)
    again = load(dump_config(config))
    assert (again.objective, again.sampling) == (config.objective, config.sampling)
    assert tomllib.loads(dump_config(config))["objective"]["shift"] == trained


def test_other_paths_and_schedules_train_shifted_and_the_noise_scale_has_bins_of_shifted_times():
    edm = ["--objective.path", "edm", "--objective.prediction", "edm", "--objective.preconditioning", "edm"]
    assert load(arguments=[*of_shape(32, 16, 16), *BY_SIZE, *edm]).objective.shift == 2**0.5
    assert load(arguments=[*of_shape(32, 16, 16), *BY_SIZE, "--gns.enable", "true"]).objective.shift == 2**0.5


@pytest.mark.parametrize(("shape", "line"), [
    ((768, 16, 16), "image of 196,608 numbers: times shifted by 6.93"),
    ((1, 8, 8), "image of 64 numbers: times shifted by 0.125, towards clean data: images below 4,096 numbers need none (leave"
     " objective.shift out)"),
    ((4, 32, 32), ""),
])  # fmt: skip
def test_a_run_says_its_shift_and_warns_of_one_below_1(shape, line):
    objective, encoder = DenoisingConfig(shift=latent_shift(shape)), SimpleNamespace(encode=False)
    config = SimpleNamespace(objective=objective, data=SimpleNamespace(name="synthetic"), autoencoder=encoder)
    assert _shifted_by_size(SimpleNamespace(config=config, info=DatasetInfo(shape))) == line
    config.objective.shift = 3.0
    assert _shifted_by_size(SimpleNamespace(config=config, info=DatasetInfo(shape))) == ""


@pytest.mark.parametrize(("given", "line"), [
    (["--objective.shift", "latent-size"], "objective.shift: must be a number or latent_size, is 'latent-size'"),
    (["--objective.shift", "0"], "objective.shift: must be at least 0.01 and at most 100, is 0.0"),
    (["--sampling.schedule.shift", "latent_size"], "sampling.schedule.shift: must be a number or objective, is 'latent_size'"),
    ([*BY_SIZE, "--sampling.schedule.last_step", "0.1"],
     "sampling.schedule.last_step: its size is not kept by sampling.schedule.shift = 1.41421 (give one of them)"),
])  # fmt: skip
def test_other_words_are_refused(given, line):
    assert problems(arguments=[*of_shape(32, 16, 16), *given]) == [f"command line: --{line}"]


@pytest.mark.parametrize(("given", "shift"), [([], 1.0), (["--shift", "objective"], 2**0.5), (["--shift", "0.3"], 0.3)])
def test_the_command_that_samples_takes_the_shift_of_training_or_a_number(given, shift, monkeypatch):
    config = load(arguments=[*of_shape(32, 16, 16), *BY_SIZE, "--sampling.schedule.shift", "1"])
    monkeypatch.setattr("sys.argv", ["sample.py", "run", *given])
    found = sampling_method(sample.parse_arguments(), SimpleNamespace(config=config))
    assert found.schedule.shift == shift and config.sampling.schedule.shift == 1
