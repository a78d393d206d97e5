"""Pictures of endings that are not read: every reader says in one line how many it leaves out, and reads the others."""

import numpy as np
import pytest

from tests.encoded_images import image_bytes, write_tar
from torchtitan.data import DATASETS
from torchtitan.fidelity.images import FolderImages
from torchtitan.processes.launch import CHECKED

COUNTS = {"png": 4, "heic": 3, "AVIF": 1}
LINE = "leaving out 4 pictures of endings that are not read: 3 .heic, 1 .avif (convert to jpg or png)"


def files(beside):
    """Names and contents of pictures, each with a file of that ending and text."""
    for kind, count in COUNTS.items():
        for number in range(count):
            yield f"{kind}{number}.{kind}", image_bytes(number) if kind == "png" else b"not read"
            if beside:
                yield f"{kind}{number}.{beside[0]}", beside[1]


def write_folder(folder, beside=None):
    folder.mkdir()
    for name, content in files(beside):
        (folder / name).write_bytes(content)
    return folder


def write_shard(folder, beside):
    write_tar(folder / "a.tar", dict(files(beside)))
    return folder


def opened(name, folder, **keys):
    config = DATASETS[name].Config(path=str(folder), validation_fraction=0, image_size=8, **keys)
    DATASETS[name].info(config)
    return DATASETS[name](config, "train")


READERS = {
    "folder": lambda place: opened("image_folder", write_folder(place)),
    "captioned folder": lambda place: opened("captioned_folder", write_folder(place, ("txt", b"a thing"))),
    "shard of captions": lambda place: opened("webdataset", write_shard(place, ("txt", b"a thing")), captions=True),
    "shard of labels": lambda place: opened("webdataset", write_shard(place, ("cls", b"0"))),
    "evaluation": lambda place: FolderImages(write_folder(place)),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_says_once_what_it_leaves_out(reader, tmp_path, caplog):
    images = READERS[reader](tmp_path / "pictures")
    assert caplog.messages == [f"{tmp_path / 'pictures'}: {LINE}"]
    assert len(images) == 4
    if reader != "evaluation":
        assert len({image.numpy().tobytes() for image in images.fetch(np.arange(4))["images"]}) == 4


def test_the_next_start_says_it_again_and_a_checked_run_does_not(tmp_path, caplog, monkeypatch):
    from torchtitan.data import image_folder, left_out

    folder = write_folder(tmp_path / "pictures")
    for checked, lines in ((False, 1), (False, 2), (True, 2)):
        image_folder._list_unlabelled.cache_clear()
        left_out.say_once.cache_clear()  # as in another process
        monkeypatch.setenv(CHECKED, "1") if checked else monkeypatch.delenv(CHECKED, raising=False)
        opened("image_folder", folder)
        assert caplog.messages == [f"{folder}: {LINE}"] * lines
