"""Images encoded while a run trains: equal to a run on a latent store of them, on two ranks, resumed and sampled."""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.estimate_memory import measured_peak
from tests.launcher import run_on_ranks
from torchtitan.config.job import ConfigError, load_config
from torchtitan.diffusion.denoising import Denoising
from torchtitan.diffusion.objectives import OBJECTIVES
from torchtitan.estimate.devices import DEVICES
from torchtitan.estimate.encoding import encoding_flops_per_image
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan.estimate.roofline import Efficiency, estimate_step_time
from torchtitan.trainer import Trainer
from torchtitan.weights.trained_model import load_run
from torchtitan_dit.commands import ema, extract_latents, sample, train

SIDE, STEPS = 16, 6
MODEL = [
    "--model.flavor", "debug", "--model.num_layers", "1", "--training.local_batch_size", "8", "--training.steps", str(STEPS),
    "--metrics.log_freq", "1", "--metrics.enable_tensorboard", "false", "--sampling.interval", str(STEPS),
    "--sampling.num_steps", "2", "--sampling.images_per_class", "1", "--lr_scheduler.warmup_steps", "0",
    "--validation.enable", "true", "--validation.interval", str(STEPS), "--validation.num_images", "4",
    "--checkpoint.enable", "true", "--checkpoint.interval", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("online"), np.random.default_rng(0)
    for part, count in (("train", 16), ("held_out", 4)):
        for number in range(count):
            image = folder / part / f"class{number % 2}" / f"{number}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(image)
        extract(folder / part, folder / f"{part}_latents", "--autoencoder", "identity")
    return folder


def extract(images: Path, store: Path, *words: str, side: int = SIDE) -> None:
    words += ("--output", str(store), "--data.name", "image_folder", "--data.path", str(images), "--data.image_size", str(side))
    assert extract_latents.main([*words, "--data.validation_fraction", "0"]) == 0


def diffusers_vae(channels: list[int]):
    return pytest.importorskip("diffusers").AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2, block_out_channels=channels,
        norm_num_groups=4, latent_channels=4,
    )  # fmt: skip


def images(place: Path) -> list[str]:
    return [
        "--data.name", "image_folder", "--data.path", str(place / "train"), "--data.validation_path", str(place / "held_out"),
        "--data.image_size", str(SIDE), "--data.horizontal_flip", "true", "--autoencoder.name", "identity",
        "--autoencoder.encode", "true", "--autoencoder.statistics", str(place / "train_latents"),
    ]  # fmt: skip


def trained(place: Path, name: str, words: list[str]) -> dict[str, list[float]]:
    """Losses, gradient norms and held-out losses of a run."""
    assert train.main(["--job.dump_folder", str(place / "runs"), "--job.name", name, *MODEL, *words]) == 0
    points = list(map(json.loads, (place / "runs" / name / "metrics.jsonl").read_text().splitlines()))
    tags = ("loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/loss")
    return {tag: [point[tag] for point in points if tag in point] for tag in tags}


@pytest.fixture(scope="module")
def online(place) -> dict[str, list[float]]:
    return trained(place, "online", images(place))


def test_losses_are_those_of_a_run_on_the_store_bit_for_bit(place, online):
    stored = ["--data.name", "latents", "--data.path", str(place / "train_latents"), "--autoencoder.name", "identity"]
    stored += ["--data.validation_path", str(place / "held_out_latents")]
    wanted = trained(place, "stored", stored)
    assert len(wanted["grad_norm"]) == STEPS and wanted["validation_metrics/loss"] and online == wanted


def test_a_finished_run_is_resumed_and_sampled_as_images(place, online):
    longer = trained(place, "longer", [*images(place), "--training.steps", "9"])
    resumed = trained(place, "online", [*images(place), "--training.steps", "9"])
    assert resumed["grad_norm"][-3:] == longer["grad_norm"][-3:] and len(longer["grad_norm"]) == 9
    assert sample.main([str(place / "runs" / "online"), "--output", str(place / "drawn")]) == 0
    with Image.open(next((place / "drawn").glob("*.png"))) as grid:
        assert grid.width >= SIDE


def test_two_ranks_encode_what_one_does(place):
    found = {}
    for ranks in (1, 2):
        case = {"steps": 3, "replicas": ranks, "shards": 1, "accumulation": 1, "overrides": tuple(images(place))}
        found[ranks] = run_on_ranks("tests.distributed.cases:train_all", ranks, {"cases": {"online": case}})[0]["online"]
    assert np.array(found[2]) == pytest.approx(np.array(found[1]), rel=1e-5)


@pytest.fixture(scope="module")
def encoders(place) -> tuple[Path, Path]:
    """Folders of a small variational autoencoder and of a vision transformer; and a store of the autoencoder's latents."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    diffusers_vae([8, 8]).save_pretrained(place / "vae")
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=4, image_size=16, mlp_ratio=2
    )
    transformers.Dinov2Model(config).save_pretrained(place / "teacher")
    for part in ("train", "held_out"):
        extract(place / part, place / f"vae_{part}", "--autoencoder", "diffusers", "--path", str(place / "vae"))
    return place / "vae", place / "teacher"


def by_vae(place: Path, vae: Path) -> list[str]:
    words = [*images(place), "--autoencoder.name", "diffusers", "--autoencoder.path", str(vae)]
    return [*words, "--autoencoder.statistics", str(place / "vae_train")]


def vae_stored(place: Path, vae: Path) -> list[str]:
    return [
        "--data.name", "latents", "--data.path", str(place / "vae_train"), "--data.validation_path", str(place / "vae_held_out"),
        "--autoencoder.name", "diffusers", "--autoencoder.path", str(vae),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def vae_runs(place, encoders) -> dict[str, dict[str, list[float]]]:
    """Losses of a run on the autoencoder's store, and of one that encodes; with what a sweep of averages reads."""
    words = ["--ema.snapshot_interval", "16", "--ema.tracks", '[{"name": "ema", "kind": "power", "sigma_rel": 0.1}]']
    words += ["--evaluation.extractor", "cifar10", "--evaluation.reference", "train", "--evaluation.allow_small", "true"]
    data = {"vae stored": vae_stored(place, encoders[0]), "vae online": by_vae(place, encoders[0])}
    return {name: trained(place, name, [*of_name, *words]) for name, of_name in data.items()}


def test_posteriors_are_drawn_as_from_a_store(place, vae_runs):
    for tag, values in vae_runs["vae stored"].items():
        assert values and vae_runs["vae online"][tag] == pytest.approx(values, rel=1e-5)
    clocks = [json.loads((place / "runs" / name / "summary.json").read_text())["clock"] for name in ("vae stored", "vae online")]
    assert clocks[0]["encode"] == 0 < clocks[1]["encode"]  # a phase of the step, and no part of waiting for data


def test_a_sweep_of_averages_encodes_held_out_images_and_compares_samples_with_those_trained_on(place, vae_runs, capsys):
    found = {}
    for name in vae_runs:
        capsys.readouterr()
        assert ema.main(["sweep", str(place / "runs" / name), "--stds", "0.1"]) == 0
        found[name] = float(capsys.readouterr().out.split()[1].rstrip(":"))
    assert found["vae online"] == pytest.approx(found["vae stored"], rel=1e-5) and found["vae online"] > 0
    given = ["sweep", str(place / "runs" / "vae online"), "--stds", "0.1", "--metric", "fd", "--images", "4"]
    assert ema.main(given) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("note: fd of 4 samples each") and said[1].startswith("fd ")


def test_a_teacher_sees_the_pixels(place, encoders):
    words = [*MODEL, *by_vae(place, encoders[0]), "--job.dump_folder", str(place / "runs"), "--job.name", "aligned"]
    words += ["--alignment.teacher", "transformers", "--alignment.path", str(encoders[1]), "--alignment.block", "1"]
    trainer = Trainer(load_config(words, 1))
    state, seen = trainer.state, []
    state.alignment._encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    trainer.state.step += 1
    trainer.train_step()
    trainer.close()
    assert seen[0].shape == (8, 3, SIDE, SIDE) and state.info.image_shape == (4, SIDE // 2, SIDE // 2)
    nothing = state.info.placeholder(2, state.info.image_shape)  # of which ranks make a backward before they begin
    assert nothing["pixels"].shape == (2, 3, SIDE, SIDE) and nothing["images"].shape == (2, 4, SIDE // 2, SIDE // 2)
    levels = 127.5 * seen[0] + 127.5
    torch.testing.assert_close(levels.round(), levels, rtol=0, atol=1e-3)  # bytes of the files


def test_an_estimate_counts_the_encoder_as_the_allocator_and_the_weights_do(place, encoders):
    torch.manual_seed(0)
    wide = diffusers_vae([32, 32])
    wide.save_pretrained(place / "wide")
    extract(place / "train", place / "wide_train", "--autoencoder", "diffusers", "--path", str(place / "wide"), side=64)
    words = [*by_vae(place, place / "wide"), "--autoencoder.statistics", str(place / "wide_train"), "--data.image_size", "64"]
    words += ["--model.flavor", "debug", "--model.num_layers", "1", "--model.patch_size", "16"]
    words += ["--training.local_batch_size", "8"]
    config = load_config(words, 1)
    memory = estimate_memory(config, 1)
    with tempfile.TemporaryDirectory() as folder:
        peak, _ = measured_peak([*words, "--job.dump_folder", folder], 1)
    peak += sum(parameter.nbytes for parameter in wide.parameters())
    assert memory.phase == "encode" and 0.9 * peak <= memory.total <= 1.1 * peak
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        wide.encode(torch.zeros(1, 3, 64, 64))
    flops = counter.get_total_flops() + 4 * 1024**2 * 32  # attention, which is not counted on the CPU
    assert encoding_flops_per_image(config) == flops
    time = estimate_step_time(config, model_on_meta(config), memory, DEVICES["H100"], Efficiency())
    assert time.encoding == pytest.approx(8 * flops / 67e12 / 0.45)  # of float32


@pytest.fixture(scope="module")
def features(place, encoders) -> Path:
    """Store of the vision transformer's features of the training images, on the grid of the network's tokens."""
    return extracted_features(place, encoders, "train", "features", "--grid", "4x4")


def extracted_features(place: Path, encoders: tuple[Path, Path], part: str, name: str, *words: str) -> Path:
    words = ("--output", str(place / name), "--features", "transformers", "--path", str(encoders[1]), *words)
    data = ["--data.name", "image_folder", "--data.path", str(place / part), "--data.image_size", str(SIDE)]
    assert extract_latents.main([*words, *data, "--data.validation_fraction", "0"]) == 0
    return place / name


def on_store(place: Path, features: Path) -> list[str]:
    return [
        "--data.name", "latents", "--data.path", str(place / "vae_train"), "--data.features_path", str(features),
        "--data.validation_path", str(place / "vae_held_out"), "--alignment.teacher", "stored", "--alignment.block", "1",
    ]  # fmt: skip


def test_stored_features_are_those_of_the_teacher_on_any_number_of_ranks(place, encoders, features):
    teacher = ["--alignment.teacher", "transformers", "--alignment.path", str(encoders[1]), "--alignment.block", "1"]
    runs, losses = {"online": [*by_vae(place, encoders[0]), *teacher], "stored": on_store(place, features)}, {}
    for name, words in runs.items():
        trained(place, f"features {name}", words)
        points = map(json.loads, (place / "runs" / f"features {name}" / "metrics.jsonl").read_text().splitlines())
        losses[name] = np.array([value for point in points for tag, value in point.items() if tag.startswith("alignment_loss/")])
    assert len(losses["online"]) > STEPS and np.ptp(losses["online"]) > 0.01
    assert losses["stored"] == pytest.approx(losses["online"], abs=2**-11)  # of half precision

    found = {}
    for ranks in (1, 2):
        case = {"steps": 3, "replicas": ranks, "shards": 1, "accumulation": 1, "overrides": tuple(runs["stored"])}
        found[ranks] = run_on_ranks("tests.distributed.cases:train_all", ranks, {"cases": {"stored": case}})[0]["stored"]
    assert np.array(found[2]) == pytest.approx(np.array(found[1]), rel=1e-5)


class ReadsFeatures(Denoising):
    """Denoising, and the mean square of an image's stored features, which held-out images lack."""

    reads_features = True

    def attach(self, model, entries):
        self.shape = entries["features"][0]

    def loss(self, model, batch, draw):
        terms = super().loss(model, batch, draw)
        if (features := batch.entries.get("features")) is None:
            return terms
        assert features.shape[1:] == self.shape
        return replace(terms, loss=terms.loss + features.float().square().flatten(1).mean(1))


def test_an_objective_may_read_stored_features_and_is_sampled_without_them(place, features, vae_runs, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "denoising", ReadsFeatures)
    words = on_store(place, features)
    words = words[: words.index("--alignment.teacher")]
    found, plain = trained(place, "reads", words), vae_runs["vae stored"]
    with monkeypatch.context() as patched:
        patched.setitem(OBJECTIVES, "denoising", Denoising)
        with pytest.raises(ConfigError, match="data.features_path: has no effect"):
            load_config([*MODEL, *words], 1)
    assert found["validation_metrics/loss"] == plain["validation_metrics/loss"]  # the term has no gradient
    assert all(one > other for one, other in zip(*(each["loss_metrics/global_avg_loss"] for each in (found, plain)), strict=True))
    monkeypatch.setattr(ReadsFeatures, "loss", None)
    assert load_run(place / "runs" / "reads", "none", None, torch.device("cpu")).objective.shape[1:] == (4, 4)


def test_a_resume_on_features_of_another_encoder_is_refused(place, encoders, features, capsys):
    copied = place / "copied features"
    shutil.copytree(features, copied)
    words = on_store(place, copied)
    trained(place, "anew", [*words, "--training.steps", "2"])
    trained(place, "anew", [*words, "--training.steps", "3"])
    shutil.rmtree(copied)
    transformers = pytest.importorskip("transformers")
    transformers.Dinov2Model(transformers.Dinov2Config.from_pretrained(encoders[1])).save_pretrained(place / "other teacher")
    extracted_features(place, (encoders[0], place / "other teacher"), "train", "copied features", "--grid", "4x4")
    capsys.readouterr()
    same = ["--job.dump_folder", str(place / "runs"), "--job.name", "anew"]
    assert train.main([*same, *MODEL, *words, "--training.steps", "4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was trained on features of another encoder; their store was made anew since (restore it, train anew, or" in line
    trained(place, "anew", [*words, "--training.steps", "4", "--job.allow_config_change", "true"])


def test_features_of_others_are_refused_in_one_line(place, encoders, features, capsys):
    other = extracted_features(place, encoders, "held_out", "features of others", "--grid", "4x4")
    one_view = extracted_features(place, encoders, "train", "features of one view", "--grid", "4x4", "--no-mirror")
    coarse = extracted_features(place, encoders, "train", "coarse features", "--grid", "2x2")
    words = on_store(place, features)
    for changes, message in [
        (["--data.features_path", str(other)], "features of other images than those of .*vae_train, num_source_images differs"),
        (["--data.features_path", str(one_view)], "has features of no mirror images"),
        (["--data.features_path", str(place / "vae_train")], ".*vae_train is a store of latents .*--features makes"),
        (["--data.path", str(features)], "--data.path: .* is a store of features .give one of latents, and"),
        (["--data.features_path", ""], "alignment.teacher: stored reads a store of features"),
        (["--alignment.teacher", "none"], "data.features_path: has no effect without alignment.teacher = stored"),
        (["--alignment.teacher", "transformers"], "set it to self, or to stored with data.features_path"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_config([*MODEL, *words, *changes], 1)
    capsys.readouterr()
    assert extract_latents.main(["show", str(features)]) == 0
    shown = capsys.readouterr().out
    assert "kept           features of each image" in shown and "shift" not in shown and len(shown.splitlines()) == 4
    assert train.main([*MODEL, *words, "--data.features_path", str(coarse), "--check-only"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("data.features_path: has features on 2 x 2, and block 1 of the network tokens on 4 x 4")
    data = ["--data.name", "image_folder", "--data.path", str(place / "train"), "--output", str(place / "none")]
    for words, message in [
        ([], "--autoencoder: give this or --features"), (["--features", "digits"], "--grid: --features needs it"),
        (["--features", "digits", "--grid", "4"], "is no height and width"),
    ]:  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            extract_latents.main([*data, *words])
        assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("words, message", [
    (["--autoencoder.statistics", "nowhere"], "autoencoder.statistics: .*nowhere"),
    (["--data.image_size", "8"], "has latents of .3, 16, 16., and the images are of .3, 8, 8."),
    (["--data.name", "latents"], "autoencoder.encode"),
    (["--autoencoder.name", "none"], "autoencoder.name: is none"),
])  # fmt: skip
def test_what_cannot_be_encoded_is_refused(place, words, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*MODEL, *images(place), *words], 1)


@pytest.mark.parametrize("store, keys", [("", []), ("train_latents", ["autoencoder.statistics"])])
def test_keys_of_encoding_for_a_latent_store_are_refused_by_one_line_each(place, store, keys):
    data = ["--data.name", "latents", "--data.path", str(place / "train_latents"), "--autoencoder.name", "identity"]
    given = ["--autoencoder.statistics", str(place / store)] if store else []
    with pytest.raises(ConfigError) as refusal:
        load_config([*MODEL, *data, "--autoencoder.encode", "true", *given], 1)
    wanted = [f"command line: --{key}: has no effect when data.name = latents" for key in ("autoencoder.encode", *keys)]
    found = refusal.value.problems
    assert len(found) == len(wanted) and all(map(str.startswith, found, wanted)), found


def test_a_missing_store_of_statistics_is_the_one_problem(place):
    with pytest.raises(ConfigError) as refusal:
        load_config([*MODEL, *images(place), "--autoencoder.statistics", ""], 1)
    (line,) = refusal.value.problems
    assert "autoencoder.statistics: is missing (give a latent store" in line
