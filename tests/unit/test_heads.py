"""Several predictions by one network: what each rule trains and how it mixes, against closed forms."""

import math

import pytest
import torch
from torch import Tensor

from tests.objectives import combine, timesteps, weighting
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.heads import HEADS, RunningErrors, SoftMinimum
from torchtitan.diffusion.objective import Draw, Microbatch, Objective
from torchtitan.diffusion.objectives import build_objective, objective_problems
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.predictions import target

DDPM = dict(path="ddpm_linear", prediction="v", preconditioning="index", timesteps=timesteps("uniform"))
THREE = ["x0", "noise", "v"]


def objective_of(name: str, heads: list[str] = THREE, of_rule: dict | None = None, **keys) -> Objective:
    config = DenoisingConfig(**(DDPM | keys), heads=heads, combine=combine(name, **of_rule or {}))
    assert not list(objective_problems(config))
    return build_objective(config, seed=0)


def drawn(objective: Objective, index: Tensor, seed: int = 0) -> tuple[Tensor, Draw]:
    """Float64 images with their noise at indices [B]."""
    generator = torch.Generator().manual_seed(seed)
    x0, noise = torch.randn(2, len(index), 2, 4, 4, dtype=torch.float64, generator=generator)
    t = objective.path.index_to_t(index)
    return x0, Draw(t, noise, torch.ones_like(t), index)


def outputs(objective: Objective, x0: Tensor, draw: Draw, errors: dict[str, Tensor] | Tensor) -> Tensor:
    """What heads say whose estimates of x0 are off by `errors`, each consistent with the same x_t."""
    a, b = (per_image(c, x0) for c in objective.path.coefficients(draw.t))
    x_t = a * x0 + b * draw.noise
    parts = []
    for name in objective.heads.names:
        estimate = x0 + (errors[name] if isinstance(errors, dict) else errors)
        parts.append(target(name, estimate, (x_t - a * estimate) / b, a, b))
    return torch.cat(parts, dim=1)


def test_the_raw_minimum_of_equally_good_heads_goes_by_the_signal_to_noise_ratio_alone():
    """x0 where snr > 1, up to index 258 of the linear schedule, the noise beyond, v never."""
    objective = objective_of("raw_minimum")
    index = torch.arange(objective.path.num_indices)
    x0, draw = drawn(objective, index)
    error = 0.1 * torch.randn_like(x0, generator=None)
    found = objective.heads.errors(outputs(objective, x0, draw, error), x0, draw.noise, draw.t)
    _, share = objective.heads.rule.loss(found, torch.logit(draw.t))
    assert share.argmax(1).tolist() == [0] * 259 + [1] * 741 and (share.sum(1) == 1).all()
    # In one parametrisation they are equal.
    torch.testing.assert_close(found.common, found.common[:, :1].expand(-1, 3), rtol=1e-9, atol=0)


def test_raw_errors_obey_the_identities():
    """MSE_x0 = MSE_noise / snr and MSE_v = MSE_noise (1 + 1 / snr) for one estimate."""
    objective = objective_of("minimum")
    x0, draw = drawn(objective, torch.tensor([0, 10, 258, 259, 600, 999]))
    found = objective.heads.errors(outputs(objective, x0, draw, 0.3), x0, draw.noise, draw.t)
    snr = 1.0 / objective.path.t_to_sigma(draw.t) ** 2
    of_x0, of_noise, of_v = found.raw.T
    torch.testing.assert_close(of_x0, of_noise / snr, rtol=1e-9, atol=0)
    torch.testing.assert_close(of_v, of_noise * (1 + 1 / snr), rtol=1e-9, atol=0)
    torch.testing.assert_close(found.common[:, 0], of_v, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["minimum", "raw_minimum"])
def test_only_the_head_of_the_least_error_has_a_gradient(name):
    objective = objective_of(name)
    index = torch.tensor([5, 300, 800])
    x0, draw = drawn(objective, index)
    errors = {"x0": torch.zeros_like(x0) + 0.2, "noise": torch.zeros_like(x0) + 0.3, "v": torch.zeros_like(x0) + 0.1}
    output = outputs(objective, x0, draw, errors).requires_grad_()
    found = objective.heads.errors(output, x0, draw.noise, draw.t)
    loss, share = objective.heads.rule.loss(found, torch.logit(draw.t))
    loss.sum().backward()
    norms = torch.stack([part.flatten(1).norm(dim=1) for part in output.grad.chunk(3, dim=1)], dim=1)
    assert torch.equal(norms > 0, share > 0)
    if name == "minimum":  # the best estimate of x0, whatever it is called
        assert share.argmax(1).tolist() == [2, 2, 2]
        # 0.1 in x0 is an error of 0.1 / b in v.
        _, b = objective.path.coefficients(draw.t)
        torch.testing.assert_close(loss, (0.1 / b) ** 2, rtol=1e-9, atol=0)


def test_the_soft_minimum_lies_between_the_minimum_and_the_mean():
    x0, draw = drawn(objective_of("minimum"), torch.tensor([40, 400]))
    errors = {"x0": torch.full_like(x0, 0.2), "noise": torch.full_like(x0, 0.1), "v": torch.full_like(x0, 0.12)}

    objective = objective_of("soft_minimum")
    found = objective.heads.errors(outputs(objective, x0, draw, errors), x0, draw.noise, draw.t)
    least, chosen = objective_of("minimum").heads.rule.loss(found, torch.logit(draw.t))
    cold, hot, middle = (SoftMinimum(3, value).loss(found, torch.logit(draw.t)) for value in (1e-3, 1e6, 0.5))
    torch.testing.assert_close(cold[0], least)
    torch.testing.assert_close(cold[1], chosen)
    torch.testing.assert_close(hot[1], torch.full_like(chosen, 1 / 3), rtol=1e-4, atol=0)
    # Squared errors 4 : 1 : 1.44 in one parametrisation.
    wanted = torch.tensor([math.exp(-3 / 0.5), 1.0, math.exp(-0.44 / 0.5)], dtype=torch.float64)
    torch.testing.assert_close(middle[1], (wanted / wanted.sum()).expand(2, -1))


def test_handover_is_from_noise_to_data():
    objective = objective_of("snr_handover", ["x0", "v", "noise"], {"snr": [0.25, 4.0]})
    snr = torch.tensor([1e-4, 0.249, 0.251, 1.0, 3.99, 4.01, 1e6], dtype=torch.float64)
    shares = objective.heads.rule.shares(-0.5 * snr.log())
    assert shares.argmax(1).tolist() == [0, 0, 1, 1, 1, 2, 2] and (shares.sum(1) == 1).all()


def test_inverse_variance_is_the_best_mix_of_independent_estimates():
    objective = objective_of("inverse_variance", uncertainty_features=64)
    index = torch.full((4000,), 300)
    x0, draw = drawn(objective, index)
    deviations = {"x0": 0.1, "noise": 0.2, "v": 0.4}  # of independent errors in x0
    generator = torch.Generator().manual_seed(1)
    errors = {
        name: value * torch.randn(x0.shape, dtype=torch.float64, generator=generator) for name, value in deviations.items()
    }
    output = outputs(objective, x0, draw, errors)
    found = objective.heads.errors(output, x0, draw.noise, draw.t)
    # u at this one level by hand: ln of each head's own mean error.
    rule, log_sigma = objective.heads.rule, torch.logit(draw.t)
    waves = rule_waves(rule, log_sigma[:1])
    with torch.no_grad():
        rule.uncertainty.weight.copy_(found.raw.mean(0).log()[:, None] * waves / waves.square().sum())
    inverse = torch.tensor([value**-2 for value in deviations.values()], dtype=torch.float64)
    torch.testing.assert_close(rule.shares(log_sigma)[0], inverse / inverse.sum(), rtol=0.02, atol=0)
    a, b = (per_image(c, x0) for c in objective.path.coefficients(draw.t))
    mixed, _ = objective.heads.combine(output, a * x0 + b * draw.noise, draw.t)
    assert (mixed - x0).square().mean().item() == pytest.approx(1 / inverse.sum().item(), rel=0.02)
    # The loss of each head is 1 + u there, and its gradient in u is 0.
    loss, _ = rule.loss(found, log_sigma)
    assert loss.mean().item() == pytest.approx(1 + found.raw.mean(0).log().mean().item(), rel=1e-5)
    loss.mean().backward()
    assert rule.uncertainty.weight.grad.abs().max() < 1e-5


def rule_waves(rule, log_sigma: Tensor) -> Tensor:
    """The waves at one level, read off by unit weights."""
    kept = rule.uncertainty.weight.detach().clone()
    features = kept.shape[1]
    with torch.no_grad():
        rows = []
        for place in range(features):
            rule.uncertainty.weight.zero_()[:, place] = 1.0
            rows.append(rule.uncertainty(log_sigma)[0, 0])
        rule.uncertainty.weight.copy_(kept)
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["minimum", "soft_minimum", "inverse_variance", "snr_handover"])
@pytest.mark.parametrize("path", ["ddpm_linear", "rectified_flow"])
def test_true_heads_give_true_images_however_they_are_mixed(name, path):
    heads = THREE if path == "ddpm_linear" else ["x0", "v", "velocity"]
    keys = {"path": path} | ({} if path == "ddpm_linear" else {"preconditioning": "identity"})
    objective = objective_of(name, heads, {"snr": [0.5, 2.0]} if name == "snr_handover" else {}, **keys)
    t = torch.tensor([0.01, 0.3, 0.5, 0.9, objective.path.t_max], dtype=torch.float64)
    x0, noise = torch.randn(2, 5, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = (per_image(c, x0) for c in objective.path.coefficients(t))
    output = torch.cat([target(name, x0, noise, a, b) for name in heads], dim=1)
    found = objective.predict(lambda *_: output, a * x0 + b * noise, t, None)
    torch.testing.assert_close(found[0].double(), x0, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), noise, rtol=1e-5, atol=1e-5)


def test_a_head_without_a_share_may_say_anything():
    objective = objective_of("snr_handover", ["x0", "noise"], {"snr": [1.0]})
    x0, draw = drawn(objective, torch.tensor([900]))
    output = outputs(objective, x0, draw, 0.0)
    output[:, 2:] = torch.inf
    a, b = (per_image(c, x0) for c in objective.path.coefficients(draw.t))
    mixed, noise = objective.heads.combine(output, a * x0 + b * draw.noise, draw.t)
    torch.testing.assert_close(mixed, x0)
    torch.testing.assert_close(noise, draw.noise)


def test_running_errors_are_means_that_fade():
    running = RunningErrors(2)
    level = torch.tensor([0.1, 0.1, -3.0])
    running.observe(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]), level)
    running.observe(torch.tensor([[float("nan"), 1.0]]), torch.tensor([0.1]))  # teaches nothing
    running.update(torch.tensor(False))
    torch.testing.assert_close(running(torch.tensor([0.2, -3.1])), torch.tensor([[2.0, 3.0], [5.0, 0.0]]).double())
    # Levels without any go by the nearest.
    torch.testing.assert_close(running(torch.tensor([8.5, -20.0, -2.0])).tolist(), [[2.0, 3.0], [5.0, 0.0], [5.0, 0.0]])
    before = {name: value.clone() for name, value in running.state_dict().items()}
    running.observe(torch.ones(1, 2), torch.zeros(1))
    running.update(torch.tensor(True))  # skipped
    assert all(torch.equal(value, before[name]) for name, value in running.state_dict().items())
    # 20,000 more samples at the same level: what was there counts half.
    running.observe(torch.zeros(20_000, 2), torch.full((20_000,), 0.1))
    running.update(torch.tensor(False))
    torch.testing.assert_close(running(torch.tensor([0.1]))[0], torch.tensor([2.0, 3.0]).double() / 20_001)
    # Half a sample is left at -3, so that it goes by what is known better.
    torch.testing.assert_close(running(torch.tensor([-3.0]))[0], torch.tensor([2.0, 3.0]).double() / 20_001)


def test_the_head_in_use_is_the_one_whose_error_has_been_the_least():
    objective = objective_of("minimum", ["x0", "noise"])
    x0, draw = drawn(objective, torch.tensor([100] * 8 + [700] * 8))
    better_late = {"x0": torch.full_like(x0, 0.2), "noise": torch.full_like(x0, 0.2)}
    better_late["noise"][:8] = 0.1  # the noise head near data
    better_late["x0"][8:] = 0.1  # the x0 head near noise
    found = objective.heads.errors(outputs(objective, x0, draw, better_late), x0, draw.noise, draw.t)
    objective.heads.observe(found, draw.t)
    objective.heads.update(torch.tensor(False))
    shares = objective.heads.rule.shares(torch.logit(draw.t[[0, -1]]))
    assert shares.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_the_loss_weighs_the_common_error_whatever_head_it_is_of():
    """min_snr on heads is min_snr on the one prediction that they agree in."""
    x0 = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(2))
    keys = dict(weighting=weighting("min_snr"))
    several, single = objective_of("minimum", **keys), build_objective(DenoisingConfig(**DDPM, **keys), 0)
    draw = Draw(
        single.path.index_to_t(torch.tensor([20, 100, 259, 400, 700, 900])).float(), torch.randn_like(x0), torch.ones(6)
    )
    a, b = (per_image(c, x0) for c in single.path.coefficients(draw.t))
    estimate = x0 + 0.2
    x_t = a * x0 + b * draw.noise

    def network(heads):
        return lambda *_: torch.cat([target(name, estimate, (x_t - a * estimate) / b, a, b) for name in heads], dim=1)

    terms, wanted = several.loss(network(THREE), Microbatch(x0), draw), single.loss(network(["v"]), Microbatch(x0), draw)
    torch.testing.assert_close(terms.loss, wanted.loss, rtol=1e-3, atol=0)
    torch.testing.assert_close(terms.error, wanted.error, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["minimum", "soft_minimum", "inverse_variance", "raw_minimum"])
def test_the_error_reported_is_that_of_the_mix(name):
    """As of the estimates that sampling uses, and finite at the ends of a path, where these do not give it back."""
    objective = objective_of(name, ["x0", "velocity"], path="rectified_flow", preconditioning="identity", prediction="v")
    x0 = torch.randn(6, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0.0, 1e-20, 0.2, 0.5, 0.9, 1.0])
    draw = Draw(t, torch.randn(6, 1, 2, 2, generator=torch.Generator().manual_seed(1)), torch.ones(6))
    a, b = (per_image(c, x0) for c in objective.path.coefficients(t))
    output = torch.cat([target(name, x0, draw.noise, a, b) for name in ("x0", "velocity")], dim=1)
    output = output + 0.1 * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    errors = objective.heads.errors(output, x0, draw.noise, t)
    objective.heads.observe(errors, t)
    objective.heads.update(torch.tensor(False))
    terms = objective.loss(lambda *_: output, Microbatch(x0), draw)
    assert terms.error.isfinite().all() and (terms.weighted >= 0).all()
    mixed = target("v", *objective.heads.combine(output, a * x0 + b * draw.noise, t), a, b)
    wanted = (mixed - target("v", x0, draw.noise, a, b)).square().flatten(1).mean(1)
    torch.testing.assert_close(terms.error[2:5], wanted[2:5], rtol=1e-4, atol=1e-6)


def test_a_head_whose_error_grows_without_bounds_is_refused():
    keys = dict(path="rectified_flow", prediction="velocity", timesteps=timesteps("uniform"))
    keys["combine"] = combine("snr_handover", snr=[1.0])
    found = list(objective_problems(DenoisingConfig(**keys, heads=["velocity", "x0"])))
    assert found and "infinite mean loss" in found[0][1]
    assert not list(objective_problems(DenoisingConfig(**keys, heads=["x0", "velocity"])))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (dict(heads=["x0", "colour"]), "objective.heads: 'colour' is no prediction of a head (there are: " + ", ".join(HEADS)),
        (dict(heads=["x0"]), "objective.heads: ['x0'] must be two predictions or more, each once"),
        (dict(heads=["x0", "x0"]), "objective.heads: ['x0', 'x0'] must be two predictions or more, each once"),
        (dict(heads=THREE, path="rectified_flow", preconditioning="identity"),
         "objective.heads: the noise does not convert to x0 at t = 1, where objective.path = rectified_flow starts"),
        (dict(heads=["x0", "v"], prediction="x0", preconditioning="edm"),
         "objective.heads: objective.preconditioning = edm is for one prediction"),
        (dict(heads=THREE, combine=combine("snr_handover", snr=[2.0, 1.0])),
         "objective.combine.snr: [2.0, 1.0] must be 2 rising, positive numbers"),
        (dict(heads=THREE, combine=combine("raw_minimum"), weighting=weighting("min_snr")),
         "objective.weighting.name: min_snr is for errors of one prediction; objective.combine.name = raw_minimum"),
        (dict(heads=THREE, learned_uncertainty=True), "objective.learned_uncertainty: objective.combine.name = inverse_variance"),
        (dict(heads=THREE, timesteps=timesteps("loss_second_moment")),
         "objective.timesteps.name: loss_second_moment learns from losses, which objective.combine.name = inverse_variance"),
        (dict(learned_uncertainty=True, timesteps=timesteps("adaptive_log_snr")),
         "objective.timesteps.name: adaptive_log_snr learns from losses, which objective.learned_uncertainty makes alike"),
    ],
)  # fmt: skip
def test_heads_that_do_not_go_together_are_refused(keys, problem):
    found = [f"{key}: {text}" for key, text in objective_problems(DenoisingConfig(**(DDPM | keys)))]
    assert any(line.startswith(problem) for line in found), found
