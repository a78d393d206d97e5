"""cosmos_latent_decoder.py: latents to pictures and back, and what it says of bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.unit.autoencoder_files import write_tokenizer
from torchtitan.autoencoders import build_autoencoder
from torchtitan_dit.commands import cosmos_latent_decoder
from torchtitan_dit.commands.cosmos_latent_decoder import CosmosLatentDecoder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture
def photographs(tmp_path) -> Path:
    """Three smooth images in two folders, and one file that is none."""
    folder = tmp_path / "photographs"
    rows, columns = np.mgrid[0:40, 0:48] / 48
    for number, name in enumerate(("a/one.png", "a/two.png", "b/three.png")):
        pixels = np.stack((rows, columns, (rows + columns + number) / 4), axis=-1)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * pixels).astype(np.uint8)).save(folder / name)
    (folder / "b" / "broken.png").write_bytes(b"no image")
    return folder


def run(*words) -> int:
    return cosmos_latent_decoder.main([str(word) for word in words])


def pixels(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 127.5 - 1


def test_images_become_latents_and_latents_become_pictures(tokenizer, photographs, tmp_path, capsys):
    file = tmp_path / "new" / "latents.safetensors"
    assert run("encode", photographs, "--image-size", 32, "--output", file, "--path", tokenizer, "--batch-size", 2) == 0
    out, err = capsys.readouterr()
    assert "latents [3, 16, 4, 4]" in out
    assert "broken.png: not an image of a known format" in err and "Traceback" not in err
    with safe_open(file, framework="pt") as written:
        names = json.loads(written.metadata()["names"])
        mean = written.get_tensor("mean")
    assert [Path(name).name for name in names] == ["one.png", "two.png", "three.png"]
    assert run("decode", file, "--path", tokenizer, "--batch-size", 2) == 0
    folder = file.with_name("latents-decoded")
    assert sorted(path.name for path in folder.iterdir()) == [f"latents-{n:06d}.png" for n in range(3)]
    images = build_autoencoder("cosmos", tokenizer).decode(mean)
    for number in range(3):
        assert (pixels(folder / f"latents-{number:06d}.png") - images[number]).abs().max() <= 1 / 255 + 1e-5
    assert torch.equal(CosmosLatentDecoder(tokenizer, batch_size=2).decode(mean), images)


def test_check_prints_the_psnr_of_each_image_and_draws_them(tokenizer, photographs, tmp_path, capsys):
    picture = tmp_path / "picture.png"
    words = ["check", photographs / "a", "--image-size", 32, "--output", picture, "--path", tokenizer]
    assert run(*words) == 0
    out = capsys.readouterr().out.splitlines()
    values = [float(line.split()[0]) for line in out[:2]]
    assert [line.rpartition("/")[2] for line in out[:2]] == ["one.png", "two.png"]
    assert out[2].startswith("cosmos: mean PSNR ") and out[2].endswith(" dB over 2 images")
    assert float(out[2].split()[3]) == pytest.approx(sum(values) / 2, abs=0.011)
    assert Image.open(picture).size[1] > 2 * 64
    capsys.readouterr()
    assert run(*words) == 2  # the picture is not replaced unasked
    assert capsys.readouterr().err == f"{picture}: exists already (--overwrite replaces it)\n"
    assert run("check", photographs / "a", "--autoencoder", "identity", "--output", picture, "--overwrite") == 0
    assert "identity: mean PSNR inf dB over 2 images" in capsys.readouterr().out


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(5, 16, 3, 2, generator=torch.Generator().manual_seed(2)) * 3


def decoded(folder: Path, tokenizer: str, raw: torch.Tensor, first: int = 0, stem: str = "z") -> bool:
    expected = CosmosLatentDecoder(tokenizer).decode(raw)
    return all(
        (pixels(folder / f"{stem}-{n:06d}.png") - image).abs().max() <= 1 / 255 + 1e-5
        for n, image in enumerate(expected, first)
    )


def test_files_of_other_origin_are_read(tokenizer, latents, tmp_path):
    stored = latents.mul(10).round().clamp(-127, 127).to(torch.int8)
    save_file({"latents": stored, "labels": torch.zeros(5)}, tmp_path / "z.safetensors")
    arguments = ["--path", tokenizer, "--output"]
    assert run("decode", tmp_path / "z.safetensors", "--factor", "16/255", *arguments, tmp_path / "int8") == 0
    assert decoded(tmp_path / "int8", tokenizer, stored.float() * 16 / 255)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "z.npy", latents.numpy().astype(np.float16))
    np.save(tmp_path / "folder" / "single.npy", latents[0].numpy())
    assert run("decode", tmp_path / "folder", "--path", tokenizer) == 0
    assert decoded(tmp_path / "folder" / "decoded", tokenizer, latents.half().float())
    assert decoded(tmp_path / "folder" / "decoded", tokenizer, latents[:1], stem="single")
    assert run("decode", tmp_path / "folder" / "z.npy", "--first", 3, "--count", 1, *arguments, tmp_path / "some") == 0
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["z-000003.png"]


def test_normalized_latents_are_brought_back_as_their_file_says(tokenizer, latents, tmp_path):
    normalization = {"shift": [0.5] * 16, "scale": [2.0] * 16}
    save_file({"mean": (latents - 0.5) * 2}, tmp_path / "z.safetensors", {"normalization": json.dumps(normalization)})
    assert run(tmp_path / "z.safetensors", "--path", tokenizer) == 0
    assert decoded(tmp_path / "z-decoded", tokenizer, latents)


def test_large_images_go_through_tiles(tokenizer, photographs, tmp_path):
    whole, tiled = tmp_path / "whole.safetensors", tmp_path / "tiled.safetensors"
    words = ["encode", photographs / "a", "--image-size", 64, "--path", tokenizer, "--output"]
    assert run(*words, whole) == run(*words, tiled, "--tile", 32, "--overlap", 8) == 0
    torch.testing.assert_close(load_file(tiled)["mean"], load_file(whole)["mean"])  # patches do not see each other


def write(path: Path, tensor: torch.Tensor, key: str = "mean", **metadata) -> Path:
    save_file({key: tensor.contiguous()}, path, {name: json.dumps(value) for name, value in metadata.items()})
    return path


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (lambda f, z: f / "none.npy", [], "no such file of latents"),
        (lambda f, z: [(f / "z.safetensors").write_bytes(b"x"), f / "z.safetensors"][1], [], "not a readable file"),
        (lambda f, z: write(f / "z.safetensors", z[:, :4]), [], "latents of 4 channels; cosmos has 16"),
        (lambda f, z: write(f / "z.safetensors", z.int()), [], "--factor 16/255"),
        (lambda f, z: write(f / "z.safetensors", z), ["--normalized"], "cosmos has no normalization of its own"),
        (lambda f, z: write(f / "z.safetensors", z, autoencoder={"name": "cosmos", "sha256": "0" * 64}), [],
         "was made with cosmos of sha256 000000000000, not with cosmos of sha256"),
        (lambda f, z: write(f / "z.safetensors", z), ["--tile", 20], "must be a multiple of 8 pixels, is 20"),
    ],
)  # fmt: skip
def test_bad_latents_are_one_line_and_nothing_is_written(tokenizer, latents, tmp_path, capsys, make, words, message):
    source = make(tmp_path, latents)
    before = sorted(tmp_path.rglob("*"))
    assert run("decode", source, "--path", tokenizer, *words) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_origin_is_no_other_autoencoder(tokenizer, latents, tmp_path):
    file = write(tmp_path / "z.safetensors", latents, autoencoder={"name": "unknown", "note": "converted"})
    assert run("decode", file, "--path", tokenizer) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["encode", "A", "--output", "z.npy"], "must end in .safetensors"),
        (["encode", "A", "--output", "A/one.safetensors", "--image-size", 20], "--image-size: must be a multiple of 8"),
        (["encode", "A/none", "--output", "z.safetensors"], "no such image file or folder"),
        (["encode", "A/../b/broken.png", "--output", "z.safetensors", "--image-size", 32], "none of 1 images can be"),
        (["check", "A", "--output", "z.txt"], "must end in .png or .jpg"),
    ],
)
def test_bad_images_are_refused_in_the_last_line(tokenizer, photographs, capsys, words, message):
    words = [str(word).replace("A", str(photographs / "a"), 1) for word in words]
    assert run(*words, "--path", tokenizer) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decode", "z", "--factor", "1/0"], "must be a positive number or fraction, is '1/0'"),
        (["decode", "z", "--overlap", "8"], "has no effect without --tile"),
        ([], "required: command"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as exit_:
        run(*words)
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and message in err and err.count("\n") == 1
