"""Hostile tables of numbers: CIFAR's pickles, parquet files, NumPy's arrays, safetensors."""

import io
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from safetensors.numpy import save

from tests.encoded_images import image_bytes
from tests.faults.hostile_case import REFUSED, STOPPED, SURVIVED, Place, hostile
from tests.faults.hostile_images import EPS, SMALL

# ---------------------------------------------------------------------- pickles

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def batch(**changes: object) -> bytes:
    """A batch of four images as CIFAR-10 has them, but for the keys given."""
    table = {b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 3]}
    table |= {name.encode(): value for name, value in changes.items()}
    return pickle.dumps(table, 2)


def cifar(name: str, *verdicts: str, second: bool = False, **options: object) -> Callable:
    """Register a first (or second) batch among good ones."""

    def register(make: Callable[[], bytes]) -> Callable:
        @hostile("pickle", *(verdicts or (REFUSED,)), name=f"pickle: {name}", **options)
        def write(place: Place) -> tuple[str, ...]:
            for each in BATCHES:
                (place.input / each).write_bytes(batch())
            (place.input / BATCHES[second]).write_bytes(make())
            return place.train("--data.name", "cifar10", "--data.path", place.input)

        return make

    return register


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


class _Call:
    """Pickles as a call of the program that must not be started."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple:
        return self._call


BINGET, MEMO = b"h", b"q"

cifar("os.system, protocol 0")(lambda: b"cposix\nsystem\n(S'hostile'\ntR.")
cifar("os.system among labels")(lambda: batch(labels=[0, 1, 2, _Call(os.system, "hostile")]))
cifar("builtins.eval by a name on the stack")(
    lambda: pickle.dumps(_Call(eval, "__import__('os').system('hostile')"), 4)
)
cifar("an old instance of os._wrap_close")(lambda: b"(S'hostile'\niposix\nsystem\n.")
cifar("an object built by posix.system")(lambda: b"(cposix\nsystem\nS'hostile'\no.")
cifar("a dotted name through numpy")(lambda: opcodes(b"\x8c\x05numpy", b"\x8c\x0ff2py.os.system..x", b"\x93"))
cifar("numpy.core.multiarray._reconstruct.__globals__")(
    lambda: opcodes(b"\x8c\x15numpy.core.multiarray", b"\x8c\x1a_reconstruct.__globals__.x", b"\x93")
)  # fmt: skip
cifar("numpy's loader of files")(lambda: b"cnumpy\nload\n(S'/etc/passwd'\ntR.")
cifar("a code of the registry")(lambda: opcodes(b"\x82\x01"))
cifar("a persistent number")(lambda: b"Phostile\n.")
cifar("a state that sets __class__")(lambda: b"cnumpy\nndarray\n(tR}S'__class__'\ncposix\nsystem\nsb.")
cifar("a state of a function")(lambda: b"cnumpy.core.multiarray\n_reconstruct\n}S'__code__'\nI1\nsb.")
cifar("an encoder of another kind")(lambda: b"c_codecs\nencode\n(Vx\nS'zlib'\ntR.")
cifar("LONG4 of 2^31 - 1 bytes")(lambda: opcodes(b"\x8b" + struct.pack("<i", 2**31 - 1)))
cifar("LONG4 of -1 bytes")(lambda: opcodes(b"\x8b" + struct.pack("<i", -1)))
cifar("a decimal of 10^7 digits")(lambda: b"L" + b"9" * 10**7 + b"L\n.")
cifar("BINUNICODE8 of 2^62 bytes")(lambda: opcodes(b"\x8d" + struct.pack("<Q", 1 << 62)))
cifar("BINBYTES8 of 2^33 bytes")(lambda: opcodes(b"\x8e" + struct.pack("<Q", 1 << 33)))
cifar("BYTEARRAY8 of 2^32 bytes")(lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 32) + b".")
cifar("BYTEARRAY8 of 2^40 bytes")(lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".")
cifar("a frame of 2^62 bytes")(lambda: opcodes(b"\x95" + struct.pack("<Q", 1 << 62) + b"N"))
cifar("a memo of 2^28 entries in 10 bytes")(lambda: opcodes(b"N" + b"r" + struct.pack("<I", 1 << 28)))
cifar("a memo of 2^32 - 1 entries in 10 bytes")(lambda: opcodes(b"N" + b"r" + struct.pack("<I", 2**32 - 1)))
cifar("a memo of 10^12 entries in text")(lambda: b"Np1000000000000\n.")
cifar("lists doubled 40 times")(
    lambda: opcodes(b"]\x94", *[b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(40)])
)
cifar("a key of tuples doubled 40 times")(
    lambda: opcodes(b"}(", b"K\x01\x85\x94", *[b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(40)],
                    b"Nu")  # fmt: skip
)
cifar("a text doubled 40 times by memory")(lambda: opcodes(b"}(C\x06labels](", b"X\0\0\x10\0" + b"a" * (1 << 20)
                                                           + b"\x94",  # fmt: skip
                                                           b"h\0" * 10**6, b"eu"))  # fmt: skip
cifar("10^6 lists in one another")(lambda: opcodes(b"]" * 10**6, b"a" * (10**6 - 1)))
cifar("10^6 marks")(lambda: opcodes(b"(" * 10**6))
cifar("a mark that is missing")(lambda: opcodes(b"u"))
cifar("no end")(lambda: batch()[:-1])
cifar("a key that is no text")(lambda: pickle.dumps({1: 2, None: 3, b"data": np.zeros((4, 3072), np.uint8)}, 2))
cifar("a key of bytes that is no text twice", REFUSED, SURVIVED)(
    lambda: pickle.dumps({b"data": np.zeros((4, 3072), np.uint8), "data": 1, b"labels": [0, 1, 2, 3]}, 2)
)
cifar("ragged labels")(lambda: batch(labels=[0, [1, 2], 3, 4]))
cifar("ragged labels in a second batch", second=True)(lambda: batch(labels=[[0], [1, 2], [], 4]))
cifar("labels in labels in labels")(lambda: batch(labels=[[[[0]]], 1, 2, 3]))
cifar("labels of texts")(lambda: batch(labels=["0", "1", "2", "3"]))
cifar("labels of NaN")(lambda: batch(labels=[float("nan")] * 4))
cifar("labels of true and false", REFUSED, SURVIVED)(lambda: batch(labels=[True, False, True, False]))
cifar("labels of nothing")(lambda: batch(labels=[None] * 4))
cifar("labels of 10^400")(lambda: batch(labels=[10**400, 1, 2, 3]))
cifar("labels of -1")(lambda: batch(labels=[-1, 1, 2, 3]))
cifar("labels of 2^63")(lambda: batch(labels=[2**63, 1, 2, 3]))
cifar("labels that are a mapping")(lambda: batch(labels={0: 1}))
cifar("fewer labels")(lambda: batch(labels=[0]))
cifar("images of floats")(lambda: batch(data=np.zeros((4, 3072), np.float32)))
cifar("images of objects")(lambda: batch(data=np.array([[None] * 3072] * 4, object)))
cifar("images big-endian")(lambda: batch(data=np.zeros((4, 3072), ">i4")))
cifar("images of another shape")(lambda: batch(data=np.zeros((4, 3, 1024), np.uint8)))
cifar("images as a list")(lambda: batch(data=[[0] * 3072] * 4))
cifar("images of dates")(lambda: batch(data=np.zeros((4, 3072), "M8[s]")))
cifar("images of records")(lambda: batch(data=np.zeros(4, [("a", "u1", 3072)])))


def _array_state(shape: tuple, content: bytes, fortran: bool = False) -> bytes:
    """A batch whose array's pickle says another shape."""
    whole = pickle.dumps({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 3]}, 0)
    return whole.replace(b"I4\nI3072\n", b"".join(b"L%dL\n" % side for side in shape)) if shape else whole


cifar("an array of a shape of 2^40")(lambda: _array_state((1 << 40, 3072), b""))
cifar("an array of a negative shape", REFUSED, SURVIVED)(lambda: _array_state((-4, 3072), b""))
cifar("an array of a shape that overflows")(lambda: _array_state((1 << 62, 1 << 62), b""))
cifar("an array of a shape of 10^400")(lambda: _array_state((10**400, 1), b""))


def other_batch(name: str, make: Callable[[Path], None]) -> None:
    @hostile("pickle", REFUSED, name=f"pickle: {name}")
    def write(place: Place) -> tuple[str, ...]:
        for each in BATCHES[1:]:
            (place.input / each).write_bytes(batch())
        make(place.input / BATCHES[0])
        return place.train("--data.name", "cifar10", "--data.path", place.input)


def _truncated(path: Path, size: int, head: bytes = b"") -> None:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)


other_batch("a link to /dev/zero", lambda path: path.symlink_to("/dev/zero"))
other_batch("a pipe", lambda path: os.mkfifo(path))
other_batch("3 GiB of bytes",
            lambda path: _truncated(path, 3 << 30, opcodes(b"\x8e" + struct.pack("<Q", 3 << 30))[:-1]))  # fmt: skip


# ---------------------------------------------------------------------- parquet

FEATURES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b"]}}
STREAMED = ("--data.name", "huggingface", "--data.streaming", "true", "--data.validation_fraction", 0,
            "--data.shuffle_row_groups", 4, *SMALL)  # fmt: skip


def rows(
    images: list[bytes | None], labels: list | None = None, features: object = FEATURES, **options: object
) -> bytes:
    """A parquet file as Hugging Face `datasets` writes one."""
    struct_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    column = pa.array([{"bytes": image, "path": "../../precious/thesis.txt"} for image in images], struct_type)
    table = pa.table({"image": column, "label": labels or [number % 2 for number in range(len(images))]})
    if features is not None:
        text = features if isinstance(features, str) else json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": text})
    file = io.BytesIO()
    parquet.write_table(table, file, **options)
    return file.getvalue()


def streamed(name: str, *verdicts: str, **options: object) -> Callable:
    """Register a parquet file that is streamed."""

    def register(make: Callable[[], bytes]) -> Callable:
        @hostile("parquet", *(verdicts or (REFUSED,)), name=f"parquet: {name}", **options)
        def write(place: Place) -> tuple[str, ...]:
            (place.input / "train-0.parquet").write_bytes(make())
            return place.train(*STREAMED, "--data.path", place.input)

        return make

    return register


IMAGES = [image_bytes(number) for number in range(12)]


def cut(content: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new) and old in content
    return content.replace(old, new)


streamed("images of nothing")(lambda: rows([None] * 12))
streamed("an image of nothing, path outside", SURVIVED)(lambda: rows([None, *IMAGES]))
streamed("PostScript", SURVIVED)(
    lambda: rows([EPS, *IMAGES])
)
streamed("names that are no list")(
    lambda: rows(IMAGES, features=FEATURES | {"label": {"_type": "ClassLabel", "names": 7}})
)
streamed("names that are numbers", REFUSED, SURVIVED)(
    lambda: rows(IMAGES, features=FEATURES | {"label": {"_type": "ClassLabel", "names": [1, None, ["x"]]}})
)
streamed("names that are a mapping", REFUSED, SURVIVED)(
    lambda: rows(IMAGES, features=FEATURES | {"label": {"_type": "ClassLabel", "names": {"a": 1}}})
)
streamed("names of escape sequences", REFUSED, SURVIVED)(
    lambda: rows(IMAGES, features=FEATURES | {"label": {"_type": "ClassLabel", "names": ["\x1b[2J\x07", "<b>x</b>"]}})
)
streamed("10^6 names", REFUSED, SURVIVED)(
    lambda: rows(IMAGES, features=FEATURES | {"label": {"_type": "ClassLabel",
                                                        "names": [str(n) for n in range(10**6)]}})  # fmt: skip
)
streamed("features nested 10^5 times", REFUSED, SURVIVED)(
    lambda: rows(IMAGES, features='{"info":' * 10**5 + "1" + "}" * 10**5)
)
streamed("features that are a list", REFUSED, SURVIVED)(lambda: rows(IMAGES, features='{"info": {"features": [1, 2]}}'))
streamed("features of other columns")(
    lambda: rows(IMAGES, features={"picture": {"_type": "Image"}, "y": {"_type": "ClassLabel"}})
)
streamed("features that say the label is the image")(
    lambda: rows(IMAGES, features={"label": {"_type": "Image"}, "image": {"_type": "ClassLabel", "names": ["a"]}})
)
streamed("columns of escape sequences")(
    lambda: rows(IMAGES, features={"\x1b[2J\nx": {"_type": "Value", "dtype": "\x1b[31m"}, "label": FEATURES["label"]})
)
streamed("labels of 2^60 without names", REFUSED, SURVIVED)(lambda: rows(IMAGES, [1 << 60] * 12, features=None))
streamed("negative labels")(lambda: rows(IMAGES, [-1] * 12))
streamed("labels of nothing", REFUSED, STOPPED)(lambda: rows(IMAGES, [None] * 11 + [1]))  # seen when they are read
streamed("labels of texts")(lambda: rows(IMAGES, ["<b>"] * 12))
streamed("labels of NaN")(lambda: rows(IMAGES, [float("nan")] * 12))
streamed("labels of lists")(lambda: rows(IMAGES, [[1], [], [2, 3]] * 4))
streamed("no rows")(lambda: rows([]))
streamed("no columns")(lambda: _written(pa.table({})))
streamed("a column twice", REFUSED, SURVIVED)(
    lambda: _written(pa.Table.from_arrays([pa.array(IMAGES), pa.array(IMAGES), pa.array([0] * 12)],
                                          ["image", "image", "label"]))  # fmt: skip
)
streamed("a footer of 2^31 bytes")(lambda: rows(IMAGES)[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1")
streamed("an encrypted footer")(lambda: rows(IMAGES)[:-4] + b"PARE")
streamed("a footer of noise")(lambda: b"PAR1" + b"\x7f" * 4096 + struct.pack("<I", 4096) + b"PAR1")
streamed("a footer nested 10^5 times")(lambda: b"PAR1" + b"\x1c" * 10**5 + struct.pack("<I", 10**5) + b"PAR1")
streamed("cut off")(lambda: rows(IMAGES)[:500])
# A read that fails is tried again after 1, 4 and 16 s: the file may be far away.
streamed("pages overwritten", REFUSED, SURVIVED, long=True, seconds=40.0)(lambda: _overwritten())
streamed("one image of 1 MiB 4,000 times by a dictionary", REFUSED, SURVIVED)(lambda: _repeated(FEATURES))


def _written(table: pa.Table) -> bytes:
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


def _repeated(features: dict | None) -> bytes:
    """One large image in 4,000 rows, stored once."""
    images = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), pa.array([IMAGES[0] + bytes(1 << 20)]))
    bytes_type = pa.struct([("bytes", images.type)])
    table = pa.table({"image": pa.StructArray.from_arrays([images], fields=list(bytes_type)), "label": [0, 1] * 2000})
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 26)
    return file.getvalue()


def _overwritten() -> bytes:
    whole = bytearray(rows(IMAGES, compression="none"))
    whole[40:400] = b"\xff" * 360
    return bytes(whole)


def cifar_table(name: str, *verdicts: str) -> Callable:
    """Register a parquet file for cifar10, read as a whole."""

    def register(make: Callable[[], bytes]) -> Callable:
        @hostile("parquet", *(verdicts or (REFUSED,)), name=f"parquet of CIFAR: {name}")
        def write(place: Place) -> tuple[str, ...]:
            (place.input / "train-0.parquet").write_bytes(make())
            return place.train("--data.name", "cifar10", "--data.path", place.input)

        return make

    return register


cifar_table("one image of 1 MiB 4,000 times")(lambda: _repeated(None))
cifar_table("images of nothing without statistics")(lambda: rows([None] * 20, features=None, write_statistics=False))
cifar_table("images of another size")(lambda: rows(IMAGES, features=None))
cifar_table("PostScript")(
    lambda: rows([EPS] * 12, features=None)
)
cifar_table("labels of 2^60")(lambda: rows(IMAGES, [1 << 60] * 12, features=None))
cifar_table("a pipe in its place")(lambda: b"")


# ---------------------------------------------------------------------- NumPy's arrays


def npy(header: str | bytes, version: int = 1, content: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + text + content


def array_file(name: str, make: Callable[[], bytes]) -> None:
    """Register one array, met as latents by the decoder and as published latents by the converter."""

    @hostile("array of numbers", REFUSED, name=f"npy: {name}, decoded")
    def decode(place: Place) -> tuple[str, ...]:
        (place.input / "x.npy").write_bytes(make())
        return ("cosmos_latent_decoder.py", "decode", str(place.input / "x.npy"), "--path", str(place.input),
                "--output", str(place.outputs))  # fmt: skip

    @hostile("array of numbers", REFUSED, name=f"npy: {name}, converted")
    def convert(place: Place) -> tuple[str, ...]:
        for kind, content in (("features", make()),
                              ("labels", npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1,)}"))):  # fmt: skip
            (place.input / f"x_{kind}").mkdir()
            (place.input / f"x_{kind}" / "0.npy").write_bytes(content)
        return ("scripts/latents.py", "convert", str(place.input), "--output", str(place.outputs / "store"))


def _object_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([_Call(os.system, "hostile")], object), allow_pickle=True)
    return file.getvalue()


def _archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


FORM = "{'descr': '%s', 'fortran_order': %s, 'shape': %s}"
ARRAYS: dict[str, Callable[[], bytes]] = {
    "objects that are calls": _object_array,
    "an archive": _archive,
    "code in the header": lambda: npy("__import__('os').system('hostile')", 3),
    "code in the type": lambda: npy(
        "{'descr': __import__('os').system('hostile'), 'fortran_order': False, 'shape': (1,)}", 3
    ),
    "a shape that overflows": lambda: npy(FORM % ("<f4", "False", "(4294967296, 4294967296, 4294967296, 4)")),
    "a negative shape": lambda: npy(FORM % ("<f4", "False", "(-1, 4, 8, 8)")),
    "a shape of 10^5 digits": lambda: npy(FORM % ("<f4", "False", "(" + "9" * 10**5 + ",)"), 2),
    "a shape of true": lambda: npy(FORM % ("<f4", "False", "(True, True, True, True)")),
    "a header of 4 GiB": lambda: npy("x", 3, length=2**32 - 1),
    "a header nested 10^5 times": lambda: npy("(" * 10**5 + ")" * 10**5, 3),
    "a header of NULs": lambda: npy(b"\0" * 118),
    "complex numbers": lambda: npy(FORM % ("<c8", "False", "(1, 4, 2, 2)"), content=b"\0" * 256),
    "a type of 2^31 bytes": lambda: npy(FORM % ("<U2147483647", "False", "(1,)")),
    "records": lambda: npy("{'descr': [('a', '<f4'), ('\\x1b[2J', '<f4')], 'fortran_order': False, 'shape': (1,)}"),
    "fewer bytes than it says": lambda: npy(FORM % ("<f4", "False", "(1, 4, 64, 64)")),
    "version 9": lambda: npy("x", 9),
}
for _name, _make in ARRAYS.items():
    array_file(_name, _make)


# ---------------------------------------------------------------------- safetensors


def tensors(header: object, content: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def one(dtype: object = "F32", shape: object = (1, 4, 2, 2), offsets: object = (0, 64), **more: object) -> dict:
    return {"latents": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **more}


TENSORS: dict[str, Callable[[], bytes]] = {
    "offsets that overlap": lambda: tensors(one(labels={"dtype": "F32", "shape": [16], "data_offsets": [0, 64]})),
    "a header of 2^62 bytes": lambda: tensors(one(), length=1 << 62),
    "a header of 99 MB of spaces": lambda: tensors(b" " * 99_000_000 + b"{}"),
    "the same name twice": lambda: tensors(json.dumps(one())[:-1].encode() + b", "
                                           + json.dumps(one("I64"))[1:].encode()),  # fmt: skip
    "NaN as metadata": lambda: tensors(b'{"__metadata__": {"normalization": NaN}, ' + json.dumps(one())[1:].encode()),
    "metadata nested 10^5 times": lambda: tensors(one(__metadata__={"normalization": "[" * 10**5})),
    "metadata of escape sequences": lambda: tensors(
        one(__metadata__={"autoencoder": '{"name": "\\u001b[2J\\n", "sha256": "\\u0007"}'})
    ),
    "a shape that overflows": lambda: tensors(one(shape=[1 << 40, 1 << 40, 1 << 40, 4])),
    "a shape of 10^30": lambda: tensors(one(shape=[10**30])),
    "a negative shape": lambda: tensors(one(shape=[-1, -4, 2, 2])),
    "an unknown type": lambda: tensors(one("\x1b[2JF31")),
    "names of escape sequences": lambda: tensors({"\x1b[2J\n\x07": one()["latents"]}),
    "10^5 tensors of nothing": lambda: tensors({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                                                for n in range(10**5)}, b""),  # fmt: skip
    "a header nested 10^5 times": lambda: tensors(b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
    "text": lambda: b"<html>" * 99,
}


def tensor_file(name: str, make: Callable[[], bytes]) -> None:
    """Register one file, met by whatever reads such files."""
    readers = {
        "decoded": lambda path, place: ("cosmos_latent_decoder.py", "decode", path, "--path", place.input,
                                        "--output", place.outputs),
        "converted": lambda path, place: ("scripts/latents.py", "convert", path, "--output", place.outputs / "store"),
        "as initial weights": lambda path, place: place.train("--data.name", "synthetic", "--checkpoint.enable", "true",
                                                              "--checkpoint.initial_weights", path),
        "sampled from": lambda path, place: ("scripts/sample.py", path, "--config", place.folder / "small.toml"),
    }  # fmt: skip
    for doing, words in readers.items():

        @hostile("safetensors", REFUSED, name=f"safetensors: {name}, {doing}", long=doing == "sampled from")
        def write(place: Place, words: Callable = words) -> tuple[str, ...]:
            path = place.input / "x.safetensors"
            path.write_bytes(make())
            return tuple(map(str, words(path, place)))


for _name, _make in TENSORS.items():
    tensor_file(_name, _make)


def no_plain_file(name: str, make: Callable[[Path], None]) -> None:
    """Register what has a file's name and is none."""
    for suffix in ("npy", "safetensors"):

        @hostile("safetensors", REFUSED, name=f"{suffix}: {name}")
        def write(place: Place, suffix: str = suffix) -> tuple[str, ...]:
            make(place.input / f"x.{suffix}")
            return ("cosmos_latent_decoder.py", "decode", str(place.input), "--path", str(place.input),
                    "--output", str(place.outputs))  # fmt: skip


no_plain_file("a pipe", lambda path: os.mkfifo(path))
no_plain_file("a folder", lambda path: path.mkdir())
no_plain_file("a link to /dev/zero", lambda path: path.symlink_to("/dev/zero"))
no_plain_file("a hole of 2^40 bytes", lambda path: _truncated(path, 1 << 40))


@hostile("safetensors", REFUSED, name="safetensors: NaN as initial weights")
def _(place: Place) -> tuple[str, ...]:
    # Of the names and shapes that the refusal itself lists; the product's own export is not asked.
    (place.input / "x.safetensors").write_bytes(save({"patch_embed.weight": np.full((16, 3, 2, 2), np.nan,
                                                                                    np.float32)}))  # fmt: skip
    return place.train("--data.name", "synthetic", "--checkpoint.initial_weights", place.input / "x.safetensors")
