"""References that samples are compared with: made and named ones, npz files of images or statistics, plain images."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from torchtitan.checkpoint.manifest import hash_file, read_json
from torchtitan.errors import DamagedFile, EvaluationError, first_line
from torchtitan.evaluation.feature_files import FeatureFolder, HashedImages, extractor_key
from torchtitan.evaluation.image_sets import IMAGES, ImageSet, NPZImages, open_images
from torchtitan.evaluation.npz_images import NPZ_SUFFIX, NPZArray, open_npz
from torchtitan.features.base import FeatureExtractor
from torchtitan.fidelity.metrics import METRICS
from torchtitan.fidelity.moments import Moments, MomentsAccumulator
from torchtitan.files.durable import make_folder, replace_file, replacing
from torchtitan.files.ownership import foreign_entry, foreign_text
from torchtitan.files.regular import LARGEST_RECORD
from torchtitan.files.shard_files import write_tensors
from torchtitan.programs import program

Form = Literal["rows", "moments"]
REFERENCES = Path("outputs", "references")  # where names are looked up
RECORD = "reference.json"
DEFAULT_ROWS = 50_000
_START = b'{\n "image_reference": 1,'
_INCEPTION = "inception"
_ROUNDING = 1e-3  # of the largest value, by which a covariance in half precision may lack symmetry
# Keys of an npz file of statistics -> the output of Inception that they describe.
_STATISTICS = {"pooled": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}


class Reference(ABC):
    """Reference of a comparison.

    Attributes:
        name: in results.
        place: in messages.
        images: those whose features have to be extracted for what `stored` does not hold; None: there are none.
    """

    name: str
    place: str
    images: ImageSet | None = None

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of its images; None: not known."""
        return None if self.images is None else self.images.size

    @property
    def count(self) -> int | None:
        """Number of the images whose moments are compared with; None: not known."""
        return None if self.images is None else len(self.images)

    @abstractmethod
    def stored(self, extractor: FeatureExtractor, output: str, form: Form) -> bool:
        """Whether it holds these features itself."""

    @abstractmethod
    def contents(self) -> str:
        """What it serves, in words."""

    def moments(self, extractor: FeatureExtractor, output: str) -> Moments:
        """Stored moments. Raises EvaluationError: there are none, or they are damaged."""
        raise EvaluationError(f"{self.place}: stores no moments, only {self.contents()}")

    def rows(self, extractor: FeatureExtractor, output: str) -> np.ndarray:
        """Stored rows, float32 [N, D]. Raises EvaluationError: there are none, or they are damaged."""
        raise EvaluationError(f"{self.place}: stores no rows, only {self.contents()}")

    def record(self, extractors: Mapping[str, FeatureExtractor]) -> dict[str, Any]:
        """Record for results: of the reference, and of what it stores of the extractors' features."""
        return {"name": self.name, "place": self.place, "size": None if self.size is None else list(self.size)}

    def check(self, extractor: FeatureExtractor, output: str, form: Form, metric: str) -> None:
        """Check that it serves a metric. Raises EvaluationError."""
        if self.images is None and not self.stored(extractor, output, form):
            wanted = f"{form} of {extractor.name}'s {output} features"
            raise EvaluationError(f"{metric}: needs {wanted}, and {self.place} holds {self.contents()}")


class ImagesReference(Reference):
    """Reference of images, extracted when they are compared with."""

    def __init__(self, images: ImageSet) -> None:
        self.images, self.place, self.name = images, images.place, Path(images.place).name

    def stored(self, extractor: FeatureExtractor, output: str, form: Form) -> bool:
        return False

    def contents(self) -> str:
        return f"{len(cast(ImageSet, self.images))} images"


class StatisticsReference(Reference):
    """Reference of an npz file: mu and sigma of Inception's features, mu_s and sigma_s of its spatial ones, some images.

    ADM's batches have all of them: the statistics are of the whole training set, the images are 10,000 of it. Other
    files have mu and sigma alone.

    Source: Dhariwal and Nichol, "Diffusion models beat GANs on image synthesis", arXiv 2105.05233, published code.
    """

    def __init__(self, path: Path, arrays: Mapping[str, NPZArray]) -> None:
        """Raises EvaluationError: the shapes do not fit, or there is nothing of the kind."""
        self.place, self.name = str(path), path.stem
        self._path, self._arrays = path, arrays
        self._there = {output: keys for output, keys in _STATISTICS.items() if any(key in arrays for key in keys)}
        for output, keys in self._there.items():
            shapes = [arrays[key].shape if key in arrays else None for key in keys]
            numbers = all(arrays[key].dtype.kind == "f" for key in keys if key in arrays)
            if shapes[0] is None or len(shapes[0]) != 1 or shapes[1] != shapes[0] * 2 or not numbers:
                found = ", ".join(
                    f"{key} {'missing' if shape is None else list(shape)}" for key, shape in zip(keys, shapes, strict=True)
                )
                raise EvaluationError(f"{path}: {found} are no mean [D] and covariance [D, D] of {output} features")
        if IMAGES in arrays:
            self.images = NPZImages(arrays[IMAGES])
            self.images.check()
        elif not self._there:
            there = ", ".join(arrays) or "nothing"
            raise EvaluationError(f"{path}: holds {there}; a reference has images {IMAGES}, or mu and sigma")

    def stored(self, extractor: FeatureExtractor, output: str, form: Form) -> bool:
        return form == "moments" and extractor.name == _INCEPTION and output in self._there

    @property
    def count(self) -> int | None:
        return None if self._there else super().count

    def contents(self) -> str:
        held = [f"{' and '.join(keys)} of {_INCEPTION}'s {output} features" for output, keys in self._there.items()]
        return " and ".join(held + ([f"{len(self.images)} images"] if self.images else []))

    def moments(self, extractor: FeatureExtractor, output: str) -> Moments:
        mean, covariance = (self._arrays[key].whole().astype(np.float64) for key in self._there[output])
        size = extractor.dims[output]
        if mean.shape != (size,):
            raise EvaluationError(f"{self.place}: statistics of {len(mean)} features, {extractor.name} has {size} ({output})")
        variances = np.diag(covariance)
        rounding = _ROUNDING * np.abs(covariance).max()
        if (variances < 0).any() or (np.abs(covariance - covariance.T) > rounding).any():
            key = self._there[output][1]
            raise EvaluationError(f"{self.place}: {key} is no covariance: it is not symmetric, or has variances below 0")
        return Moments(None, mean, covariance)

    def record(self, extractors: Mapping[str, FeatureExtractor]) -> dict[str, Any]:
        return super().record(extractors) | {"file_sha256": hash_file(self._path), "holds": self.contents()}


class MadeReference(Reference):
    """Reference of a folder that `make_reference` wrote: moments and rows of the features of one or more extractors."""

    def __init__(self, folder: Path) -> None:
        """Raises EvaluationError: the record or a file is damaged."""
        self.place, self._folder = str(folder), folder
        try:
            record = read_json(folder / RECORD, dict, LARGEST_RECORD)
            self.name = record["name"]
            self._images, self._features = record["images"], record["features"]
            self._size = self._images["size"][0], self._images["size"][1]
            self.sha256, self._count = self._images["sha256"], self._images["count"]
            self._names = {key: entry["extractor"]["name"] for key, entry in self._features.items()}
            self._outputs = {key: dict(entry["outputs"]) for key, entry in self._features.items()}
            kinds = {"file": str, "sha256": str, "rows": int}
            entries = [entry for outputs in self._outputs.values() for entry in outputs.values()]
            if not all(isinstance(entry[key], kind) for entry in entries for key, kind in kinds.items()):
                raise TypeError("entries of another type")
            if not all(isinstance(number, int) for number in (*self._size, self._count)):
                raise TypeError("counts of another type")
        except DamagedFile as error:
            raise EvaluationError(f"{folder}: {error} (make it anew)") from error
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise EvaluationError(f"{folder / RECORD}: is damaged (make it anew)") from error

    @property
    def size(self) -> tuple[int, int] | None:
        return self._size

    @property
    def count(self) -> int | None:
        return self._count

    def stored(self, extractor: FeatureExtractor, output: str, form: Form) -> bool:
        entry = self._entry(extractor, output)
        return entry is not None and (form == "moments" or bool(entry.get("rows")))

    def keeps_all_rows(self, extractor: FeatureExtractor, output: str) -> bool:
        entry = self._entry(extractor, output)
        return entry is not None and entry.get("rows") == self.count

    def contents(self) -> str:
        held = [
            f"moments{f' and {rows} rows' if (rows := entry.get('rows')) else ''} of {self._names[key]}'s {output}"
            for key, outputs in self._outputs.items() for output, entry in outputs.items()
        ]  # fmt: skip
        held = [f"{', '.join(held)} features"] if held else ["nothing yet"]
        return f"{held[0]} ({program('evaluate')} reference adds those of other extractors)"

    def moments(self, extractor: FeatureExtractor, output: str) -> Moments:
        mean, covariance = self._tensors(extractor, output, ("mean", "covariance"))
        return Moments(self.count, mean, covariance)

    def rows(self, extractor: FeatureExtractor, output: str) -> np.ndarray:
        return self._tensors(extractor, output, ("rows",))[0]

    def record(self, extractors: Mapping[str, FeatureExtractor]) -> dict[str, Any]:
        stored = {
            name: {output: {key: entry[key] for key in ("sha256", "rows")} for output, entry in outputs.items()}
            for name, extractor in extractors.items() if (outputs := self._outputs.get(extractor_key(extractor.record())))
        }
        return super().record(extractors) | {"images": self._images, "stored": stored}

    def _entry(self, extractor: FeatureExtractor, output: str) -> dict[str, Any] | None:
        return self._outputs.get(extractor_key(extractor.record()), {}).get(output)

    def _tensors(self, extractor: FeatureExtractor, output: str, names: tuple[str, ...]) -> list[np.ndarray]:
        entry = cast(dict[str, Any], self._entry(extractor, output))
        path = self._folder / Path(entry["file"]).name
        try:
            if hash_file(path) != entry["sha256"]:
                raise EvaluationError(f"{path}: is not the file that {RECORD} describes (make the reference anew)")
            with safe_open(path, framework="np") as file:
                return [file.get_tensor(name) for name in names]
        except (SafetensorError, OSError) as error:
            raise EvaluationError(f"{path}: cannot be read: {first_line(error)} (make the reference anew)") from error


@dataclass(frozen=True)
class KeptOutput:
    """Output whose features a reference keeps.

    Attributes:
        output: of the extractor.
        rows: most rows that are kept beside the moments; 0: none.
    """

    output: str
    rows: int


def kept_outputs(extractor: FeatureExtractor, most_rows: int) -> list[KeptOutput]:
    """Outputs of an extractor that metrics compare with those of a reference."""
    forms: dict[str, set[Form]] = {}
    for metric in METRICS.values():
        if metric.reference and metric.extractor in (None, extractor.name) and metric.output in extractor.dims:
            forms.setdefault(metric.output, set()).add(metric.reference)
    return [KeptOutput(output, most_rows if "rows" in wanted else 0) for output, wanted in forms.items()]


def open_reference(text: str, option: str = "--reference") -> Reference:
    """Open the reference of a command line: a path, or the name of one in `outputs/references`.

    Raises:
        EvaluationError: there is no such reference, or it is damaged.
    """
    path = Path(text)
    if not path.exists() and (REFERENCES / text / RECORD).exists():
        path = REFERENCES / text
    if not path.exists():
        known = ", ".join(sorted(folder.parent.name for folder in REFERENCES.glob(f"*/{RECORD}"))) or "none"
        raise EvaluationError(
            f"{option}: {text!r} is neither a path nor the name of a reference (there are: {known}; "
            f"{program('evaluate')} reference makes one)"
        )
    if (path / RECORD).exists():
        return MadeReference(path)
    if path.suffix == NPZ_SUFFIX and path.is_file():
        return StatisticsReference(path, open_npz(path))
    return ImagesReference(open_images(path))


def begin_reference(folder: Path, name: str, hashed: HashedImages, versions: Mapping[str, Any]) -> None:
    """Begin a reference, or resume one of the same images; in one process.

    Args:
        folder: of the reference.
        name: of the reference.
        hashed: its images.
        versions: of what computes it, for the record.

    Raises:
        EvaluationError: the folder holds something else, or cannot be written.
    """
    images = hashed.images
    with _writing(folder):
        if foreign := foreign_entry(folder, {RECORD: _START}):
            raise EvaluationError(foreign_text(folder, foreign, "a reference's", "give another --output"))
        if not (folder / RECORD).exists():
            described = images.record() | {"count": len(images), "size": list(images.size), "sha256": hashed.sha256}
            content = {"image_reference": 1, "name": name, "images": described, "features": {}, "versions": versions}
            make_folder(folder)
            replace_file(folder / RECORD, json.dumps(content, indent=1) + "\n")
            return
    there = MadeReference(folder)
    if (there.name, there.sha256) != (name, hashed.sha256):
        raise EvaluationError(
            f"{folder}: is reference {there.name!r} of {there.count} other images, with hash {there.sha256[:12]} instead of "
            f"{hashed.sha256[:12]} (give another --name)"
        )


def add_features(folder: Path, hashed: HashedImages, features: FeatureFolder, kept: list[KeptOutput]) -> None:
    """Add an extractor's features to a reference that was begun; in one process.

    Args:
        folder: of the reference.
        hashed: its images.
        features: opened, with all of them.
        kept: what to keep.

    Raises:
        EvaluationError: features are missing, or it cannot be written.
    """
    outputs: dict[str, Any] = {}
    with _writing(folder):
        for each in kept:
            path = folder / f"{features.path.name}.{each.output}.safetensors"
            tensors = {name: torch.from_numpy(values) for name, values in _kept_tensors(hashed, features, each).items()}
            entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            with replacing(path) as unfinished:
                written = write_tensors(unfinished, entries, tensors.values(), {})
            rows = len(tensors["rows"]) if "rows" in tensors else 0
            outputs[each.output] = {"file": path.name, "sha256": written["sha256"], "rows": rows}
        content = read_json(folder / RECORD, dict, LARGEST_RECORD)
        content["features"][features.key] = {"extractor": features.extractor.record(), "outputs": outputs}
        replace_file(folder / RECORD, json.dumps(content, indent=1) + "\n")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, DamagedFile) as error:
        advice = "make room, or give another --output"
        raise EvaluationError(f"{folder}: cannot be written: {first_line(error)} ({advice})") from error


def kept_numbers(count: int, most: int, sha256: str) -> np.ndarray:
    """Images whose rows are kept: all, or a random choice by the images' hash, in order."""
    if count <= most:
        return np.arange(count)
    seed = int.from_bytes(hashlib.sha256(sha256.encode()).digest()[:8], "little")
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])  # numpy's PCG64


def _kept_tensors(hashed: HashedImages, features: FeatureFolder, kept: KeptOutput) -> dict[str, np.ndarray]:
    size = features.extractor.dims[kept.output]
    numbers = kept_numbers(len(hashed.images), kept.rows, hashed.sha256)
    rows = np.empty((len(numbers), size), np.float32)
    moments = MomentsAccumulator(size)
    begin = filled = 0
    for part in features.rows(hashed, kept.output):
        moments.add(part)
        inside = numbers[(numbers >= begin) & (numbers < begin + len(part))] - begin
        rows[filled : filled + len(inside)] = part[inside]
        begin, filled = begin + len(part), filled + len(inside)
    found = moments.moments()
    tensors = {"mean": found.mean, "covariance": found.covariance}
    return tensors | ({"numbers": numbers, "rows": rows} if len(numbers) else {})
