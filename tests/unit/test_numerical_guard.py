"""Steps that must not count: how they are judged, counted and skipped, and what names the fault."""

import copy
import logging
import math

import pytest
import torch
from torch import nn

from torchtitan.diffusion.objective import LossTerms
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.state.resume import load_counts
from torchtitan.training.config import OptimizerConfig
from torchtitan.training.metrics import LossWindow
from torchtitan.training.non_finite import Watch, not_finite, over_ranks, watched
from torchtitan.training.numerical_guard import LARGEST_NORM, NumericalGuard, StepSamples, backward
from torchtitan.training.optimizer import build_optimizer


def judge(guard: NumericalGuard, step: int, norm: float) -> bool:
    guard.add_images(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    return bool(guard.judge(StepSamples(step, GlobalBatch(16 * step, 16), 1), torch.tensor(norm, dtype=torch.float64)))


# ---------------------------------------------------------------------- judging and counting


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_step_is_judged_at_once_and_counted_one_step_late(broken, caplog):
    guard = NumericalGuard(1)
    assert not judge(guard, 1, 1.0)
    assert judge(guard, 2, broken)
    assert (guard.skipped, guard.in_doubt, guard.exhausted) == (0, False, False)
    with caplog.at_level(logging.WARNING):
        assert judge(guard, 3, broken)
    assert caplog.messages == [
        f"step 2: skipped, the gradient norm is {broken} (1 since the last checkpoint, training.max_skipped_steps = 1)"
    ]
    assert (guard.skipped, guard.in_doubt, guard.exhausted) == (1, True, False)
    guard.settle()
    assert (guard.skipped, guard.exhausted, guard.last_skipped) == (2, True, StepSamples(3, GlobalBatch(48, 16), 1))


def test_a_checkpoint_starts_the_count_anew_unless_it_was_saved_in_doubt():
    guard = NumericalGuard(1)
    for step, norm in enumerate((math.nan, 1.0), 1):
        judge(guard, step, norm)
    guard.settle()
    guard.checkpoint_saved()
    judge(guard, 3, math.nan)
    guard.settle()
    assert not guard.exhausted
    guard.checkpoint_saved()
    judge(guard, 4, math.nan)
    guard.settle()
    assert guard.exhausted and guard.skipped == 3


def test_the_same_checkpoint_is_gone_back_to_once():
    guard = NumericalGuard(0)
    judge(guard, 7, math.nan)
    guard.settle()
    assert guard.exhausted and guard.may_roll_back_to(4)
    guard.rolled_back(4)
    assert not (guard.exhausted or guard.in_doubt or guard.may_roll_back_to(4)) and guard.may_roll_back_to(8)
    assert guard.state_dict() == {"skipped": 1, "rollbacks": 1}
    load_counts(guard, {"skipped": 0, "rollbacks": 0})  # of the checkpoint, which knows nothing of it
    assert guard.state_dict() == {"skipped": 1, "rollbacks": 1}


@pytest.mark.parametrize("norms, reason", [
    ((LARGEST_NORM, 1.0), "the gradient norm is 1.84467e+19"),
    ((1.0, 1e25), "the gradient norm of the objective's parameters is 1e+25"),
    ((math.nan, math.inf), "the gradient norm is nan"),
])  # fmt: skip
def test_every_trained_parameter_is_judged_and_none_whose_square_overflows_in_float32(norms, reason):
    guard = NumericalGuard(1)
    samples = StepSamples(1, GlobalBatch(0, 16), 1)
    guard.add_images(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    assert not guard.judge(samples, torch.tensor(0.99 * LARGEST_NORM), torch.tensor(1.0))
    guard.settle()
    assert guard.last_healthy == samples
    guard.add_images(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    assert guard.judge(samples, *(torch.tensor(norm, dtype=torch.float64) for norm in norms))
    guard.settle()
    assert guard.reason == reason
    assert torch.tensor(0.99 * LARGEST_NORM).square().isfinite() and torch.tensor(1.01 * LARGEST_NORM).square().isinf()


@pytest.mark.parametrize("loss, wanted", [(3.0, 2.0), (math.inf, math.nan), (math.nan, math.nan)])
def test_a_loss_that_is_not_finite_makes_its_gradient_nan_though_that_is_finite(loss, wanted):
    x = torch.tensor(0.0, requires_grad=True)
    backward(2.0 * x + loss)
    assert x.grad.item() == pytest.approx(wanted, nan_ok=True)


# ---------------------------------------------------------------------- images


def show(guard: NumericalGuard, step: int, largest: list[float]) -> None:
    """A healthy step of one microbatch whose images have these largest absolute values."""
    images = torch.zeros(len(largest), 1, 2, 2)
    images[:, 0, 1, 0] = -torch.tensor(largest)
    guard.add_images(images[:1], 100 * step + torch.arange(1))
    guard.add_images(images[1:], 100 * step + torch.arange(1, len(largest)))
    judge(guard, step, 1.0)
    guard.settle()


def test_an_image_with_a_value_that_none_should_have_is_named_once(caplog):
    guard = NumericalGuard(1, image_of=lambda sample, attempt: sample % 100)
    with caplog.at_level(logging.WARNING):
        show(guard, 1, [1.0, 999.0, 0.0])
        assert not caplog.messages
        show(guard, 2, [1.0, 2.0, 1e20])
        show(guard, 3, [1.0, 2.0, 1e20])
        show(guard, 4, [1e5, math.nan, 1e20])
    of = "of the dataset, has a value of"
    assert caplog.messages == [
        f"step 2: sample 202, image 2 {of} 1e+20 (images lie within [-1, 1]): check it",
        f"step 4: sample 401, image 1 {of} nan (images lie within [-1, 1]): check it",
    ]


# ---------------------------------------------------------------------- states


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_tensor_of_a_state_that_is_not_finite_is_named(bad):
    good, wrong = torch.full((3, 5), -3e38), torch.ones(7)
    wrong[4] = bad
    codes = torch.full((4,), 255, dtype=torch.uint8)
    assert not_finite({"a": good, "codes": codes, "none": torch.empty(0)}) == "" == not_finite({})
    state = {"a": good, "codes": codes, "b": torch.tensor(1.0, dtype=torch.float64), "c": wrong, "d": wrong}
    assert not_finite(state) == "c is not finite"


# ---------------------------------------------------------------------- skipping


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_skipped_step_changes_nothing_and_any_other_everything_as_before(name):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    plain, guarded = copy.deepcopy(block), copy.deepcopy(block)
    config = OptimizerConfig(name=name, lr=0.1, weight_decay=0.1)
    optimizers = [build_optimizer(dict(model.named_parameters()), config, [model]) for model in (plain, guarded)]
    for step in range(6):
        gradients = [torch.randn(p.shape) for p in plain.parameters()]
        broken = step in (0, 3)
        for model, optimizer in zip((plain, guarded), optimizers, strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            if model is plain and not broken:
                optimizer.step()
            if model is guarded:
                if broken:
                    for parameter in model.parameters():
                        parameter.grad.fill_(math.nan)
                optimizer.step(torch.tensor(broken))
        for one, other in zip(plain.parameters(), guarded.parameters(), strict=True):
            assert torch.equal(one, other), step
    states = [list(optimizer.state.values()) for optimizer in optimizers]
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_samples_without_a_finite_loss_are_left_out_of_the_means():
    window = LossWindow(torch.tensor([0.5]))
    loss, t = torch.tensor([1.0, math.nan, 3.0, math.inf]), torch.tensor([0.1, 0.2, 0.7, 0.9])
    window.add(LossTerms(loss=loss, error=loss, t=t, weighted=loss))
    assert window.reduce() == {
        "loss_metrics/global_avg_loss": 2.0, "loss_metrics/global_max_loss": 2.0, "loss_by_bin/0": 1.0, "loss_by_bin/1": 3.0,
    }  # fmt: skip


# ---------------------------------------------------------------------- naming the fault


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))


def test_the_first_module_whose_output_is_not_finite_is_named():
    model, watch = two_layers(), Watch()
    with torch.no_grad():
        model[0][0].weight[0, 0] = math.inf
    with watched(model, watch):
        model(torch.zeros(1, 4))
    assert watch.found == "the output of 0.0"
    with watched(model, watch := Watch()):
        pass
    model(torch.zeros(1, 4))
    assert watch.found == ""  # nothing is watched outside


def test_the_first_gradient_that_is_not_finite_is_named():
    model, watch = two_layers(), Watch()
    model[0][1].register_forward_hook(lambda *call: call[-1].register_hook(lambda g: g * math.nan) and None)
    with watched(model, watch):
        model(torch.randn(2, 4)).sum().backward()
    assert watch.found == "the gradient of the output of 0.1"
    watch = Watch()
    watch.see_all([("a", None), ("b", torch.ones(2)), ("c", torch.tensor(math.nan)), ("d", torch.tensor(math.nan))], "<{}>")
    assert watch.found == "<c>" and over_ranks(watch.found) == "<c>" and over_ranks("") == ""
