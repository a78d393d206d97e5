"""Published latents of three formats, and the command that turns them into a store."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.latent_stores import plan_of, write_store
from torchtitan.data.latents import LatentsConfig
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.published_latents import NpyFolders, open_source
from torchtitan.latents import LatentStore
from torchtitan.latents.index import PARTIAL_FOLDER
from torchtitan_dit.commands.extract_latents import main

SHAPE = (4, 8, 8)
COUNT = 20


def floats(seed, count=COUNT):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def int8_file(tmp_path):
    latents = torch.randint(-128, 128, (COUNT, *SHAPE), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    labels = (torch.arange(COUNT) * 49).to(torch.int16)
    safetensors.torch.save_file({"latents": latents, "labels": labels}, tmp_path / "imagenet_ci8x8.safetensors")
    return tmp_path / "imagenet_ci8x8.safetensors"


@pytest.fixture
def npy_folders(tmp_path):
    for name in ("imagenet256_features", "imagenet256_labels"):
        (tmp_path / "npy" / name).mkdir(parents=True)
    for number in range(COUNT):
        latent = (floats(0)[number : number + 1] * 0.18215).numpy()
        np.save(tmp_path / "npy" / "imagenet256_features" / f"{number}.npy", latent)
        np.save(tmp_path / "npy" / "imagenet256_labels" / f"{number}.npy", np.array([number]))
    return tmp_path / "npy"


@pytest.fixture
def mirrored_shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, rows in enumerate((slice(0, 9), slice(9, 10), slice(10, 20))):
        tensors = {"latents": floats(0)[rows], "latents_flip": floats(1)[rows], "labels": torch.arange(COUNT)[rows]}
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, folder / f"latents_rank00_shard{number:03d}.safetensors")
    return folder


def convert(source, store, *options):
    return main(["convert", str(source), "--output", str(store), "--images_per_shard", "8", *options])


def read_all(folder, view=0):
    store = LatentStore(folder)
    return store.read(np.arange(len(store)), np.full(len(store), view))


def test_int8_file_becomes_a_store_of_the_same_integers(int8_file, tmp_path, capsys):
    assert open_source(int8_file).origin["format"] == "int8_file"
    assert convert(int8_file, tmp_path / "store") == 0
    assert "20 images" in (said := capsys.readouterr().out) and "int8 in steps of 0.0627451" in said
    wanted = safetensors.torch.load_file(int8_file)
    store = LatentStore(tmp_path / "store")
    assert np.array_equal(store.read_stored(np.arange(COUNT))[0][:, 0], wanted["latents"].numpy())
    values, labels = read_all(tmp_path / "store")
    torch.testing.assert_close(values[:, 0], wanted["latents"].float() * 16 / 255)
    assert labels.tolist() == wanted["labels"].tolist()
    assert store.index.autoencoder == {"name": "unknown"} and not store.index.mirrored and not store.index.posterior
    assert main(["verify", str(tmp_path / "store")]) == 0


def test_npy_folders_become_raw_latents_in_numerical_order(npy_folders, tmp_path, caplog):
    assert isinstance(open_source(npy_folders), NpyFolders) and not caplog.messages
    assert convert(npy_folders, tmp_path / "store", "--normalization", "source") == 0
    values, labels = read_all(tmp_path / "store")
    assert labels.tolist() == list(range(COUNT))  # 2.npy comes before 10.npy
    torch.testing.assert_close(values[:, 0], floats(0), atol=2.0**-11 * 5, rtol=0)
    normalization = LatentStore(tmp_path / "store").index.normalization
    assert normalization.shift == [0.0] * 4 and normalization.scale == [0.18215] * 4 and normalization.source == "given"
    for number in (2, 5):
        (npy_folders / "imagenet256_features" / f"{number}.npy").unlink()
    assert open_source(npy_folders).num_images == COUNT - 2
    assert f": 2 of the files 0.npy to {COUNT - 1}.npy are missing" in caplog.text


def test_mirrored_shards_keep_both_images_across_files_of_unequal_length(mirrored_shards, tmp_path):
    assert open_source(mirrored_shards).origin["format"] == "mirrored_shards"
    assert convert(mirrored_shards, tmp_path / "store", "--num_classes", "20") == 0
    for view in (0, 1):
        values, labels = read_all(tmp_path / "store", view)
        assert torch.equal(values[:, 0], floats(view).half().float())
        assert labels.tolist() == list(range(COUNT))
    index = LatentStore(tmp_path / "store").index
    assert index.normalization.source == "measured" and index.num_classes == 20


def test_half_converted_source_goes_on_and_another_source_is_refused(mirrored_shards, int8_file, tmp_path, capsys):
    assert convert(mirrored_shards, tmp_path / "straight") == 0
    last = sorted(mirrored_shards.iterdir())[-1]
    good = last.read_bytes()
    tensors = safetensors.torch.load(good)
    tensors["labels"][-1] = 1000
    last.write_bytes(safetensors.torch.save(tensors))
    assert convert(mirrored_shards, tmp_path / "store") == 2
    assert "image 19: label 1000 is not in 0..999 (with another --num-classes remove " in capsys.readouterr().err
    assert (tmp_path / "store" / PARTIAL_FOLDER).is_dir()
    assert main(["show", str(tmp_path / "store")]) == 2
    assert "not finished" in capsys.readouterr().err
    first = tmp_path / "store" / "shard-00000.safetensors"
    before = first.stat().st_mtime_ns
    assert convert(int8_file, tmp_path / "store") == 2
    assert "was begun with" in capsys.readouterr().err
    last.write_bytes(good)
    assert convert(mirrored_shards, tmp_path / "store") == 0
    assert first.stat().st_mtime_ns == before
    names = sorted(path.name for path in (tmp_path / "straight").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "store").iterdir())
    for name in names:
        assert (tmp_path / "store" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_class_names_are_kept_and_must_be_as_many_as_classes(int8_file, tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("".join(f"class {number}\n" for number in range(1000)))
    assert convert(int8_file, tmp_path / "store", "--class_names", str(names)) == 0
    assert LatentStore(tmp_path / "store").index.class_names[999] == "class 999"
    capsys.readouterr()
    assert convert(int8_file, tmp_path / "other", "--class_names", str(names), "--num_classes", "10") == 2
    assert capsys.readouterr().err == "1000 class names for 10 classes\n"
    assert convert(int8_file, tmp_path / "unlabelled", "--num_classes", "0") == 0
    assert read_all(tmp_path / "unlabelled")[1].tolist() == [0] * COUNT


def test_another_source_that_looks_alike_from_outside_is_refused(npy_folders, tmp_path, capsys):
    last = sorted((npy_folders / "imagenet256_features").iterdir(), key=lambda path: int(path.stem))[-1]
    label = npy_folders / "imagenet256_labels" / last.name
    good = label.read_bytes()
    np.save(label, np.array([1000]))
    assert convert(npy_folders, tmp_path / "store", "--images_per_shard", "2") == 2
    label.write_bytes(good)
    np.save(last, np.load(last) + 1)
    capsys.readouterr()
    assert convert(npy_folders, tmp_path / "store", "--images_per_shard", "2") == 2
    assert "was begun with origin" in capsys.readouterr().err


def test_verify_names_each_damaged_shard_and_exits_with_1(tmp_path, capsys):
    write_store(tmp_path / "store", plan_of())
    for number in (0, 2):
        path = tmp_path / "store" / f"shard-0000{number}.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert main(["verify", str(tmp_path / "store")]) == 1
    lines = capsys.readouterr().out.splitlines()
    named = [line.split("/")[-1].split(":")[0] for line in lines]
    assert named == ["shard-00000.safetensors", "shard-00002.safetensors"]


def write_tensors(path, **tensors):
    path.parent.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, path)
    return path


def test_sources_that_are_none(tmp_path, capsys):
    labels = torch.zeros(3, dtype=torch.int16)
    latents = torch.zeros(3, *SHAPE, dtype=torch.int8)
    cases = {
        "no such file or folder": tmp_path / "absent",
        "has no tensor 'latents'": write_tensors(tmp_path / "a.safetensors", indices=latents, labels=labels),
        "'latents' is torch.float32 [3, 4, 8, 8], not int8": write_tensors(
            tmp_path / "b.safetensors", latents=latents.float(), labels=labels
        ),
        "'labels' is torch.int16 [2], not 3 integers": write_tensors(
            tmp_path / "c.safetensors", latents=latents, labels=labels[:2].clone()
        ),
        "has no tensor 'latents_flip'": write_tensors(
            tmp_path / "d" / "x.safetensors", latents=latents.float(), labels=labels
        ).parent,
        "'latents_flip' is torch.float32 [2, 4, 8, 8], not as 'latents'": write_tensors(
            tmp_path / "e" / "x.safetensors", latents=latents.float(), latents_flip=floats(0, 2), labels=labels
        ).parent,
        "'latents_flip' is torch.int8 [3, 4, 8, 8], not as 'latents'": write_tensors(
            tmp_path / "f" / "x.safetensors", latents=latents.float(), latents_flip=latents, labels=labels
        ).parent,
    }
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "c.safetensors").read_bytes()[:-1])
    cases["the header does not describe the file"] = tmp_path / "cut.safetensors"
    cases["no latents in a known format"] = tmp_path / "empty"
    (tmp_path / "empty").mkdir()
    for message, source in cases.items():
        assert convert(source, tmp_path / "store") == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said
    assert not (tmp_path / "store").exists()


def test_npy_files_that_are_none(npy_folders, tmp_path, capsys):
    labels, features = npy_folders / "imagenet256_labels", npy_folders / "imagenet256_features"
    cases = {
        labels / "3.npy": (b"", "cannot be read"),
        labels / "4.npy": (np.array([1.5]), "float64 [1] is not one image of [1]"),
        features / "5.npy": (np.zeros((2, *SHAPE)), "float64 [2, 4, 8, 8] is not one image of [1, 4, 8, 8]"),
        features / "6.npy": (np.array([{}]), "cannot be read"),
    }
    for path, (content, message) in cases.items():
        good = path.read_bytes()
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
        assert convert(npy_folders, tmp_path / "store") == 2
        said = capsys.readouterr().err.split("\r")[-1]
        assert f"{path}: " in said and message in said, said
        path.write_bytes(good)
    (labels / "7.npy").unlink()
    assert convert(npy_folders, tmp_path / "store") == 2
    assert f"{labels / '7.npy'}: cannot be read" in capsys.readouterr().err
    with pytest.raises(LatentStoreError, match="0 folders whose names end with _labels"):
        labels.rename(npy_folders / "else")
        open_source(npy_folders)


def test_documented_section_is_valid():
    text = (Path(__file__).parents[2] / "docs" / "latents.md").read_text()
    sections = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
    configs = [LatentsConfig(**table["data"]) for table in sections if table.get("data", {}).get("name") == "latents"]
    assert configs
