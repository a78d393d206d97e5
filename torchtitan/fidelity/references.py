"""References that samples are compared with: statistics and rows of features in an npz file, or images.

An npz file has ADM's and EDM's names where there are some: `mu` and `sigma` of Inception's pooled features, `mu_s` and `sigma_s`
of its spatial ones, `arr_0` of images. Others begin with extractor and output, as `dinov2.pooled.mu` and `digits.pooled.rows`.
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.numpy_pickle import read_table
from torchtitan.errors import EvaluationError, first_line
from torchtitan.fidelity.extraction import Rows
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.images import IMAGES, ImageSet, open_images, written
from torchtitan.fidelity.measurement import Form
from torchtitan.fidelity.metrics import METRICS
from torchtitan.fidelity.moments import Moments, moments_of_rows
from torchtitan.fidelity.npz import NPZ_SUFFIX, NPZArray, open_npz
from torchtitan.files.durable import make_folder, replacing
from torchtitan.programs import program

REFERENCES = Path("outputs", "references")  # where names are looked up
MOST_ROWS = 50_000  # that a reference keeps
PKL_SUFFIX = ".pkl"
_RECORD = "record"
_ROUNDING = 1e-3  # of the largest value, by which a covariance in half precision may lack symmetry
_PUBLISHED_NAMES = {("inception", "pooled"): ("mu", "sigma"), ("inception", "spatial"): ("mu_s", "sigma_s")}
_EDM2_EXTRACTORS = {"fid": "inception", "fd_dinov2": "dinov2"}


class Reference:
    """Reference: images, or statistics and rows of features, or both.

    ADM's batches have statistics of the whole training set, and 10,000 images of it.

    Attributes:
        images: to extract what `holds` denies; None: there are none.
        size: height and width of the images; None: not known.
        count: images behind the statistics; None: not known.
    """

    def __init__(self, images: ImageSet | None, place: str, arrays: Mapping[str, NPZArray | np.ndarray] | None = None) -> None:
        """Raises EvaluationError: the shapes do not fit, or there is nothing of the kind."""
        self.images, self.place, self.name = images, place, Path(place).stem
        self.size: tuple[int, int] | None = None if images is None else images.size
        self.count = None if images is None else len(images)
        self.origin: dict[str, Any] = {} if images is None else images.record()
        self._arrays = arrays or {}
        self._there = {key for key in map(_key_of, self._arrays) if key is not None}
        for key in self._there:
            self._check_shapes(*_names(*key))
        if images is None and not self._there:
            there = ", ".join(self._arrays) or "nothing"
            raise EvaluationError(f"{place}: holds {there}; a reference has images {IMAGES}, or mu and sigma")
        if self._there:
            self.count = None  # of other images than those in the file
        if _RECORD in self._arrays:
            self._read_record()

    def _check_shapes(self, *names: str) -> None:
        shapes = {name: self._arrays[name].shape for name in names if name in self._arrays}
        mean, covariance = map(shapes.get, names)
        if mean is None or len(mean) != 1 or covariance != mean * 2:
            found = ", ".join(f"{name} {list(shapes[name]) if name in shapes else 'missing'}" for name in names)
            raise EvaluationError(f"{self.place}: {found} are no mean [D] and covariance [D, D]")

    def holds(self, extractor: str, output: str, form: Form) -> bool:
        """Whether it holds these features itself."""
        if form == "rows":
            return _rows_name(extractor, output) in self._arrays
        return (extractor, output) in self._there

    def holds_all_rows(self, extractor: str, output: str) -> bool:
        name = _rows_name(extractor, output)
        return name in self._arrays and self._arrays[name].shape[0] == self.count

    def contents(self) -> str:
        """What it holds, in words."""
        held = []
        for extractor, output in sorted(self._there):
            rows = self._arrays.get(_rows_name(extractor, output))
            held.append(f"statistics{'' if rows is None else f' and {rows.shape[0]} rows'} of {extractor}'s {output} features")
        return " and ".join(held + ([f"{len(self.images)} images"] if self.images else []))

    def moments(self, extractor: str, output: str) -> Moments:
        """Moments that it holds. Raises EvaluationError: they are damaged."""
        mean, covariance = (self._whole(name).astype(np.float64) for name in _names(extractor, output))
        rounding = _ROUNDING * np.abs(covariance).max()
        # A NaN fails both.
        if not ((np.diag(covariance) >= 0).all() and (np.abs(covariance - covariance.T) <= rounding).all()):
            name = _names(extractor, output)[1]
            raise EvaluationError(f"{self.place}: {name} is no covariance: it is not symmetric, or has variances below 0")
        return Moments(self.count, mean, covariance)

    def rows(self, extractor: str, output: str) -> np.ndarray:
        """Rows that it holds, float32 [N, D]. Raises EvaluationError: they are damaged."""
        return self._whole(_rows_name(extractor, output))

    def record(self) -> dict[str, Any]:
        """Record for results."""
        return {"name": self.name, "place": self.place, "count": self.count, "images": self.origin, **written(Path(self.place))}

    def check(self, extractor: str, output: str, form: Form, metric: str) -> None:
        """Check that it serves a metric. Raises EvaluationError."""
        if self.images is None and not self.holds(extractor, output, form):
            raise EvaluationError(
                f"{metric}: needs {form} of {extractor}'s {output} features, and {self.place} holds {self.contents()} "
                f"({program('evaluate')} reference makes another)"
            )

    def _whole(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        return array if isinstance(array, np.ndarray) else array.whole()

    def _read_record(self) -> None:
        try:
            record = json.loads(self._whole(_RECORD).tobytes())
            self.name, self.origin = str(record["name"]), dict(record["images"])
            self.count, (height, width) = int(record["count"]), record["size"]
            self.size = int(height), int(width)
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(f"{self.place}: {_RECORD} is damaged (make the reference anew)") from error


def new_reference(name: str, output: Path | None = None) -> Path:
    """File of a reference that is to be made: the one named, or that of its name. Raises EvaluationError."""
    path = output or REFERENCES / f"{name}{NPZ_SUFFIX}"
    if path.suffix != NPZ_SUFFIX:
        raise EvaluationError(f"--output: {path} is no name of a {NPZ_SUFFIX} file")
    if path.exists():
        raise EvaluationError(f"{path}: exists already (remove it, or give another --name)")
    return path


def reference_path(text: str) -> Path:
    """File of the made reference of this name, which goes before a file or folder here, or else the path."""
    named = REFERENCES / f"{text}{NPZ_SUFFIX}"
    return named if text == Path(text).name and named.exists() else Path(text)


def open_reference(text: str, option: str = "--reference") -> Reference:
    """Open a name in `outputs/references`, or else a path. Raises EvaluationError: there is none, or it is damaged."""
    path = reference_path(text)
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in REFERENCES.glob(f"*{NPZ_SUFFIX}"))) or "none"
        if text in ("train", "validation"):
            raise EvaluationError(f"{option}: {text!r} is for [evaluation] of a run (make one: {program('evaluate')} reference)")
        raise EvaluationError(
            f"{option}: {text!r} is neither a path nor the name of a reference (there are: {known}; "
            f"{program('evaluate')} reference makes one)"
        )
    if path.suffix == NPZ_SUFFIX and path.is_file():
        arrays = open_npz(path)
        return Reference(open_images(path) if IMAGES in arrays else None, str(path), arrays)
    if path.suffix == PKL_SUFFIX and path.is_file():
        return Reference(None, str(path), _statistics_of_edm2(path))
    return Reference(open_images(path), str(path))


def kept_outputs(extractor: FeatureExtractor) -> dict[str, set[Form]]:
    """Outputs of an extractor that metrics compare with those of a reference, and the forms that they need."""
    forms: dict[str, set[Form]] = {}
    for metric in METRICS.values():
        if metric.reference and metric.extractor in (None, extractor.name) and metric.output in extractor.dims:
            forms.setdefault(metric.output, set()).add(metric.reference)
    return forms


def write_reference(
    path: Path, name: str, images: ImageSet, extractors: Mapping[str, FeatureExtractor], rows: Rows, versions: Mapping[str, Any]
) -> None:
    """Write a reference: statistics of all images, and at most MOST_ROWS rows, drawn at random; in one process.

    Raises:
        EvaluationError: features are not finite, or it cannot be written.
    """
    numbers = np.arange(len(images))
    if len(images) > MOST_ROWS:
        numbers = np.sort(np.random.default_rng(0).permutation(len(images))[:MOST_ROWS])
    record = {
        "name": name, "images": images.record(), "count": len(images), "size": list(images.size),
        "extractors": {key: extractor.record() for key, extractor in extractors.items()}, "versions": dict(versions),
    }  # fmt: skip
    arrays: dict[str, np.ndarray] = {_RECORD: np.frombuffer(json.dumps(record).encode(), np.uint8)}
    for key, extractor in extractors.items():
        for output, forms in kept_outputs(extractor).items():
            moments = moments_of_rows(rows[key, output])
            arrays |= dict(zip(_names(key, output), (moments.mean, moments.covariance), strict=True))
            arrays |= {_rows_name(key, output): rows[key, output][numbers]} if "rows" in forms else {}
    try:
        make_folder(path.parent)
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # none of its names is allow_pickle
    except OSError as error:
        text = f"{path}: cannot be written: {first_line(error)} (make room, or give another --output)"
        raise EvaluationError(text) from error


def _names(extractor: str, output: str) -> tuple[str, str]:
    return _PUBLISHED_NAMES.get((extractor, output), (f"{extractor}.{output}.mu", f"{extractor}.{output}.sigma"))


def _rows_name(extractor: str, output: str) -> str:
    return f"{extractor}.{output}.rows"


def _key_of(name: str) -> tuple[str, str] | None:
    """Extractor and output that an array of statistics is of; None: of none."""
    for key, names in _PUBLISHED_NAMES.items():
        if name in names:
            return key
    extractor, _, rest = name.partition(".")
    output, _, kind = rest.partition(".")
    return (extractor, output) if kind in ("mu", "sigma") else None


def _statistics_of_edm2(path: Path) -> dict[str, np.ndarray]:
    """Arrays of EDM2's reference statistics, running no code in the file. Raises EvaluationError: no such file."""
    arrays: dict[str, np.ndarray] = {}
    try:
        content = read_table(path)
        for metric, extractor in _EDM2_EXTRACTORS.items():
            if metric in content:
                found = (np.asarray(content[metric][key], dtype=np.float64) for key in ("mu", "sigma"))
                arrays |= dict(zip(_names(extractor, "pooled"), found, strict=True))
    except (pickle.UnpicklingError, OSError, ValueError, TypeError, KeyError) as error:
        raise EvaluationError(f"{path}: is no file of EDM2's statistics: {first_line(error)}") from error
    return arrays
