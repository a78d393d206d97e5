"""Metadata of ImageNet: names of classes, and the class of each held-out image."""

import csv
import io
import re
import tarfile
import zlib
from pathlib import Path

from torchtitan.data.base import DatasetError
from torchtitan.data.class_folders import read_classes
from torchtitan.errors import one_line
from torchtitan.files.regular import read_regular, read_text

SYNSET_MAPPING = "LOC_synset_mapping.txt"
VALIDATION_SOLUTION = "LOC_val_solution.csv"
DEVKIT = "ILSVRC2012_devkit_t12"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
WNID = re.compile(r"n\d{8}")


def find_class_names(roots: list[Path]) -> dict[str, str]:
    """Wnid -> its first name, by Kaggle's mapping or the devkit, if there. Raises DatasetError: one is damaged."""
    if mapping := _find(roots, SYNSET_MAPPING):
        return {wnid: _first(names) for wnid, names in read_classes(str(mapping)).items()}
    content = _devkit_file(roots, "meta.mat")
    if content is None:
        return {}
    return {wnid: _first(words) for wnid, words in _synsets(content).values()}


def find_validation_wnids(roots: list[Path]) -> dict[str, str]:
    """Held-out image (no ending) -> wnid, by Kaggle's solution or the devkit. Raises DatasetError: none, or damaged."""
    if solution := _find(roots, VALIDATION_SOLUTION):
        return _read_solution(solution)
    numbers, content = _devkit_file(roots, GROUND_TRUTH), _devkit_file(roots, "meta.mat")
    if numbers is None or content is None:
        raise DatasetError(
            f"data.path: the held-out images of {roots[0]} are in no class folders, and neither {VALIDATION_SOLUTION} "
            f"nor {DEVKIT}.tar.gz lies there to say their classes (put one there)"
        )
    synsets = _synsets(content)
    try:
        wnids = [synsets[int(line)][0] for line in numbers.decode("ascii").split()]
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise DatasetError(f"{roots[0]}: the devkit's ground truth is damaged: {error}") from error
    return {f"ILSVRC2012_val_{number:08}": wnid for number, wnid in enumerate(wnids, 1)}


def _find(roots: list[Path], name: str) -> Path | None:
    return next((root / name for root in roots if (root / name).is_file()), None)


def _first(names: str) -> str:
    return names.split(",")[0].strip()


def _read_solution(path: Path) -> dict[str, str]:
    """Read lines "ImageId,PredictionString", where the prediction begins with the wnid."""
    try:
        rows = list(csv.reader(read_text(path).splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    wnids = {}
    for number, row in enumerate(rows[1:], 2):
        name, wnid = (row[0], row[1].partition(" ")[0]) if len(row) == 2 else ("", "")
        if not name or not WNID.fullmatch(wnid):
            raise DatasetError(f"{path}: line {number}: not an image's name, a comma and a wnid")
        wnids[name] = wnid
    return wnids


def _devkit_file(roots: list[Path], name: str) -> bytes | None:
    """Read a file of the devkit's folder `data`, unpacked or still in its archive."""
    inside = f"{DEVKIT}/data/{name}"
    place = _find(roots, inside) or _find(roots, f"{DEVKIT}.tar.gz")
    if place is None:
        return None
    try:
        if place.name == name:
            return read_regular(place)
        with tarfile.open(place) as archive:
            file = archive.extractfile(inside)
            return file.read() if file else None
    except (OSError, EOFError, KeyError, zlib.error, tarfile.TarError) as error:
        raise DatasetError(f"{place}: {inside} cannot be read from it ({error})") from error


def _synsets(content: bytes) -> dict[int, tuple[str, str]]:
    """Synsets of the devkit's table: ILSVRC2012_ID -> (wnid, words)."""
    from scipy.io import loadmat

    try:
        rows = loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])["synsets"]
        return {int(row["ILSVRC2012_ID"]): (str(row["WNID"]), str(row["words"])) for row in rows}
    except Exception as error:  # a damaged file fails in any way
        raise DatasetError(f"the devkit's meta.mat is damaged ({one_line(error)})") from error
