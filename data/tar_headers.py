"""Headers of a tar archive, one after the other, with every member checked against the archive's end.

Formats: POSIX ustar and pax (IEEE 1003.1-2001), GNU's long names and large numbers. The standard library's tarfile ends
silently at a damaged header, and loses the members behind it.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK = 512

REGULAR = (b"\0", b"0", b"7")
SPECIAL = {
    b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file",
}  # fmt: skip
_FOLDER = b"5"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL = b"L", b"K", b"xX", b"g"

_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*", re.DOTALL)
_BELOW_128 = bytes(range(128))
_RECORD_LENGTH = re.compile(rb"([1-9]\d{0,6}) ")

ReadAt = Callable[[int, int], bytes]


class TarError(Exception):
    """Not a tar archive, or a damaged one; the message names the place."""


class Entry(NamedTuple):
    """Entry: a member of any kind.

    Attributes:
        name: as it is stored, without a slash at its end.
        kind: the header's type flag.
        offset, size: of its content in bytes.
    """

    name: bytes
    kind: bytes
    offset: int
    size: int


class _Header(NamedTuple):
    name: bytes
    kind: bytes
    size: int


def walk(read_at: ReadAt, begin: int, end: int) -> Iterator[Entry]:
    """Walk over the members between two bytes, in their order.

    Args:
        read_at: reads so many bytes from an offset, fewer at the end.
        begin, end: of the archive, in bytes.

    Raises:
        TarError: it is cut short or damaged.
    """
    position = begin
    of_all: dict[bytes, bytes] = {}
    while True:
        own: dict[bytes, bytes] = {}
        while True:
            header = _header(read_at, position, begin, end)
            if header is None:
                return
            position += BLOCK
            if header.kind in (_LONG_NAME, _LONG_LINK):
                name = _extra(read_at, position, header, end).partition(b"\0")[0]
                own |= {b"path": name} if header.kind == _LONG_NAME else {}
            elif header.kind == _PAX_OF_ALL:
                of_all |= _records(_extra(read_at, position, header, end), position)
            elif header.kind in _PAX:
                own |= _records(_extra(read_at, position, header, end), position)
            else:
                break
            position += _blocks(header.size)
        entry = _entry(header, of_all | own, position)
        if entry.offset + entry.size > end:
            raise TarError(f"cut short: {entry.name.decode('utf-8', 'backslashreplace')!r} extends past byte {end}")
        yield entry
        position += _blocks(entry.size)


def _header(read_at: ReadAt, position: int, begin: int, end: int) -> _Header | None:
    """Header at a position; None at the block of zeros that ends an archive."""
    block = read_at(position, BLOCK) if position + BLOCK <= end else b""
    if len(block) < BLOCK:
        raise TarError(f"cut short at byte {end}: a tar's last block is missing")
    if not any(block):
        return None
    if _number(block[148:156]) not in _sums(block):
        first = "no tar archive, or damaged (its first header is none)"
        raise TarError(f"damaged at byte {position}: no tar header" if position else first)
    size, name, kind = _number(block[124:136]), block[:100].partition(b"\0")[0], block[156:157]
    if size is None:
        raise TarError(f"damaged at byte {position}: a size that is no number of bytes")
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    if kind == b"\0" and name.endswith(b"/"):  # the oldest format has no other sign of a folder
        kind = _FOLDER
    return _Header(prefix + b"/" + name if prefix else name, kind, size)


def _sums(block: bytes) -> tuple[int, int]:
    """Sum of the bytes with the sum's own field as spaces; old systems took bytes as signed."""
    others = block[:148] + b" " * 8 + block[156:]
    total = sum(others)
    return total, total - 256 * len(others.translate(None, _BELOW_128))


def _number(field: bytes) -> int | None:
    """Number in octal digits, or GNU's binary number after a byte 0x80; None for anything else, negative ones too."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    found = _OCTAL.fullmatch(field)
    return int(found[1] or b"0", 8) if found else None


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _extra(read_at: ReadAt, position: int, header: _Header, end: int) -> bytes:
    """Extra information of a header about the next member."""
    if position + header.size > end:
        raise TarError(f"cut short: a header extends past byte {end}")
    return read_at(position, header.size)


def _records(content: bytes, position: int) -> dict[bytes, bytes]:
    """Records of a pax header, each "length key=value\\n" whose length counts itself."""
    records, at = {}, 0
    while at < len(content) and content[at]:
        found = _RECORD_LENGTH.match(content, at)
        end = at + int(found[1]) if found else at
        record = content[found.end() : end] if found else b""
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n") or end > len(content):
            raise TarError(f"damaged at byte {position + at}: no record of a pax header")
        records[key] = value[:-1]
        at = end
    return records


def _entry(header: _Header, records: dict[bytes, bytes], position: int) -> Entry:
    name, kind, size = records.get(b"path", header.name), header.kind, header.size
    if b"size" in records:
        if not re.fullmatch(rb"\d{1,19}", records[b"size"]):
            raise TarError(f"damaged at byte {position - BLOCK}: a size that is no number of bytes")
        size = int(records[b"size"])
    if any(key.startswith(b"GNU.sparse.") for key in records):
        kind = b"S"
    # A link or folder may state a size, but nothing of it follows.
    return Entry(name.rstrip(b"/"), kind, position, 0 if kind == _FOLDER or kind in SPECIAL else size)
