"""Runs on latents whose grids are decoded images: what they show, and that training does not know of it."""

import json
import shutil
import tomllib

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.decoding import CLASS_NAMES, decoded_by_hand, write_encoded_store
from tests.end_to_end.drawing import sample
from tests.end_to_end.runs import checkpoint_tensors
from tests.faults.forked import ForkedRun
from tests.forked import run_script
from torchtitan.fidelity.images import open_images
from torchtitan.pictures.grids import class_labels, image_grid
from torchtitan_dit.api import WeightsError
from torchtitan_dit.api import load as open_weights

CONFIG = """
[model]
flavor = "debug"
[data]
name = "latents"
path = "{folder}/store"
[training]
steps = 6
local_batch_size = 4
global_batch_size = 8
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
interval = 3
[sampling]
interval = 3
num_steps = 3
images_per_class = 3
[validation]
enable = true
interval = 2
num_images = 3
"""


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoded")
    index, matrix = write_encoded_store(folder / "store", folder / "tokenizer")
    (folder / "latents.toml").write_text(CONFIG.format(folder=folder))
    return folder, index, matrix


@pytest.fixture(scope="module")
def runs(encoded):
    folder = encoded[0]
    decode = ["--autoencoder.name", "cosmos", "--autoencoder.path", str(folder / "tokenizer")]
    found = {
        "decoded": ForkedRun(folder / "latents.toml", "decoded", *decode, ranks=2, replicas=2),
        "plain": ForkedRun(folder / "latents.toml", "plain", ranks=2, replicas=2),
    }
    return {name: (run, run.finish()[0]) for name, run in found.items()}


def differences(one, other) -> np.ndarray:
    one, other = (np.asarray(Image.open(path).convert("RGB")).astype(int) for path in (one, other))
    assert one.shape == other.shape
    return np.abs(one - other)


def test_training_is_the_same_bit_for_bit_with_and_without_decoding(runs):
    (decoded, _), (plain, _) = runs["decoded"], runs["plain"]
    timed = ("clock", "time", "throughput", "memory", "tflops", "mfu")
    learned = [
        [{tag: value for tag, value in point.items() if not tag.startswith(timed)} for point in run.points()]
        for run in (decoded, plain)
    ]
    assert learned[0] == learned[1] and learned[0][-1]["step"] == 6
    for step in (3, 6):
        checkpoints = [run.folder / "checkpoint" / f"step-{step:08d}" for run in (decoded, plain)]
        tensors = [checkpoint_tensors(checkpoint) for checkpoint in checkpoints]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
        states = [json.loads((checkpoint / "state.json").read_text()) for checkpoint in checkpoints]
        for state in states:  # what the runs are called, that one of them decodes, and points with their times
            del state["config"]["job"], state["config"]["autoencoder"], state["reports"]
        assert states[0] == states[1]


def test_grids_are_decoded_images_and_a_run_without_says_how_to_get_them(runs, encoded):
    hint = "for images give --autoencoder.name and --autoencoder.path"
    assert hint in runs["plain"][1] and hint not in runs["decoded"][1]
    grids = {}
    for name, (run, _) in runs.items():
        names = {path.name for path in (run.folder / "samples").iterdir()}
        assert ("held-out.png" in names) == (name == "decoded")
        grids[name] = run.folder / "samples" / "step-00000006.png"
    assert Image.open(grids["decoded"]).size == Image.open(grids["plain"]).size  # 32 pixels and 4 are both shown as 64
    held_out = Image.open(runs["decoded"][0].folder / "samples" / "held-out.png")
    assert held_out.width > 3 * 64
    folder, index, matrix = encoded
    (code, output), = sample(folder / "drawn", runs["decoded"][0].folder, "--images-per-class", "3", "--latents")
    assert code == 0, output
    (file,) = (folder / "drawn").glob("latents-*.safetensors")
    content = load_file(file)
    assert content["latents"].shape == (9, 16, 4, 4)
    names = class_labels([0, 1, 2], CLASS_NAMES)
    assert names == ["tench", "goldfish", "great white shark"]
    image_grid(
        decoded_by_hand(content["latents"], index, matrix), 3, 3, names, "step 6, ema, guidance 2"
    ).save(folder / "by-hand.png")  # fmt: skip
    assert differences(folder / "by-hand.png", folder / "drawn" / "grid-step-6-ema-seed-0.png").max() == 0
    # The run's own grid has the same images under another title; it was drawn by two ranks.
    drawn, trained = (np.asarray(Image.open(path)).astype(int) for path in (folder / "by-hand.png", grids["decoded"]))
    rows = 3 * 64 + 2 * 4
    width = min(drawn.shape[1], trained.shape[1])
    assert np.abs(drawn[-12 - rows : -12, :width] - trained[-12 - rows : -12, :width]).max() <= 1


def test_a_lost_tokenizer_is_said_once_and_may_have_moved(runs, encoded):
    folder, run = encoded[0], runs["decoded"][0].folder
    shutil.copytree(folder, folder / "moved", ignore=shutil.ignore_patterns("outputs", "store", "moved"))
    tokenizer, away = folder / "tokenizer", folder / "away"
    tokenizer.rename(away)
    try:
        for code, output in sample(folder / "lost", run, ranks=2):
            assert code == 2
            assert len(output.splitlines()) <= 1  # of the first rank
            assert not output or "no such folder" in output and "--autoencoder-path" in output
        moved = ["--autoencoder-path", str(folder / "moved" / "tokenizer")]
        (code, output), = sample(folder / "elsewhere", run, *moved, "--images-per-class", "3")
        assert code == 0 and list((folder / "elsewhere").glob("grid-*.png")), output
        (code, output), = sample(folder / "raw", run, "--autoencoder", "none", "--classes", "0")
        assert code == 0 and "--autoencoder NAME" not in output
    finally:
        away.rename(tokenizer)


def test_a_file_of_weights_opens_no_autoencoder_that_the_user_does_not_name(runs, encoded, tmp_path):
    """Its header may be anybody's, and TorchScript of a path in it may write files."""
    run, weights = runs["decoded"][0].folder, tmp_path / "weights.safetensors"
    given = ("--classes", "0", "--num-steps", "2", "--images-per-class", "8")  # wider than the titles
    exported = run_script("scripts/checkpoint.py", "export", str(run), "--format", "safetensors", "--output", str(weights))
    assert exported.returncode == 0, exported.stderr
    with safe_open(weights, "pt") as file:
        header, tensors = file.metadata(), load_file(weights)
    assert str(encoded[0]) not in header["config"]
    forged, autoencoder = tmp_path / "forged.safetensors", {"name": "cosmos", "path": str(encoded[0] / "tokenizer")}
    tables = tomllib.loads(header["config"]) | {"autoencoder": autoencoder}
    save_file(tensors, forged, header | {"config": tomli_w.dumps(tables)})
    for path in (weights, forged):
        (code, said), = sample(tmp_path / "refused", path, *given)
        assert code == 2 and len(said.splitlines()) == 1 and not (tmp_path / "refused").exists()
        assert said.startswith(f"{path}: ") and "--autoencoder-path PATH, or the configuration" in said
        with pytest.raises(WeightsError, match="or the configuration after"):
            open_weights(path)
    tokenizer = str(encoded[0] / "tokenizer")
    for name, words in {"path": ("--autoencoder-path", tokenizer), "config": ("--config", str(run / "config.toml"))}.items():
        (code, said), = sample(tmp_path / name, forged, *given, *words)
        assert code == 0, said
    (code, said), = sample(tmp_path / "run", run, *given)
    pictures = [next((tmp_path / name).glob("grid-*.png")) for name in ("path", "config", "run")]
    assert code == 0 and not any(differences(one, pictures[2])[-70:].any() for one in pictures)
    open_weights(forged, autoencoder_path=tokenizer)


def test_a_set_of_latents_is_decoded_by_the_rank_that_drew_it(runs, encoded):
    folder, run = encoded[0], runs["decoded"][0].folder
    options = ("--count", "5", "--batch-size", "2")
    for ranks in (1, 2):
        results = sample(folder / f"set-{ranks}", run, *options, ranks=ranks)
        assert [code for code, _ in results] == [0] * ranks, results
    one, two = (open_images(folder / f"set-{ranks}").pixels(range(5)) for ranks in (1, 2))
    assert one.shape == (5, 32, 32, 3) and np.array_equal(one, two)
    assert len(np.unique(one[0])) > 10
    (code, said), = sample(folder / "refused", runs["plain"][0].folder, *options)
    assert code == 2 and "draws latents or images of 16 channels, a set is of pictures" in said
    assert not (folder / "refused").exists()
