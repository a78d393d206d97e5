"""Published weights of extractors: where they come from, and the hash without which they are not used. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

DOWNLOADS = Path("downloads")  # of scripts/download.py, which makes a folder of the name in it


@dataclass(frozen=True)
class PublishedWeights:
    """File of weights on the web."""

    name: str
    url: str
    size: int
    sha256: str
    what: str

    @property
    def file_name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def path(self) -> Path:
        """Where scripts/download.py puts the file."""
        return DOWNLOADS / self.name / self.file_name


INCEPTION = PublishedWeights(
    name="inception",
    url="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    size=95_628_359,
    sha256="6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    what="Inception-2015 of TensorFlow, for FID, KID, IS, precision and recall",
)
DINOV2 = PublishedWeights(
    name="dinov2",
    url="https://dl.fbaipublicfiles.com/dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth",
    size=1_217_586_395,
    sha256="d5383ea8f4877b2472eb973e0fd72d557c7da5d3611bd527ceeb1d7162cbf428",
    what="DINOv2 ViT-L/14, for FD-DINOv2",
)
PUBLISHED = {weights.name: weights for weights in (INCEPTION, DINOV2)}
