"""Files of latents, safetensors or npy, which the latent decoder reads and writes."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchtitan.autoencoders.base import AutoencoderError, Latents, Normalization, denormalize
from torchtitan.errors import first_line
from torchtitan.files.npy_files import map_npy
from torchtitan.files.weight_files import written_whole

SUFFIXES = (".safetensors", ".npy")
KEYS = ("mean", "latents")


@dataclass(frozen=True)
class LatentFile:
    """Latents on disk, read in parts.

    Attributes:
        integers: whether they are stored as whole numbers, which mean nothing without a factor.
        autoencoder: identity of the one that made them, if the file states it.
        normalization: applied to them, if the file states it; None: they are raw.
    """

    path: Path
    shape: tuple[int, int, int, int]
    integers: bool
    autoencoder: dict | None = None
    normalization: Normalization | None = None

    def read(self, begin: int, end: int, factor: float | None = None) -> Tensor:
        """Read raw latents [end - begin, C, h, w], float32. Raises AutoencoderError: that part cannot be read."""
        try:
            stored = self._stored(begin, end).reshape(end - begin, *self.shape[1:]).to(torch.float32)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise _unreadable(self.path, error) from error
        if factor is not None:
            stored = stored * factor
        return denormalize(stored, self.normalization) if self.normalization else stored

    def _stored(self, begin: int, end: int) -> Tensor:
        if self.path.suffix == ".npy":
            return torch.from_numpy(np.array(map_npy(self.path).reshape(self.shape)[begin:end]))
        with safe_open(self.path, framework="pt") as file:
            tensor = file.get_slice(_key(self.path, file.keys()))
            return tensor[begin:end] if len(tensor.get_shape()) == 4 else tensor[:]


def open_latents(path: Path) -> LatentFile:
    """Open a file of latents; only its header is read.

    Args:
        path: .npy with [N, C, h, w] or [C, h, w]; .safetensors with such a tensor, named `mean` or `latents`.

    Raises:
        AutoencoderError: no such file, or it holds no latents.
    """
    if not path.is_file():
        raise AutoencoderError(f"{path}: no such file of latents")
    if path.suffix not in SUFFIXES:
        raise AutoencoderError(f"{path}: latents are read from {' and '.join(SUFFIXES)} files")
    try:
        shape, dtype, metadata = _npy_header(path) if path.suffix == ".npy" else _safetensors_header(path)
        autoencoder, normalization = (json.loads(metadata.get(key, "null")) for key in ("autoencoder", "normalization"))
    except (OSError, ValueError, EOFError, MemoryError, SafetensorError) as error:  # MemoryError: too large to map
        raise _unreadable(path, error) from error
    if dtype not in ("integer", "floating"):
        raise AutoencoderError(f"{path}: holds {dtype} values, not latents")
    if len(shape) not in (3, 4) or 0 in shape:
        raise AutoencoderError(f"{path}: holds {list(shape)}, not latents [N, C, h, w] or [C, h, w]")
    count, channels, height, width = (1,) * (4 - len(shape)) + tuple(shape)
    return LatentFile(path, (count, channels, height, width), dtype == "integer", autoencoder, normalization)


def find_latents(source: Path) -> list[Path]:
    """Find files of latents: the file itself, or those in a folder, by name. Raises AutoencoderError if none."""
    if not source.is_dir():
        return [source]
    found = sorted(path for path in source.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))
    if not found:
        raise AutoencoderError(f"{source}: holds no files of latents ({' or '.join(SUFFIXES)})")
    return found


def save_latents(path: Path, latents: Latents, names: list[str], autoencoder: dict, overwrite: bool) -> None:
    """Save raw latents as safetensors: `mean`, and `std` where there is one, with their origin as metadata.

    Raises:
        WeightsError: the file exists, or cannot be written; no partial file is left.
    """
    tensors = {"mean": latents.mean} | ({} if latents.std is None else {"std": latents.std})
    metadata = {"autoencoder": json.dumps(autoencoder), "names": json.dumps(names)}
    with written_whole(path, overwrite) as temporary:
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, temporary, metadata)


def _npy_header(path: Path) -> tuple[tuple[int, ...], str, dict]:
    array = map_npy(path)
    kind = {"f": "floating", "i": "integer", "u": "integer"}.get(array.dtype.kind, str(array.dtype))
    return array.shape, kind, {}


def _safetensors_header(path: Path) -> tuple[tuple[int, ...], str, dict]:
    with safe_open(path, framework="pt") as file:
        tensor = file.get_slice(_key(path, file.keys()))
        kind = {"F": "floating", "B": "floating", "I": "integer", "U": "integer"}
        dtype = tensor.get_dtype()
        name = dtype if dtype == "BOOL" else kind.get(dtype[0], dtype)
        return tuple(tensor.get_shape()), name, file.metadata() or {}


def _key(path: Path, keys: list[str]) -> str:
    found = next((key for key in KEYS if key in keys), None)
    if found is None:
        held = ", ".join(sorted(keys)[:3]) or "nothing"
        raise AutoencoderError(f"{path}: has no tensor {' or '.join(KEYS)}, but {held}")
    return found


def _unreadable(path: Path, error: Exception) -> AutoencoderError:
    reason = first_line(error)
    return AutoencoderError(f"{path}: is not a readable file of latents: {reason}")
