"""Checkpoints made to mislead: their checksums are right, their content is not. They are named and not loaded."""

import hashlib
import json
import random
import resource
from pathlib import Path

import pytest
import torch

from torchtitan.checkpoint.checkpointer import Checkpointer, checkpoint_path, newest_good, verify
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.manifest import read_manifest, write_manifest
from torchtitan.files.shard_files import DamagedShard, Piece, check_shards, write_shard

SHARD = "shard-00001.safetensors"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    keeper = Checkpointer(tmp_path / "checkpoint", CheckpointConfig(), rank=0)
    for step in (1, 2):
        tensors = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(5, dtype=torch.uint8)}
        keeper.save(step, tensors, {"step": step})
    return checkpoint_path(keeper.folder, 2)


def replace(checkpoint: Path, name: str, content: bytes) -> None:
    """Put a file into a checkpoint, manifest included."""
    files = read_manifest(checkpoint)
    (checkpoint / name).write_bytes(content)
    files[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, files)


def split(shard: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(shard[:8], "little")
    return json.loads(shard[8 : 8 + length]), shard[8 + length :]


def joined(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def refused(checkpoint: Path, words: str) -> None:
    assert words in verify(checkpoint)
    step, skipped = newest_good(checkpoint.parent)
    assert step == 1 and len(skipped) == 1 and "\n" not in skipped[0]


STATES = {
    "list": b"[1]", "nested": b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "cut off": b'{"step": ',
    "binary": bytes(range(256)), "huge number": b'{"step": ' + b"9" * 10_000 + b"}", "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_something_else_is_damaged(checkpoint, name):
    replace(checkpoint, "state.json", STATES[name])
    refused(checkpoint, "state.json is damaged")


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_json_larger_than_any_is_not_read(checkpoint, name):
    replaced = checkpoint / name
    with open(replaced, "r+b") as file:
        file.truncate(1 << 36)  # a hole: no disk is used
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(checkpoint, f"{name} ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "name",
    ["../../elsewhere", "/etc/hostname", "a/b", "..", ".", "", ".hidden", "manifest.json", "a\0b", "x" * 300, "a\nb"],
)
def test_a_manifest_that_names_files_elsewhere_is_damaged(checkpoint, name):
    files = read_manifest(checkpoint) | {name: {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, files)
    refused(checkpoint, "manifest.json is damaged")


@pytest.mark.parametrize("entry", [
    {}, [], None, {"size": True, "sha256": "0" * 64}, {"size": 1.0, "sha256": "0" * 64}, {"size": 1, "sha256": 7},
    {"size": 1, "sha256": "0" * 63}, {"size": 1, "sha256": "0" * 64, "more": 1},
])  # fmt: skip
def test_a_manifest_entry_of_another_type_is_damaged(checkpoint, entry):
    files = read_manifest(checkpoint) | {"other.safetensors": entry}
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, files)
    refused(checkpoint, "manifest.json is damaged")


def test_a_manifest_without_the_state_is_damaged(checkpoint):
    files = read_manifest(checkpoint)
    del files["state.json"]
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, files)
    refused(checkpoint, "manifest.json is damaged")


def edited(**changes):
    def edit(header: dict) -> None:
        header["a"] |= changes
    return edit  # fmt: skip


def placed(name: str, offsets: object):
    def edit(header: dict) -> None:
        places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"]) | {name: {"saved_offsets": offsets}}
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)
    return edit  # fmt: skip


HEADERS = {
    "overlap": edited(data_offsets=[0, 5], dtype="U8", shape=[5]),
    "outside": edited(data_offsets=[0, 4800], shape=[300, 4]),
    "negative": edited(data_offsets=[-48, 0]),
    "backwards": edited(data_offsets=[48, 0]),
    "wrong shape": edited(shape=[3, 5]),
    "huge shape": edited(shape=[1 << 62, 1 << 62]),
    "negative shape": edited(shape=[-3, -4]),
    "shape of floats": edited(shape=[3.0, 4.0]),
    "unknown dtype": edited(dtype="F31"),
    "no shape": lambda header: header["a"].pop("shape"),
    "entry": lambda header: header.update(a=[1, 2]),
    "no metadata place": placed("b", None),
    "far away": placed("a", [1 << 40, 0]),
    "place of other rank": placed("a", [0]),
    "negative place": placed("a", [-1, 0]),
    "unplaced": lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="{}"),
    "places nested": lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="[" * 100_000),
    "metadata": lambda header: header.update(__metadata__=[]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_does_not_describe_its_file_is_damage(checkpoint, name):
    header, data = split((checkpoint / SHARD).read_bytes())
    HEADERS[name](header)
    replace(checkpoint, SHARD, joined(header, data))
    problem = verify(checkpoint)
    assert "header" in problem or "leave a gap" in problem
    refused(checkpoint, problem)


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_of_an_impossible_length_is_not_read(checkpoint, length):
    shard = (checkpoint / SHARD).read_bytes()
    replace(checkpoint, SHARD, length.to_bytes(8, "little") + shard[8:])
    refused(checkpoint, "the header's length is impossible")


@pytest.mark.parametrize("trials", [50, pytest.param(2000, marks=pytest.mark.long)])
def test_mutated_headers_are_refused_or_mean_the_same(tmp_path, trials):
    chance, file = random.Random(trials), tmp_path / SHARD
    write_shard(file, [Piece("a", torch.arange(12.0).reshape(3, 4), (0, 0)), Piece("b", torch.zeros(2), (0,))])
    whole = file.read_bytes()
    wanted, (length, _) = split(whole)[0], (int.from_bytes(whole[:8], "little"), None)
    for _ in range(trials):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            content[chance.randrange(8 + length)] = chance.randrange(256)
        file.write_bytes(content)
        try:
            check_shards([file])
        except DamagedShard:
            continue
        # A name, the format's word or white space: the bytes are shared out as before.
        header = split(bytes(content))[0]
        spans = [sorted(e["data_offsets"] for k, e in h.items() if k != "__metadata__") for h in (header, wanted)]
        assert spans[0] == spans[1]


def test_pieces_must_fill_a_tensor_once(tmp_path):
    def check(*places: tuple[int, int]) -> None:
        paths = []
        for number, (row, rows) in enumerate(places):
            paths.append(tmp_path / f"{row}-{rows}-{number}.safetensors")
            paths[-1].unlink(missing_ok=True)
            write_shard(paths[-1], [Piece("a", torch.zeros(rows, 2), (row, 0))])
        check_shards(paths)

    check((0, 3))
    check((0, 3), (3, 3), (6, 1))
    for wrong in ([(1, 3)], [(0, 3), (4, 3)], [(0, 3), (2, 3)], [(0, 3), (0, 3)], [(0, 3), (3, 3), (3, 3)]):
        with pytest.raises(DamagedShard, match="leave a gap or overlap"):
            check(*wrong)
