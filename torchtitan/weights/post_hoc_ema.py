"""Weight averages of lengths chosen after training, reconstructed from a run's snapshots, a few tensors at a time.

docs/objectives.md has the method and its accuracy.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchtitan.checkpoint.reading import reader, tensor_shapes
from torchtitan.files.shard_files import write_tensors
from torchtitan.files.weight_files import written_whole
from torchtitan.pictures.number_text import counted
from torchtitan.training.ema_snapshots import AVERAGED, BESIDE, FROZEN
from torchtitan.training.power_profiles import WIDEST_STD, Combination, Profile, combinations, combine
from torchtitan.training.snapshot_series import Snapshot, SnapshotError, read_series

MAX_ERROR = 0.1
# Below it, coefficients are so large that the rounding of half precision grows to whole per cents.
SHORTEST_OF_HALF_PRECISION = 0.05
_READ_AT_ONCE = 32 << 20  # bytes of stored tensors
_BFLOAT16_ROUNDING = 2.0**-9

_Reader = Callable[[Iterable[str]], dict[str, Tensor]]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class StoredAverages:
    """Stored averages of a run up to a step, snapshots oldest first."""

    snapshots: tuple[Snapshot, ...]
    tracks: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> Snapshot:
        return self.snapshots[-1]

    @cached_property
    def places(self) -> list[tuple[Snapshot, str]]:
        return [(snapshot, track) for snapshot in self.snapshots for track in self.tracks if track in snapshot.tracks]

    @cached_property
    def profiles(self) -> list[Profile]:
        return [Profile(snapshot.progress, snapshot.tracks[track]) for snapshot, track in self.places]

    def wanted(self, std: float) -> Profile:
        """Profile of a length at the last snapshot."""
        return Profile(self.last.progress, std)

    def reach(self, max_error: float) -> str:
        """Lengths with a profile error of at most `max_error`, in words, to 0.001."""
        stds = sorted({*(np.arange(2, int(1000 * WIDEST_STD) + 1) / 1000).tolist(), *self.last.tracks.values()})
        errors = [each.error for each in combinations(self.profiles, [self.wanted(std) for std in stds])]
        within = [error <= max_error for error in errors]
        starts = [std for n, std in enumerate(stds) if within[n] and not (n and within[n - 1])]
        ends = [std for n, std in enumerate(stds) if within[n] and not (n + 1 < len(stds) and within[n + 1])]
        return " and ".join(f"{low:g} to {high:g}" for low, high in zip(starts, ends, strict=True)) or "no length"


@dataclass(frozen=True)
class Reconstruction:
    """Average as a combination of `stored`; std: deviation of its profile relative to the time trained."""

    std: float
    stored: StoredAverages
    combination: Combination

    @cached_property
    def shapes(self) -> Shapes:
        """Shape and dtype of every weight, those of more bytes first."""
        stored = tensor_shapes(self.stored.last.path)
        prefix = f"{AVERAGED}{self.stored.places[-1][1]}."
        shapes = {n.removeprefix(prefix): (s, torch.float32) for n, (s, _) in stored.items() if n.startswith(prefix)}
        shapes |= {n.removeprefix(FROZEN): entry for n, entry in stored.items() if n.startswith(FROZEN)}
        return dict(sorted(shapes.items(), key=lambda entry: (-entry[1][1].itemsize, entry[0])))

    @property
    def warnings(self) -> list[str]:
        """Lines about a reconstruction that is less accurate than its profile error tells."""
        coarse = [snapshot for snapshot in self.stored.snapshots if snapshot.dtype == "bfloat16"]
        if not coarse:
            return []
        share = self.combination.magnitude * _BFLOAT16_ROUNDING
        return [
            f"{counted(len(coarse), 'snapshot')} in bfloat16: their rounding moves a weight by up to {100 * share:.2g} % of its "
            "size (ema.snapshot_dtype = \"float16\" takes as much room, and is 8 times finer)"
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in the order of `shapes`; a few are in memory at a time. Raises SnapshotError."""
        readers = {path: reader(path) for path in self._terms}
        last = reader(self.stored.last.path)
        for names in _portions(self.shapes):
            copied = last(FROZEN + name for name in names if name in self.frozen)
            sums = self._sums([name for name in names if name not in self.frozen], readers)
            for name in names:
                yield name, copied.pop(FROZEN + name) if name in self.frozen else self._finite(name, sums.pop(name))

    @cached_property
    def _terms(self) -> dict[Path, list[tuple[str, float]]]:
        """Tracks and coefficients of each snapshot that has any but 0."""
        terms: dict[Path, list[tuple[str, float]]] = {}
        for (snapshot, track), coefficient in zip(self.stored.places, self.combination.coefficients, strict=True):
            if coefficient:
                terms.setdefault(snapshot.path, []).append((track, coefficient))
        return terms

    def _sums(self, names: Sequence[str], readers: dict[Path, _Reader]) -> dict[str, Tensor]:
        """Weighted sums of the stored averages of some weights, float64."""
        sums = {name: torch.zeros(self.shapes[name][0], dtype=torch.float64) for name in names}
        for path, tracks in self._terms.items():
            for track, coefficient in tracks:
                read = readers[path](f"{AVERAGED}{track}.{name}" for name in names)
                for name in names:
                    sums[name].add_(read.pop(f"{AVERAGED}{track}.{name}"), alpha=coefficient)
        return sums

    def beside(self) -> dict[str, Tensor]:
        """Tensors of the objective at that step, by name."""
        path = self.stored.last.path
        tensors = reader(path)(name for name in tensor_shapes(path) if name.startswith(BESIDE))
        return {name.removeprefix(BESIDE): tensor for name, tensor in tensors.items()}

    @cached_property
    def frozen(self) -> set[str]:
        """Names of buffers, and of parameters that are not trained: they are copied."""
        stored = tensor_shapes(self.stored.last.path)
        return {name.removeprefix(FROZEN) for name in stored if name.startswith(FROZEN)}

    def _finite(self, name: str, value: Tensor) -> Tensor:
        if not value.isfinite().all():
            advice = "a snapshot holds values that are not (--step chooses an earlier one)"
            raise SnapshotError(f"std {self.std:g}: {name} is not finite: {advice}")
        return value.to(torch.float32)

    def describe(self) -> str:
        """Describe the reconstruction and its accuracy in one line."""
        last, count = self.stored.last, len(self.stored.snapshots)
        return (
            f"std {self.std:g} at step {last.step} ({last.images} images): {count} snapshot{'s' if count > 1 else ''} of "
            f"{', '.join(self.stored.tracks)}; profile error {self.combination.error:.3g}, "
            f"sum of |coefficients| {self.combination.magnitude:.3g}"
        )


def stored_averages(
    run: Path, step: int | None = None, without: Sequence[str] = (), ignore_gaps: bool = False
) -> StoredAverages:
    """Averages up to a snapshot's step (None: the newest), verified. Raises SnapshotError."""
    snapshots, gaps = read_series(run, step, ignore_gaps)
    last = snapshots[-1]
    if unknown := [name for name in without if name not in last.tracks]:
        raise SnapshotError(f"--without: {last.path} has no track {unknown[0]!r} (there are: {', '.join(last.tracks)})")
    of_std = {std: name for name, std in reversed(last.tracks.items()) if name not in without}  # one of each length
    tracks = tuple(name for name in last.tracks if of_std.get(last.tracks[name]) == name)
    if not tracks:
        raise SnapshotError(f"{last.path}: no track is left to reconstruct from (there are: {', '.join(last.tracks)})")
    _check_alike(snapshots, tracks)
    return StoredAverages(tuple(snapshots), tracks, tuple(f"{gap.problem}; left out" for gap in gaps))


def reconstruct(stored: StoredAverages, std: float, max_error: float = MAX_ERROR) -> Reconstruction:
    """Reconstruct the average of a length at the last snapshot.

    Args:
        std: standard deviation of its profile relative to the time trained, in (0, 12^-1/2).

    Raises:
        SnapshotError: there is no such length, or the snapshots cannot represent it.
    """
    check_std(std)
    halves = {snapshot.dtype for snapshot in stored.snapshots} - {"float32"}
    if halves and std < SHORTEST_OF_HALF_PRECISION:
        raise SnapshotError(
            f"std {std:g}: snapshots are {min(halves)}, whose rounding is too coarse for lengths below "
            f"{SHORTEST_OF_HALF_PRECISION:g} (give a longer one, or train with ema.snapshot_dtype = \"float32\")"
        )
    found = Reconstruction(std, stored, combine(stored.profiles, stored.wanted(std)))
    if not found.combination.error <= max_error:
        raise SnapshotError(
            f"std {std:g}: the snapshots represent it with a profile error of {found.combination.error:.3g}, above "
            f"{max_error:g}; they reach {stored.reach(max_error)} (give another length, or --max-error)"
        )
    return found


def check_std(std: float) -> None:
    """Check that profiles of a standard deviation exist. Raises SnapshotError."""
    if not (math.isfinite(std) and 0 < std < WIDEST_STD):
        raise SnapshotError(f"std {std:g}: must be above 0 and below {WIDEST_STD:.4f}, the width of the flat profile")


def write_weights(found: Reconstruction, output: Path, run: Path, overwrite: bool = False) -> None:
    """Write a reconstruction to a safetensors file of the model's weights. Raises SnapshotError, WeightsError."""
    last = found.stored.last
    metadata = {
        "layout": "safetensors", "run": run.resolve().name,
        "weights": f"{run.resolve().name}, step {last.step}, std={found.std:g}", "step": str(last.step),
        "images": str(last.images), "std": repr(found.std),
        "tracks": ", ".join(found.stored.tracks), "snapshots": str(len(found.stored.snapshots)),
        "profile_error": repr(found.combination.error),
        "sum_of_coefficient_magnitudes": repr(found.combination.magnitude),
    }  # fmt: skip
    with written_whole(output, overwrite) as path:
        write_tensors(path, found.shapes, (tensor for _, tensor in found.tensors()), metadata)


def _check_alike(snapshots: Sequence[Snapshot], tracks: Sequence[str]) -> None:
    """Check that the snapshots hold the same parameters and lengths. Raises SnapshotError."""
    last = snapshots[-1]
    wanted = {name: shape for name, (shape, _) in tensor_shapes(last.path).items() if name.startswith((AVERAGED, FROZEN))}
    for snapshot in snapshots:
        if {name: snapshot.tracks.get(name) for name in tracks} != {name: last.tracks[name] for name in tracks}:
            raise SnapshotError(f"{snapshot.path}: has other averages than {last.path.name} (move one of them away)")
        found = {name: shape for name, (shape, _) in tensor_shapes(snapshot.path).items() if name.startswith((AVERAGED, FROZEN))}
        if found != wanted:
            raise SnapshotError(f"{snapshot.path}: has other parameters than {last.path.name} (move one of them away)")


def _portions(shapes: Shapes) -> Iterator[list[str]]:
    portion, size = [], 0
    for name, (shape, dtype) in shapes.items():
        portion.append(name)
        size += math.prod(shape) * dtype.itemsize
        if size >= _READ_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
