"""Attention's implementation and the precision of float32 products: chosen for a run, refused where they cannot be."""

import pytest
import torch
import torch.nn.functional as F

from tests.configurations import load, problems
from tests.distributed.cases import make_trainer
from torchtitan.distributed.kernel_choices import KernelError, check_attention, kernel_choices, kernel_problems


def attention_used() -> str:
    q = torch.zeros(1, 2, 16, 8, requires_grad=True)
    return type(F.scaled_dot_product_attention(q, q, q).grad_fn).__name__


@pytest.fixture
def precisions(monkeypatch):
    """Precisions that torch was set to; that of a CPU build is not to be changed for other tests."""
    set_to = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_to.append)
    return set_to


def test_attention_is_the_chosen_one_and_torchs_own_choice_again_afterwards():
    own = attention_used()
    with kernel_choices("math", "highest"):
        assert attention_used() != own
    with kernel_choices("flash", "highest"):
        assert attention_used() == own == "ScaledDotProductFlashAttentionForCpuBackward0"
    assert attention_used() == own


def test_precision_of_products_is_restored_also_after_an_error(precisions):
    with pytest.raises(ZeroDivisionError), kernel_choices("auto", "high"):
        assert precisions == ["high"]
        raise ZeroDivisionError
    assert precisions == ["high", "highest"]


def test_a_run_attends_by_its_choice_in_training_and_sampling_until_it_is_closed(tmp_path, monkeypatch):
    own, used, original = attention_used(), set(), F.scaled_dot_product_attention

    def spied(*args, **options):
        training = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in args]
            used.add((training, type(original(*inputs).grad_fn).__name__))
        return original(*args, **options)

    settings = ("--training.attention_backend", "math", "--sampling.enable", "true", "--sampling.num_steps", "2",
        "--lr_scheduler.warmup_steps", "1")
    trainer = make_trainer(str(tmp_path), "run", steps=1, replicas=1, shards=1, accumulation=1, overrides=settings)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    trainer.train()
    trainer.close()
    monkeypatch.undo()
    (in_training, training_kernel), (_, sampling_kernel) = sorted(used, reverse=True)
    assert in_training and training_kernel == sampling_kernel != own
    assert attention_used() == own


@pytest.mark.parametrize(
    "attention, precision, dtype, width, key, part",
    [
        ("flash", "highest", "float32", 64, "attention_backend", "flash has no float32 kernels"),
        ("cudnn", "highest", "bfloat16", 36, "attention_backend", "multiple of 8 channels, and these have 36"),
        ("cudnn", "highest", "bfloat16", 72, None, ""),
    ],
)
def test_kernels_that_cuda_lacks_are_refused(attention, precision, dtype, width, key, part, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = list(kernel_problems(attention, precision, dtype, width))
    assert [name for name, _ in found] == ([key] if key else [])
    assert all(part in text for _, text in found)


def test_choices_of_cuda_are_refused_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert problems("[training]\nattention_backend = 'cudnn'\nfloat32_matmul_precision = 'high'") == [
        "run.toml: training.float32_matmul_precision: high is of CUDA's tensor cores, which are not there (set highest)",
        "run.toml: training.attention_backend: cudnn is for CUDA, which is not there (the CPU has flash and math)",
    ]
    assert load("[training]\nattention_backend = 'math'").training.attention_backend == "math"


def test_attention_that_the_device_lacks_is_one_line():
    check_attention("flash", 36, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(KernelError, match="efficient has no kernel for heads of 36 channels in bfloat16 on cpu"):
        check_attention("efficient", 36, torch.bfloat16, torch.device("cpu"))
