"""Tables of the formulas that are copied to a device once: every further copy would make the host wait for the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.objectives import timesteps
from torchtitan.conditions import POOLED, TEXT, Embeddings
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Draw, Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.timesteps.bin_pure import BinPureTimesteps
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps

META, EDGES = torch.device("meta"), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


class HostCopies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[1] if function.overloadpacket is torch.ops.aten.copy_ else args[0]
            if source.device != out.device and source.ndim:
                self.found.append(tuple(source.shape))
        return out


def copies_of_second_use(use):
    """Shapes copied from the host by the second call; a device without memory stands in for an accelerator."""
    use()
    with HostCopies() as copies:
        use()
    return copies.found


@pytest.mark.parametrize(("name", "path"), [
    ("beta", "rectified_flow"), ("uniform", "ddpm_linear"), ("beta", "ddpm_linear"), ("uniform", "ddpm_linear_continuous"),
    ("speed", "ddpm_linear_continuous"), ("loss_second_moment", "ddpm_linear"),
])  # fmt: skip
def test_drawing_timesteps_copies_no_table(name, path):
    sampler = build_objective(DenoisingConfig(path=path, timesteps=timesteps(name)), 0).timestep_sampler
    indices = torch.arange(8, device=META)
    assert copies_of_second_use(lambda: sampler.sample(GlobalBatch(0, 8), indices)) == []


@pytest.mark.parametrize("sampler", [
    lambda density: BinPureTimesteps(density, 0, edges=EDGES, microbatches_per_step=2),
    lambda density: AllocatedTimesteps(density, 0, edges=EDGES),
])  # fmt: skip
def test_samplers_of_bins_copy_no_table(sampler):
    sampler = sampler(build_objective(DenoisingConfig(), 0).timestep_sampler.density)
    indices = torch.arange(8, device=META)

    def step():
        sampler.sample(GlobalBatch(0, 8), indices)
        assert sampler.bin_importance(META).device == META

    assert copies_of_second_use(step) == []


def test_shares_that_were_set_have_their_own_importance():
    sampler = AllocatedTimesteps(build_objective(DenoisingConfig(), 0).timestep_sampler.density, 0, edges=EDGES)
    assert sampler.bin_importance().tolist() == pytest.approx([1.0] * 4)
    sampler.set_shares(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    assert sampler.bin_importance().tolist() == pytest.approx((sampler.masses / sampler.shares).tolist())


@pytest.mark.parametrize("path", ["ddpm_linear", "ddpm_cosine_continuous", "edm"])
def test_the_loss_copies_no_table(path):
    preconditioning = "index" if path.startswith("ddpm") else "edm"
    objective = build_objective(DenoisingConfig(path=path, prediction="noise", preconditioning=preconditioning), 0)
    outputs = 2 if path == "ddpm_linear" else 1  # the second trains the variance
    x0 = torch.zeros(4, 1, 2, 2, device=META)

    def step():
        t = torch.zeros(4, device=META)
        draw = Draw(t, torch.zeros_like(x0), torch.ones_like(t))
        objective.loss(lambda x, time, condition: x.repeat(1, outputs, 1, 1), Microbatch(x0), draw)

    assert copies_of_second_use(step) == []


def test_null_conditions_of_a_text_are_not_copied_at_each_drop():
    kind = Embeddings({TEXT: torch.zeros(5, 4), POOLED: torch.zeros(3)})
    condition = {TEXT: torch.ones(8, 5, 4, device=META), POOLED: torch.ones(8, 3, device=META)}
    dropped = torch.ones(8, dtype=torch.bool, device=META)
    assert copies_of_second_use(lambda: kind.drop(condition, dropped)) == []
