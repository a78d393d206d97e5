"""Lines of the console at a run's start and end."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan.conditions import Classes, Embeddings, Unconditional
from torchtitan.console import _images
from torchtitan.data import DatasetInfo
from torchtitan.data.digits import DigitsConfig
from torchtitan.data.image_folder import ImageFolder, ImageFolderConfig
from torchtitan.gns.allocate import NEYMAN, PredictedRatio
from torchtitan.gns.monitor import GNSMonitor


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


def monitor(scale: tuple[float, float, float], ratio: PredictedRatio) -> GNSMonitor:
    """Monitor that has measured a noise scale with its interval, and predicted a sampler's ratio."""
    made = object.__new__(GNSMonitor)
    made.pool = SimpleNamespace(geometries=("plain",), narrowest=lambda geometry: "sketch")
    made.pool_kept_steps = lambda: None
    names = ("b_simple", "lower", "upper")
    made._whole = lambda *_: SimpleNamespace(**dict(zip(names, map(torch.tensor, scale), strict=True)))
    made.predicted_ratios = lambda: [ratio]
    return made


SLIGHT = PredictedRatio(NEYMAN, 0.95, 0.94, 0.96)
USELESS, USEFUL = PredictedRatio(NEYMAN, 0.99, 0.9, 1.1), PredictedRatio(NEYMAN, 0.5, 0.45, 0.55)


@pytest.mark.parametrize(("scale", "batch", "said"), [
    ((100.0, 50.0, 200.0), 128, ""), ((100.0, 90.0, 110.0), 150, ""), ((100.0, 90.0, 110.0), 10, " is below "),
    ((100.0, 90.0, 110.0), 1000, " is above "), ((0.0, 50.0, float("inf")), 20, " is below "),
    ((0.0, 50.0, float("inf")), 80, ""), ((0.0, -1.0, float("inf")), 20, ""), ((0.0, float("nan"), 3.0), 20, ""),
])  # fmt: skip
def test_advice_is_given_only_where_something_is_to_be_changed(scale, batch, said):
    phase = "at the peak learning rate"
    lines = monitor(scale, USELESS).advice(batch, phase)
    assert len(lines) == bool(said) and all(said in line for line in lines)
    assert all(line.startswith(f"measured {phase} (sketch, plain geometry): ") for line in lines)
    assert [line for line in monitor(scale, USEFUL).advice(batch, phase) if "fewer samples" in line and "would give" in line]
    assert monitor(scale, SLIGHT).advice(batch, phase) == lines  # certain, but a factor below 1.1
