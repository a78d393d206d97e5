"""Sampling of Flux: published times and settings, embedded guidance, any size, and noise that depends on no device."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.adapted_models import flux
from tests.configurations import load, problems
from tests.objectives import schedule, solver
from tests.refusals import one_line
from torchtitan import philox
from torchtitan.conditions import POOLED, TEXT, Embeddings
from torchtitan.data import DATASETS, DataConfig, Dataset, DatasetInfo
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance, Guide
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.solvers import flux_log_shift
from torchtitan.evaluation import during_training
from torchtitan.evaluation.config import SamplingConfig, sampling_problems
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.flux.config import FLAVORS
from torchtitan.models.flux.model import Flux
from torchtitan.run import run
from torchtitan.sampling.image_size import sampled_shape
from torchtitan.sampling.setup import SamplingSetup, open_setup
from torchtitan.settings import setting
from torchtitan.settings.record import dump_config
from torchtitan.weights.trained_model import WeightsError
from torchtitan_dit.commands import sample

DEBUG, IMAGE = FLAVORS["debug"], (3, 8, 12)
GUIDED = replace(DEBUG, guidance_embedding=True, guidance=2.5)
NULLS = {TEXT: torch.zeros(5, DEBUG.text_dim), POOLED: torch.zeros(DEBUG.pooled_dim)}


def sampler(model: Flux, device: str = "cpu") -> ImageSampler:
    return ImageSampler(model, build_objective(DenoisingConfig(), seed=0), "float32", torch.device(device))


def flux_times(num_steps: int, tokens: int) -> Tensor:
    return schedule("flux_shift").times(PATHS["rectified_flow"](), num_steps, lambda: tokens)


@pytest.mark.parametrize(("pixels", "mu"), [(256, 0.5), (512, 0.63), (768, 0.846667), (1024, 1.15)])
def test_the_shift_is_the_published_one(pixels, mu):
    assert flux_log_shift((pixels // 16) ** 2) == pytest.approx(mu, abs=5e-7)


def test_times_are_the_published_ones():
    assert flux_times(4, 4096).tolist() == pytest.approx([1, 0.904531, 0.759511, 0.512844, 0], abs=5e-7)
    unshifted = schedule("uniform").times(PATHS["rectified_flow"](), 4, lambda: 4096)
    assert unshifted.tolist() == [1, 0.75, 0.5, 0.25, 0]


def test_times_are_the_published_formula_at_any_number_of_tokens():
    for tokens in (24, 256, 3000, 16384):
        mu = torch.tensor(0.5 + (tokens - 256) * 0.65 / 3840, dtype=torch.float64)
        t = torch.linspace(1, 0, 51, dtype=torch.float64)[:-1]
        # Either side rounds fewer than eight times, by 2^-53 each.
        wanted = mu.exp() / (mu.exp() + 1 / t - 1)
        torch.testing.assert_close(flux_times(50, tokens)[:-1], wanted, rtol=16 * 2**-53, atol=0)
        assert flux_times(50, tokens)[-1] == 0


@pytest.mark.parametrize("name", ["uniform", "flux_shift"])
def test_a_sample_is_euler_s_steps_along_the_network_s_velocity(name):
    model, numbers = flux(), torch.arange(2)
    found = sampler(model).draw(
        torch.zeros(2, dtype=torch.int64), 7, solver=solver("euler"), schedule=schedule(name), num_steps=4,
        guidance=Guidance(), state_dtype="float64", batch_size=2,
    )  # fmt: skip
    times = [1, 0.75, 0.5, 0.25, 0] if name == "uniform" else flux_times(4, 4 * 6).tolist()
    x = philox.normal(7, "sampling", numbers, IMAGE).double()
    condition = model.condition_kind.choose(numbers)
    with torch.no_grad():
        for now, then in pairwise(times):
            x = x + (then - now) * model(x.float(), torch.full((2,), 1000.0 * now), condition).double()
    assert (x - philox.normal(7, "sampling", numbers, IMAGE)).std() > 0.1
    torch.testing.assert_close(found, x.float(), rtol=1e-5, atol=1e-6)


def test_edm_heun_is_refused_where_the_first_sigma_is_infinite():
    config = SamplingConfig(solver=solver("edm_heun"), schedule=schedule("flux_shift"))
    ((key, text),) = sampling_problems(config, "rectified_flow", False)
    assert key == "solver.name" and "needs a finite sigma" in text


@pytest.mark.parametrize("name", ["euler", "euler_maruyama"])
def test_noise_is_drawn_on_the_cpu_whatever_the_device(name, monkeypatch):
    drawn_on, normal = [], philox.normal

    def recorded(seed: int, purpose: str, numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
        drawn_on.append(numbers.device.type)
        return normal(seed, purpose, numbers, shape)

    monkeypatch.setattr(philox, "normal", recorded)
    model = flux().to("meta")
    method = {"solver": solver(name), "schedule": schedule("flux_shift"), "num_steps": 3, "guidance": Guidance()}
    with sampler(model, "meta").drawing(0, **method) as draw:
        assert draw(torch.zeros(2, dtype=torch.int64), torch.arange(2)).device.type == "meta"
    assert drawn_on == ["cpu"] * (1 if name == "euler" else 3)


# --- what a configuration samples with


@dataclass(kw_only=True)
class WordsConfig(DataConfig):
    name: Literal["words"] = setting("words", "dataset")


class Words(Dataset):
    """Noise with two texts, for the debug size of Flux."""

    Config = WordsConfig

    @staticmethod
    def info(config):
        return DatasetInfo(IMAGE, Embeddings(NULLS, Words.texts(torch.arange(2)), names=("one", "two")))

    @staticmethod
    def texts(numbers: Tensor) -> dict[str, Tensor]:
        return {name: philox.normal(0, "synthetic_data", numbers % 2, tuple(null.shape)) for name, null in NULLS.items()}

    def __init__(self, config, split):
        pass

    def __len__(self):
        return 16

    def fetch(self, indices):
        numbers = torch.from_numpy(indices)
        return {"images": philox.normal(1, "synthetic_data", numbers, IMAGE)} | self.texts(numbers)


FLUX = ["--model.name", "flux", "--model.flavor", "debug", "--data.name", "words"]
DEV = [*FLUX, "--model.guidance_embedding", "true"]


@pytest.fixture
def words(monkeypatch, tmp_path):
    monkeypatch.setitem(DATASETS, "words", Words)
    monkeypatch.chdir(tmp_path)


def sampled_by(*arguments: str, toml: str | None = None) -> tuple[int, str, str, float]:
    sampling = load(toml, list(arguments)).sampling
    return sampling.num_steps, sampling.solver.name, sampling.schedule.name, sampling.guidance_scale


def test_flux_samples_as_published_where_nothing_is_given(words):
    assert sampled_by(*FLUX) == (4, "euler", "uniform", 1.0)
    assert sampled_by(*DEV) == (50, "euler", "flux_shift", 1.0)
    assert load(None, FLUX).sampling.schedule.shift == 1
    assert sampled_by("--data.name", "digits") == (50, "euler", "uniform", 2.0)


def test_what_is_given_wins_over_the_model_s_defaults(words):
    toml = "[sampling]\nnum_steps = 50\nguidance_scale = 2.0\nschedule.name = 'uniform'\nschedule.shift = 3.0"
    assert sampled_by(*DEV, toml=toml) == (50, "euler", "uniform", 2.0)
    assert load(toml, DEV).sampling.schedule.shift == 3
    assert sampled_by(*DEV, "--sampling.num_steps", "7", toml=toml)[0] == 7
    assert sampled_by(*FLUX, "--sampling.schedule.shift", "3") == (4, "euler", "uniform", 1.0)
    assert sampled_by(*FLUX, "--sampling.solver.name", "heun")[1] == "heun"


def test_a_resolved_configuration_samples_in_the_same_way(words):
    for arguments in (FLUX, DEV, [*DEV, "--sampling.embedded_guidance", "4"]):
        config = load(None, arguments)
        assert load(dump_config(config)).sampling == config.sampling


def test_on_another_path_than_flux_s_the_path_s_defaults_hold(words):
    edm = ["--objective.path", "edm", "--objective.prediction", "x0", "--objective.timesteps.name", "lognormal_sigma"]
    assert sampled_by(*DEV, *edm) == (50, "ddim", "edm", 2.0)


@pytest.mark.parametrize(("arguments", "line"), [
    (["--data.name", "digits", "--sampling.embedded_guidance", "3"],
     "sampling.embedded_guidance: the network takes no guidance scale as an input, as trained with model.guidance_embedding"
     " (leave it out)"),
    ([*DEV, "--sampling.schedule.shift", "2"],
     "sampling.schedule.shift: has no effect on the schedule of model.name = flux, flux_shift"
     " (remove it, or give sampling.schedule.name)"),
    ([*FLUX, "--sampling.guide_track", "none"],
     "sampling.guide_track: has no effect when sampling.guidance_scale = 1, the default of model.name = flux (remove it)"),
])  # fmt: skip
def test_keys_without_effect_on_flux_are_refused_in_one_line(words, arguments, line):
    assert [problem.removeprefix("command line: --") for problem in problems(None, arguments)] == [line]


# --- embedded guidance


METHOD = {"solver": solver("euler"), "schedule": schedule("uniform"), "num_steps": 2, "guidance": Guidance()}


def draw(model: Flux, **method) -> Tensor:
    return sampler(model).draw(torch.zeros(2, dtype=torch.int64), 7, batch_size=2, **METHOD | method)


def test_embedded_guidance_is_that_of_a_network_trained_with_it():
    model = flux(GUIDED)
    own, given = draw(model), draw(model, embedded_guidance=7.0)
    assert torch.equal(given, draw(flux(replace(GUIDED, guidance=7.0)))) and (own - given).std() > 1e-4
    assert torch.equal(draw(model), own)


def test_training_has_its_guidance_again_however_sampling_ends():
    model, weak = flux(GUIDED), flux(replace(GUIDED, guidance=1.0))
    guide = Guide(weak, build_objective(DenoisingConfig(), seed=0), conditional=True)
    method = METHOD | {"guidance": Guidance(2.0), "guide": guide, "embedded_guidance": 7.0}
    with pytest.raises(KeyboardInterrupt), sampler(model).drawing(0, **method):
        assert (model.guidance, weak.guidance) == (7.0, 7.0)
        raise KeyboardInterrupt
    assert (model.guidance, weak.guidance) == (2.5, 1.0)


def trained(folder: Path, name: str, *more: str) -> list[dict]:
    arguments = [
        *DEV, "--job.dump_folder", str(folder), "--job.name", name, "--training.steps", "4", "--optimizer.lr", "0.02",
        "--lr_scheduler.warmup_steps", "0", "--training.local_batch_size", "4", "--metrics.log_freq", "1",
        "--validation.enable", "false", "--sampling.num_steps", "2", "--sampling.interval", "1",
        "--sampling.images_per_class", "2", "--sampling.ema_track", "none", "--gns.enable", "false",
        "--metrics.enable_tensorboard", "false",
    ]  # fmt: skip
    assert run(load(None, [*arguments, *more])) == 0
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{key: point[key] for key in ("loss_metrics/global_avg_loss", "grad_norm")} for point in map(json.loads, lines)]


def opened(monkeypatch, folder: Path, *options: str) -> SamplingSetup:
    monkeypatch.setattr("sys.argv", ["sample.py", str(folder), *options])
    return open_setup(sample.parse_arguments())


def test_sampling_in_training_and_by_the_command_agree_and_change_no_training(words, tmp_path, monkeypatch):
    grids, image_grid = [], during_training.image_grid

    def recorded(images, *arguments, **options):
        grids.append(images)
        return image_grid(images, *arguments, **options)

    monkeypatch.setattr(during_training, "image_grid", recorded)
    points = trained(tmp_path, "given", "--sampling.embedded_guidance", "30")
    drawn = grids[-1]
    assert trained(tmp_path, "default") == points and (grids[-1] - drawn).abs().max() > 1e-4
    choices = torch.tensor([0, 0, 1, 1])
    for name, options, wanted in (
        ("given", (), drawn), ("default", (), grids[-1]), ("default", ("--embedded-guidance", "30"), drawn)
    ):
        drawing = opened(monkeypatch, tmp_path / name, *options)
        found = drawing.sampler().draw(choices, 0, batch_size=256, **drawing.method())
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        assert drawing.sampling.schedule.name == "flux_shift" and drawing.sampling.guidance_scale == 1
        assert drawing.title == "step 4, trained weights, guidance 1" + (", embedded guidance 30" if options else "")
    options = ("--guidance-scale", "4", "--num-steps", "3", "--solver", "heun", "--guide", "none")
    title = opened(monkeypatch, tmp_path / "given", *options).title
    assert title == "step 4, trained weights, guidance 4, solver heun, num steps 3, guide none"


# --- size


def trained_model(model_name: str = "flux") -> SimpleNamespace:
    config = SimpleNamespace(model=DEBUG if model_name == "flux" else DiTConfig(), data=WordsConfig())
    return SimpleNamespace(config=config, model=SimpleNamespace(image_shape=IMAGE), record=SimpleNamespace(latents=None))


def test_an_image_of_another_size_is_that_of_a_network_built_for_it():
    method = {"schedule": schedule("flux_shift"), "num_steps": 3}
    model = flux()
    built = Flux(DEBUG, (3, 16, 6), Embeddings(NULLS))
    built.init_buffers()
    built.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        draw(model, image_shape=(3, 16, 6), **method), draw(built.eval(), **method), rtol=0, atol=1e-6
    )


def test_a_size_is_in_pixels_also_where_latents_are_drawn():
    assert sampled_shape(None, trained_model(), None) == IMAGE
    assert sampled_shape((16, 10), trained_model(), None) == (3, 16, 10)
    latents = trained_model()
    index = SimpleNamespace(autoencoder={"name": "a", "downscale": 16}, image_size=None, shape=IMAGE)
    latents.record.latents = index
    decoder = SimpleNamespace(identity=lambda: {"downscale": 8})
    assert sampled_shape((64, 96), latents, decoder) == (3, 8, 12)
    assert sampled_shape((64, 96), latents, None) == (3, 4, 6)
    index.autoencoder, index.image_size = {"name": "unknown"}, 32
    assert sampled_shape((64, 96), latents, None) == (3, 16, 24)
    index.image_size = None
    with pytest.raises(WeightsError, match="the store does not know the pixels of a latent"):
        sampled_shape((64, 96), latents, None)
    said = one_line(WeightsError, sampled_shape, (60, 100), latents, decoder)
    assert said == "--size: 60x100: height and width must be multiples of 16 pixels (give 64x96)"


@pytest.mark.parametrize(("model_name", "size", "line"), [
    ("flux", (16, 7), "--size: 16x7: height and width must be multiples of 2 pixels (give 16x8)"),
    ("dit", (12, 8), "--size: model.name = dit draws 8x12 only, as it was trained (leave it out)"),
])  # fmt: skip
def test_a_size_that_cannot_be_drawn_is_refused_in_one_line(model_name, size, line):
    assert one_line(WeightsError, sampled_shape, size, trained_model(model_name), None) == line


def test_a_network_of_one_size_draws_it_where_it_is_asked_for():
    dit = trained_model("dit")
    assert sampled_shape(dit.model.image_shape[1:], dit, None) == dit.model.image_shape


# --- files


def test_the_command_draws_any_size_with_embedded_guidance_and_records_both(words, tmp_path, monkeypatch):
    trained(tmp_path, "run", "--training.steps", "1")
    folder = tmp_path / "run"
    monkeypatch.setattr("sys.argv", ["sample.py", str(folder), "--size", "16x6", "--images-per-class", "1", "--files",
                                     "--output", str(tmp_path / "grid")])  # fmt: skip
    arguments = sample.parse_arguments()
    sample.refuse_unused(arguments)
    drawing = open_setup(arguments)
    sample.check(arguments, drawing)
    sample.draw_grid(arguments, drawing)
    (one, other) = sorted((tmp_path / "grid").glob("class-*.png"))
    assert Image.open(one).size == Image.open(other).size == (6, 16)
    own = opened(monkeypatch, folder).plan(None, 2, []).record()
    assert own["image_shape"] == list(IMAGE) and own["embedded_guidance"] == 3.5
    other = opened(monkeypatch, folder, "--size", "16x6", "--embedded-guidance", "2").plan(None, 2, []).record()
    assert {key for key in own if own[key] != other[key]} == {"image_shape", "embedded_guidance"}
    assert (other["image_shape"], other["embedded_guidance"]) == ([3, 16, 6], 2.0)
    of_one_shape = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(model=DiTConfig()), model=SimpleNamespace(image_shape=IMAGE))
    )
    monkeypatch.setattr("torchtitan.sampling.setup.open_guide", lambda *arguments: of_one_shape)
    with pytest.raises(WeightsError, match="--size: the guide takes images of one shape only"):
        opened(monkeypatch, folder, "--size", "16x6")
