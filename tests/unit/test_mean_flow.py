"""Mean flows: closed forms on Gaussian data, the difference quotient against a forward derivative, draws, steps, refusals."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan import philox
from torchtitan.conditions import Classes
from torchtitan.config.job import ConfigError, load_config
from torchtitan.diffusion.guidance import Guidance, guided_network, over_duration
from torchtitan.diffusion.mean_flow import MeanFlow, MeanFlowConfig
from torchtitan.diffusion.objective import Draw, Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import RectifiedFlow
from torchtitan.diffusion.solvers import SCHEDULES, SOLVERS
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.estimate.memory import model_on_meta
from torchtitan.estimate.roofline import training_flops_per_image
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.evaluation.validation import held_out_draw
from torchtitan.models import MODELS
from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.dit.model import DiT
from torchtitan.models.layers import timestep_sinusoid
from torchtitan.sampling.method_options import sampling_method
from torchtitan.sampling.setup import SamplingSetup
from torchtitan.weights.trained_model import WeightsError
from torchtitan_dit.commands import sample

KIND, SHAPE = Classes(3), (2, 8, 8)


def variance(t, std: float):
    return ((1 - t) * std) ** 2 + t**2


def exact(z, r, t, std: float):
    """Mean velocity over r to t of data N(0, std^2), without the difference of equal numbers that r = t has."""
    slope = (t + r) - std**2 * (2 - t - r)  # (V(t) - V(r)) / (t - r)
    of_t, of_r = variance(t, std), variance(r, std)
    return z * slope / (of_t + (of_t * of_r) ** 0.5)


def exact_network(std: float, scale: Tensor | float = 1.0):
    def network(x, time, _condition, duration):
        t = (1 - time).reshape(-1, 1, 1, 1)
        return scale * exact(x, t - duration.reshape(-1, 1, 1, 1), t, std)

    return network


def built(**keys) -> MeanFlow:
    objective = build_objective(MeanFlowConfig(**keys), 0)
    assert isinstance(objective, MeanFlow)
    return objective


GOLDEN = [(0.5, 0.2, 0.8, 1.3, 0.9648162415, 1.5), (2.0, 0.0, 1.0, -0.7, 0.7, -0.7)]
GOLDEN += [(0.5, 0.6, 0.6001, 1.0, 1.249921865, 1.249999961)]


@pytest.mark.parametrize(("std", "r", "t", "z", "mean", "velocity"), GOLDEN)
def test_the_exact_mean_velocity_satisfies_the_identity_of_the_loss(std, r, t, z, mean, velocity):
    assert exact(z, r, t, std) == pytest.approx(mean, abs=1e-9 if r == 0.6 else 1e-10)
    assert exact(z, t, t, std) == pytest.approx(velocity, abs=1e-9 if r == 0.6 else 1e-10)
    objective = built(tangent="predicted")
    objective.step = 1e-5
    x, time, duration = (torch.tensor([each], dtype=torch.float64) for each in (z, t, t - r))
    x = x.reshape(1, 1, 1, 1)
    tangent = objective.velocity(exact_network(std), x, time, None)
    slope = objective.slope(exact_network(std), x, tangent, time, duration, None)
    # At t = 1 the quotient is one-sided, of first order.
    tolerance = 1e-4 if t == 1 else 1e-10
    assert (exact(z, t, t, std) - (t - r) * slope).item() == pytest.approx(exact(z, r, t, std), abs=tolerance)


@pytest.mark.parametrize("tangent", ["sampled", "predicted"])
def test_the_exact_mean_velocity_has_no_gradient_and_the_variance_of_its_target_as_loss(tangent):
    """At the larger time the target varies as v does given z; of a sampled tangent by V(r) / V(t) of that."""
    std, t, r, count = 0.5, 0.8, 0.2, 400_000
    generator = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(count, 1, 1, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    times = torch.full((count,), t, dtype=torch.float64)
    draw = Draw(times, noise, torch.ones_like(times), duration=times - r)
    objective = built(tangent=tangent, weight_power=0.0)

    def gradient(error: float) -> tuple[float, float]:
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        network = exact_network(std, 1 + error)

        def trained(*inputs: torch.Tensor) -> torch.Tensor:
            return network(*inputs) * (scale if torch.is_grad_enabled() else 1.0)

        terms = objective.loss(trained, Microbatch(std * x0), draw)
        terms.loss.mean().backward()
        return scale.grad.item(), terms.error.mean().item()

    (found, loss), (off, _) = gradient(0.0), gradient(0.1)
    assert abs(found) < 0.05 * abs(off)
    wanted = 1 + std**2 - (t - (1 - t) * std**2) ** 2 / variance(t, std)  # Var(v | z_t)
    if tangent == "sampled":
        wanted *= variance(r, std) / variance(t, std)
    assert loss == pytest.approx(wanted, rel=0.01)  # four standard errors


@pytest.mark.parametrize(("power", "tangent", "floor"), [(1.0, "sampled", 1e-3), (0.75, "predicted", 1e-2)])
def test_the_weight_is_the_published_one_of_sums_over_the_elements(power, tangent, floor):
    torch.manual_seed(0)
    x0, noise = torch.randn(2, 4, *SHAPE)
    size, draw = x0[0].numel(), Draw(torch.full((4,), 0.5), noise, torch.tensor([1.0, 2.0, 1.0, 1.0]))
    scale = torch.tensor([1.0, 1.0, 0.99, 0.9]).reshape(-1, 1, 1, 1).requires_grad_()
    terms = built(weight_power=power, tangent=tangent).loss(lambda *_: scale * (noise - x0), Microbatch(x0), draw)
    terms.loss.sum().backward()
    squares, velocity = ((noise - x0) * (scale.detach() - 1)).square().sum((1, 2, 3)), noise - x0
    wanted = draw.importance * squares / (squares + floor) ** power * size ** (power - 1)
    torch.testing.assert_close(terms.loss, wanted)
    torch.testing.assert_close(terms.weighted, draw.importance * squares / size)
    slope = (2 * velocity.square() * (scale.detach() - 1)).sum((1, 2, 3))  # no gradient through the weight
    wanted_gradient = draw.importance * slope / (squares + floor) ** power * size ** (power - 1)
    torch.testing.assert_close(scale.grad.flatten(), wanted_gradient, rtol=1e-4, atol=1e-7)


def network(**keys) -> DiT:
    config = DiTConfig(dim=32, num_layers=2, num_heads=2, mlp_hidden_dim=64, duration_embedding=True, **keys)
    model = MODELS["dit"].build(config, SHAPE, KIND)
    torch.manual_seed(0)
    model.init_weights()
    for parameter in model.parameters():  # an untrained network has no slope
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return model


WIDE = pytest.mark.parametrize("wide", [{}, {"wide_dim": 64, "wide_heads": 4, "wide_layers": 1}], ids=["dit", "wide head"])


@WIDE
@torch.no_grad()
def test_the_embedded_duration_is_added_to_the_embedded_time(wide):
    model, x, t, condition = network(**wide), torch.randn(4, *SHAPE), torch.rand(4), torch.arange(4)
    duration, zeros = 0.5 * t, torch.zeros(4)
    found, nothing = model(x, t, condition, duration), model(x, t, condition)
    assert torch.equal(nothing, model(x, t, condition, zeros)) and (found - nothing).abs().max() > 1e-4
    of_duration, of_zero = (model.duration_embed(timestep_sinusoid(each, 256)) for each in (duration, zeros))
    model.time_embed.register_forward_hook(lambda _module, _inputs, time: time + of_duration - of_zero)
    torch.testing.assert_close(model(x, t, condition), found, rtol=1e-5, atol=1e-6)


@WIDE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_difference_quotient_is_the_forward_derivative_under_autocast_too(wide, dtype):
    model, count = network(**wide), 64
    torch.manual_seed(1)
    x, velocity, condition = torch.randn(count, *SHAPE), torch.randn(count, *SHAPE), torch.arange(count) % 4
    t = torch.linspace(0.3, 0.9, count)
    duration = 0.7 * t
    objective = built(tangent="sampled")

    with sdpa_kernel(SDPBackend.MATH):
        _, wanted = torch.func.jvp(  # the duration grows with t
            lambda x, t, d: model(x, 1 - t, condition, d), (x, t, duration), (velocity, torch.ones(count), torch.ones(count))
        )
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = objective.slope(model, x, velocity, t, duration, condition)
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


def test_the_ends_of_the_quotient_stay_between_the_smaller_time_and_one():
    seen = []

    def recorded(x, time, _condition, duration):
        seen.append((1 - time, 1 - time - duration))
        return x

    t, duration = torch.tensor([1.0, 0.9995, 0.5, 0.5, 1.0]), torch.tensor([0.0, 0.5, 0.0, 0.001, 1.0])
    zeros = torch.zeros(5, 1, 1, 1)
    slope = built(tangent="sampled").slope(recorded, zeros, zeros + 2, t, duration, None)
    for end, earlier in seen:
        assert (end <= 1).all() and (end >= earlier - 1e-6).all()
        torch.testing.assert_close(earlier, t - duration, rtol=0, atol=1e-6)
    torch.testing.assert_close(slope.flatten(), torch.tensor([0.0, 2.0, 2.0, 2.0, 2.0]), rtol=1e-3, atol=0)


def test_times_are_two_sorted_draws_with_a_share_of_equal_ones_by_sample_number():
    count = 40_000
    objective, samples = built(equal_share=0.25), torch.arange(40_000)
    draw = objective.draw((1, 1, 1), GlobalBatch(0, count), samples)
    assert draw.duration is not None and draw.duration.dtype == torch.float32
    equal, chosen = draw.duration == 0, torch.tensor([3, 39_999, 17])
    again = objective.draw((1, 1, 1), GlobalBatch(0, count), chosen)
    assert torch.equal(again.duration, draw.duration[chosen]) and torch.equal(again.t, draw.t[chosen])
    assert not torch.equal(objective.draw((1, 1, 1), GlobalBatch(0, count, 1), chosen).duration, again.duration)
    assert equal.double().mean().item() == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / count))
    pairs = torch.randn(400_000, 2, generator=torch.Generator().manual_seed(0)).sigmoid().sort(dim=1).values
    for t in (draw.t, draw.t[equal], draw.t[~equal]):
        assert t.mean().item() == pytest.approx(pairs[:, 1].mean().item(), abs=5 * 0.18 / math.sqrt(len(t)))
    t, r = draw.t[~equal], (draw.t - draw.duration)[~equal]
    for found, wanted in ((r, pairs[:, 0]), (t * r, pairs.prod(1)), ((r / t).square(), (pairs[:, 0] / pairs[:, 1]).square())):
        assert found.mean().item() == pytest.approx(wanted.mean().item(), abs=5 * wanted.std().item() / math.sqrt(len(r)))
    held_out = held_out_draw(objective, 1, torch.arange(200), 200, (1, 1, 1))
    assert held_out.duration is not None and 20 < int((held_out.duration == 0).sum()) < 80
    assert torch.equal(held_out.duration[5:6], held_out_draw(objective, 1, torch.tensor([5]), 200, (1, 1, 1)).duration)
    assert built(equal_share=1.0).draw((1, 1, 1), GlobalBatch(0, 4), torch.arange(4)).duration is None


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_steps_of_the_exact_mean_velocity_are_exact_samples(num_steps):
    std = 0.7

    def predict(x, t, duration):
        u = exact_network(std)(x, 1 - t, None, duration)
        return x - t.reshape(-1, 1, 1, 1) * u, x + (1 - t).reshape(-1, 1, 1, 1) * u

    x, times = torch.randn(5, 1, 2, 2, dtype=torch.float64), torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    found = SOLVERS["mean_flow"].solve(predict, RectifiedFlow(), x, times, lambda step: pytest.fail("no noise is asked for"))
    torch.testing.assert_close(found, std * x, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_sampler_draws_by_durations_with_guidance_and_without():
    model, choices, noise = network().eval(), torch.arange(3), philox.normal(5, "sampling", torch.arange(3), SHAPE)
    sampler = ImageSampler(model, built(), "float32", torch.device("cpu"))
    solver, schedule = SOLVERS["mean_flow"](name="mean_flow"), SCHEDULES["uniform"](name="uniform")
    for scale in (1.0, 2.0):
        method = dict(solver=solver, num_steps=2, schedule=schedule, guidance=Guidance(scale))
        found = sampler.draw(choices, 5, batch_size=2, **method)
        velocity, wanted = guided_network(over_duration(model, torch.tensor([0.5])), KIND, scale), noise
        for time in (0.0, 0.5):  # 1 - t
            wanted = wanted - 0.5 * velocity(wanted, torch.full((3,), time), choices)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


GUIDED = dict(guidance_max=8.0, equal_share=0.25)


def exact_guided_network(of_class: float, of_null: float):
    """Mean velocity of guided flows between data N(0, of_class^2) and N(0, of_null^2); class 3 is the null one.

    A velocity k z has the mean velocity z (1 - exp(-integral of k)) / (t - r), and half of d ln V is the integral of k.
    """

    def logarithm(low, high, std):
        return 0.5 * torch.log(variance(high, std) / variance(low, std))

    def network(x, time, condition, duration, guidance):
        t, (scale, low, high) = 1 - time, guidance.to(time).unbind(1)
        r, std = t - duration, torch.where(condition == 3, of_null, of_class).to(time)
        low, high = torch.minimum(torch.maximum(r, low), t), torch.maximum(torch.minimum(t, high), r)
        guided = torch.where(high > low, (scale - 1) * (logarithm(low, high, std) - logarithm(low, high, of_null)), 0.0)
        integral = logarithm(r, t, std) + guided
        scale = torch.where((guidance[:, 1] <= t) & (t <= guidance[:, 2]), scale, 1.0)
        k, k_null = ((t - (1 - t) * each**2) / variance(t, each) for each in (std, of_null))
        rate = torch.where(duration > 0, -torch.expm1(-integral) / duration.clamp_min(1e-12), k + (scale - 1) * (k - k_null))
        return x * rate.reshape(-1, 1, 1, 1)

    return network


@pytest.mark.parametrize("tangent", ["predicted", "sampled"])
def test_exact_guided_mean_velocities_satisfy_the_identity_of_the_loss(tangent):
    of_class, of_null = 0.5, 0.9
    objective, network = built(tangent=tangent, **GUIDED), exact_guided_network(of_class, of_null)
    objective.condition_kind, objective.step = KIND, 1e-5
    rows = [[0.8, 0.2, 4, 0, 1], [0.8, 0.2, 4, 0.3, 0.6], [0.5, 0.1, 7, 0.2, 0.9], [0.6, 0.6, 3, 0, 1], [0.7, 0, 1, 0, 1]]
    times = torch.tensor(rows, dtype=torch.float64)  # t, r, scale, low, high
    t, r, guidance = times[:, 0], times[:, 1], times[:, 2:]
    x, condition = torch.full((5, 1, 1, 1), 1.3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 3])
    std = torch.where(condition == 3, of_null, of_class)
    velocity = x * ((t - (1 - t) * std**2) / variance(t, std)).reshape(-1, 1, 1, 1)  # the mean of e - x at z
    target, along = objective.guided(network, x, velocity, t, condition, guidance)
    found, _ = objective.outputs(network, x, t, t - r, condition, guidance)
    slope = objective.slope(network, x, along, t, t - r, condition, guidance)
    torch.testing.assert_close(found + (t - r).reshape(-1, 1, 1, 1) * slope, target, rtol=1e-8, atol=1e-8)
    assert (target - velocity).flatten()[[0, 2, 3]].abs().min() > 0.3 and torch.equal(target[[1, 4]], velocity[[1, 4]])
    torch.testing.assert_close(target, objective.velocity(network, x, t, condition, guidance))
    moved, along_moved = objective.guided(network, x, velocity + 1, t, condition, guidance)
    torch.testing.assert_close(moved, target + 1)
    torch.testing.assert_close(along_moved, along + (tangent == "sampled"))


def test_guidance_is_drawn_by_sample_number_and_not_for_dropped_conditions():
    count = 20_000
    objective, samples = built(**GUIDED), torch.arange(count)
    draw = objective.draw((1, 1, 1), GlobalBatch(0, count), samples)
    chosen = torch.tensor([3, 19_999, 17])
    assert torch.equal(objective.draw((1, 1, 1), GlobalBatch(0, count), chosen).guidance, draw.guidance[chosen])
    assert draw.guidance.dtype == torch.float32 and torch.equal(draw.t, built(equal_share=0.25).draw(
        (1, 1, 1), GlobalBatch(0, count), samples).t)  # fmt: skip
    (scale, low, high), equal = draw.guidance.double().unbind(1), draw.duration == 0
    assert torch.equal(torch.stack((low, high), 1)[equal], torch.tensor([[0.0, 1.0]]).double().expand(int(equal.sum()), 2))
    low, high = 2 * low[~equal], 2 * high[~equal] - 1
    for uniform in (scale.log() / math.log(8), low, high):
        assert uniform.min() >= 0 and uniform.max() <= 1
        assert uniform.mean().item() == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / len(uniform)))
        assert uniform.var().item() == pytest.approx(1 / 12, rel=0.05)  # five standard errors
    whole = built(guidance_max=8.0, equal_share=1.0).draw((1, 1, 1), GlobalBatch(0, 2), samples[:2])
    assert whole.duration is None and whole.guidance[:, 1:].tolist() == [[0, 1]] * 2
    assert held_out_draw(objective, 1, torch.arange(2), 2, (1, 1, 1)).guidance is None

    seen = []

    def recorded(x, _time, condition, duration, guidance):
        seen.append((condition.tolist(), duration, guidance))
        return x

    objective.attach(network(), {})
    draw = Draw(torch.tensor([0.5, 0.5, 0.5]), torch.randn(3, *SHAPE), torch.ones(3), duration=torch.tensor([0.2, 0.0, 0.2]),
                guidance=torch.tensor([[4.0, 0.6, 0.9], [4.0, 0.0, 1.0], [4.0, 0.1, 0.9]]))  # fmt: skip
    kept = objective.kept(torch.tensor([0.5, 0.5, 0.05]), 0.1)
    objective.loss(recorded, Microbatch(torch.randn(3, *SHAPE), torch.tensor([0, 1, 3]), kept=kept), draw)
    assert objective.untrained_forwards + 1 == len(seen) == 5
    always, given = [0.0, 1.0], draw.guidance.tolist()
    of_dropped = [1.0, *always]
    assert [each[2].tolist() for each in seen[:2]] == [[of_dropped, [4.0, *always], of_dropped], [of_dropped] * 3]
    assert [each[0] for each in seen] == [[0, 1, 3], [3, 3, 3], *[[0, 1, 3]] * 3]
    assert not seen[0][1].any() and not seen[1][1].any()
    for each in seen[2:]:
        torch.testing.assert_close(each[2], torch.tensor([given[0], given[1], of_dropped]))


@torch.no_grad()
def test_a_sampler_gives_the_network_its_guidance():
    model, choices = network(guidance_embedding=True).eval(), torch.arange(3)
    noise = philox.normal(5, "sampling", choices, SHAPE)
    objective = built(**GUIDED)
    sampler = ImageSampler(model, objective, "float32", torch.device("cpu"))
    solver, schedule = SOLVERS["mean_flow"](name="mean_flow"), SCHEDULES["uniform"](name="uniform")
    method = dict(solver=solver, num_steps=1, schedule=schedule, guidance=Guidance(1.0, (0.2, 0.8)))
    found = {scale: sampler.draw(choices, 5, batch_size=3, embedded_guidance=scale, **method) for scale in (None, 1.0, 3.0)}
    ones = torch.ones(3)
    for scale, given in ((None, [1.0, 0.0, 1.0]), (1.0, [1.0, 0.2, 0.8]), (3.0, [3.0, 0.2, 0.8])):
        guidance = torch.tensor([given]).expand(3, 3)
        wanted = noise - model(noise, 1 - ones, choices, ones, guidance)
        torch.testing.assert_close(found[scale], wanted, rtol=1e-4, atol=1e-4)
    assert (found[3.0] - found[1.0]).abs().max() > 1e-4 and model.guidance.tolist() == [1, 0, 1]


def test_the_intermediate_head_learns_the_velocity_and_gives_the_tangent():
    model, count = network(intermediate_head=1), 4
    objective = built(tangent="head", weight_power=0.0)
    torch.manual_seed(0)
    x0, noise, condition = torch.randn(count, *SHAPE), torch.randn(count, *SHAPE), torch.arange(count)
    t = torch.full((count,), 0.6)
    draw = Draw(t, noise, torch.ones(count), duration=0.5 * t)
    terms = objective.loss(model, Microbatch(x0, condition), draw)
    x_t = 0.4 * x0 + 0.6 * noise
    mean_velocity, head = model(x_t, 1 - t, condition, 0.5 * t).chunk(2, dim=1)
    along = model(x_t, 1 - t, condition, 0 * t).chunk(2, dim=1)[1].detach()
    slope = objective.slope(model, x_t, along, t, 0.5 * t, condition)
    errors = [(each - noise + x0).square().mean((1, 2, 3)) for each in (mean_velocity + 0.3 * slope, head)]
    torch.testing.assert_close(terms.loss, sum(errors))
    torch.testing.assert_close(terms.error, errors[0].detach())
    x_0, _ = objective.predict(over_duration(model, torch.tensor([0.3])), x_t, t, condition)
    torch.testing.assert_close(x_0, x_t - 0.6 * mean_velocity, rtol=1e-4, atol=1e-4)


ORDINARY = "--model.flavor debug --data.name digits --gns.enable false"
TWO_TIMES = f"{ORDINARY} --objective.name mean_flow"


def test_a_run_has_what_follows_from_the_objective_and_its_cost():
    flops = {}
    for words in ("denoising", "mean_flow --objective.tangent sampled", "mean_flow"):
        config = load_config(f"{ORDINARY} --objective.name {words}".split(), 1)
        model = model_on_meta(config)
        flops[words] = training_flops_per_image(config, model) / model.forward_macs_per_image(model.image_shape)
        assert any("duration_embed" in name for name in model.state_dict()) == (words != "denoising")
    assert list(flops.values()) == [6, 10, 12]
    guided = load_config(f"{TWO_TIMES} --objective.guidance_max 8 --sampling.embedded_guidance 3".split(), 1)
    assert guided.model.guidance_embedding and "guidance_embed.hidden.weight" in model_on_meta(guided).state_dict()
    assert (config.sampling.solver.name, config.sampling.num_steps, config.sampling.guidance_scale) == ("mean_flow", 1, 1.0)
    assert config.objective.difference_step == 0.002 and config.model.duration_embedding
    narrow = f"{TWO_TIMES} --training.mixed_precision_param bfloat16".split()
    whole, coarse = (load_config(narrow, ranks) for ranks in (1, 2))  # sharded by default
    assert (whole.objective.difference_step, coarse.objective.difference_step) == (0.002, 0.05)
    assert build_objective(coarse.objective, 0).introduction() == (
        "mean flow: du/dt over steps of 0.05 in t (13 to 16 % off the derivative, on digits; less than 0.1 % with whole weights"
        " or in float32); 3 calls of the network without gradient make a step 2.00 times the FLOPs of denoising"
    )


@pytest.mark.parametrize("guide", ["head", "outputs/other@300"])
def test_a_guide_of_a_mean_flow_is_refused_by_its_option(guide):
    trained = SimpleNamespace(config=load_config(TWO_TIMES.split(), 1))
    with pytest.raises(WeightsError) as refusal:
        sampling_method(sample.parse_arguments(["run", "--guide", guide, "--guidance-scale", "2"]), trained)
    assert str(refusal.value) == "--guide: is for solvers of one time, not for sampling.solver.name = mean_flow (leave it out)"


@pytest.mark.parametrize(("scale", "said"), [(0.5, 1), (1, 0), (8, 0), (8.5, 1), (None, 0)])
def test_an_embedded_guidance_that_was_not_trained_is_a_warning(scale, said):
    config = load_config(f"{TWO_TIMES} --objective.guidance_max 8".split(), 1)
    config.sampling.embedded_guidance = scale
    trained = SimpleNamespace(config=config, warnings=())
    setup = SamplingSetup(Path("run"), trained, config.sampling, None, None, SHAPE, 1, "float32")
    assert list(setup.warnings) == [f"--embedded-guidance: {scale} was not trained, only 1 to objective.guidance_max = 8"] * said
    config.sampling.guidance_interval = [0.6, 0.8]
    line = "--guidance-interval: 0.6 to 0.8 was not trained, only intervals with 0.5 in them"
    assert (line in setup.warnings) == (scale is not None)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (f"{TWO_TIMES} --sampling.solver.name euler", "sampling.solver.name: euler is for a network of one time"),
        (f"{ORDINARY} --sampling.solver.name mean_flow", "sampling.solver.name: mean_flow is for a network of two times"),
        (f"{TWO_TIMES} --sampling.clip_x0 true", "sampling.clip_x0: clips the image that a velocity points to"),
        (f"{TWO_TIMES} --sampling.guide_track none", "sampling.guide_track: is for solvers of one time"),
        (f"{TWO_TIMES} --gns.enable true", "gns.single_pass: objective.name = mean_flow calls the network more than once"),
        (f"{TWO_TIMES} --objective.path edm", "objective.path: edm is not for objective.name = mean_flow (use rectified_flow)"),
        (f"{TWO_TIMES} --objective.preconditioning identity", "identity is not for objective.name = mean_flow (use data_time)"),
        (f"{TWO_TIMES} --objective.timesteps.name time_warping", "objective.timesteps.name: time_warping draws one time"),
        (f"{TWO_TIMES} --model.name flux", "objective.name: mean velocities are over two times, and model.name = flux"),
        (f"{TWO_TIMES} --model.magnitude_preserving true", "model.magnitude_preserving: has no embedding of a second time"),
        (f"{TWO_TIMES} --objective.guidance_max 8 --data.labels false", "objective.guidance_max: needs classes"),
        (f"{TWO_TIMES} --model.guidance_embedding true", "model.guidance_embedding: follows from objective.guidance_max = 1"),
        (f"{TWO_TIMES} --objective.tangent head", "objective.tangent: head and model.intermediate_head"),
        (f"{TWO_TIMES} --model.intermediate_head 1", "objective.tangent: head and model.intermediate_head"),
        (f"{ORDINARY} --model.duration_embedding true", "model.duration_embedding: follows from objective.name = denoising"),
    ],
)  # fmt: skip
def test_what_has_no_mean_flow_is_refused_in_one_line(arguments, line):
    with pytest.raises(ConfigError) as error:
        load_config(arguments.split(), 1)
    (found,) = [each for each in str(error.value).splitlines() if line in each]
    assert found.endswith(")")
