"""A process whose /dev/shm is small, as a container's; for tests that run as root on Linux."""

import ctypes
import multiprocessing
import os
import sys
import tempfile

import pytest

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000  # linux/sched.h, linux/mount.h


def _may_mount() -> bool:
    if sys.platform != "linux" or os.geteuid():
        return False
    pid = os.fork()
    if not pid:
        os._exit(ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0)
    return os.waitpid(pid, 0)[1] == 0


needs_mounts = pytest.mark.skipif(not _may_mount(), reason="mounting a small /dev/shm takes root on Linux")


def shrink_shared_memory(size: str) -> None:
    """Give this process, and those it starts, a /dev/shm of their own of that size (as mount has it: 1m)."""
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"  # what is in there now is hidden afterwards, multiprocessing's sockets too
    multiprocessing.current_process()._config.pop("tempdir", None)
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "no small /dev/shm")
