"""Hostile latent stores and files of weights."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.faults.hostile_case import REFUSED, SURVIVED, Place, device, hostile
from tests.faults.hostile_images import zeros
from tests.latent_stores import plan_of, write_store
from torchtitan.latents.index import INDEX_FILE, read_sealed, write_sealed

# ---------------------------------------------------------------------- latent stores

STORE = ("--data.name", "latents", "--data.validation_fraction", 0)
Edit = Callable[[dict], None]


def store(name: str, *verdicts: str, more: tuple = (), long: bool = False) -> Callable:
    """Register what is changed in a good store."""

    def register(make: Callable[[Path, Place], None]) -> Callable:
        @hostile("latent store", *(verdicts or (REFUSED,)), name=f"store: {name}", long=long)
        def write(place: Place) -> tuple[str, ...]:
            write_store(place.input / "store", plan_of(images_per_shard=8))
            make(place.input / "store", place)
            return place.train(*STORE, "--data.path", place.input / "store", *more)

        return make

    return register


def index(name: str, edit: Edit, *verdicts: str, **options: object) -> None:
    """Register an index whose checksum is right."""

    def make(folder: Path, place: Place) -> None:
        content = read_sealed(folder / INDEX_FILE)
        edit(content)
        write_sealed(folder / INDEX_FILE, content)

    store(f"index with {name}", *verdicts, **options)(make)


def setting(**changes: object) -> Edit:
    return lambda content: content.update(changes)


index("a shape of 2^39 a side", setting(shape=[1 << 39] * 3))
index("a shape of true", setting(shape=[True, 8, 8]))
index("a negative shape", setting(shape=[-4, 8, 8]))
index("a shape of floats", setting(shape=[4.0, 8.0, 8.0]))
index("2^31 - 1 classes", setting(num_classes=2**31 - 1))
index("names of escape sequences", setting(class_names=["\x1b[2J\x07"] * 10), REFUSED, SURVIVED)
index("names of 10 MB", setting(class_names=["x" * 10**6] * 10), REFUSED, SURVIVED)
index("an autoencoder of escape sequences", setting(autoencoder={"name": "\x1b[2J\n\x07"}), REFUSED, SURVIVED)
index("an autoencoder nested 500 times", setting(autoencoder={"name": "x", "y": json.loads("[" * 500 + "]" * 500)}),
      REFUSED, SURVIVED)  # fmt: skip
index("a scale of 1e308", setting(normalization={"shift": [1e308] * 4, "scale": [1e308] * 4, "source": "given"}),
      REFUSED, SURVIVED, "stopped at work")  # fmt: skip
index("a scale of 0", setting(normalization={"shift": [0.0] * 4, "scale": [0.0] * 4, "source": "given"}))
index("2^39 images", setting(num_images=1 << 39, num_source_images=1 << 39, images_per_shard=1 << 39))
index("no shards", setting(shards=[]))
index("an unknown key of escape sequences", setting(**{"\x1b[2J\x07": 1}))
index("a dtype of escape sequences", setting(dtype="\x1b[2J\x07"))
index("shards in another's folder", lambda content: content["shards"][0].update(path="../../precious"))
index("images of nothing", lambda content: content["shards"][0].update(num_images=0), REFUSED)


def _shard(folder: Path, number: int = 0) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


@store("without labels")
def _(folder: Path, place: Place) -> None:
    tensors = load_file(_shard(folder))
    del tensors["labels"]
    _reseal(folder, tensors)


@store("labels out of range", REFUSED, "stopped at work")
def _(folder: Path, place: Place) -> None:
    tensors = load_file(_shard(folder))
    tensors["labels"] += 1 << 60
    _reseal(folder, tensors)


@store("latents of NaN", REFUSED, SURVIVED, "stopped at work")  # its steps are skipped, and named
def _(folder: Path, place: Place) -> None:
    tensors = load_file(_shard(folder))
    tensors["latents"][:] = float("nan")
    _reseal(folder, tensors)


def _reseal(folder: Path, tensors: dict) -> None:
    """Put other tensors into the first shard; size and checksum in the index follow."""
    save_file(tensors, _shard(folder))
    content = read_sealed(folder / INDEX_FILE)
    whole = _shard(folder).read_bytes()
    content["shards"][0] |= {"size": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    write_sealed(folder / INDEX_FILE, content)


def in_place_of(name: str, file: str, make: Callable[[Path, Place], None], *verdicts: str) -> None:
    @store(f"{name} in place of {file}", *verdicts)
    def replace(folder: Path, place: Place) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file, place)


def _hole(path: Path, place: Place) -> None:
    with open(path, "wb") as file:
        file.truncate(3 << 30)


for _file in (INDEX_FILE, "shard-00001.safetensors"):
    in_place_of("a pipe", _file, lambda path, place: os.mkfifo(path))
    in_place_of("a folder", _file, lambda path, place: path.mkdir())
    in_place_of("a link to /dev/zero", _file, lambda path, place: path.symlink_to(device(place, "zero")))
    in_place_of("a link to itself", _file, lambda path, place: path.symlink_to(path.name))
    in_place_of("a hole of 3 GiB", _file, _hole)
    in_place_of("something else of the user's", _file, lambda path,
                place: path.symlink_to(place.precious / "thesis.txt"))  # fmt: skip


@store("an index with its names twice", REFUSED, SURVIVED)
def _(folder: Path, place: Place) -> None:
    text = (folder / INDEX_FILE).read_text()
    (folder / INDEX_FILE).write_text(text.replace('"shape"', '"shape": [1, 1, 1], "shape"', 1))


@store("an index nested 10^5 times")
def _(folder: Path, place: Place) -> None:
    (folder / INDEX_FILE).write_text('{"a":' * 10**5 + "1" + "}" * 10**5)


@store("an index with a number of 10^6 digits")
def _(folder: Path, place: Place) -> None:
    (folder / INDEX_FILE).write_text('{"num_images": ' + "9" * 10**6 + "}")


@store("an index of 23 MiB of lists")
def _(folder: Path, place: Place) -> None:
    (folder / INDEX_FILE).write_bytes(b"[" + b"[]," * (7 << 20) + b"[]]")


@store("a shard of other bytes and the same size", REFUSED, "stopped at work")
def _(folder: Path, place: Place) -> None:
    whole = bytearray(_shard(folder, 1).read_bytes())
    whole[-200:-100] = bytes(100)
    _shard(folder, 1).write_bytes(whole)


for _tool in ("show", "verify", "statistics"):

    @hostile("latent store", REFUSED, "stopped at work",
             name=f"store: scripts/latents.py {_tool} of a folder of escape sequences")  # fmt: skip
    def _(place: Place, tool: str = _tool) -> tuple[str, ...]:
        folder = place.input / "\x1b[2J\x07\nx"
        folder.mkdir()
        return ("scripts/latents.py", tool, str(folder))


@hostile("latent store", REFUSED, SURVIVED, name="store: scripts/latents.py into a folder of the user's")
def _(place: Place) -> tuple[str, ...]:
    save_file({"latents": torch.zeros(4, 4, 2, 2, dtype=torch.int8), "labels": torch.zeros(4, dtype=torch.int64)},
              place.input / "x.safetensors")  # fmt: skip
    shutil.copytree(place.precious, place.outputs)
    return ("scripts/latents.py", "convert", str(place.input / "x.safetensors"), "--output", str(place.outputs))


# ---------------------------------------------------------------------- weights


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple:
        return self._call


def weights(name: str, *verdicts: str, suffix: str = "pt", long: bool = False) -> Callable:
    """Register a file of published weights to be imported."""

    def register(make: Callable[[Path, Place], None]) -> Callable:
        @hostile("weights", *(verdicts or (REFUSED,)), name=f"weights: {name}", long=long)
        def write(place: Place) -> tuple[str, ...]:
            path = place.input / f"x.{suffix}"
            make(path, place)
            config = place.folder / "small.toml"
            like_dit = 'flavor = "debug"\nmlp = "gelu"\nnorm = "layernorm"\nqk_norm = false\nposition = "sincos"'
            config.write_text(config.read_text().replace('flavor = "debug"', like_dit) + '[data]\nname = "synthetic"\n')
            return ("scripts/checkpoint.py", "import", str(path), "--format", "dit", "--config", str(config),
                    "--output", str(place.outputs / "x.safetensors"))  # fmt: skip

        return make

    return register


def archive(path: Path, data: bytes, storages: dict[str, bytes] | None = None,
            compression: int = zipfile.ZIP_STORED) -> None:  # fmt: skip
    """A torch checkpoint: a zip file of a pickle and what it refers to."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        for name, content in (storages or {}).items():
            file.writestr(f"archive/data/{name}", content)
        file.writestr("archive/version", b"3\n")
        file.writestr("archive/byteorder", b"little")


def tensor_pickle(numel: int, offset: int, size: tuple, stride: tuple, key: str = "0") -> bytes:
    """A state dict of one tensor, as torch.save writes it."""
    def number(value: int) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    def numbers(values: tuple) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    named = struct.pack("<I", len(key)) + key.encode()
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX" + named + b"X\x03\0\0\0cpu"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(numel) + b"tQ" + number(offset)
    head = b"\x80\x02}X\x01\0\0\0x"
    return head + tensor + numbers(size) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)RtRs."


weights("a pickled call of os.system")(lambda path, place: torch.save({"x": Call(os.system, "hostile")}, path))
weights("a pickled call of eval")(
    lambda path, place: torch.save(Call(eval, "__import__('os').system('hostile')"), path)
)
weights("a pickled call of torch.load")(lambda path, place: torch.save(Call(torch.load, str(place.precious)), path))
weights("a bare pickle of os.system")(lambda path, place: path.write_bytes(b"cposix\nsystem\n(S'hostile'\ntR."))
weights("a pickle of the old form that calls")(
    lambda path, place: torch.save({"x": Call(os.system, "hostile")}, path, _use_new_zipfile_serialization=False)
)
weights("a pickled subprocess", )(lambda path, place: path.write_bytes(b"csubprocess\nPopen\n((S'hostile'\nltR."))
weights("a tensor far outside of its storage")(
    lambda path, place: archive(path, tensor_pickle(4, 1 << 40, (4,), (1,)), {"0": bytes(16)})
)
weights("a tensor of 2^60 numbers in 16 bytes")(
    lambda path, place: archive(path, tensor_pickle(1 << 60, 0, (1 << 60,), (1,)), {"0": bytes(16)})
)
weights("a tensor of negative strides")(
    lambda path, place: archive(path, tensor_pickle(4, 3, (4,), (-1,)), {"0": bytes(16)})
)
weights("a tensor of a negative size")(
    lambda path, place: archive(path, tensor_pickle(4, 0, (-4,), (1,)), {"0": bytes(16)})
)
weights("a tensor of one number seen 2^40 times")(
    lambda path, place: archive(path, tensor_pickle(1, 0, (1 << 40,), (0,)), {"0": bytes(4)})
)
weights("a storage named by a path")(
    lambda path, place: archive(path, tensor_pickle(4, 0, (4,), (1,), "../../precious/thesis.txt"), {"0": bytes(16)})
)
weights("a zip that unpacks to 3 GiB")(lambda path, place: _bomb(path))
weights("a zip in a zip's place, cut")(
    lambda path, place: (archive(path, b"N."), path.write_bytes(path.read_bytes()[:-30]))
)
weights("a zip whose directory names members outside")(lambda path, place: _climbing(path))
weights("a zip of nothing")(lambda path, place: path.write_bytes(b"PK\x05\x06" + bytes(18)))
weights("10^6 tensors in a list in a list")(
    lambda path, place: archive(path, b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".")
)
weights("a memo of 2^28 entries in 10 bytes")(
    lambda path, place: archive(path, b"\x80\x02Nr" + struct.pack("<I", 1 << 28) + b".")
)
weights("tuples doubled 40 times as a key")(lambda path, place: archive(path, b"\x80\x02}(" + b"K\x01\x85q\0"
                                                                        + b"".join(  # fmt: skip
    b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(40)) + b"Nu."))  # fmt: skip
weights("names of escape sequences")(lambda path, place: torch.save({"\x1b[2J\n\x07": torch.zeros(1)}, path))
weights("a name that is a number")(lambda path, place: torch.save({1: torch.zeros(1)}, path))
weights("a dictionary of dictionaries")(
    lambda path, place: torch.save({"model": {"model": {"x": torch.zeros(1)}}}, path)
)
weights("a sparse tensor of 2^40 a side")(
    lambda path, place: torch.save({"x": torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=int), torch.ones(1),
                                                                 (1 << 40, 1 << 20))}, path)  # fmt: skip
)
weights("a quantized tensor", REFUSED)(
    lambda path, place: torch.save({"x": torch.zeros(1, dtype=torch.complex64)}, path)
)
weights("a pipe")(lambda path, place: os.mkfifo(path))
weights("a link to /dev/zero")(lambda path, place: path.symlink_to(device(place, "zero")))
weights("a hole of 3 GiB")(_hole)
weights("a tar of the oldest form")(
    lambda path, place: path.write_bytes(b"pickle".ljust(512, b"\0") + bytes(1024))
)


def _bomb(path: Path) -> None:
    """A storage of 3 GiB of zeros, packed by hand: the zip module would take seconds."""
    data = tensor_pickle(3 << 28, 0, (3 << 28,), (1,))
    deflated = zeros(3 << 30)[2:-4]
    members = [(b"archive/data.pkl", data, data, 0), (b"archive/data/0", deflated, None, 8),
               (b"archive/version", b"3\n", b"3\n", 0)]  # fmt: skip
    content, directory = b"", b""
    for name, packed, whole, method in members:
        size = 3 << 30 if whole is None else len(whole)
        crc = 0 if whole is None else zlib.crc32(whole)
        fields = struct.pack("<HHHHIII", 0, method, 0, 0, crc, len(packed), size)
        directory += b"PK\x01\x02\x14\0\x14\0" + fields + struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0,
                                                                      len(content)) + name  # fmt: skip
        content += b"PK\x03\x04\x14\0" + fields + struct.pack("<HH", len(name), 0) + name + packed
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(members), len(members), len(directory), len(content), 0)
    path.write_bytes(content + directory + end)


def _climbing(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("../../precious/data.pkl", b"N.")
        file.writestr("/etc/data.pkl", b"N.")
