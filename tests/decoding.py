"""A tiny tokenizer and a store of what it encodes, for the tests of decoding."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tests.unit.autoencoder_files import write_tokenizer
from torchtitan.autoencoders import build_autoencoder
from torchtitan.latents import StoreIndex, StorePlan, StoreWriter, pack_views

SIDE = 32
CLASS_NAMES = ["n01440764 tench, Tinca tinca", "goldfish, Carassius auratus", "n01484850 great white shark, man-eater"]


def images_of(numbers: range) -> Tensor:
    """Smooth coloured squares, one per number, [N, 3, 32, 32] in [-1, 1]."""
    colours = [torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(number)) for number in numbers]
    return functional.interpolate(torch.cat(colours) * 1.6 - 0.8, SIDE, mode="bilinear")


def write_encoded_store(folder: Path, tokenizer: Path, num_images: int = 60) -> tuple[StoreIndex, Tensor]:
    """Encode images with a tokenizer that is written to `tokenizer`; returns the index and the tokenizer's matrix."""
    matrix = write_tokenizer(tokenizer)
    autoencoder = build_autoencoder("cosmos", str(tokenizer))
    plan = StorePlan(
        num_source_images=num_images, images_per_shard=32, shape=(16, SIDE // 8, SIDE // 8), posterior=False, mirrored=False,
        dtype="float16", num_classes=3, class_names=CLASS_NAMES, autoencoder=autoencoder.identity(), image_size=SIDE,
    )  # fmt: skip
    writer = StoreWriter(folder, plan)
    for number in writer.pending():
        numbers = plan.source_images_of(number)
        latents = autoencoder.encode(images_of(numbers))
        writer.write(number, pack_views([(latents.mean, None)]), torch.tensor([image % 3 for image in numbers]))
    return writer.finish(), matrix


def decoded_by_hand(latents: Tensor, index: StoreIndex, matrix: Tensor) -> Tensor:
    """Normalised latents -> images: undo the normalisation, each position times the matrix, clamp."""
    shift, scale = (torch.tensor(getattr(index.normalization, key)).reshape(1, -1, 1, 1) for key in ("shift", "scale"))
    raw = latents / scale + shift
    return functional.conv_transpose2d(raw, matrix.reshape(16, 3, 8, 8), stride=8).clamp(-1, 1)
