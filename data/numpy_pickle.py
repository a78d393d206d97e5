"""Read a pickle of numbers, bytes and NumPy arrays without running any function that it names.

Loading a pickle calls any function that the file names, and reserves as much memory as its lengths ask for. Here only
the few operations of a table of arrays are executed: each of the few allowed names stands for a function of this file,
every length is compared with the rest of the file, and the number of operations is bounded.
"""

import codecs
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.files.regular import read_regular

MAX_BYTES = 256 << 20  # CIFAR-100's largest batch has 155 MB
MAX_STEPS = 2_000_000  # operations; that batch needs 300,000
MAX_INTEGER_BYTES = 16


class _ArrayType:
    """Placeholder for `numpy.ndarray` where a pickle names it."""


class _Array:
    """Placeholder for an array until its content has been read."""

    values: np.ndarray | None = None

    def fill(self, state: tuple) -> None:
        _, shape, element, fortran_order, content = state
        if not isinstance(element, _ElementType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array of something else than numbers")
        self.values = np.frombuffer(content, element.dtype).reshape(shape, order="F" if fortran_order else "C")


class _ElementType:
    """Placeholder for `numpy.dtype`: little-endian integers only."""

    def __init__(self, code: str | bytes, *flags: Any) -> None:
        code = code.decode("latin1") if isinstance(code, bytes) else code
        if code not in ("u1", "i4", "i8"):
            raise pickle.UnpicklingError(f"an array of type {code!r:.40}")
        self.dtype = np.dtype("<" + code)

    def fill(self, state: tuple) -> None:
        if state[1] in (">", b">"):
            raise pickle.UnpicklingError("a big-endian array")


def _reconstruct(array_type: type, shape: tuple, code: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"text encoded as {encoding!r:.40}")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy", "ndarray"): _ArrayType,
    ("numpy", "dtype"): _ElementType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _encode,  # how protocol 2 writes bytes
}
_CALLABLE = (_ElementType, _reconstruct, _encode)


def read_table(path: Path) -> dict[str, Any]:
    """Read a pickled dict of numbers, lists, bytes and integer arrays.

    Args:
        path: a file that may have been written by Python 2 or 3.

    Returns:
        the dict, keys as str, arrays as read-only NumPy arrays.

    Raises:
        pickle.UnpicklingError: the file is damaged, is not a dict, or names anything else; nothing was executed.
        OSError: the file cannot be read, or is no regular one.
    """
    table = _Machine(read_regular(path, MAX_BYTES)).run()
    if not isinstance(table, dict):
        raise pickle.UnpicklingError("not a dict")
    return {
        key.decode("latin1") if isinstance(key, bytes) else key: value.values if isinstance(value, _Array) else value
        for key, value in table.items()
    }


class _Machine:
    """Machine for the operations of a pickle, known ones only, on a stack of plain values."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # where in the stack each list of arguments begins
        self._memo: dict[int, Any] = {}
        self._left_to_encode = len(content)  # of texts, each of which stands in the file

    def run(self) -> Any:
        """Run the operations and return the pickle's value. Raises pickle.UnpicklingError."""
        try:
            for _ in range(MAX_STEPS):
                code = self._take(1)
                if code == b".":
                    return self._stack.pop()
                if code not in _OPERATIONS:
                    raise pickle.UnpicklingError(f"an operation {code!r}, which numbers and arrays do not need")
                _OPERATIONS[code](self)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, struct.error) as error:
            raise pickle.UnpicklingError(f"damaged ({type(error).__name__} before byte {self._position})") from error
        raise pickle.UnpicklingError(f"more than {MAX_STEPS:,} operations")

    def _take(self, count: int) -> bytes:
        taken = self._content[self._position : self._position + count] if count > 0 else b""
        if len(taken) != count:
            raise pickle.UnpicklingError(f"cut short: {count:,} bytes are wanted at byte {self._position:,}")
        self._position += count
        return taken

    def _line(self) -> bytes:
        line = self._take(self._content.index(b"\n", self._position) + 1 - self._position)
        return line[:-1]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _marked(self) -> list[Any]:
        begin = self._marks.pop()
        values, self._stack[begin:] = self._stack[begin:], []
        return values

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise TypeError
        self._stack[-1].extend(values)

    def _push_dict(self) -> None:
        values = self._marked()
        self._push({})
        self._set_items(values)

    def _set_items(self, values: list[Any]) -> None:
        table = self._stack[-1]
        keys = values[::2]
        # A tuple of tuples that share their parts would take for ever to hash.
        if not isinstance(table, dict) or not all(isinstance(key, str | bytes | int) for key in keys):
            raise TypeError
        table.update(zip(keys, values[1::2], strict=True))

    def _memoize(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _name(self, module: str, name: str) -> None:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it names {module:.80}.{name:.80}, which numbers and arrays do not need")
        self._push(_STAND_INS[module, name])

    def _stacked_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if function not in _CALLABLE or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("a call of what is no function")
        if function is _encode:
            self._left_to_encode -= len(arguments[0])
            if self._left_to_encode < 0:
                raise pickle.UnpicklingError("the same text again and again")
        self._push(function(*arguments))

    def _fill(self) -> None:
        state = self._stack.pop()
        if not isinstance(self._stack[-1], _Array | _ElementType) or not isinstance(state, tuple):
            raise TypeError
        self._stack[-1].fill(state)

    def _long(self, count: int) -> None:
        if not 0 <= count <= MAX_INTEGER_BYTES:
            raise pickle.UnpicklingError(f"an integer of {count:,} bytes")
        self._push(int.from_bytes(self._take(count), "little", signed=True))

    def _integer_line(self) -> None:
        line = self._line()
        self._push(line == b"01" if line in (b"00", b"01") else int(line))  # how protocol 0 writes truth

    def _quoted_line(self) -> None:
        found = re.fullmatch(rb"""(['"])(.*)\1""", self._line(), re.DOTALL)
        if found is None:
            raise ValueError
        self._push(codecs.escape_decode(found[2])[0])


def _text(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine._push(machine._take(machine._number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine._push(machine._take(machine._number(form)))


def _number(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine._push(machine._number(form))


def _constant(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine._push(make())


_OPERATIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda machine: machine._take(1),  # protocol
    b"\x95": lambda machine: machine._take(8),  # length of what follows
    b"N": _constant(lambda: None), b"\x88": _constant(lambda: True), b"\x89": _constant(lambda: False),
    b"}": _constant(dict), b"]": _constant(list), b")": _constant(tuple),
    b"K": _number("<B"), b"M": _number("<H"), b"J": _number("<i"), b"G": _number(">d"),
    b"\x8a": lambda machine: machine._long(machine._number("<B")),
    b"\x8b": lambda machine: machine._long(machine._number("<i")),
    b"I": _Machine._integer_line,
    b"L": lambda machine: machine._push(int(machine._line().removesuffix(b"L"))),
    b"F": lambda machine: machine._push(float(machine._line())),
    b"S": _Machine._quoted_line,
    b"V": lambda machine: machine._push(machine._line().decode("raw-unicode-escape")),
    b"U": _bytes("<B"), b"T": _bytes("<i"), b"C": _bytes("<B"), b"B": _bytes("<I"), b"\x8e": _bytes("<Q"),
    b"\x8c": _text("<B"), b"X": _text("<I"), b"\x8d": _text("<Q"),
    b"(": lambda machine: machine._marks.append(len(machine._stack)),
    b"t": lambda machine: machine._push(tuple(machine._marked())),
    b"l": lambda machine: machine._push(machine._marked()),
    b"\x85": lambda machine: machine._tuple(1),
    b"\x86": lambda machine: machine._tuple(2),
    b"\x87": lambda machine: machine._tuple(3),
    b"a": lambda machine: machine._extend([machine._stack.pop()]),
    b"e": lambda machine: machine._extend(machine._marked()),
    b"s": lambda machine: machine._set_items([machine._stack.pop(-2), machine._stack.pop()]),
    b"u": lambda machine: machine._set_items(machine._marked()),
    b"d": _Machine._push_dict,
    b"p": lambda machine: machine._memoize(int(machine._line())),
    b"q": lambda machine: machine._memoize(machine._number("<B")),
    b"r": lambda machine: machine._memoize(machine._number("<I")),
    b"\x94": lambda machine: machine._memoize(len(machine._memo)),
    b"g": lambda machine: machine._push(machine._memo[int(machine._line())]),
    b"h": lambda machine: machine._push(machine._memo[machine._number("<B")]),
    b"j": lambda machine: machine._push(machine._memo[machine._number("<I")]),
    b"c": lambda machine: machine._name(machine._line().decode(), machine._line().decode()),
    b"\x93": _Machine._stacked_name,
    b"R": _Machine._call,
    b"b": _Machine._fill,
}  # fmt: skip
