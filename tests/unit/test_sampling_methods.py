"""Guidance on an interval and on some channels, every solver through ImageSampler, and what is refused."""

import re
import shlex
import tomllib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import ROOT
from tests.objectives import schedule, solver, timesteps
from torchtitan import philox
from torchtitan.conditions import Classes
from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance, guided_network, predictor
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.solvers import SCHEDULES, SOLVERS
from torchtitan.evaluation.config import SamplingConfig, default_schedule, sampling_problems
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.models.flux.config import FLAVORS
from torchtitan.sampling.method_options import method_keys, sampling_method
from torchtitan.settings.record import dump_config
from torchtitan.settings.sections import keys
from torchtitan.weights.trained_model import WeightsError
from torchtitan_dit.commands.sample import parse_arguments

KIND, SHAPE = Classes(3), (4, 2, 2)
DDPM = DenoisingConfig(path="ddpm_linear", prediction="noise", preconditioning="index", timesteps=timesteps("uniform"))
OBJECTIVES = {
    "rectified_flow": DenoisingConfig(),
    "edm": DenoisingConfig(path="edm", prediction="edm", preconditioning="edm", timesteps=timesteps("lognormal_sigma")),
    "ddpm_linear": DDPM,
}


class Toy(nn.Module):
    """A smooth network of four channels, or eight with a learned variance, that counts the images it sees."""

    def __init__(self, out_channels: int = 4) -> None:
        super().__init__()
        self.image_shape, self.condition_kind, self.out_channels = SHAPE, KIND, out_channels
        self.batches: list[int] = []

    def forward(self, x: Tensor, time: Tensor, condition: Tensor | None) -> Tensor:
        self.batches.append(len(x))
        mixed = torch.cat((x, x.flip(1)), dim=1)[:, : self.out_channels]
        shift = (0.2 * condition.to(x.dtype) + 0.1 * torch.sin(time)).reshape(-1, 1, 1, 1)
        return torch.tanh(0.7 * mixed + shift * torch.arange(1, self.out_channels + 1).reshape(-1, 1, 1))


def inputs() -> tuple[Tensor, Tensor]:
    return philox.normal(0, "sampling", torch.arange(3), SHAPE), torch.tensor([0, 2, 1])


@pytest.mark.parametrize(("channels", "guided_channels"), [("all", 4), ("first_three", 3)])
@pytest.mark.parametrize("out_channels", [4, 8])
def test_channels_without_guidance_are_the_conditional_ones(channels, guided_channels, out_channels):
    x, classes = inputs()
    model, time = Toy(out_channels), torch.full((3,), 0.4)
    found = guided_network(model, KIND, 2.5, channels)(x, time, classes)
    conditional = model(x, time, classes)
    unconditional = model(x, time, torch.full_like(classes, KIND.count))
    wanted = conditional.clone()
    wanted[:, :guided_channels] = (2.5 * conditional - 1.5 * unconditional)[:, :guided_channels]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("t", "guided"), [(0.1, False), (0.25, True), (0.5, True), (0.75, True), (0.9, False)])
def test_outside_the_interval_is_one_plain_call(t, guided):
    x, classes = inputs()
    time, objective = torch.full((3,), t), build_objective(DenoisingConfig(), seed=0)
    model = Toy()
    found = predictor(objective, model, KIND, classes, Guidance(3.0, (0.25, 0.75)))(x, time)
    whole = predictor(objective, model, KIND, classes, Guidance(3.0 if guided else 1.0))(x, time)
    assert model.batches == [6 if guided else 3] * 2
    assert torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])


def test_learned_variance_reaches_the_solver_as_a_fraction_of_the_conditional_output():
    x, classes = inputs()
    objective, model = build_objective(DDPM, seed=0), Toy(8)
    t = objective.path.index_to_t(torch.tensor([400, 400, 400])).float()
    *_, fraction = predictor(objective, model, KIND, classes, Guidance(3.0))(x, t)
    output = model(x, torch.full((3,), 400.0), classes)[:, 4:]
    torch.testing.assert_close(fraction, (output + 1) / 2, rtol=1e-5, atol=1e-6)
    *_, nothing = predictor(objective, Toy(4), KIND, classes, Guidance(3.0))(x, t)
    assert nothing is None


METHODS = [
    ("rectified_flow", SamplingConfig(schedule=schedule("uniform", shift=3.0))),
    ("rectified_flow", SamplingConfig(solver=solver("euler_maruyama", diffusion_scale=0.5))),
    ("rectified_flow", SamplingConfig(solver=solver("dpmpp_2m"))),
    ("rectified_flow", SamplingConfig(solver=solver("ddpm"))),
    ("edm", SamplingConfig(solver=solver("edm_heun", churn=2.0), schedule=schedule("edm"))),
    ("edm", SamplingConfig(solver=solver("ddim", eta=0.5), schedule=schedule("edm"))),
    ("ddpm_linear", SamplingConfig(solver=solver("ddpm", variance="learned"), schedule=schedule("ddpm"))),
    ("ddpm_linear", SamplingConfig(solver=solver("ddpm", variance="large"), schedule=schedule("ddpm"))),
    ("ddpm_linear", SamplingConfig(solver=solver("ddim"), schedule=schedule("ddpm"), guidance_channels="first_three")),
    ("ddpm_linear", SamplingConfig(solver=solver("heun"), schedule=schedule("ddpm"), guidance_interval=[0.2, 0.8])),
]


def draw(path_name: str, config: SamplingConfig, labels: Tensor, batch_size: int = 64, **options) -> Tensor:
    sampler = ImageSampler(Toy(8 if path_name == "ddpm_linear" else 4), build_objective(OBJECTIVES[path_name], 0), "float32",
                           torch.device("cpu"))
    return sampler.draw(labels, 5, **config.method() | {"num_steps": 6, "batch_size": batch_size} | options)


@pytest.mark.parametrize(
    ("path_name", "config"), METHODS, ids=lambda value: getattr(value, "solver", SimpleNamespace(name=value)).name
)
def test_an_image_is_the_same_in_every_batch(path_name, config):
    assert sampling_problems(config, path_name, learned_variance=True) == []
    labels = torch.arange(7) % 3
    whole = draw(path_name, config, labels)
    assert whole.dtype == torch.float32 and whole.isfinite().all()
    for batch_size in (1, 3):
        torch.testing.assert_close(draw(path_name, config, labels, batch_size), whole, rtol=1e-4, atol=1e-5)
    later = draw(path_name, config, labels[4:], first_number=4)
    torch.testing.assert_close(later, whole[4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("path_name", "one", "other"),
    [
        ("rectified_flow", {}, {"schedule": schedule("uniform", shift=2.0)}),
        ("rectified_flow", {"guidance_interval": [0.0, 1.0]}, {"guidance_interval": [0.3, 0.7]}),
        ("rectified_flow", {"guidance_channels": "all"}, {"guidance_channels": "first_three"}),
        (
            "rectified_flow",
            {"solver": solver("euler_maruyama")},
            {"solver": solver("euler_maruyama", diffusion_scale=0.1)},
        ),
        ("edm", {"schedule": schedule("edm")}, {"schedule": schedule("edm", sigma_max=40.0)}),
        ("edm", {"schedule": schedule("edm")}, {"schedule": schedule("edm", sigma_min=0.1)}),
        (
            "edm",
            {"schedule": schedule("edm"), "solver": solver("edm_heun")},
            {"schedule": schedule("edm"), "solver": solver("edm_heun", churn=1.0)},
        ),
        (
            "ddpm_linear",
            {"schedule": schedule("ddpm"), "solver": solver("ddim")},
            {"schedule": schedule("ddpm"), "solver": solver("ddim", eta=1.0)},
        ),
        (
            "ddpm_linear",
            {"schedule": schedule("ddpm"), "solver": solver("ddpm")},
            {"schedule": schedule("ddpm"), "solver": solver("ddpm", variance="learned")},
        ),
    ],
)
def test_every_key_reaches_the_images(path_name, one, other):
    labels = torch.tensor([2, 0])
    images = [draw(path_name, SamplingConfig(**keys), labels) for keys in (one, other)]
    assert (images[0] - images[1]).abs().max() > 1e-3


def test_sampling_starts_at_the_path_s_last_noise_level():
    seen = []

    class Recorder(Toy):
        def forward(self, x, time, condition):
            seen.append(x)
            return super().forward(x, time, condition)

    objective = build_objective(DenoisingConfig(path="edm", prediction="x0", timesteps=timesteps("lognormal_sigma")), 0)
    method = SamplingConfig(schedule=schedule("edm"), guidance_scale=1.0).method()
    ImageSampler(Recorder(), objective, "float32", torch.device("cpu")).draw(
        torch.tensor([0, 1]), 5, **method, batch_size=2
    )
    noise = philox.normal(5, "sampling", torch.arange(2), SHAPE)
    torch.testing.assert_close(seen[0], 80 * noise, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("path_name", "keys", "line"),
    [
        ("rectified_flow", {"guidance_interval": [0.8, 0.2]},
         "guidance_interval: [0.8, 0.2] runs backwards (give the lower t first, both in 0..1)"),
        ("rectified_flow", {"schedule": schedule("ddpm")},
         "schedule.name: objective.path = rectified_flow has no DDPM indices (use uniform or edm)"),
        ("ddpm_cosine", {"schedule": schedule("uniform")},
         "schedule.name: objective.path = ddpm_cosine is trained at integer indices only (use ddpm)"),
        ("ddpm_linear", {"schedule": schedule("ddpm"), "num_steps": 1001},
         "num_steps: 1001 steps cannot be chosen from the 1000 indices of objective.path = ddpm_linear"
         " (use at most 1000)"),
        ("edm", {"schedule": schedule("edm"), "solver": solver("euler_maruyama")},
         "solver.name: euler_maruyama is for rectified_flow, and objective.path = edm (use ddpm, or edm_heun with churn)"),
        ("rectified_flow", {"solver": solver("edm_heun")},
         "solver.name: edm_heun needs a finite sigma to start from, and objective.path = rectified_flow"
         " (use sampling.schedule.name = edm)"),
    ],
)
def test_impossible_methods_are_refused_in_one_line(path_name, keys, line):
    assert [": ".join(found) for found in sampling_problems(SamplingConfig(**keys), path_name, False)] == [line]


def test_schedules_follow_the_path():
    found = [default_schedule(name) for name in ("rectified_flow", "edm", "ddpm_linear", "ddpm_cosine_continuous")]
    assert found == ["uniform", "edm", "ddpm", "uniform"]


def method_of(monkeypatch, arguments: list[str], path_name: str = "rectified_flow") -> SamplingConfig:
    monkeypatch.setattr("sys.argv", ["sample.py", *arguments])
    config = JobConfig()
    config.objective.path = path_name
    if arguments[0] == "outputs/flux":
        config.model = FLAVORS["dev"]
    return sampling_method(parse_arguments(), SimpleNamespace(config=config))


def test_commands_of_the_documentation_are_ways_to_sample(monkeypatch):
    text = (ROOT / "docs" / "samples.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^    \.venv/bin/python scripts/sample.py (.*)$", text, re.MULTILINE)]
    methods = [method_of(monkeypatch, command) for command in commands]
    assert [method.solver.name for method in methods] == [
        "euler", "heun", "euler_maruyama", "edm_heun", "edm_heun", *["euler"] * 9
    ]  # fmt: skip
    assert methods[3].solver.churn == 40 and methods[3].schedule.name == "edm"
    assert (methods[4].state_dtype, methods[4].clip_x0, methods[4].solver.churn_noise) == ("float64", True, 1.007)
    assert (methods[5].guidance_scale, methods[5].guidance_interval) == (3.0, [0.2, 0.8])
    assert (methods[-4].embedded_guidance, methods[-4].num_steps) == (2.5, 28)
    assert methods[-2].guidance.interval == (0.23, 0.75)
    assert (methods[-1].guidance_scale, methods[-1].null_guidance_scale) == (1.4, 1.35)
    for section, key in re.findall(r"`(sampling)\.([a-z_]+)", text):
        assert hasattr(SamplingConfig(), key), f"{section}.{key}"


def test_every_key_of_the_method_is_an_option():
    others = {"enable", "interval", "classes", "images_per_class", "ema_track", "guide_track", "batch_size"}
    others |= {"previews"}
    inner = {key.name for each in (*SOLVERS.values(), *SCHEDULES.values()) for key in keys(each) if key.name != "name"}
    options = {key for _, key in method_keys()}
    assert options == {key.name for key in keys(SamplingConfig)} - others | inner and len(options) == len(method_keys())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--guidance-interval 0.9 0.1",
         "--guidance-interval: [0.9, 0.1] runs backwards (give the lower t first, both in 0..1)"),
        ("--eta 0.5", "--eta: has no effect with --solver euler, --schedule uniform (leave it out)"),
        ("--guide path_drop --null-guidance-scale 1.5",
         "--null-guidance-scale: has no effect without --guide head (leave it out)"),
        ("--null-guidance-scale 1.5", "--null-guidance-scale: has no effect without --guide head (leave it out)"),
        ("--guide head --null-guidance-scale 2 --guidance-scale 1",
         "--null-guidance-scale: has no effect at a guidance scale of 1 (for guidance by the null condition alone give it "
         "as --guidance-scale, with --guide none)"),
        ("--solver ddim --eta 2", "--eta: must be at least 0 and at most 1, is 2.0"),
    ],
)
def test_options_that_cannot_be_drawn_are_refused(monkeypatch, arguments, line):
    with pytest.raises(WeightsError) as refusal:
        method_of(monkeypatch, ["run", *arguments.split()])
    assert str(refusal.value) == line


SMALL_DDPM = '[data]\nname = "synthetic"\n[objective]\npath = "ddpm_linear"\nprediction = "noise"\n' + (
    'preconditioning = "index"\ntimesteps.name = "uniform"\n'
)


def load(folder, toml: str) -> JobConfig:
    (folder / "run.toml").write_text(toml, encoding="utf-8")
    return load_config(["--job.config_file", str(folder / "run.toml")], 1)


def test_a_configuration_takes_the_schedule_of_its_path(tmp_path):
    assert load(tmp_path, SMALL_DDPM).sampling.schedule == schedule("ddpm")
    assert load(tmp_path, '[data]\nname = "synthetic"').sampling.schedule == schedule("uniform")
    resolved = dump_config(load(tmp_path, SMALL_DDPM))
    assert tomllib.loads(resolved)["sampling"]["schedule"] == {"name": "ddpm", "spacing": "even"}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("schedule.shift = 2.0", "sampling.schedule.shift: has no effect on the schedule of objective.path = ddpm_linear, ddpm"
         " (remove it)"),
        ('solver.name = "ddpm"\nsolver.variance = "learned"', "sampling.solver.variance: the model has not learned the variance"
         " (use small or large, or train with model.learned_variance)"),
    ],
)
def test_a_configuration_that_cannot_be_sampled_is_refused(tmp_path, keys, line):
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, f"{SMALL_DDPM}[sampling]\n{keys}")
    assert [problem.split("run.toml: ")[-1] for problem in refusal.value.problems] == [line]


def test_a_model_that_learns_the_variance_can_use_it(tmp_path):
    learns = SMALL_DDPM + "[model]\nlearned_variance = true\n"
    config = load(tmp_path, learns + '[sampling]\nsolver.name = "ddpm"\nsolver.variance = "learned"')
    assert config.sampling.solver.options() == {"variance": "learned"}
