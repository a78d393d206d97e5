"""Bounds on files of torch.save before torch reads them: against more memory or time than the file's size explains."""

import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

from torchtitan.files.regular import open_regular

_LARGEST_RECORD = 64 << 20  # bytes of the pickle that lists the tensors; a file of 100,000 tensors has 20 MB
_DEEPEST_TUPLE = 16  # a tuple of tuples that share their parts takes 2^depth steps to hash
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")


def check_archive(path: Path) -> None:
    """Check that reading a file of torch.save takes no more memory than its size, and terminates.

    Files in the format of torch before 1.6, which are no archives, are left to torch.

    Raises:
        pickle.UnpicklingError: it would exceed that; nothing was unpacked.
        OSError: it is no regular file, or cannot be read.
    """
    with open_regular(path) as file:
        if not zipfile.is_zipfile(file):
            return
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                # torch stores its members: what is packed may unpack to a thousand times its size.
                if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                    raise pickle.UnpicklingError("a packed archive, which torch.save does not write")
                if sum(member.file_size for member in members) > path.stat().st_size:
                    raise pickle.UnpicklingError("its members are larger than the file")
                for member in members:
                    if member.filename.endswith("data.pkl"):
                        _check_record(archive, member)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
            raise pickle.UnpicklingError(f"a damaged archive ({error})") from error


def _check_record(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    if member.file_size > _LARGEST_RECORD:
        raise pickle.UnpicklingError(f"its list of tensors has {member.file_size:,} bytes, more than {_LARGEST_RECORD:,}")
    try:
        depth = tuple_depth(archive.read(member))
    except (IndexError, KeyError) as error:  # a stack that runs empty, an entry of the memo that was never made
        raise pickle.UnpicklingError("its list of tensors is damaged") from error
    if depth > _DEEPEST_TUPLE:
        raise pickle.UnpicklingError(f"tuples within tuples, {depth} deep")


def tuple_depth(content: bytes) -> int:
    """Depth of nested tuples in a pickle; no object of it is built.

    Raises:
        ValueError, IndexError, KeyError: it is no pickle.
    """
    stack: list[int | None] = []  # depth of each value, None for a mark
    memo: dict[int, int | None] = {}
    deepest = 0
    argument: Any
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in _PUTS:
            memo[argument] = stack[-1]
        elif operation.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif operation.name in _GETS:
            stack.append(memo[argument])
        elif operation.name == "DUP":
            stack.append(stack[-1])
        elif operation.name == "MARK":
            stack.append(None)
        else:
            taken = []
            before = operation.stack_before
            if pickletools.markobject in before:
                while (value := stack.pop()) is not None:
                    taken.append(value)
                before = before[: before.index(pickletools.markobject)]
            taken += [stack.pop() or 0 for _ in before]
            depth = 1 + max(taken, default=0) if "TUPLE" in operation.name else 0
            stack += [depth] * len(operation.stack_after)
            deepest = max(deepest, depth)
    return deepest
