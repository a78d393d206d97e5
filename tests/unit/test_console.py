"""Lines of the console at a run's start and end."""

import time
from types import SimpleNamespace

import pytest
import torch

from torchtitan.conditions import Classes, Embeddings, Unconditional
from torchtitan.console import _images
from torchtitan.data import DatasetInfo
from torchtitan.data.digits import DigitsConfig
from torchtitan.data.image_folder import ImageFolder, ImageFolderConfig
from torchtitan.reports import Reports


@pytest.mark.parametrize(("kind", "said"), [
    (Unconditional(), "without classes"), (Classes(1), "in 1 class"), (Classes(1000), "in 1,000 classes"),
    (Embeddings({"text": torch.zeros(3)}), "with embeddings"),
])  # fmt: skip
def test_the_images_found_are_counted(kind, said):
    state = SimpleNamespace(config=SimpleNamespace(data=DigitsConfig()), info=DatasetInfo((1, 8, 8), kind), images_per_epoch=1234)
    assert _images(state) == f"1,234 images to train on, {said}"


def test_the_held_out_pictures_of_a_folder_are_counted(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.png").touch()
    data = ImageFolderConfig(path=str(tmp_path), image_size=8)
    info, train = DatasetInfo((3, 8, 8)), ImageFolder(data, "train")
    state = SimpleNamespace(config=SimpleNamespace(data=data), info=info, images_per_epoch=len(train))
    assert _images(state) == "38 images to train on and 2 held out, without classes"


def test_work_is_named_once_it_has_taken_long(monkeypatch):
    said, deadline = [], time.monotonic() + 20
    reports = SimpleNamespace(_first=True, _state=SimpleNamespace(step=7), _say=said.append)
    monkeypatch.setattr("torchtitan.reports._SILENT_SECONDS", 0.2)
    with Reports.named(reports, "short work"):
        pass
    with Reports.named(reports, "saving the checkpoint"):
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said == ["step      7  saving the checkpoint ..."]
