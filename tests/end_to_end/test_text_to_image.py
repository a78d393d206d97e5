"""From photographs to pictures by prompt: a store with captions, a Flux trained on it, resumed, and sampled with texts."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.end_to_end.drawing import results_of, sample, start_sampling
from tests.extractions import write_photographs
from torchtitan.config.job import load_config
from torchtitan.fidelity.images import open_images
from torchtitan.run import run
from torchtitan.runs.record import read_run
from torchtitan_dit.api import load
from torchtitan_dit.commands.checkpoint import main as checkpoint_tool
from torchtitan_dit.commands.evaluate import main as evaluate
from torchtitan_dit.commands.extract_latents import main as extract_latents

ENCODERS = ["--text-encoder", "stub:32", "--pooled-encoder", "stub:24", "--text-length", "5"]  # as the debug flavor's


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    photographs = write_photographs(folder / "photographs", 24)
    words = [
        "--output", str(folder / "store"), "--autoencoder", "identity", "--num-workers", "0", "--data.name", "image_folder",
        "--data.path", str(photographs), "--data.image_size", "16", "--data.validation_fraction", "0",
        "--class-captions", "a photo of a {}", *ENCODERS,
    ]  # fmt: skip
    assert extract_latents(words) == 0
    return folder / "store"


def train(store, folder, *more):
    arguments = [
        "--model.name", "flux", "--model.flavor", "debug", "--model.patch_size", "4", "--model.label_dropout", "0.5",
        "--data.name", "latents", "--data.path", str(store), "--data.validation_fraction", "0.25",
        "--autoencoder.name", "identity", "--job.dump_folder", str(folder), "--job.name", "one", "--training.steps", "4",
        "--training.local_batch_size", "4", "--training.global_batch_size", "8", "--metrics.log_freq", "1",
        "--optimizer.lr", "0.01", "--checkpoint.interval", "2", "--validation.enable", "true", "--validation.interval", "2",
        "--validation.num_images", "6", "--sampling.interval", "2", "--sampling.num_steps", "2",
        "--sampling.images_per_class", "2", "--sampling.guidance_scale", "2", "--gns.enable", "true", "--gns.num_bins", "2",
        "--gns.log_interval", "2",
    ]  # fmt: skip
    assert run(load_config([*arguments, *more], 1)) == 0
    return [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder / "one", train(store, folder)


def numbers_of(points):
    kept = ("step", "loss", "grad_norm", "validation_metrics", "gns")
    return [{tag: value for tag, value in point.items() if tag.startswith(kept)} for point in points]


def test_training_on_captions_resumes_bit_for_bit(store, trained, tmp_path):
    run_folder, points = trained
    assert [point["step"] for point in points if "grad_norm" in point] == [1, 2, 3, 4]
    assert all(np.isfinite(point["loss"]) for point in points if "loss" in point)
    assert any(tag.startswith("gns") for point in points for tag in point)
    shutil.copytree(run_folder, tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "checkpoint" / "step-00000004")
    (tmp_path / "one" / "summary.json").unlink()
    assert numbers_of(train(store, tmp_path)) == numbers_of(points)
    name = "step-00000004.png"
    assert (tmp_path / "one" / "samples" / name).read_bytes() == (run_folder / "samples" / name).read_bytes()


def test_a_prompt_of_the_data_draws_what_its_number_draws(trained):
    model = load(trained[0], num_steps=2)
    prompts = ["a photo of a class0", "a photo of a class2"]
    assert torch.equal(model.sample([0, 2], output="latents"), model.sample(prompts=prompts, output="latents"))


def test_files_and_checkpoints_draw_what_the_run_draws_by_prompt(trained, tmp_path):
    run_folder, _ = trained
    words = ["export", str(run_folder), "--format", "safetensors", "--output", str(tmp_path / "one.safetensors")]
    assert checkpoint_tool(words) == 0
    shutil.copytree(run_folder / "checkpoint" / "step-00000004", tmp_path / "step-00000004")
    options = ["--prompt", "a new [text]", "--images-per-class", "2", "--num-steps", "2", "--guidance-scale", "2", "--files"]
    drawn = {}
    for source in (run_folder, tmp_path / "one.safetensors", tmp_path / "step-00000004"):
        ((code, said),) = sample(tmp_path / f"{source.name}-drawn", source, *options)
        assert code == 0, said
        files = sorted((tmp_path / f"{source.name}-drawn").glob("class-*.png"))
        drawn[source.name] = [np.asarray(Image.open(path)).tolist() for path in files]
    assert len(drawn["one"]) == 2 and drawn["one"] == drawn["one.safetensors"] == drawn["step-00000004"]


def pixels_of(folder):
    return open_images(folder).pixels(range(6))


def test_prompts_make_sets_that_are_their_own(trained, tmp_path):
    run_folder, _ = trained
    words = ["--count", "6", "--num-steps", "2", "--guidance-scale", "4"]
    ((code, said),) = sample(tmp_path / "set", run_folder, "--prompt", "a new, text", "a photo of a class1", *words)
    assert code == 0, said
    before = pixels_of(tmp_path / "set")
    lines = (tmp_path / "set" / "labels.csv").read_text().splitlines()
    assert lines[:3] == ["file,class,prompt", '000000.png,0,"a new, text"', "000001.png,1,a photo of a class1"]
    assert open_images(tmp_path / "set").classes().tolist() == [0, 1] * 3
    prompts = ["--prompt", "a new, text", "a photo of a class1"]
    two = results_of(start_sampling(tmp_path / "two", run_folder, *prompts, *words, ranks=2))
    assert [code for code, _ in two] == [0, 0], two
    assert np.array_equal(pixels_of(tmp_path / "two"), before)
    ((code, said),) = sample(tmp_path / "set", run_folder, "--prompt", "another text", "a photo of a class1", *words)
    assert code == 2 and "prompts" in said and said.count("\n") == 1, said
    ((code, said),) = sample(tmp_path / "long", run_folder, "--prompt", "one two three four five six", "--num-steps", "1")
    assert code == 0 and "--prompt: 1 text longer than 5 tokens is cut" in said
    ((code, said),) = sample(tmp_path / "other", run_folder, "--prompt", "another text", "a photo of a class1", *words)
    other = pixels_of(tmp_path / "other")
    assert code == 0 and np.array_equal(other[1::2], before[1::2]) and not np.array_equal(other[::2], before[::2])


def test_prompts_are_drawn_and_measured(trained, store, tmp_path, capsys):
    words = [str(trained[0]), "--extractor", "cifar10", "--allow-small", "--count", "4", "--num-steps", "1", "--prompt", "a text"]
    words += ["--reference", str(store.parent / "photographs"), "--output", str(tmp_path / "found.json")]
    assert evaluate([*words, "--metrics", "accuracy"]) == 2
    refused = "accuracy: cifar10 knows 10 classes, and the samples are of none (leave it out)\n"
    assert capsys.readouterr().err == refused
    assert evaluate([*words, "--metrics", "kid"]) == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "found.json").rename(tmp_path / "run" / "evaluation.json")
    (name,) = read_run(tmp_path / "run").evaluated
    assert name == 'kid (cifar10, 4 samples of "a text" by euler in 1 step, guidance 2 against photographs)'
    drawn = next(path for path in (trained[0] / "samples").rglob("labels.csv"))
    assert evaluate([str(drawn.parent), "--extractor", "cifar10", "--metrics", "accuracy", "--allow-small"]) == 2
    assert capsys.readouterr().err.endswith(refused)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompt", "a", "--output", "g.png"], "--output: g.png names a picture (give a folder"),
        (["--prompt", "a", "--classes", "1"], "--classes: has no effect with --prompt"),
        (["--prompt", "new", "--pooled-encoder", "stub:32"], "--pooled-encoder: stub:32 is another encoder than that of"),
    ],
)
def test_prompts_that_cannot_be_encoded_are_refused_in_one_line(trained, tmp_path, words, message):
    ((code, said),) = sample(tmp_path / "out", trained[0], *words)
    assert code == 2 and message in said and said.count("\n") == 1, said
    assert not (tmp_path / "out").exists()
