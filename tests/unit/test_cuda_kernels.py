"""RMS norm and SiLU of tensors without values, as a GPU computes them: what they give, and keep for the backward."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.config.job import load_config
from torchtitan.estimate.cuda_kernels import cuda_kernels
from torchtitan.estimate.fake_cuda.counter import NO_KERNEL
from torchtitan.estimate.live_storages import ACTIVATIONS
from torchtitan.estimate.memory import estimate_memory
from torchtitan.estimate.simulation import simulate_step

ROWS, CHANNELS = (3, 5), 16


def kept_by_norm(device: str, dtype: torch.dtype, gain: bool) -> tuple[list[int], list[torch.Tensor | None]]:
    """Sizes in bytes of the storages that an RMS norm keeps besides its gain, sorted; its output and its gradients."""
    x = torch.randn(*ROWS, CHANNELS, device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(CHANNELS, device=device, dtype=dtype, requires_grad=True) if gain else None
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is not weight:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = F.rms_norm(x, (CHANNELS,), weight, 1e-6)
    y.sum().backward()
    return sorted(kept.values()), [y, x.grad, None if weight is None else weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain", [False, True])
def test_a_fused_norm_keeps_its_input_and_a_number_per_row_and_gives_what_a_composed_one_does(dtype, gain):
    with FakeTensorMode():
        composed, wanted = kept_by_norm("cpu", dtype, gain)
        with cuda_kernels("cpu"):
            fused, found = kept_by_norm("cpu", dtype, gain)
    elements, rows = 15 * CHANNELS, 15
    assert fused == [4 * rows, dtype.itemsize * elements]
    assert sum(composed) > sum(fused) or dtype == torch.float32
    for tensor, other in zip(found, wanted, strict=True):
        assert (tensor is None) == (other is None)
        assert tensor is None or (tensor.shape, tensor.dtype, tensor.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain", [False, True])
def test_a_gpu_keeps_as_much(dtype, gain):
    with FakeTensorMode(), cuda_kernels("cpu"):
        imitated, _ = kept_by_norm("cpu", dtype, gain)
    assert kept_by_norm("cuda", dtype, gain)[0] == imitated


def test_the_backward_of_silu_is_one_operation():
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name.partition("::")[2])
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), cuda_kernels("cpu"):
        x = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
        with Names():
            y = F.silu(x)
            torch.autograd.grad(y, x, torch.empty_like(y))
    assert [name for name in names if name not in NO_KERNEL] == ["silu", "silu_backward"]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_gain_of_another_dtype_and_other_devices_are_composed():
    with FakeTensorMode(), cuda_kernels("cuda"):
        kept, _ = kept_by_norm("cpu", torch.bfloat16, False)
    assert kept == [4 * 15, 4 * 15 * CHANNELS]  # in float32
    with FakeTensorMode(), cuda_kernels("cpu"):
        x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
        y = F.rms_norm(x, (4,), torch.ones(4))
    assert y.shape == (2, 4) and "Fused" not in type(y.grad_fn).__name__


def config_of(*words: str):
    return load_config(["--data.name=synthetic", "--data.shape=[4,8,8]", "--model.flavor=debug", "--gns.enable=false", *words], 1)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_are_computed_again_by_the_same_kernels(mode):
    recomputed = f"--activation_checkpoint.mode={mode}"
    config = config_of("--model.patch_size=2", recomputed, "--training.mixed_precision_param=bfloat16")
    assert simulate_step(config, 1, on_gpu=True).windows


def test_the_estimate_for_a_gpu_counts_fused_norms():
    """In bfloat16 a block's norms keep their inputs in it, not in float32."""
    words = ("--model.patch_size=2", "--training.local_batch_size=16", "--training.global_batch_size=16",
             "--training.mixed_precision_param=bfloat16", "--model.num_layers=4")  # fmt: skip
    kept = {}
    for on_gpu in (False, True):
        steps = {layers: simulate_step(config_of(*words, f"--model.num_layers={layers}"), 1, on_gpu) for layers in (3, 4)}
        three, four = (step.windows[0, "forward", layers - 1][ACTIVATIONS] for layers, step in steps.items())
        kept[on_gpu] = four - three
    assert kept[True] < kept[False]
    config = config_of(*words)
    assert estimate_memory(config, 1, on_gpu=True).total < estimate_memory(config, 1, on_gpu=False).total
    assert estimate_memory(config, 1) == estimate_memory(config, 1, on_gpu=torch.cuda.is_available())
