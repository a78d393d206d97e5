"""Pickles: what each protocol writes is read, and none takes memory, time or names that it should not."""

import pickle
import struct

import numpy as np
import pytest

from tests.faults.confinement import bounded
from tests.unit.test_cifar10 import BATCH, write_batches
from torchtitan.data import DatasetError, numpy_pickle
from torchtitan.data.cifar10 import Cifar10, Cifar10Config
from torchtitan.data.numpy_pickle import read_table

MIB = 1 << 20
TABLE = {
    b"bytes": bytes(range(256)), "text": "é", "labels": [0, -1, 2**31, 70_000, -(2**63)], "truth": [True, False, None],
    "pair": (1.5, ()), "nested": {"a": [(1,), (1, 2, 3, 4)]}, 7: "a number for a key",
}  # fmt: skip


def write(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    return tmp_path / "x"


@pytest.mark.parametrize("protocol", range(6))
def test_tables_of_every_protocol_are_read_as_the_library_reads_them(tmp_path, protocol):
    repeated = TABLE | {"again": TABLE["labels"]}  # the same object twice: by reference
    found = read_table(write(tmp_path, pickle.dumps(repeated, protocol)))
    assert found == {"bytes" if key == b"bytes" else key: value for key, value in repeated.items()}


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("array", [
    np.arange(6, dtype=np.uint8).reshape(2, 3), np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
    np.arange(4, dtype=np.int64),
])  # fmt: skip
def test_arrays_of_every_protocol_are_read(tmp_path, protocol, array):
    found = read_table(write(tmp_path, pickle.dumps({"data": array}, protocol)))["data"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def array_of(shape, content=b"abc"):
    """A pickled table with an array of bytes of any stated shape."""
    numbers = b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in shape) + b"t"
    return (
        b"\x80\x02}X\4\0\0\0datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R(K\1" + numbers
        + b"cnumpy\ndtype\nU\2u1K\0K\1\x87R(K\3U\1|NNNK\0K\0K\0tb\x89B" + struct.pack("<I", len(content)) + content
        + b"tbs."
    )  # fmt: skip


def doubled(levels, key=False):
    """A tuple of two of the tuple before, many times: 2 ** levels leaves, each a reference."""
    return b"\x80\x02}" + (b"" if key else b"U\1x") + b"K\0" + b"q\0h\0\x86" * levels + (b"K\1" if key else b"") + b"s."


HOSTILE = {
    "bytes of 4.3 GB": (b"\x80\x04B\xff\xff\xff\xff.", "cut short: 4,294,967,295 bytes"),
    "bytes of 2^63": (b"\x80\x04\x8e" + b"\xff" * 8 + b".", "cut short: 18,446,744,073,709,551,615 bytes"),
    "text of 2^62": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62), "cut short"),
    "text of -1 byte": (b"T\xff\xff\xff\xff.", "cut short: -1 bytes"),
    "an integer of 2 GB": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "an integer of 2,147,483,647 bytes"),
    "an integer of many digits": (b"L" + b"9" * MIB + b"L\n.", "damaged (ValueError"),
    "a place in memory of 4.3 G": (b"\x80\x02Nr\xff\xff\xff\xff.", "not a dict"),
    "a frame of 2^63": (b"\x80\x04\x95" + b"\xff" * 8 + b"}.", ""),
    "a million lists": (b"]" * MIB, "more than 100,000 operations"),
    "a key of many tuples": (doubled(200, key=True), "damaged (TypeError"),
    "the same text again": (
        b"\x80\x02X\0\0\x10\0" + b"a" * MIB + b"q\0" + b"c_codecs\nencode\nh\0X\6\0\0\0latin1\x86R" * 500 + b".",
        "the same text again and again",
    ),
    "an empty file": (b"", "cut short: 1 bytes"),
    "nothing on the stack": (b"\x80\x02.", "damaged (IndexError"),
    "no mark": (b"\x80\x02t.", "damaged (IndexError"),
    "an unknown reference": (b"\x80\x02h\x07.", "damaged (KeyError"),
    "an odd number of items": (b"\x80\x02}(K\1u.", "damaged (ValueError"),
    "a list for a key": (b"\x80\x02}]K\1s.", "damaged (TypeError"),
    "an object": (b"\x80\x02cnumpy\nndarray\n)\x81.", "an operation b'\\x81', which numbers"),
    "a call of an array": (b"\x80\x02cnumpy\nndarray\n)R.", "a call of what is no function"),
    "a call of a number": (b"\x80\x02K\1)R.", "a call of what is no function"),
    "no arguments": (b"\x80\x02cnumpy\ndtype\n)R.", "damaged (TypeError"),
    "a persistent name": (b"Pname\n.", "an operation b'P'"),
    "an extension": (b"\x80\x02\x82\x01.", "an operation b'\\x82'"),
    "a shape of 2^62 rows": (array_of((1 << 62, 2)), "damaged (ValueError"),
    "a shape of more than is there": (array_of((4,)), "damaged (ValueError"),
    "an endless name": (b"c" + b"a" * MIB, "damaged (ValueError"),
    "a long name": (b"c" + b"a" * MIB + b"\nb\n", "it names aaa"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pickle_is_refused_soon_and_in_little_memory(tmp_path, case, monkeypatch):
    monkeypatch.setattr(numpy_pickle, "MAX_STEPS", 100_000)
    content, reason = HOSTILE[case]
    path = write(tmp_path, content)
    with bounded(20, 500 * MIB):
        try:
            assert read_table(path) == {} and not reason
        except pickle.UnpicklingError as error:
            assert reason in str(error) and len(str(error)) < 200 and "\n" not in str(error)


def test_shared_parts_take_no_memory_and_are_no_labels(tmp_path):
    with bounded(20, 200 * MIB):
        read_table(write(tmp_path, doubled(10_000)))
    write_batches(tmp_path, data_batch_5=BATCH)
    batch = pickle.dumps({b"data": BATCH[b"data"]}, 2)
    lists = b"(K\0" + b"q\0h\0\x86" * 60 + b"l"  # 2 ** 60 numbers, if they were copied
    (tmp_path / "data_batch_5").write_bytes(batch.removesuffix(b".") + b"U\6labels" + lists + b"s.")
    with bounded(20, 200 * MIB), pytest.raises(DatasetError, match="'labels' is not a list of 3 integers"):
        Cifar10.info(Cifar10Config(path=str(tmp_path)))


@pytest.mark.parametrize("labels", [
    [1, [2, 3], 4], [1, 2.0, 3], [True, 1, 2], [1, 2, 2**80], "abc", None, (1, 2, 3), {0: 1}, [[1], [2], [3]], [1, 2],
])  # fmt: skip
def test_labels_that_are_no_list_of_integers_are_refused_in_one_line(tmp_path, labels):
    write_batches(tmp_path, data_batch_5=BATCH | {b"labels": labels})
    with pytest.raises(DatasetError, match="data_batch_5: 'labels' is not a list of 3 integers$"):
        Cifar10.info(Cifar10Config(path=str(tmp_path)))
