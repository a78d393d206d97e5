"""What choosing timesteps by measured noise is predicted to save is saved: gradients of fresh batches, weights frozen."""

import tempfile

import pytest

from benchmarks.gns_allocation import FLOOR, FrozenDraws, allocated, build, measure, realise
from benchmarks.shared import train_to
from torchtitan.diffusion.timesteps.sampler import TimestepSampler
from torchtitan.diffusion.timesteps.shares import bin_masses
from torchtitan.gns.allocate import neyman_shares, predicted_ratios
from torchtitan.gns.config import inner_edges

BATCH, MEASURED_STEPS, GROUPS, GROUP_SIZE = 32, 40, 30, 8
BIN_EDGES = (0.0, 0.05, 0.15, 0.25, 0.45, 0.7, 1.0)  # of unequal masses


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A tiny model on digits, hardly trained, on the loss whose multiplier (1 - t)^2 wastes samples."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("run")))
        trainer = build("noise", dim=32, num_layers=2, batch=BATCH, bin_edges=BIN_EDGES)
    train_to(trainer, 40)
    yield trainer
    trainer.close()


def test_variance_of_fresh_batches_is_as_predicted(trainer):
    density = trainer.state.objective.timestep_sampler.density
    edges = inner_edges(trainer.config.gns, density)
    mass = bin_masses(density, edges)
    draws, present = FrozenDraws(trainer), TimestepSampler(density, trainer.config.debug.seed)
    measured = measure(trainer, draws, present, MEASURED_STEPS)["adam"]
    predicted = predicted_ratios(mass, measured, stratified=False, floor=FLOOR)[0]
    shares = neyman_shares(mass, measured.noise, measured.signal, FLOOR)
    samplers = {"present": present, "neyman": allocated(present, edges, shares)}
    found = realise(trainer, draws, samplers, GROUPS, GROUP_SIZE)
    ratio = found.ratio("neyman", "present", "adam")
    assert ratio.lower < predicted.ratio < ratio.upper
    assert ratio.upper < 0.8 and ratio.upper - ratio.lower < 0.2  # so that it says something
    shift, stderr = found.shift("neyman", "present")
    assert abs(shift) < 4 * stderr < 0.2  # the objective is the same one
