"""Files of weights: read without running code from them, written whole or not at all."""

import argparse
import json
import math
import os
import pickle
import tomllib
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from torchtitan.errors import CheckpointError, first_line
from torchtitan.files.durable import follow_umask, make_folder, sync, unfinished_path
from torchtitan.files.regular import read_regular
from torchtitan.files.removal import remove_folder
from torchtitan.programs import program

CONFIG = "config"  # entry of a safetensors header: the configuration of the network, as TOML
INDEX_SUFFIX = ".safetensors.index.json"
_MOST_INDEX_BYTES = 16 << 20
_PICKLED = (".pt", ".pth", ".ckpt", ".bin")
_NESTED = ("ema", "EMA", "model", "MODEL", "state_dict")  # where training scripts put a state dict, the best weights first


class WeightsError(CheckpointError):
    """Weights that cannot be used; one line per problem."""


class NotTensors(WeightsError):
    """File of weights that holds other objects than tensors, or is damaged."""


def check_fits(path: Path, model: nn.Module, strict: bool = True) -> list[str]:
    """Read the header of a safetensors file and compare it with a model's weights; the model may be on meta.

    Returns:
        differences, one line per kind: of a file that is not read strictly, tensors that are missing or superfluous.

    Raises:
        WeightsError: not a safetensors file, or tensors are missing, superfluous or of another shape.
    """
    with _opened(path) as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (a file is no mapping)
    wanted = {name: tuple(tensor.shape) for name, tensor in named_weights(model).items()}
    problems = mismatches(wanted, found)
    common = wanted.keys() & found.keys()
    refused = problems if strict or not common else mismatches(*({name: of[name] for name in common} for of in (wanted, found)))
    if refused:
        raise WeightsError("\n".join(f"{path}: {problem}" for problem in refused))
    return problems


def header_of(path: Path) -> dict[str, str]:
    """Header of a safetensors file: its entries beside the tensors. Raises WeightsError."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def recorded_data(path: Path, table: str = "data") -> dict[str, Any]:
    """Table of the data, or another, by the record in a file of weights, maybe a stranger's; empty where it has none.

    Raises WeightsError.
    """
    try:
        return dict(tomllib.loads(header_of(path).get(CONFIG, ""))[table])
    except (ValueError, TypeError, KeyError):
        return {}


def refuse_not_finite(path: Path, bad: list[str]) -> None:
    """Refuse a file of which the tensors with these names hold NaN or infinities. Raises WeightsError: there are some."""
    if bad:
        raise WeightsError(f"{path}: {len(bad)} tensors hold values that are not finite: {_some(bad)}")


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights of a model by name, as files hold them: parameters and saved buffers; the tensors themselves."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | saved_buffers(model)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of a model that are saved with its parameters, neither trained nor averaged; the tensors themselves."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def fill(model: nn.Module, path: Path, strict: bool = True) -> None:
    """Fill a model with the weights of a safetensors file, under the names of `named_weights`. Raises WeightsError."""
    check_fits(path, model, strict)
    weights = named_weights(model)
    for name, tensor in each_tensor(path):
        if name in weights:
            weights[name].copy_(tensor)


@torch.no_grad()
def fill_rows(weights: Mapping[str, Tensor], rows_of: Mapping[str, slice], path: Path) -> None:
    """Fill tensors from a fitting safetensors file, reading only the rows given, or else all. Raises WeightsError."""
    with _opened(path) as file:
        for name, tensor in ((name, weights[name]) for name in weights.keys() & set(file.keys())):
            tensor.copy_(file.get_slice(name)[rows_of[name]] if name in rows_of else file.get_tensor(name))


def tensor_sizes(path: Path) -> dict[str, int]:
    """Elements of each tensor of a safetensors file, by its header. Raises WeightsError."""
    with _opened(path) as file:
        names = file.keys()
        return {name: math.prod(file.get_slice(name).get_shape()) for name in names}


def each_tensor(path: Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a safetensors file with these names, or all, one after the other. Raises WeightsError."""
    with _opened(path) as file:
        for name in list(file.keys()) if names is None else names:
            yield name, file.get_tensor(name)


def read_state_dict(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Read a state dict from safetensors or from a torch checkpoint; no code of the file is run.

    Safetensors may be several files with an index, NAME.safetensors.index.json; their tensors are memory-mapped.

    Returns:
        the tensors, and the key of the file under which they were nested, if any.

    Raises:
        WeightsError: it is neither; NotTensors: it holds other objects than tensors.
    """
    if not path.is_file():
        raise WeightsError(f"{path}: no such file of weights")
    if path.name.endswith(INDEX_SUFFIX):
        return _read_sharded(path), None
    if path.suffix == ".safetensors":
        try:
            return load_file(path), None
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
    try:
        # The usual training script saves its arguments with the weights, as this plain record of values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = first_line(error).partition(". ")[0]
        raise NotTensors(f"{path}: holds more than tensors, or is damaged ({reason}); nothing in it was run") from error
    except Exception as error:  # whatever a damaged archive makes torch.load raise
        raise WeightsError(f"{path}: is not a readable torch checkpoint: {first_line(error)}") from error
    nested = None
    if isinstance(content, dict):
        nested = next((key for key in _NESTED if isinstance(content.get(key), dict)), None)
    tensors = content[nested] if nested else content
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise WeightsError(f"{path}: holds no state dict (a dictionary of tensors, or one under {', '.join(_NESTED)})")
    return dict(tensors), nested


def _read_sharded(path: Path) -> dict[str, Tensor]:
    """Tensors of the files that an index lists. Raises WeightsError."""
    try:
        places = json.loads(read_regular(path, _MOST_INDEX_BYTES))["weight_map"]
        known = all(isinstance(name, str) and Path(name).name == name for name in places.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: is no index of safetensors files") from error
    if not known or not places:
        raise WeightsError(f"{path}: lists something else than files beside it")
    found: dict[str, Tensor] = {}
    for name in sorted({*places.values()}):
        file = path.with_name(name)
        if not file.is_file():
            raise WeightsError(f"{file}: missing, though {path.name} lists it")
        tensors, _ = read_state_dict(file)
        wanted = {tensor for tensor, place in places.items() if place == name}
        if lacking := sorted(wanted - tensors.keys()):
            raise WeightsError(f"{file}: lacks {_some(lacking)}, which {path.name} lists there")
        found |= {tensor: tensors[tensor] for tensor in wanted}
    return found


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Refuse a path that must not be replaced, or that names no file. Raises WeightsError."""
    if path.name in ("", ".."):
        raise WeightsError(f"{path}: names no file")
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise WeightsError(f"{path}: exists already (--overwrite replaces it)")


@contextmanager
def written_whole(path: Path, overwrite: bool) -> Iterator[Path]:
    """Write a file whole: yield a temporary path in the same folder, and rename it to `path` if the block succeeds.

    A folder replaces one that holds nothing but plain files of the same names.

    Raises:
        WeightsError: the path exists and `overwrite` is false, or is of another kind or not writable.
    """
    refuse_existing(path, overwrite)
    temporary = unfinished_path(path)
    try:
        make_folder(path.parent)
        yield temporary
        if temporary.is_dir():
            _name_folder(temporary, path)
        else:
            follow_umask(temporary)
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: cannot be written: {first_line(error)}") from error
    finally:
        with suppress(OSError):
            if temporary.is_dir():
                remove_folder(temporary, lambda name: True)  # all of it was written just now
            else:
                temporary.unlink(missing_ok=True)


def _name_folder(temporary: Path, path: Path) -> None:
    """Bring a folder of files to the disk and rename it. Raises OSError, WeightsError."""
    names = {entry.name for entry in temporary.iterdir()}
    for name in names:
        follow_umask(temporary / name)
        sync(temporary / name)
    sync(temporary)
    if not os.path.lexists(path):
        temporary.rename(path)
        sync(path.parent)
        return
    if path.is_symlink() or not path.is_dir():
        raise WeightsError(f"{path}: is no folder; it was not replaced")
    others = [entry.name for entry in path.iterdir() if entry.name not in names or entry.is_symlink() or not entry.is_file()]
    if others:
        raise WeightsError(f"{path}: holds other files ({min(others)}); it was not replaced")
    old = path.with_name(f".{path.name}-replaced-{uuid.uuid4().hex}")
    path.rename(old)
    temporary.rename(path)
    sync(path.parent)
    if left := remove_folder(old, names.__contains__):  # it came after we looked
        raise WeightsError(f"{path}: was replaced; new files in the old folder are kept: {left[0]}")


def mismatches(wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    """Differences between tensors of the shapes `found` and those `wanted`: one line per kind."""
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    other = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {_some(missing)}")
    if extra:
        problems.append(f"{len(extra)} tensors are not of this model: {_some(extra)}")
    if other:
        first = other[0]
        problems.append(
            f"{len(other)} tensors have another shape: {first} is {list(found[first])} instead of {list(wanted[first])}"
        )
    return problems


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises WeightsError, also where reading in the block fails."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> WeightsError:
    if isinstance(error, FileNotFoundError):
        return WeightsError(f"{path}: no such file of weights")
    advice = f" ({program('checkpoint')} import reads published ones)" if path.suffix in _PICKLED else ""
    return WeightsError(f"{path}: is not a readable safetensors file: {first_line(error)}{advice}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
