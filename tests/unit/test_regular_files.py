"""Files that are none, or too large: refused without waiting and without reading."""

import os
import socket

import pytest

from torchtitan.files.regular import UnsuitableFile, check_regular, open_regular, read_regular


def test_a_file_and_a_link_to_it_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file", 7) == read_regular(os.fsencode(tmp_path / "link"), 7) == b"content"
    with open_regular(str(tmp_path / "link")) as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind, linked):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    if linked:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    for read in (check_regular, open_regular, lambda path: read_regular(path, 100)):
        with pytest.raises(UnsuitableFile) as caught:
            read(path)
        assert caught.value.strerror == f"is a {kind}, not a regular file"


def test_a_larger_file_is_not_read(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 42)  # a hole: takes no room
    with pytest.raises(UnsuitableFile) as caught:
        read_regular(tmp_path / "file", 1 << 20)
    assert caught.value.strerror == "4,398,046,511,104 bytes, more than 1,048,576"
