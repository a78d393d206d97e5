"""CUDA's kernel of RMS norm on the CPU: what it computes, and what a backward keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.test_activation_checkpoint import CountOperations
from torchtitan.config.job import load_config
from torchtitan.estimate.cuda_kernels import cuda_kernels
from torchtitan.estimate.live_storages import ACTIVATIONS
from torchtitan.estimate.memory import estimate_memory
from torchtitan.estimate.simulation import simulate_step

ROWS, CHANNELS = (3, 5), 16


def norm(device: str, dtype: torch.dtype, gain: bool) -> tuple[list[int], list[Tensor | None]]:
    """Sizes in bytes of the storages that an RMS norm keeps besides its gain, sorted; and its output and gradients."""
    torch.manual_seed(0)
    x = torch.randn(*ROWS, CHANNELS, device=device, dtype=dtype, requires_grad=True)
    weight = torch.rand(CHANNELS, device=device, dtype=dtype, requires_grad=True) if gain else None
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor is not weight:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = F.rms_norm(x, (CHANNELS,), weight, 1e-6)
    y.backward(torch.randn(y.shape, device=device).to(dtype))
    return sorted(kept.values()), [y, x.grad, None if weight is None else weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("gain", [False, True])
def test_a_kernel_computes_the_composed_norm_and_keeps_its_input_and_a_number_per_row(dtype, gain):
    composed, wanted = norm("cpu", dtype, gain)
    with cuda_kernels():
        fused, found = norm("cpu", dtype, gain)
    elements, rows, statistic = 15 * CHANNELS, 15, torch.promote_types(dtype, torch.float32).itemsize
    assert fused == sorted([statistic * rows, dtype.itemsize * elements])
    assert (sum(composed) > sum(fused)) == (gain or dtype == torch.bfloat16)
    for tensor, other in zip(found, wanted, strict=True):
        assert (tensor is None) == (other is None)
        if tensor is not None:
            torch.testing.assert_close(tensor, other)
    assert norm("cpu", dtype, gain)[0] == composed  # the kernels are gone with their context


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares with a GPU's own kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain", [False, True])
def test_a_gpu_keeps_as_much(dtype, gain):
    with cuda_kernels():
        imitated, _ = norm("cpu", dtype, gain)
    assert norm("cuda", dtype, gain)[0] == imitated


def test_a_gain_of_another_dtype_is_composed_as_by_cuda():
    with FakeTensorMode(), cuda_kernels(), CountOperations() as seen, pytest.warns(UserWarning, match="Mismatch dtype"):
        F.rms_norm(torch.randn(2, 4, dtype=torch.bfloat16), (4,), torch.ones(4))
    assert seen.counts and "_fused_rms_norm" not in seen.counts


def config_of(*words: str):
    return load_config(["--data.name=synthetic", "--data.shape=[4,8,8]", "--model.flavor=debug", "--gns.enable=false", *words], 1)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_are_computed_again_by_the_same_kernels(mode):
    recomputed = f"--activation_checkpoint.mode={mode}"
    config = config_of("--model.patch_size=2", recomputed, "--training.mixed_precision_param=bfloat16")
    assert simulate_step(config, 1, on_gpu=True).windows


def test_the_estimate_for_a_gpu_has_the_norms_of_one():
    """In bfloat16 a block's norms keep their inputs in it, not in float32."""
    words = ("--model.patch_size=2", "--training.local_batch_size=16", "--training.global_batch_size=16",
             "--training.mixed_precision_param=bfloat16")  # fmt: skip
    kept = {}
    for on_gpu in (False, True):
        steps = {layers: simulate_step(config_of(*words, f"--model.num_layers={layers}"), 1, on_gpu) for layers in (3, 4)}
        three, four = (step.windows[0, "forward", layers - 1][ACTIVATIONS] for layers, step in steps.items())
        kept[on_gpu] = four - three
    assert kept[True] < kept[False]
    config = config_of(*words, "--model.num_layers=4")
    of_gpu, of_cpu = (estimate_memory(config, 1, on_gpu=on_gpu) for on_gpu in (True, False))
    assert of_gpu.total < of_cpu.total
    assert estimate_memory(config, 1) == (of_gpu if torch.cuda.is_available() else of_cpu)
