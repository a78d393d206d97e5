"""Random damage to files of known formats: to their bytes, to what they mean, or both."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.test_config_fuzz import MUTATIONS as TEXT_MUTATIONS
from torchtitan.checkpoint.manifest import MANIFEST, read_manifest, write_manifest

Damage = Callable[[random.Random, bytes], bytes]

REPLACEMENTS = [
    b"", b"\n", b"null", b"[]", b"[1]", b"{}", b'"text"', b"1", b"NaN", b"\xff\xfe", b"\x00" * 64, b'{"step": ',
    b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"9" * 10_000, b'{"step": ' + b"9" * 10_000 + b"}",
    bytes(range(256)), b"\xef\xbb\xbf{}",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, 1 << 200, -(1 << 200), 0.5, 1e308, float("nan"), float("inf"), "",
    "x" * 5000, "../../x", "/etc/passwd", "\x00", "\ud800", "completed", "F32", "I32", [], [[]], {}, [1, 2],
    [0, 1 << 60], {"a": 1}, [None], "NaN", "step",
]  # fmt: skip


def damage_bytes(draw: random.Random, content: bytes) -> bytes:
    """Change, cut, double, move or replace bytes."""
    changed = bytearray(content)
    kind = draw.randrange(6)
    if kind == 0 or not changed:
        return draw.choice(REPLACEMENTS)
    begin = draw.randrange(len(changed))
    end = min(len(changed), begin + draw.choice([1, 2, 8, 64, len(changed)]))
    if kind == 1:
        return bytes(changed[:begin])
    if kind == 2:
        del changed[begin:end]
    elif kind == 3:
        changed[begin:begin] = changed[begin:end]
    elif kind == 4:
        changed[begin:begin] = draw.choice([draw.randbytes(8), *REPLACEMENTS[:12]])
    else:
        for _ in range(draw.choice([1, 1, 2, 8])):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def damage_json(draw: random.Random, content: bytes) -> bytes:
    """Put another value, another name, one more or one less somewhere in a document, or damage its bytes."""
    if draw.random() < 0.3:
        return damage_bytes(draw, content)
    document = json.loads(content)
    for _ in range(draw.choice([1, 1, 2])):
        document = _changed(draw, document)
    return json.dumps(document, indent=draw.choice([None, 1])).encode()


def _changed(draw: random.Random, document: Any) -> Any:
    places = list(_places(document))
    if not places or draw.random() < 0.03:
        return draw.choice(VALUES)
    container, key = draw.choice(places)
    kind = draw.randrange(4)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        name = draw.choice([key.upper(), key[:-1], f"{key} ", "", "__metadata__", "../x", "step"])
        container[name] = container.pop(key)
    elif kind == 2 and isinstance(container[key], int | float):
        value = container[key]
        container[key] = draw.choice([value + 1, value - 1, -value, float(value), str(value), value > 0, 1000 * value])
    else:
        container[key] = draw.choice(VALUES)
    return document


def _places(value: Any) -> Any:
    """Every (container, key or index) in a document."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def damage_lines(draw: random.Random, content: bytes) -> bytes:
    """Damage a line of JSON among others, or leave some out, double or move them."""
    lines = content.splitlines(keepends=True)
    if not lines or draw.random() < 0.2:
        return damage_bytes(draw, content)
    at = draw.randrange(len(lines))
    if draw.random() < 0.3:
        lines.insert(draw.randrange(len(lines)), draw.choice([lines[at], lines.pop(at)]))
    else:
        lines[at] = damage_json(draw, lines[at]).replace(b"\n", b" ") + b"\n"
    return b"".join(lines)


def damage_text(draw: random.Random, content: bytes) -> bytes:
    """Damage TOML as a person might, or its bytes."""
    if draw.random() < 0.2:
        return damage_bytes(draw, content)
    return draw.choice(TEXT_MUTATIONS)(draw, content.decode()).encode()


def damage_safetensors(draw: random.Random, content: bytes) -> bytes:
    """Damage the header of a safetensors file, its length, or what follows it."""
    length = int.from_bytes(content[:8], "little")
    header, values = content[8 : 8 + length], content[8 + length :]
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice([0, 1, length + 1, length - 1, 1 << 40, (1 << 64) - 1]).to_bytes(8, "little") + content[8:]
    if kind == 1:
        return content[: draw.randrange(len(content))]
    if kind == 2:
        return damage_bytes(draw, content)
    damaged = damage_json(draw, header)
    if kind < 6:
        damaged += b" " * (-len(damaged) % 8)
    return len(damaged).to_bytes(8, "little") + damaged + values


def make_sums_fit(checkpoint: Path, name: str) -> None:
    """Let a checkpoint's manifest say of a damaged file what it is now: only its content can give it away."""
    content, files = (checkpoint / name).read_bytes(), read_manifest(checkpoint)
    files[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, files)
