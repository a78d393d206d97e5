"""Published weights of extractors: where they come from, and the hash without which they are not used."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from torchtitan.features.base import ExtractorError, file_sha256
from torchtitan.files.regular import user_path
from torchtitan.files.weight_files import WeightsError, mismatches, read_state_dict

DOWNLOADS = Path("downloads")  # of scripts/download.py, which makes a folder of the name in it


@dataclass(frozen=True)
class PublishedWeights:
    """File of weights on the web.

    Attributes:
        name: of the download.
        url: of the file.
        size: in bytes.
        sha256: of the file.
        what: description.
    """

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


def read_published(weights: PublishedWeights, path: Path | None) -> tuple[dict[str, Tensor], str]:
    """Read published weights; no code of the file is run.

    Args:
        weights: which ones.
        path: of the file, of any name; None is where scripts/download.py puts it.

    Returns:
        the state dict, and the file's SHA-256.

    Raises:
        ExtractorError: the file is missing, cannot be read, or is not the published one.
    """
    file = weights.path if path is None else user_path(path)
    advice = f"python scripts/download.py {weights.name} fetches it, {weights.size / 1e6:,.0f} MB; --weights names a copy"
    if not file.exists():
        raise ExtractorError(f"{weights.name}: {file}: no such file of weights ({advice})")
    found = file_sha256(file)
    if found != weights.sha256:
        raise ExtractorError(
            f"{weights.name}: {file}: is not the published file: SHA-256 {found[:12]}..., not {weights.sha256[:12]}... "
            f"({advice})"
        )
    try:
        return read_state_dict(file)[0], found
    except WeightsError as error:
        raise ExtractorError(f"{weights.name}: {error}") from error


def check_tensors(name: str, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Compare a state dict with the shapes of a network's. Raises ExtractorError: one line with every difference."""
    problems = mismatches(dict(wanted), {key: tuple(tensor.shape) for key, tensor in tensors.items()})
    if problems:
        raise ExtractorError(f"{name}: weights of another network: {'; '.join(problems)}")
