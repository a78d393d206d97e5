"""Decode, encode and check latents: cosmos_latent_decoder.py [decode|encode|check] ... --path TOKENIZER_FOLDER

    [decode] LATENTS   a .safetensors or .npy file of latents, or a folder of them -> one PNG per latent
    encode IMAGES...   image files or folders -> one .safetensors file of latents
    check IMAGES...    encode and decode again: PSNR of each image, and a picture of both side by side

The autoencoder is a Cosmos tokenizer (encoder.jit and decoder.jit); --autoencoder chooses another.
From Python: CosmosLatentDecoder("TOKENIZER_FOLDER").decode(latents).
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from torchtitan.autoencoders import AUTOENCODERS, build_autoencoder
from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents, denormalize
from torchtitan.autoencoders.latent_files import LatentFile, find_latents, open_latents, save_latents
from torchtitan.autoencoders.reconstruction import psnr, side_by_side
from torchtitan.data.base import UnreadableImage
from torchtitan.data.image_files import ImageList, SquareImages, list_images, shown_path
from torchtitan.distributed.mesh import compute_device
from torchtitan.files.durable import make_folder, replacing
from torchtitan.files.weight_files import WeightsError, refuse_existing
from torchtitan.pictures.grids import save_image
from torchtitan.processes.command_line import OneLineParser, at_least, refusing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CosmosLatentDecoder:
    """Decoder of latents, a few at a time; a Cosmos tokenizer unless another autoencoder is named."""

    def __init__(
        self, path: str, autoencoder: str = "cosmos", dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, batch_size: int = 16, tile: int | None = None, overlap: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            path, autoencoder, dtype, tile, overlap: as in `build_autoencoder`.
            device: where to compute; None is the GPU where there is one.

        Raises:
            AutoencoderError: the autoencoder cannot be opened, or tile and overlap do not suit it.
        """
        self.autoencoder = build_autoencoder(autoencoder, path, dtype, device or compute_device(), tile, overlap)
        self.batch_size = batch_size

    def decode(self, latents: Tensor) -> Tensor:
        """Decode raw latents [N, C, h, w] to images [N, 3, H, W] float32 in [-1, 1], on the CPU. Raises
        AutoencoderError.
        """
        return torch.cat([self.autoencoder.decode(part).cpu() for part in latents.split(self.batch_size)])


@refusing(
    AutoencoderError, WeightsError,
    stopped="interrupted; what was written stays (decode resumes with --first, or --overwrite)",
)  # fmt: skip
def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words and words[0] not in (*VERBS, "-h", "--help"):
        words = ["decode", *words]
    arguments = parse_arguments(words)
    try:
        return VERBS[arguments.command](arguments)
    except OSError as error:
        print(f"{error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in VERBS.items():
        add = commands.add_parser(name, help=run.__doc__).add_argument
        if name == "decode":
            add("source", metavar="LATENTS", type=Path, help="file of latents, or folder of such files")
            add("--output", type=Path, help="folder for the PNGs (default: LATENTS/decoded, of a file LATENTS-decoded)")
            add("--first", metavar="NUMBER", type=at_least(0), default=0,
                help="number of the first latent, in each file")
            add("--count", type=at_least(1), help="number of latents of each file (default: all)")
            add("--factor", type=factor, help="factor on the stored numbers, such as 16/255")
            add("--normalized", action="store_true",
                help="the latents were normalized by the autoencoder's own configuration")
        else:
            add("sources", metavar="IMAGES", type=Path, nargs="+", help="image files, or folders of them")
            add("--image-size", type=at_least(1), default=256, help="pixels of each side after the usual resizing and "
                "centre crop (default: 256)")
        if name == "encode":
            add("--output", type=Path, required=True, help=".safetensors file to write")
        if name == "check":
            add("--output", type=Path, help="picture to write (default: NAME-reconstruction.png here, of the first of IMAGES)")
            add("--pictures", type=at_least(1), default=8, help="images in the picture (default: 8)")
        add("--overwrite", action="store_true", help="replace existing files")
        add_autoencoder_options(add, default="cosmos")
        add("--batch-size", type=at_least(1), default=16, help="images at a time (default: 16)")
    arguments = parser.parse_args(words)
    if arguments.overlap is not None and arguments.tile is None:
        parser.error("--overlap: has no effect without --tile")
    return arguments


def add_autoencoder_options(add: Callable[..., Any], **required_or_default: Any) -> None:
    """Add the options of `open_decoder`, without the batch size."""
    add("--autoencoder", choices=tuple(AUTOENCODERS), **required_or_default)
    add("--path", default="", help="the autoencoder's folder, or its name on the Hugging Face hub")
    add("--dtype", choices=tuple(DTYPES), help="of compute (default: float32; for cosmos that of its files)")
    add("--tile", metavar="PIXELS", type=at_least(1), help="side of the tiles that large images are cut into")
    add("--overlap", metavar="PIXELS", type=at_least(1), help="of neighbouring tiles (default: a quarter of them)")


def factor(text: str) -> float:
    """Read a positive number, also as a fraction."""
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number or fraction, is {text!r}")
    return value


def open_decoder(arguments: argparse.Namespace) -> CosmosLatentDecoder:
    return CosmosLatentDecoder(
        arguments.path, arguments.autoencoder, DTYPES.get(arguments.dtype), batch_size=arguments.batch_size,
        tile=arguments.tile, overlap=arguments.overlap,
    )  # fmt: skip


def decode(arguments: argparse.Namespace) -> int:
    """Decode latents to PNGs."""
    files = [open_latents(path) for path in find_latents(arguments.source)]
    decoder = open_decoder(arguments)
    for file in files:
        check_decodable(file, decoder.autoencoder, arguments)
    folder = arguments.output or (
        arguments.source / "decoded" if arguments.source.is_dir()
        else arguments.source.with_name(f"{arguments.source.stem}-decoded")
    )
    jobs = [(file, begin, end) for file in files for begin, end in batches(file, arguments)]
    wanted = [picture_path(folder, file, number) for file, begin, end in jobs for number in range(begin, end)]
    if len(set(wanted)) < len(wanted):
        raise AutoencoderError(f"{arguments.source}: two files differ in their ending only (decode one at a time)")
    for path in wanted:
        refuse_existing(path, arguments.overwrite)
    make_folder(folder)
    with tqdm(total=len(wanted), unit="image", desc="decoding") as progress:
        for file, begin, end in jobs:
            latents = file.read(begin, end, arguments.factor)
            if arguments.normalized and decoder.autoencoder.normalization:
                latents = denormalize(latents, decoder.autoencoder.normalization)
            for number, image in enumerate(decoder.decode(latents), begin):
                with replacing(picture_path(folder, file, number)) as path:
                    save_image(image, path)
            progress.update(end - begin)
    print(f"{folder}: {len(wanted)} images")
    return 0


def check_decodable(file: LatentFile, autoencoder: Autoencoder, arguments: argparse.Namespace) -> None:
    """Check that the file's latents belong to this autoencoder, and the options to them. Raises AutoencoderError."""
    if arguments.first >= file.shape[0]:
        raise AutoencoderError(f"{file.path}: --first {arguments.first}: it holds {file.shape[0]} latents")
    if file.shape[1] != autoencoder.channels:
        raise AutoencoderError(
            f"{file.path}: latents of {file.shape[1]} channels; {autoencoder.name} has {autoencoder.channels}"
        )
    made_by = file.autoencoder or {"name": "unknown"}
    if made_by.get("name") != "unknown" and made_by != autoencoder.identity():
        raise AutoencoderError(
            f"{file.path}: was made with {shown_identity(made_by)}, not with {shown_identity(autoencoder.identity())}"
        )
    if file.integers and arguments.factor is None:
        raise AutoencoderError(
            f"{file.path}: holds whole numbers; give their unit (for imagenet_ci8x8.safetensors: --factor 16/255)"
        )
    if arguments.normalized and file.normalization:
        raise AutoencoderError(f"{file.path}: states its own normalization of latents (leave --normalized out)")
    if arguments.normalized and autoencoder.normalization is None:
        raise AutoencoderError(f"--normalized: {autoencoder.name} has no normalization of its own")


def shown_identity(identity: dict) -> str:
    return f"{identity.get('name')} of sha256 {str(identity.get('sha256'))[:12]}"


def batches(file: LatentFile, arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    last = file.shape[0] if arguments.count is None else min(arguments.first + arguments.count, file.shape[0])
    for begin in range(arguments.first, last, arguments.batch_size):
        yield begin, min(begin + arguments.batch_size, last)


def picture_path(folder: Path, file: LatentFile, number: int) -> Path:
    return folder / f"{file.path.stem}-{number:06d}.png"


def encode(arguments: argparse.Namespace) -> int:
    """Encode images to latents."""
    if arguments.output.suffix != ".safetensors":
        raise AutoencoderError(f"{arguments.output}: --output must end in .safetensors")
    refuse_existing(arguments.output, arguments.overwrite)
    files = find_images(arguments.sources)
    autoencoder = open_decoder(arguments).autoencoder
    names, parts = [], []
    for batch_names, images in read_images(files, arguments, autoencoder, "encoding"):
        latents = autoencoder.encode(images)
        parts.append(Latents(latents.mean.cpu(), None if latents.std is None else latents.std.cpu()))
        names += batch_names
    deviations = [part.std for part in parts if part.std is not None]
    std = torch.cat(deviations) if deviations else None
    latents = Latents(torch.cat([part.mean for part in parts]), std)
    save_latents(arguments.output, latents, names, autoencoder.identity(), arguments.overwrite)
    print(f"{arguments.output}: latents {list(latents.mean.shape)}")
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Check reconstruction quality: images -> latents -> images, with PSNR."""
    if arguments.output is None:
        first = arguments.sources[0].resolve()
        arguments.output = Path(f"{first.stem if first.is_file() else first.name}-reconstruction.png")
    if arguments.output.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise AutoencoderError(f"{arguments.output}: --output must end in .png or .jpg")
    refuse_existing(arguments.output, arguments.overwrite)
    files = find_images(arguments.sources)
    autoencoder = open_decoder(arguments).autoencoder
    decibels: list[tuple[str, float]] = []
    shown: list[Any] = []
    for names, images in read_images(files, arguments, autoencoder, "reconstructing"):
        decoded = autoencoder.decode(autoencoder.encode(images).mean).cpu()
        for name, image, back, value in zip(names, images, decoded, psnr(images, decoded).tolist(), strict=True):
            decibels.append((name, value))
            if len(shown) < arguments.pictures:
                shown.append((image, back, f"{value:.1f} dB {Path(name).stem}"))
    for name, value in decibels:
        print(f"{value:6.2f} dB  {name}")
    mean = sum(value for _, value in decibels) / len(decibels)
    summary = f"{autoencoder.name}: mean PSNR {mean:.2f} dB over {len(decibels)} images"
    originals, reconstructions, labels = zip(*shown, strict=True)
    title = f"{summary}. Original, reconstruction, difference x 4"
    picture = side_by_side(torch.stack(originals), torch.stack(reconstructions), labels, title)
    make_folder(arguments.output.parent)
    with replacing(arguments.output) as path:
        picture.save(path, "PNG" if arguments.output.suffix.lower() == ".png" else "JPEG")
    print(f"{summary}\n{arguments.output}")
    return 0


def find_images(sources: list[Path]) -> list[bytes]:
    """Find the given image files and those in the given folders. Raises AutoencoderError: there are none."""
    found = []
    for source in sources:
        if source.is_dir():
            files = list_images(os.fsencode(source))
            found += [files.path(position) for position in range(len(files))]
        elif source.is_file():
            found.append(os.fsencode(source))
        else:
            raise AutoencoderError(f"{source}: no such image file or folder")
    if not found:
        raise AutoencoderError(f"{', '.join(map(str, sources))}: no images in it")
    return found


def read_images(
    files: list[bytes], arguments: argparse.Namespace, autoencoder: Autoencoder, doing: str
) -> Iterator[tuple[list[str], Tensor]]:
    """Read names and images [B, 3, S, S] in batches, with a progress bar; unreadable files are named and left out.

    Raises:
        AutoencoderError: the size does not suit the autoencoder, or no image can be read.
    """
    size = arguments.image_size
    if size % autoencoder.downscale:
        raise AutoencoderError(f"--image-size: must be a multiple of {autoencoder.downscale}, is {size}")
    everything = np.arange(len(files))
    reader = SquareImages(ImageList.of(b"", [files]), everything, np.zeros_like(everything), size)
    some = False
    with tqdm(total=len(files), unit="image", desc=doing) as progress:
        for begin in range(0, len(files), arguments.batch_size):
            names, images = [], []
            for number in everything[begin : begin + arguments.batch_size]:
                try:
                    images.append(reader.fetch(np.array([number]))["images"])
                except UnreadableImage as error:
                    progress.write(f"left out: {error}", file=sys.stderr)
                else:
                    names.append(shown_path(files[number]))
            if images:
                some = True
                yield names, torch.cat(images)
            progress.update(len(everything[begin : begin + arguments.batch_size]))
    if not some:
        raise AutoencoderError(f"none of {len(files)} images can be read")


VERBS = {"decode": decode, "encode": encode, "check": check}
