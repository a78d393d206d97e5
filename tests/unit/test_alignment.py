"""Alignment: its loss, projectors, encoders and average against golden values, brute force and other implementations."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.configurations import problems
from tests.distributed.cases import make_trainer
from tests.unit.published_state_dicts import uniform
from tests.unit.test_gns_taps import BATCH, EDGES, PAPER, SHAPE, Problem, close, one_process
from torchtitan import philox
from torchtitan.alignment.config import AlignmentConfig, alignment_problems
from torchtitan.alignment.dual_times import lowered, with_second_time
from torchtitan.alignment.encoders import open_digits, open_transformers
from torchtitan.alignment.feature_store import FeatureEncoder
from torchtitan.alignment.loss import cosine_loss, spatially_normalised
from torchtitan.alignment.plan import Plan, open_encoder
from torchtitan.alignment.projectors import ConvolutionProjector, MLPProjector
from torchtitan.alignment.tap import Tap
from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.config.job import load_config
from torchtitan.config.latent_cache import trained_info
from torchtitan.data.digits import Digits, DigitsConfig
from torchtitan.diffusion.objective import LossTerms
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.errors import ConfigError, EvaluationError
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan.estimate.roofline import training_flops_per_image
from torchtitan.fidelity.extractors import open_extractor
from torchtitan.gns.step_sums import PARTS
from torchtitan.models.base import ProbePoint
from torchtitan_dit.commands import train

CPU = torch.device("cpu")
SELF = ("--alignment.teacher=self", "--alignment.block=1", "--alignment.teacher_block=3")
DIGITS = ("--alignment.teacher=digits", "--alignment.block=2", "--alignment.projector=convolution")


def sequence(function, rate: float) -> torch.Tensor:
    return function(rate * torch.arange(1, 25, dtype=torch.float64)).view(2, 4, 3)


FEATURES, PROJECTED = sequence(torch.sin, 0.7391), sequence(torch.cos, 0.5123)
# gamma -> loss of the normalised features, and the first token's.
NORMALISED = {
    1.0: (-0.05280795247333131, [0.5762475003, 0.8834181701, 0.7882170170]),
    0.6: (-0.05711312253937007, [0.6837540256, 1.0131974884, 0.8807418561]),
    0.8: (-0.05492137736701384, None),
}


def test_the_loss_of_a_golden_pair():
    assert cosine_loss(PROJECTED, FEATURES).mean().item() == pytest.approx(-0.06122434629447311, abs=1e-12)
    assert cosine_loss(5 * FEATURES, FEATURES).tolist() == pytest.approx([-1, -1], abs=1e-12)


@pytest.mark.parametrize("gamma", NORMALISED)
def test_normalised_features_of_a_golden_pair(gamma):
    found, (loss, first) = spatially_normalised(FEATURES, gamma), NORMALISED[gamma]
    assert cosine_loss(PROJECTED, found).mean().item() == pytest.approx(loss, abs=1e-12)
    assert first is None or found[0, 0].tolist() == pytest.approx(first, abs=1e-10)


def test_half_precision_and_constant_features_have_finite_gradients():
    tokens = torch.full((2, 4, 3), 1e-4, dtype=torch.float16).requires_grad_()  # of which a square is zero
    features = spatially_normalised(torch.full((2, 4, 3), 1e-4, dtype=torch.float16), 0.6)
    cosine_loss(tokens, features).sum().backward()
    assert features.dtype == torch.float32 and features.isfinite().all() and tokens.grad.isfinite().all()


def test_the_mlp_is_three_linears_with_silu_between_them():
    ours = MLPProjector(6, 5, (2, 2))
    first, second, third = ours.linears
    x = uniform("tokens", (2, 4, 6))
    silu = torch.nn.functional.silu
    torch.testing.assert_close(ours(x), third(silu(second(silu(first(x))))), rtol=0, atol=0)


def test_a_tap_takes_the_forward_that_is_differentiated_and_no_other():
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.ModuleDict({"layer": layer})
    tap = Tap(model, ProbePoint("layer", 2))
    x, other = uniform("one", (1, 2, 3)), uniform("two", (1, 2, 3))
    with tap.taken(grad=True):
        layer(x)
        with torch.no_grad():
            layer(other)
    assert torch.equal(tap.tokens(), layer(x))


@pytest.mark.parametrize("projector, dim, count", [
    (MLPProjector, 384, 6_558_464), (MLPProjector, 768, 7_344_896), (MLPProjector, 1152, 8_131_328),
    (ConvolutionProjector, 768, 5_309_184), (ConvolutionProjector, 1152, 7_963_392),
])  # fmt: skip
def test_projectors_have_the_published_number_of_parameters(projector, dim, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in projector(dim, 768, (16, 16)).parameters()) == count


def test_a_convolution_sees_the_neighbours_of_a_token_on_the_grid():
    projector = ConvolutionProjector(3, 2, (3, 4)).double()
    tokens = torch.randn(1, 12, 3, dtype=torch.float64)
    weight, total = projector.convolution.weight, projector.convolution.bias.clone()
    for row in range(3):  # around the token of row 1, column 2
        for column in range(1, 4):
            total = total + weight[:, :, row, column - 1] @ tokens[0, 4 * row + column]
    torch.testing.assert_close(projector(tokens)[0, 6], total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("point", [ProbePoint("", 2, 1), ProbePoint("", 1)], ids=["tokens", "maps"])
def test_tokens_of_an_output_are_in_the_order_of_rows(point):
    image = torch.arange(12.0).view(1, 3, 2, 2)  # [B, D, h, w]
    rows = image[0].flatten(1).T[None]
    output = image if point.channel_dim == 1 else (torch.cat((torch.full((1, 1, 3), -1.0), rows), 1), None)
    assert torch.equal(point.tokens(output), rows)


# ---------------------------------------------------------------------- teachers


def pixels(count: int) -> torch.Tensor:
    return Digits(DigitsConfig(), "validation").fetch(torch.arange(count).numpy())["images"]


def test_maps_of_a_classifier_are_those_that_its_features_are_the_mean_of():
    images = (127.5 * pixels(5) + 127.5).round() / 127.5 - 1
    wanted = open_extractor("digits").extract((127.5 * images + 127.5).round().to(torch.uint8))["pooled"]
    torch.testing.assert_close(open_digits("", CPU)(images, (4, 4)).mean(1), wanted, rtol=1e-4, atol=1e-4)
    assert open_digits("", CPU)(images, (8, 8)).shape == (5, 64, 48)
    with pytest.raises(EvaluationError, match="has features on 8 x 8, 4 x 4"):
        open_digits("", CPU)(images, (2, 2))


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory):
    """Folder of a small Dinov2Model of transformers, and the network."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4, image_size=20, mlp_ratio=2
    )
    torch.manual_seed(0)
    network = transformers.Dinov2Model(config).eval()
    folder = tmp_path_factory.mktemp("dinov2")
    network.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}))
    return folder, network


def test_a_vision_transformer_sees_normalised_images_of_whole_patches(dinov2):
    folder, network = dinov2
    images = 2 * uniform("pixels", (2, 1, 20, 30)) - 1
    resized = torch.nn.functional.interpolate(images.expand(-1, 3, -1, -1), (16, 24), mode="bicubic")
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    with torch.no_grad():
        wanted = network(pixel_values=((resized + 1) / 2 - mean) / std).last_hidden_state[:, 1:]
        found = open_transformers(str(folder), CPU)(images, (4, 6))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert open_transformers(str(folder), torch.device("meta"))(images.to("meta"), (7, 3)).shape == (2, 21, 24)


def test_the_teacher_of_a_run_is_its_average_at_a_lower_time(tmp_path):
    """Same noise and condition, and the trained weights are in place again."""
    trainer = make_trainer(str(tmp_path), "run", steps=9, replicas=1, shards=1, accumulation=1, overrides=SELF)
    state = trainer.state
    for tensor in state.ema.tracks["ema"].values():
        tensor.normal_(std=0.1)
    before = {name: tensor.clone() for name, tensor in state.network.tensors().items()}
    batch, samples = state.to_device(state.data.next_batch()), GlobalBatch(0, 16)
    draw = state.objective.draw(tuple(batch["images"].shape[1:]), samples, batch["samples"])
    condition = state.condition(batch, draw)
    modes: list[bool] = []
    hook = state.model.register_forward_hook(lambda model, inputs, output: modes.append(model.training))
    found = state.alignment.features(
        SimpleNamespace(images=batch["images"], condition=condition, entries=batch), draw, samples.attempt, state.ema
    )
    hook.remove()
    assert modes == [False]  # nothing is dropped
    u = philox.uniform(state.objective.seed, "alignment", batch["samples"], 0).float()
    t = (draw.t - 0.2 * u).clamp(0, 1)
    assert (t < draw.t).all() and t.std() > 0
    x_t = (1 - t)[:, None, None, None] * batch["images"] + t[:, None, None, None] * draw.noise
    outputs: list[torch.Tensor] = []
    hook = state.model.layers[2].register_forward_hook(lambda block, inputs, output: outputs.append(output))
    with torch.no_grad():
        functional_call(state.model, state.ema.tracks["ema"], (x_t, 1000 * t, condition))
    hook.remove()
    torch.testing.assert_close(found, outputs[0], rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.network.tensors().items())
    assert state.model.training
    doubled = []  # the term keeps the objective, as the objective's own loss does, where timesteps have importance weights
    for importance in (draw.importance, 2 * draw.importance):
        with state.alignment.tapped():
            state.model(batch["images"], 1000 * t, condition)
        zero = torch.zeros(len(t))
        terms = state.alignment.added(LossTerms(zero, zero, t, zero), found, draw._replace(importance=importance))
        doubled.append(terms.beside.detach())
    torch.testing.assert_close(doubled[1], 2 * doubled[0])
    with state.alignment.tapped():
        state.model(batch["images"], 1000 * t, condition)
    of_objective = LossTerms(zero, zero, t, zero, beside=zero + 1)
    added = state.alignment.added(of_objective, found, draw)
    torch.testing.assert_close(added.beside, doubled[0] + 1)
    trainer.close()


def test_features_of_a_run_are_normalised_over_tokens(tmp_path):
    overrides = (*DIGITS, "--alignment.spatial_norm=0.6")
    trainer = make_trainer(str(tmp_path), "run", steps=9, replicas=1, shards=1, accumulation=1, overrides=overrides)
    state, images = trainer.state, pixels(5)
    batch, draw = SimpleNamespace(images=images, entries={}), SimpleNamespace(t=torch.rand(5))
    found, wanted = state.alignment.features(batch, draw, 0, state.ema), open_digits("", CPU)(images, (4, 4))
    assert torch.equal(found, spatially_normalised(wanted, 0.6)) and not torch.equal(found, wanted)
    trainer.close()


def test_images_that_are_no_whole_steps_end_with_their_last_step():
    config = AlignmentConfig(teacher="digits", stop_images=65)
    assert config.steps(100, 32) == 3 and config.steps(2, 32) == 2


# ---------------------------------------------------------------------- noise scale, cost


class Aligned(Problem):
    """A problem of which the loss has an alignment of the first block's tokens too."""

    def loss(self, chosen=slice(None), parameters=None):
        if not hasattr(self, "tap"):
            torch.manual_seed(3)
            self.tap, self.projector = Tap(self.model, ProbePoint("layers.0", 2)), nn.Linear(32, 5).double()
            self.features = torch.randn(BATCH, 16, 5, dtype=torch.float64)
        with self.tap.taken(grad=True):
            loss = super().loss(chosen, parameters)
        return loss + 0.7 * self.weight[chosen] * cosine_loss(self.projector(self.tap.tokens()), self.features[chosen])


def test_taps_measure_the_networks_part_of_an_aligned_loss():
    """Exactly in the layers that keep whole gradients or pairs; the rest is compared with the gradient of the step."""
    problem, plain = Aligned(PAPER, torch.float64), Problem(PAPER, torch.float64)
    assert SHAPE[1] // PAPER.patch_size == 4
    per_sample = [each.per_sample() for each in (problem, plain)]
    taps = problem.taps(adam=False)
    taps.begin_step(0, True, {}, 0.9, one_process())
    taps.begin_microbatch(problem.t)
    problem.loss().mean().backward()
    taps.end_microbatch(BATCH, torch.zeros(BATCH))
    sums = taps.end_step(one_process())  # raises CannotMeasure where it has not seen all of a gradient
    one_hot = nn.functional.one_hot(torch.bucketize(problem.t, EDGES), 3).double()
    for index, part in enumerate(PARTS[:3]):
        of_part = [name for name in per_sample[0] if taps._parts[name] == part]
        flat = ([gradients[name].flatten(1) for name in of_part] for gradients in per_sample)
        wanted, without = (sum(one_hot.T @ (g @ g.T) @ one_hot for g in gradients) for gradients in flat)
        assert close(sums.products[index][0], wanted, 1e-10), part
        assert (wanted - without).abs().max() > 1e-3 * without.abs().max() or part == "embedding"


def test_training_counts_projector_and_teacher_as_torch_does():
    words = ["--model.flavor=debug", "--training.steps=100", "--training.global_batch_size=32", "--training.local_batch_size=32"]
    plain = load_config(words, 1)
    model = model_on_meta(plain)
    forward = model.forward_macs_per_image(model.image_shape)
    of_self = load_config([*words, *SELF], 1)
    projector = 16 * (64 * 2048 + 2048 * 2048 + 2048 * 64)
    base = training_flops_per_image(plain, model)
    assert training_flops_per_image(of_self, model) - base == 2 * forward + 6 * projector
    stopped = load_config([*words, *SELF, "--alignment.stop_images=800"], 1)  # 25 of 100 steps
    assert 4 * (training_flops_per_image(stopped, model) - base) == 2 * forward + 6 * projector
    of_digits = load_config([*words, *DIGITS], 1)
    encoder = 64 * 9 * (32 + 32 * 48) + 16 * 9 * 48 * 64
    assert training_flops_per_image(of_digits, model) - base == 2 * encoder + 6 * 16 * 9 * 64 * 64


def test_an_estimate_holds_projector_and_encoder():
    words = ["--model.flavor=debug", "--training.local_batch_size=8", "--optimizer.weight_decay=0.1"]
    plain, aligned = load_config(words, 1), load_config([*words, *DIGITS], 1)
    projector = 9 * 64 * 64 + 64
    with torch.device("meta"):
        encoder = Plan(aligned.alignment, model_on_meta(aligned), trained_info(aligned)).encoder_bytes
    assert encoder == 4 * (9 * (32 + 32 * 48 + 48 * 64) + 2 * (32 + 48 + 64) + 64 * 10 + 10)
    before, found = estimate_memory(plain, 1), estimate_memory(aligned, 1)
    assert found.parameters - before.parameters == 4 * projector + encoder
    assert found.optimizer - before.optimizer == 8 * projector + 2 * 4
    assert found.ema == before.ema
    deep = load_config(["--model.flavor=debug", "--model.num_layers=9", "--training.local_batch_size=8", *SELF], 1)
    assert estimate_memory(deep, 1).total > 0  # from networks of fewer blocks


# ---------------------------------------------------------------------- two times in an image

DUAL = ("--model.flavor=debug", *SELF, "--alignment.dual_share=0.25")


def test_a_share_of_an_images_tokens_has_a_second_time_by_sample_number():
    objective, count, grid = build_objective(load_config(["--model.flavor=debug"], 1).objective, 0), 4000, (4, 4)
    samples = torch.arange(count)
    single = objective.draw((1, 8, 8), GlobalBatch(0, count), samples)
    draw = with_second_time(single, objective, samples, 0, 0.25, grid)
    times, t = draw.token_times.flatten(1), single.t[:, None]
    assert torch.equal(draw.t, single.t) and draw.token_times.shape == (count, 1, *grid)
    assert ((times != t).sum(1) == 4).all()
    second = times[times != t].view(count, 4)
    assert (second == second[:, :1]).all()
    assert second[:, 0].mean().item() == pytest.approx(0.5, abs=5 * 0.21 / count**0.5)  # of logit-normal times
    assert torch.corrcoef(torch.stack((second[:, 0], single.t)))[0, 1].abs() < 5 / count**0.5
    places = (times != t).double().mean(0)
    assert (places - 0.25).abs().max() < 5 * (0.1875 / count) ** 0.5
    chosen = torch.tensor([3, 3999])
    few = with_second_time(objective.draw((1, 8, 8), GlobalBatch(0, count), chosen), objective, chosen, 0, 0.25, grid)
    assert torch.equal(few.token_times, draw.token_times[chosen])
    assert not torch.equal(with_second_time(single, objective, samples, 1, 0.25, grid).token_times, draw.token_times)
    first, other = torch.full((count,), 0.1), torch.full((count,), 0.02)
    wanted = torch.where(times == t, times - 0.1, times - 0.02).clamp_min(0.0)
    torch.testing.assert_close(lowered(draw, first, other).flatten(1), wanted)


def test_the_network_sees_each_token_at_its_time_and_the_average_at_lower_ones(tmp_path):
    trainer = make_trainer(str(tmp_path), "dual", replicas=1, shards=1, accumulation=1, steps=2, overrides=DUAL)
    state, seen = trainer.state, []
    state.model.register_forward_pre_hook(lambda module, inputs: seen.append((module.training, *inputs[:2])))
    batch = state.to_device(trainer.state.data.next_batch())
    count = len(batch["samples"])
    state.loss_terms(batch, GlobalBatch(0, count))
    (_, of_average, lower), (training, images, time) = seen
    single = state.objective.draw(tuple(batch["images"].shape[1:]), GlobalBatch(0, count), batch["samples"])
    draw = state.alignment.drawn(single, batch["samples"], 0)
    assert training and torch.equal(time, 1000 * draw.token_times.flatten(1)) and ((time - lower) >= 0).all()
    assert ((time - lower) <= 200.001).all() and (time - lower).std() > 10
    for t, x in ((time / 1000, images), (lower / 1000, of_average)):
        t = t.view(count, 1, 4, 1, 4, 1).expand(-1, -1, -1, 2, -1, 2).reshape(count, 1, 8, 8)  # patches of 2 x 2
        torch.testing.assert_close(x, (1 - t) * batch["images"] + t * single.noise, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        state.model.eval()
        for parameter in state.model.parameters():  # gates are zero at first
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
        condition, one = batch["class"], single.t * 1000
        alike = state.model(images, one[:, None].expand(-1, 16), condition)
        torch.testing.assert_close(alike, state.model(images, one, condition), rtol=1e-5, atol=1e-5)
        assert (state.model(images, time, condition) - alike).abs().max() > 1e-3
    trainer.close()


def test_flops_of_two_times_count_the_modulation_of_every_token():
    words = ["--model.flavor=debug", "--training.steps=10"]
    single, dual = load_config([*words, *SELF], 1), load_config([*words, *DUAL], 1)
    model = model_on_meta(single)
    vectors = 256 * 64 + 64 * 64 + 3 * 6 * 64 * 64 + 2 * 64 * 64  # of times, blocks, and the output layer
    assert training_flops_per_image(dual, model) - training_flops_per_image(single, model) == 2 * 4 * 15 * vectors
    assert estimate_memory(dual, 1).activations > estimate_memory(single, 1).activations


# ---------------------------------------------------------------------- what is refused

REFUSED = {
    ("--alignment.teacher=self", "--alignment.block=4"): "alignment.block: 4 is no block of the network, which has 3",
    ("--alignment.teacher=self", "--alignment.block=1"): "alignment.teacher_block: 8 is no block of the network, which has 3",
    (*DIGITS, "--model.patch_size=4"): "alignment.teacher: digits has features on 8 x 8, 4 x 4, and tokens are on 2 x 2 (choose",
    ("--alignment.teacher=cifar10", "--alignment.block=1"): (
        "alignment.teacher: cifar10 encodes images of 3 x 32 x 32, and these are of 1 x 8 x 8 (choose another teacher)"
    ),
    ("--alignment.teacher=transformers", "--alignment.block=1", "--alignment.path=nowhere"): (
        "alignment.path: teacher: nowhere: no such folder"
    ),
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_an_alignment_that_does_not_fit_ends_the_check_in_one_line(words, tmp_path, capsys):
    pytest.importorskip("transformers")
    arguments = ["--job.dump_folder", str(tmp_path), "--model.flavor=debug", *words, "--check-only"]
    assert train.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(REFUSED[words])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text, line",
    [
        ('teacher = "self"\ntrack = "slow"', "alignment.track: 'slow' is no name of ema.tracks (there are: ema)"),
        ('teacher = "transformers"', "alignment.path: is missing (give the folder or hub name of a vision transformer"),
        ('teacher = "self"\nstop_steps = 5\nstop_images = 5', "alignment.stop_images: the end is given by"),
        ('teacher = "digits"\n[data]\nname = "synthetic"\nshape = [4, 8, 8]', "alignment.teacher: digits encodes images"),
        ('teacher = "self"\ndual_share = 0.25\n[gns]\nenable = true', "alignment.dual_share: images of two times need gns"),
        ('teacher = "self"\ndual_share = 0.25\n[objective]\ncosine_weight = 1.0', "two times need objective.cosine_weight = 0"),
        ('teacher = "digits"\ndual_share = 0.25', "alignment.dual_share: has no effect when alignment.teacher = digits"),
        ('teacher = "digits"\ntrack = "ema"', "alignment.track: has no effect when alignment.teacher = digits"),
        ("weight = 1.0", "alignment.weight: has no effect when alignment.teacher = none"),
        ('teacher = "self"\n[compile]\nenable = true\nscope = "model"', "alignment.teacher: self reads a block's output, inside"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_in_one_line(text, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (found,) = problems(f"[alignment]\n{text}")
    assert line in found


def test_an_encoder_of_images_has_none_in_a_store_of_latents():
    config = AlignmentConfig(teacher="digits")
    common = dict(tracks=["ema"], features=False, buckets=False, context_parallel=False, whole_graph=False)
    ((key, text),) = alignment_problems(config, channels=4, latents=True, **common)
    assert key == "teacher" and text.startswith("digits encodes images, and the data are stored latents, which hold none (")
    assert not list(alignment_problems(AlignmentConfig(teacher="self"), channels=4, latents=True, **common))


def test_a_published_encoder_that_is_not_there_is_refused(tmp_path):
    words = ["--alignment.teacher=dinov2", "--alignment.block=1", f"--alignment.path={tmp_path / 'none.pth'}"]
    config = load_config(["--model.flavor=debug", *words], 1)
    with pytest.raises(ConfigError, match="alignment.path: dinov2: .*none.pth: no such file of weights .*--alignment.path"):
        open_encoder(config.alignment, CPU)
    with pytest.raises(AutoencoderError, match="--features dinov2: path: .*; --path names a copy"):
        FeatureEncoder("dinov2", str(tmp_path / "none.pth"), (4, 4), None, CPU)
    with torch.device("meta"):
        plan = Plan(config.alignment, model_on_meta(config), trained_info(config))
    assert plan.channels == 1024 and plan.student.grid == (4, 4)
