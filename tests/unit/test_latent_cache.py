"""Cache of a run's captioned images: filled before training, resumed to the same bytes, renewed by what changes, refused."""

import importlib.util
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import torchtitan.extraction.cache_filling as cache_filling
from tests.configurations import problems
from tests.extractions import content, die_at_rename
from tests.forked import ForkedProcess
from tests.launcher import free_port
from torchtitan.conditions import TEXT
from torchtitan.config.job import load_config
from torchtitan.config.latent_cache import cache_folder, trained_info
from torchtitan.data.captioned_folder import _read_folder
from torchtitan.extras import install
from torchtitan.files.weight_files import named_weights
from torchtitan.latents.bucketed import open_stores
from torchtitan.models import MODELS
from torchtitan.run import run
from torchtitan.runs.record import read_run
from torchtitan.texts.stub import StubEncoder
from torchtitan.weights.network import network_on_meta
from torchtitan_dit.commands.checkpoint import main as checkpoint_tool
from torchtitan_dit.commands.extract_latents import main as extract_latents
from torchtitan_dit.commands.train import main as train

SIZES = [(140, 130), (70, 64), (130, 200), (128, 128), (64, 96)]


def write_pictures(folder, enlarged=1):
    """Pictures of noise with captions, of which the first lacks the trigger; enlarged: factor of their sides."""
    folder.mkdir()
    random = np.random.default_rng(1)
    for number, (width, height) in enumerate(SIZES):
        pixels = random.integers(0, 256, (height * enlarged, width * enlarged, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a [trigger] thing, number {number}" if number else "a thing", "utf-8")
    return folder


@pytest.fixture
def pictures(tmp_path):
    return write_pictures(tmp_path / "pictures")


def words(pictures, dump_folder, *more):
    return [
        "--model.name", "flux", "--model.flavor", "debug", "--model.patch_size", "4", "--data.name", "captioned_folder",
        "--data.path", str(pictures), "--data.trigger_word", "sks", "--data.resolutions", "[64, 128]",
        "--data.text_encoder", "stub:32", "--data.pooled_encoder", "stub:24", "--data.text_length", "6",
        "--data.prompts", '["[trigger] on a beach", "a red house"]', "--cache.enable", "true", "--autoencoder.name", "identity",
        "--job.dump_folder", str(dump_folder), "--training.local_batch_size", "1", "--training.steps", "2",
        "--sampling.interval", "2", "--sampling.num_steps", "1", "--sampling.images_per_class", "1", *more,
    ]  # fmt: skip


def fill(given):
    config = load_config(given, 1)
    cache_filling.fill_cache(config)
    return cache_folder(config)


def test_a_run_fills_its_cache_and_trains_on_the_latents(pictures, tmp_path):
    given = words(pictures, tmp_path / "out")
    config = load_config(given, 1)
    assert config.data.name == "captioned_folder" and config.cache.enable
    folder = cache_folder(config)
    assert run(config, lambda: load_config(given, 1)) == 0
    resolved = load_config(["--job.config_file", str(tmp_path / "out" / "run" / "config.toml")], 1)
    assert resolved.data.name == "latents" and resolved.data.path == str(folder / "train") and not resolved.cache.enable
    assert load_config(given, 1).data == resolved.data  # the same command finds it
    assert read_run(tmp_path / "out" / "run").compared["data.path"] == f"{folder.name.removeprefix('pictures')}/train"
    stores = open_stores(folder / "train")
    # Resolution 64: four squares, and the 64 x 96 picture in the square bucket. Resolution 128: pictures of 128 x 128 and more.
    counts = {store.index.shape[1:]: len(store) for store in stores}
    assert sum(count for shape, count in counts.items() if shape == (64, 64)) == 5
    assert sum(counts.values()) == 8 and all(side % 64 == 0 for shape in counts for side in shape)
    captions = stores[0].captions
    assert [captions.text(number) for number in captions.plan.prompts] == ["sks on a beach", "a red house"]
    assert captions.text(0) == ""
    texts = {store.captions.text(number) for store in stores for number in range(len(store.captions))}
    assert texts == {"", "sks a thing", "sks on a beach", "a red house", *(f"a sks thing, number {n}" for n in range(1, 5))}
    number = captions.number_of("sks on a beach")
    expected = StubEncoder(32).encode(["sks on a beach"], 6).tokens[0].to(torch.bfloat16)
    assert torch.equal(captions.read([number])[TEXT][0], expected)


def test_a_filled_cache_opens_no_encoder_again(pictures, tmp_path, monkeypatch):
    given = words(pictures, tmp_path / "out")
    folder = fill(given)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(cache_filling, "open_encoders", lambda *arguments: pytest.fail("opened again"))
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def train_rank(given, kill_at):
    die_at_rename(kill_at)
    return train(given)


def ranks(given, count, kill_at=-1):
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    started = [
        ForkedProcess(train_rank, (given, -1 if rank else kill_at), shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    if kill_at >= 0:
        started[0].wait(120)
        for process in started[1:]:
            process.kill()
    return [process.wait(120) for process in started]


def test_captions_that_lose_their_ends_are_said_once_for_all_sizes(pictures, tmp_path, caplog):
    (pictures / "0.txt").write_text("a thing of more words than six")
    fill(words(pictures, tmp_path / "out"))
    (said,) = (message for message in caplog.messages if "longer" in message)
    assert said == "1 caption longer than data.text_length = 6 tokens, cut there: 'sks a thing of more words than six'"


def test_killed_filling_resumes_on_other_numbers_of_ranks_to_the_same_bytes(pictures, tmp_path):
    straight = content(fill(words(pictures, tmp_path / "straight")) / "train")
    given = words(pictures, tmp_path / "killed")
    folder = cache_folder(load_config(given, 1)) / "train"
    for count, kill_at in ((1, 2), (2, 4)):
        assert ranks(given, count, kill_at)[0] == -signal.SIGKILL
        assert not (folder / "buckets.json").exists()
    assert ranks([*given, "--training.steps", "1"], 2) == [0, 0]
    assert content(folder) == straight


def test_a_signal_while_filling_asks_for_the_same_command_again(pictures, tmp_path, monkeypatch):
    given, write_store = words(pictures, tmp_path / "out"), cache_filling.write_store
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(tmp_path / "status"))

    def interrupted(*arguments):
        written = write_store(*arguments)
        os.kill(os.getpid(), signal.SIGUSR1)
        return written

    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(cache_filling, "write_store", interrupted)
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 128 + signal.SIGUSR1
    assert '"reason": "interrupted by SIGUSR1 while the cache was filled"' in (tmp_path / "status").read_text()
    assert signal.getsignal(signal.SIGUSR1) == before
    monkeypatch.setattr(cache_filling, "write_store", write_store)
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 0


def test_what_decides_the_latents_names_the_cache(pictures, tmp_path):
    def name(path=pictures, *more):
        _read_folder.cache_clear()
        return cache_folder(load_config(words(path, tmp_path / "out", *more), 1)).name

    first = name()
    (tmp_path / "elsewhere").mkdir()
    assert name(shutil.copytree(pictures, tmp_path / "elsewhere" / "pictures")) == first  # wherever it lies
    assert name(pictures, "--training.steps", "9", "--data.num_workers", "1") == first
    others = {name(pictures, key, value) for key, value in {
        "--data.resolutions": "[64]", "--data.trigger_word": "xyz",
        "--data.text_length": "7", "--data.null_caption": "[trigger]", "--data.prompts": '["a red house"]',
        "--data.horizontal_flip": "true",
    }.items()}  # fmt: skip
    (pictures / "0.txt").write_text("another thing")
    others.add(name())
    image = np.asarray(Image.open(pictures / "0.png")).copy()
    image[0, 0, 0] ^= 1
    Image.fromarray(image).save(pictures / "0.png")
    others.add(name())
    assert len(others | {first}) == 9


def test_a_run_is_not_resumed_on_another_cache(pictures, tmp_path, capsys):
    given = words(pictures, tmp_path / "out")
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 0
    longer = [*given, "--data.null_caption", "[trigger]", "--training.steps", "3", "--job.allow_config_change", "false"]
    capsys.readouterr()
    assert run(load_config(longer, 1), lambda: load_config(longer, 1)) == 2
    changed = "  data: the pictures, captions or prompts of the cache have changed, or how they are encoded"
    said, stores = capsys.readouterr().err.splitlines(), list((tmp_path / "out" / "latents").iterdir())
    assert changed in said and said[-1] == "  training.steps: 2 -> 3" and len(said) == 3
    assert len(stores) == 1  # nothing was encoded
    assert train([*longer, "--check-only"]) == 2 and changed in capsys.readouterr().err.splitlines()
    store = Path(read_run(tmp_path / "out" / "run").settings["data.path"]).parent
    assert extract_latents(["show", str(store)]) == 0 and extract_latents(["verify", str(store)]) == 0
    assert f"{store}/train: good" in capsys.readouterr().out
    shutil.copytree(pictures, tmp_path / "renamed")  # the same pictures
    moved = [str(tmp_path / "renamed") if word == str(pictures) else word for word in given]
    moved += ["--training.steps", "3", "--job.allow_config_change", "false"]
    assert run(load_config(moved, 1), lambda: load_config(moved, 1)) == 0
    (pictures / "1.txt").write_text("a corrected caption")
    _read_folder.cache_clear()
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 2
    assert changed in capsys.readouterr().err.splitlines()
    given += ["--training.steps", "4", "--job.allow_config_change", "false"]
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 2
    assert changed in capsys.readouterr().err.splitlines()


def test_unusable_pictures_are_refused_in_a_line(pictures, tmp_path):
    (pictures / "2.txt").unlink()
    (line,) = problems(arguments=words(pictures, tmp_path / "out"))
    assert "data.path: " in line and "an image without a caption (add 2.txt" in line


def test_all_that_a_cache_lacks_is_said_at_once(pictures, tmp_path, monkeypatch):
    missing, found = ("transformers", "diffusers"), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    given = words(pictures, tmp_path / "out", "--autoencoder.name", "diffusers", "--autoencoder.path", str(tmp_path / "none"))
    given += ["--data.text_encoder", str(tmp_path / "t5"), "--checkpoint.initial_weights", str(tmp_path / "x.safetensors")]
    encoder, packages, weights = problems(arguments=given)
    assert "none: no such folder" in encoder and "x.safetensors: no such file" in weights
    assert f"lacks extras: text, diffusers ({install('text', 'diffusers')})" in packages


def test_a_picture_that_ends_early_is_refused_before_training(pictures, tmp_path, capsys):
    path = pictures / "2.png"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    given = words(pictures, tmp_path / "out")
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("data.path: ") and "2.png" in said and "mend or remove it" in said
    assert not (tmp_path / "out" / "run").exists()


def weights_of(given):
    config = load_config(given, 1)
    model = network_on_meta(config, trained_info(config))
    return model, {name: torch.randn(tensor.shape) for name, tensor in named_weights(model).items()}


def published_of(given, layout):
    model, weights = weights_of(given)
    published, _ = MODELS["flux"].layouts[layout].export_weights(weights, model)
    return {name: published[name].contiguous() for name in published}


PEFT = "base_model.model.transformer_blocks.0.attn.to_q.lora_{}.weight"
SD = "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"
STARTS = {  # key and value of a run that cannot start -> the file's tensors, and what is said
    "missing": ("checkpoint.initial_weights", None, "(published weights: .venv/bin/python scripts/checkpoint.py import)"),
    "bfl": ("checkpoint.initial_weights", lambda given: published_of(given, "bfl"), "python scripts/checkpoint.py import"),
    "folder": ("checkpoint.initial_weights", "folder", "is a folder (import it: .venv/bin/python scripts/checkpoint.py import"),
    "dev": ("checkpoint.initial_weights", lambda given: weights_of([*given, "--model.guidance_embedding", "true"])[1],
            "4 tensors are not of this model: guidance_embed"),
    "adapter": ("checkpoint.initial_weights", lambda given: {PEFT.format("A"): torch.ones(2, 64)},
                "is an adapter (give it as lora.initial_adapter"),
    "peft": ("lora.initial_adapter", lambda given: {PEFT.format("A"): torch.ones(2, 64), PEFT.format("B"): torch.ones(64, 2)},
             "adapter_config.json"),
    "foreign": ("lora.initial_adapter", lambda given: dict.fromkeys([SD], torch.ones(2, 64)), "lora_unet_down_blocks_0"),
}  # fmt: skip


@pytest.mark.parametrize("name", STARTS)
def test_a_run_that_cannot_start_is_refused_before_anything_is_encoded(name, pictures, tmp_path, capsys, monkeypatch):
    key, value, said = STARTS[name]
    given = [*words(pictures, tmp_path / "out"), "--lora.enable", "true"]
    place = tmp_path / ("x" if value == "folder" else "x.safetensors")
    if value == "folder":
        (place / "transformer").mkdir(parents=True)
    elif callable(value):
        save_file(value(given), place)
    given += [f"--{key}", str(place)]
    monkeypatch.setattr(cache_filling, "_fill", lambda *arguments: pytest.fail("encoded"))
    for refused in (lambda: train([*given, "--check-only"]), lambda: run(load_config(given, 1), lambda: load_config(given, 1))):
        assert refused() == 2
        error = capsys.readouterr().err
        assert said in error, error
        assert len(error.splitlines()) == 1 and not (tmp_path / "out" / "run").exists(), error


def test_texts_of_another_width_are_refused_before_they_are_encoded(pictures, tmp_path, capsys, monkeypatch):
    given = words(pictures, tmp_path / "out", "--model.text_dim", "48")
    monkeypatch.setattr(cache_filling, "_fill", lambda *arguments: pytest.fail("encoded"))
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 2
    assert capsys.readouterr().err == (
        "model.text_dim: 48, and the data's text has width 32 (set it to 32, or, as given weights need, encode by a "
        "data.text_encoder of width 48)\n"
    )


def test_a_finished_run_needs_its_initial_weights_no_more(pictures, tmp_path, capsys):
    base = tmp_path / "x.safetensors"
    given = [*words(pictures, tmp_path / "out"), "--lora.enable", "true", "--checkpoint.initial_weights", str(base)]
    # Their normalization decides the cache's name, so without them the cache is another.
    save_file(weights_of(given)[1], base, {"config": "[data]\nshift = [0.5, 0.25, 0.0]\nscale = [2.0, 3.0, 4.0]"})
    assert train([*given, "--check-only"]) == 0
    assert run(load_config(given, 1), lambda: load_config(given, 1)) == 0
    base.unlink()
    assert train([*given, "--check-only"]) == 0 and run(load_config(given, 1), lambda: load_config(given, 1)) == 0
    longer = [*given, "--training.steps", "9"]
    for work in (lambda: train([*longer, "--check-only"]), lambda: run(load_config(longer, 1), lambda: load_config(longer, 1))):
        capsys.readouterr()
        assert work() == 2
        assert f"checkpoint.initial_weights: {base}: no such file" in (said := capsys.readouterr().err) and "cache" not in said
    for change in ("--optimizer.lr", "--lora.alpha"):  # of another run: the weights that lack do not explain it
        config = load_config([*given, change, "0.5"], 1)
        assert run(config, lambda: None) == 2  # before the cache would be filled
        assert f"  {change[2:]}: " in (said := capsys.readouterr().err) and "cache" not in said


def test_a_frozen_network_gets_latents_as_it_was_trained_on_them(pictures, tmp_path):
    base = tmp_path / "x.safetensors"
    given = [*words(pictures, tmp_path / "out"), "--lora.enable", "true", "--checkpoint.initial_weights", str(base)]
    _, weights = weights_of(given)
    save_file(weights, base)
    measured = cache_folder(load_config(given, 1))
    save_file(weights, base, {"config": "[data]\nshift = [0.5, 0.25, 0.0]\nscale = [2.0, 3.0, 4.0]"})
    folder = fill(given)
    assert folder != measured
    assert fill([*given, "--lora.enable", "false"]) == measured  # a network that trains on follows its data
    for store in open_stores(folder / "train"):
        found = store.index.normalization
        assert (found.shift, found.scale, found.source) == ([0.5, 0.25, 0.0], [2.0, 3.0, 4.0], "given")
    assert {store.index.normalization.source for store in open_stores(measured / "train")} == {"measured"}


def test_published_weights_are_imported_for_a_configuration_whose_cache_is_not_filled(pictures, tmp_path):
    model, weights = weights_of(words(pictures, tmp_path / "out"))
    published, _ = MODELS["flux"].layouts["bfl"].export_weights(weights, model)
    save_file({name: published[name].contiguous() for name in published}, tmp_path / "bfl.safetensors")
    (tmp_path / "mine.toml").write_text(
        "[model]\nname = 'flux'\nflavor = 'debug'\npatch_size = 4\n[data]\nname = 'captioned_folder'\nresolutions = [64, 128]\n"
        "text_encoder = 'stub:32'\npooled_encoder = 'stub:24'\n[cache]\nenable = true\n[autoencoder]\nname = 'identity'\n"
    )
    given = ["import", str(tmp_path / "bfl.safetensors"), "--format", "bfl", "--config", str(tmp_path / "mine.toml")]
    given += ["--output", str(tmp_path / "own.safetensors"), "--data.path", str(pictures), "--data.trigger_word", "sks"]
    assert checkpoint_tool(given) == 0
    found = load_file(tmp_path / "own.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    assert not (tmp_path / "out").exists()
