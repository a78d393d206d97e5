"""Schedule, optimizer, gradient norm, metrics and guards against float64 and closed forms."""

import itertools
import json
import os
import signal
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan.config.job import load_config
from torchtitan.diffusion.objective import LossTerms
from torchtitan.distributed import collectives as agreement
from torchtitan.distributed.collectives import StopRequest
from torchtitan.distributed.parallelize import clip_gradients, gradient_norm, sum_of_squares
from torchtitan.run import run
from torchtitan.state.resume import load_sums, materialise_state
from torchtitan.supervision.supervision import Supervision
from torchtitan.training import metrics
from torchtitan.training.config import LRSchedulerConfig, OptimizerConfig
from torchtitan.training.metric_cut import cut_metrics
from torchtitan.training.metrics import LossWindow, Stopwatch, tail_medians
from torchtitan.training.optimizer import build_optimizer, optimizer_tensors, set_lr
from torchtitan.training.schedules import lr_factor


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


# --- schedule and optimizer


@pytest.mark.parametrize(("config", "wanted"), [
    # step -> factor over 100 steps
    (LRSchedulerConfig(), {1: 1, 50: 1, 100: 1}),
    (LRSchedulerConfig(warmup_steps=10), {1: 0.1, 5: 0.5, 10: 1, 11: 1, 100: 1}),
    (LRSchedulerConfig(warmup_steps=20, decay_type="linear"), {20: 1, 21: 1, 61: 0.5, 100: 1 / 80}),
    (LRSchedulerConfig(decay_type="linear", min_lr_factor=0.2), {1: 1, 51: 0.6, 100: 0.2 + 0.8 / 100}),
    (LRSchedulerConfig(warmup_steps=20, decay_type="cosine"), {20: 1, 21: 1, 61: 0.5, 81: (1 - 0.5**0.5) / 2}),
    (
        LRSchedulerConfig(decay_type="cosine", min_lr_factor=0.1),
        {1: 1, 51: 0.55, 100: 0.1 + 0.9 * np.sin(np.pi / 200) ** 2},
    ),
    (LRSchedulerConfig(warmup_steps=100, decay_type="cosine"), {1: 0.01, 100: 1}),
])
def test_learning_rate_has_its_closed_form(config, wanted):
    for step, factor in wanted.items():
        assert lr_factor(config, step, 100) == pytest.approx(factor, rel=1e-12), step
    factors = [lr_factor(config, step, 100) for step in range(1, 101)]
    peak = max(config.warmup_steps, 1)
    assert all(a < b for a, b in itertools.pairwise(factors[:peak]))
    assert all(a >= b for a, b in zip(factors[peak - 1 : -1], factors[peak:], strict=True))
    assert all(config.min_lr_factor < factor <= 1 for factor in factors)


def gradients(model: nn.Module, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def test_adamw_step_equals_its_formula_and_spares_vectors_from_decay():
    model = network()
    config = OptimizerConfig(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3)
    optimizer = build_optimizer(dict(model.named_parameters()), config)
    weights = {key: p.detach().double() for key, p in model.named_parameters()}
    first, second = ({key: torch.zeros_like(p) for key, p in weights.items()} for _ in range(2))
    for step in (1, 2, 3):
        gradients(model, step)
        set_lr(optimizer, 0.01 * step)
        for key, parameter in model.named_parameters():
            gradient, lr = parameter.grad.double(), 0.01 * step
            first[key] = 0.8 * first[key] + 0.2 * gradient
            second[key] = 0.95 * second[key] + 0.05 * gradient**2
            weights[key] = weights[key] * (1 - lr * (0.3 if parameter.ndim > 1 else 0))
            root = (second[key] / (1 - 0.95**step)).sqrt() + 1e-6
            weights[key] = weights[key] - lr * first[key] / (1 - 0.8**step) / root
        optimizer.step()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), weights[key], rtol=1e-5, atol=1e-6)


def test_materialised_state_is_zero_and_the_next_step_that_of_a_fresh_optimizer():
    config = OptimizerConfig(lr=0.02, weight_decay=0.1)
    models = {name: network() for name in ("fresh", "materialised")}
    optimizers = {name: build_optimizer(dict(m.named_parameters()), config) for name, m in models.items()}
    materialise_state(optimizers["materialised"], 0.02)

    parameters = dict(models["materialised"].named_parameters())
    state = optimizer_tensors(optimizers["materialised"], parameters)
    assert set(state) == {f"{key}.{part}" for key in parameters for part in ("step", "exp_avg", "exp_avg_sq")}
    assert all((value == 0).all() for value in state.values())
    assert [group["lr"] for group in optimizers["materialised"].param_groups] == [0.02, 0.02]
    assert all(p.grad is None for p in parameters.values())
    for key, parameter in models["fresh"].named_parameters():
        assert torch.equal(parameter, parameters[key])

    for _ in range(2):
        for name, model in models.items():
            gradients(model)
            optimizers[name].step()
        for key, parameter in models["fresh"].named_parameters():
            assert torch.equal(parameter, parameters[key])


# --- gradient norm


def test_sum_of_squares_of_25_million_elements_is_exact_to_1e_8():
    generator = torch.Generator().manual_seed(0)
    sizes = (20_000_003, 5_000_000, 1023, 1024, 0, 1)
    tensors = [1e-3 * torch.randn(size, generator=generator) for size in sizes]
    wanted = sum((part.double() ** 2).sum().item() for tensor in tensors for part in tensor.split(1 << 20))
    found = sum_of_squares(tensors)
    assert found.dtype == torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(wanted, rel=1e-8, abs=0)


def test_a_rank_without_a_row_has_a_sum_of_squares_of_zero():
    assert sum_of_squares([torch.zeros(0), torch.zeros(0, 3)]).item() == sum_of_squares([]).item() == 0.0


def test_sum_of_squares_is_the_sum_over_tensors_of_any_size():
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.linspace(3, -6, 60)
    tensors = [scale * torch.randn(100 + 37 * place, generator=generator) for place, scale in enumerate(scales)]
    wanted = sum(sum_of_squares([tensor]).item() for tensor in tensors)
    # Positive addends: a sum of 60 in a row errs by 60 roundoffs at most, one of 2^16 by pairs by 16.
    assert sum_of_squares(tensors).item() == pytest.approx(wanted, rel=(60 + 2 * 16) * 2.0**-53, abs=0)


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clipping_scales_the_gradient_to_the_norm_and_no_further(max_norm):
    model = network()
    gradients(model)
    model[0].bias.grad = None
    parameters = list(model.parameters())
    before = [p.grad.double().clone() for p in parameters if p.grad is not None]
    norm = gradient_norm(parameters, SimpleNamespace(sharded=False, device=torch.device("cpu")))
    wanted = np.sqrt(sum((g**2).sum().item() for g in before))
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(wanted, rel=1e-7)
    clip_gradients(parameters, norm, max_norm)
    after = [p.grad.double() for p in parameters if p.grad is not None]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old * min(1, max_norm / wanted), rtol=3e-6, atol=0)
    assert np.sqrt(sum((g**2).sum().item() for g in after)) <= max_norm * (1 + 1e-6)
    if max_norm > wanted:
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


# --- metrics


def terms(generator: np.random.Generator, size: int) -> LossTerms:
    t = torch.from_numpy(generator.choice([0.0, 0.1, 0.25, 0.3, 0.6, 0.75, 1.0], size).astype(np.float32))
    loss, error = torch.from_numpy(generator.random((2, size)).astype(np.float32))
    return LossTerms(loss, error, t, loss)


def test_window_means_equal_numpy_s_and_start_anew():
    edges = np.array([0.1, 0.25, 0.5, 0.75, 0.99], dtype=np.float32)
    window, generator = LossWindow(torch.from_numpy(edges)), np.random.default_rng(0)
    for _ in range(2):
        batches = [terms(generator, size) for size in (7, 1, *[30] * 70, 2)]
        for batch in batches:
            window.add(batch)
        loss, error, t = (
            torch.cat([getattr(b, key) for b in batches]).double().numpy() for key in ("loss", "error", "t")
        )
        bins = np.searchsorted(edges, t.astype(np.float32), side="left")
        wanted = {"loss_metrics/global_avg_loss": loss.mean(), "loss_metrics/global_max_loss": loss.mean()}
        wanted |= {f"loss_by_bin/{k}": error[bins == k].mean() for k in range(6) if (bins == k).any()}
        assert window.reduce() == pytest.approx(wanted, rel=1e-12)
    # nothing fell between the last sample at an edge and the next bin; bins without samples are left out
    window.add(LossTerms(torch.ones(2), torch.tensor([2.0, 4.0]), torch.tensor([0.1, 0.1001]), torch.ones(2)))
    assert window.reduce() == {
        "loss_metrics/global_avg_loss": 1, "loss_metrics/global_max_loss": 1, "loss_by_bin/0": 2, "loss_by_bin/1": 4
    }
    # of a loss with further terms, the weighted error is a metric too
    window.add(LossTerms(torch.ones(2), torch.ones(2), torch.tensor([0.2, 0.3]), torch.tensor([0.25, 0.5])))
    window.add(LossTerms(torch.ones(1), torch.ones(1), torch.tensor([0.2]), torch.tensor([0.75])))
    found = window.reduce()
    assert found["loss_metrics/global_avg_weighted_error"] == 0.5 and found["loss_metrics/global_avg_loss"] == 1


def test_window_goes_on_from_its_stored_state():
    edges, generator = torch.tensor([0.3, 0.6]), np.random.default_rng(1)
    straight, first, second = (LossWindow(edges) for _ in range(3))
    before, after = terms(generator, 20), terms(generator, 9)
    for window in (straight, first):
        window.add(before)
    load_sums(second, json.loads(json.dumps(first.state_dict()))["sums"], first=True)
    for window in (straight, first, second):
        window.add(after)
    wanted = straight.reduce()
    assert first.reduce() == wanted and second.reduce() == wanted

    other_bins = LossWindow(torch.tensor([0.5]))
    load_sums(other_bins, straight.state_dict()["sums"], first=True)
    other_bins.add(after)
    assert other_bins.reduce()["loss_metrics/global_avg_loss"] == pytest.approx(after.loss.double().mean().item())


def test_stopwatch_leaves_out_what_is_excluded(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    watch = Stopwatch()
    spend(3)
    with watch.excluded():
        spend(50)
    spend(2)
    assert watch.lap() == 5
    assert watch.lap() == 0
    with pytest.raises(KeyError), watch.excluded():
        spend(7)
        raise KeyError
    spend(0.5)
    assert watch.lap() == 0.5


def test_metrics_are_cut_to_the_step_resumed_from(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut_metrics(path, 3)
    assert not path.exists()
    lines = [json.dumps({"step": step, "loss": step / 7}) for step in (1, 2, 3, 3, 4, 5)]
    for half in ('{"step": 6, "lo', '{"st', "6", "\0\0\0", "{}", "null"):
        path.write_text("\n".join([*lines, half]))
        cut_metrics(path, 3)
        assert path.read_text() == "\n".join(lines[:4]) + "\n"
        assert os.listdir(tmp_path) == ["metrics.jsonl"]
    cut_metrics(path, 0)
    assert path.read_text() == ""


def test_tail_medians_are_those_of_the_last_half(tmp_path):
    path = tmp_path / "metrics.jsonl"
    generator = np.random.default_rng(0)
    points = [{"step": n, "a": generator.random(), **({"b": n} if n % 3 == 0 else {})} for n in range(1, 12)]
    path.write_text("".join(json.dumps(point) + "\n" for point in points))
    tail = points[5:]
    wanted = {"a": statistics.median(p["a"] for p in tail), "b": 7.5}  # steps 6 and 9
    assert tail_medians(path, ("a", "b", "never")) == wanted
    path.write_text("")
    assert tail_medians(path, ("a",)) == {}


# --- guards and agreements


@pytest.mark.parametrize("number", StopRequest.SIGNALS)
def test_a_signal_is_polled_once_per_step_and_handlers_are_restored(number):
    before = {n: signal.getsignal(n) for n in StopRequest.SIGNALS}
    with StopRequest() as stop:
        assert stop.poll() == 0
        signal.raise_signal(number)
        assert stop.poll() == number and stop.poll() == number
    assert {n: signal.getsignal(n) for n in StopRequest.SIGNALS} == before


def test_a_signal_while_the_supervision_starts_is_not_lost(tmp_path, monkeypatch):
    enter = Supervision.__enter__
    monkeypatch.setattr(Supervision, "__enter__", lambda self: (signal.raise_signal(signal.SIGTERM), enter(self))[1])
    words = "--data.name synthetic --model.flavor debug --training.steps 3 --sampling.enable false --checkpoint.enable false"
    assert run(load_config([*words.split(), "--job.dump_folder", str(tmp_path)], 1)) == 128 + signal.SIGTERM


def test_the_first_signal_is_acknowledged_at_once_and_once(capfd):
    with StopRequest("stopping: finishing this step") as stop:
        for said in ("stopping: finishing this step\n", ""):  # the second is an echo
            signal.raise_signal(signal.SIGINT)
            assert capfd.readouterr().err == said
        assert stop.poll() == signal.SIGINT
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_a_later_second_signal_ends_the_process_but_an_echo_does_not(monkeypatch):
    now, polled = [50.0], []
    monkeypatch.setattr(agreement.time, "monotonic", lambda: now[0])
    before = {n: signal.getsignal(n) for n in StopRequest.SIGNALS}
    with pytest.raises(SystemExit) as ended, StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        now[0] += 1.9
        signal.raise_signal(signal.SIGINT)
        assert stop.poll() == signal.SIGTERM
        now[0] += 0.2
        polled.append("the echo passed")
        signal.raise_signal(signal.SIGINT)
        stop.poll()
    assert polled == ["the echo passed"]
    assert ended.value.code == 128 + signal.SIGINT
    assert {n: signal.getsignal(n) for n in StopRequest.SIGNALS} == before
