"""Dtype of norms: CUDA's autocast widens them to float32, the CPU's does not, so that no step on a CPU shows it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from tests.adapted_models import CLASSES, PIXELS, flux, flux_inputs, randomised
from torchtitan.gns.taps import OFF, TappedNorm, TapSwitch
from torchtitan.models import MODELS
from torchtitan.models.layers import LayerNorm, group_norm, normed

NORMS = {
    "layer": lambda x: normed(x, None, 1e-6),
    "layer with gain": lambda x: normed(x, torch.ones(8, device=x.device), 1e-6),
    "rms": lambda x: normed(x, None, 1e-6, rms=True),
    "rms with gain": lambda x: normed(x, torch.ones(8, device=x.device), 1e-6, rms=True),
    "group": lambda x: group_norm(x, 2),
}
DEBUG, EDM2 = MODELS["dit"].flavors["debug"], replace(MODELS["edm2"].flavors["cifar"], channels=32, num_blocks=1)
CONFIGS = {
    "layer norm": replace(DEBUG, norm="layernorm"),
    "layer norm with gain": replace(DEBUG, norm="layernorm", norm_affine=True),
    "RMS norm": replace(DEBUG, norm_affine=True),
    "magnitude-preserving": replace(DEBUG, magnitude_preserving=True, qk_norm=False),
    "EDM2 C": replace(EDM2, config="C"),
    "EDM2 G": EDM2,
}


class CudaAutocast:
    """CUDA's autocast on a machine without CUDA, where torch.autocast turns itself off."""

    def __enter__(self):
        self.before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)

    def __exit__(self, *_):
        torch.set_autocast_enabled("cuda", self.before[0])
        torch.set_autocast_dtype("cuda", self.before[1])


class WidenedNorms(TorchFunctionMode):
    """Norms called with autocast on: those which it would widen on CUDA."""

    names = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in self.names and torch.is_autocast_enabled("cpu"):
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NORMS)
def test_norms_keep_bfloat16_under_the_autocast_of_cuda(name):
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), CudaAutocast():
        x = torch.empty(2, 4, 8, device="cuda", dtype=torch.bfloat16)
        assert F.layer_norm(x, (8,)).dtype == torch.float32  # what torch does by itself
        assert NORMS[name](x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [*CONFIGS, "flux", "tapped norm"])
def test_no_norm_of_a_network_is_left_to_autocast(name):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), WidenedNorms() as widened:
        if name == "flux":
            model, inputs = flux(), flux_inputs()
        elif name == "tapped norm":
            model = TappedNorm(LayerNorm(8, 1e-6), TapSwitch(OFF, torch.ones(2, 1)))
            inputs = [torch.randn(2, 4, 8).to(torch.bfloat16)]
        else:
            model = randomised(MODELS[CONFIGS[name].name].build(CONFIGS[name], PIXELS, CLASSES))
            inputs = torch.randn(2, *PIXELS), torch.rand(2), torch.arange(2)
        model(*inputs)
    assert widened.found == []


@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_bfloat16_are_those_of_float32(name):
    # Far from 0 compared with its spread: sums in bfloat16 would leave no digit of the variance.
    x = (30 + 2 * torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    exact = NORMS[name](x.float()).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = NORMS[name](x)
    spacing = torch.finfo(torch.bfloat16).eps * exact.abs().clamp_min(1e-2)
    assert ((found - exact).abs() <= spacing).all()
