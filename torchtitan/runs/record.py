"""Records of runs, read from their folders, grouped by seed, averaged with intervals."""

import bisect
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.manifest import read_json
from torchtitan.errors import DamagedFile, unwrapped
from torchtitan.files.regular import read_toml
from torchtitan.runs.evaluated import evaluated, is_number
from torchtitan.runs.status import STATUS_FILE
from torchtitan.settings.sections import filled_in, flattened
from torchtitan.statistics.interval import Interval, mean_interval, positive_interval
from torchtitan.training.metric_points import SESSION_FILE, TIMED, last_smaller_batch, read_points

TRAINING_LOSS = "loss_metrics/global_avg_loss"
WEIGHTED_ERROR = "loss_metrics/global_avg_weighted_error"  # logged where the loss is another
HELD_OUT_LOSS = "validation_metrics/loss"

RUN_FILES = ("config.toml", "metrics.jsonl", "summary.json")

# Keys that never make two runs different trainings: the seed, and everything about where a run is kept.
_NOT_A_SETTING = ("debug.seed", "job.")
_CACHED_STORE = re.compile(r"-[0-9a-f]{16}/(train|validation)$")  # as torchtitan.config.latent_cache names stores


class RunRecordError(Exception):
    """Folder that cannot be read as a run, or holds none; the message is one line for each."""


@dataclass(frozen=True)
class Series:
    """Series of the finite values of one metric over steps; steps rise strictly."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def coincides(self, other: "Series") -> bool:
        """Check whether both have the same steps, and values within 1e-6 of each other, which no chart shows apart."""
        pairs = zip(self.values, other.values, strict=False)
        return self.steps == other.steps and all(math.isclose(one, two, rel_tol=1e-6) for one, two in pairs)

    def tail(self) -> tuple[float, ...]:
        """Tail: the last half of the points, as for summary.json's medians."""
        return self.values[len(self.values) // 2 :]

    def final(self) -> float | None:
        """Final value."""
        return self.values[-1] if self.values else None

    def lowest(self) -> tuple[float, int] | None:
        """Lowest value and its step, the earliest of equals."""
        return min(zip(self.values, self.steps, strict=True)) if self.values else None

    def tail_median(self) -> float | None:
        return statistics.median(self.tail()) if self.values else None

    def at(self, step: float) -> float:
        """Interpolate linearly between points; `step` lies within the first and the last one."""
        right = bisect.bisect_left(self.steps, step)
        if self.steps[right] == step:
            return self.values[right]
        share = (step - self.steps[right - 1]) / (self.steps[right] - self.steps[right - 1])
        return self.values[right - 1] + share * (self.values[right] - self.values[right - 1])

    def smoothed(self, width: float) -> "Series":
        """Smooth by a centred running mean over the points within `width` steps.

        At the start, where curves are steep, over as many as fit on both sides; at the end over the remaining ones.
        """
        half = self._points_beside(width)
        if not half:
            return self
        sums = [0.0, *itertools.accumulate(self.values)]
        means = list(self.values)
        for i in range(1, len(self)):
            start, end = self._around(i, half)
            means[i] = (sums[end] - sums[start]) / (end - start)
        return Series(self.steps, tuple(means))

    def _points_beside(self, width: float) -> int:
        """Points on each side of one that lie within half a width of steps; 0 where nothing is to be smoothed."""
        if len(self) < 3:
            return 0
        return int(width / 2 / statistics.median(after - before for before, after in itertools.pairwise(self.steps)))

    def _around(self, place: int, half: int) -> tuple[int, int]:
        reach = min(half, place)
        return place - reach, min(place + reach + 1, len(self))


@dataclass(eq=False)
class RunRecord:
    """Record of one run's folder.

    Attributes:
        config: the tables of config.toml; empty where there is none.
        summary: of summary.json; None where there is none, as in a run in progress or killed.
        points: metrics.jsonl in the order of steps; later lines follow earlier ones of the same step.
        evaluated: the last values of evaluation.json, by metric and what it depends on.
        session: of session.json, of the last start.
        ended: of status.json, which each end writes, also one before the first step.
        stride: 1; of a very large metrics.jsonl k, where every k-th point was kept.
    """

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, Path] = field(default_factory=dict)
    evaluated: dict[str, Interval | None] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    damaged_lines: int = 0
    stride: int = 1
    problems: list[str] = field(default_factory=list)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the configuration by dotted key."""
        return dict(flattened(self.config))

    @cached_property
    def compared(self) -> dict[str, Any]:
        """Settings as compared with those of other runs: of a cached store its digest counts, and not its place."""
        stores = {key: _CACHED_STORE.search(str(self.settings.get(key))) for key in ("data.path", "data.validation_path")}
        return self.settings | {key: found[0] for key, found in stores.items() if found}

    @property
    def seed(self) -> int | None:
        return self.settings.get("debug.seed")

    @property
    def about(self) -> dict[str, Any]:
        """The summary or, without one, what is known since the last start: layout, hardware, changes."""
        return self.session if self.summary is None else self.summary

    @property
    def plugins(self) -> dict[str, str]:
        """SHA-256 of each plugin's file, or version of its package, by the name of the file."""
        return {Path(name).name: str(version) for name, version in (self.about.get("plugins") or {}).items()}

    @property
    def last_step(self) -> int:
        logged = self.points[-1]["step"] if self.points else 0
        return max(logged, self._summary_step())

    @property
    def status(self) -> str:
        """Status of the summary; a run that logged beyond its summary, or has none, is running, was killed or failed."""
        failed = self._failed
        if self.summary is None:
            return "failed" if failed else "no summary (running or killed)"
        status = str(self.summary.get("status", "unknown"))
        if self.points and self.points[-1]["step"] > self._summary_step():
            return f"{status} at step {self._summary_step()}, resumed since ({'failed' if failed else 'running or killed'})"
        since = failed and status not in ("failed", "oom") and self.ended.get("exit_code") == 1  # no signal
        return f"{status} at step {self._summary_step()}, failed since" if since else status

    @property
    def reason(self) -> str:
        """Why it did not complete; "" where nothing says so."""
        return str(self.ended.get("reason", "") if self._failed else (self.summary or {}).get("reason") or "")

    @property
    def _failed(self) -> bool:
        """Whether its last start failed."""
        return self.ended.get("status") == "failed"

    @cached_property
    def images_per_step(self) -> float | None:
        """Images per step; None where neither metrics nor configuration give it."""
        for point in reversed(self.points):
            if point["step"] > 0 and is_number(images := point.get("n_images_seen")) and images > 0:
                return images / point["step"]
        batch: Any = self.settings.get("training.global_batch_size")
        return batch if is_number(batch) and batch > 0 else None

    @cached_property
    def _images_seen(self) -> Series:
        """Images seen at logged steps, both rising from 0."""
        seen, rising = self.series("n_images_seen"), [(0, 0.0)]
        for step, images in zip(seen.steps, seen.values, strict=True):
            if step > rising[-1][0] and images > rising[-1][1]:
                rising.append((step, images))
        return Series(tuple(step for step, _ in rising), tuple(images for _, images in rising))

    def images_at(self, step: int) -> int:
        """Images seen after a step, on straight lines between logged points, for the batch may have grown between them.

        Beyond the last point the line is that of the last two; without points, `images_per_step`, which must be known, counts.
        """
        seen = self._images_seen
        if len(seen) == 1:
            return round(step * (self.images_per_step or 0))
        if step <= seen.steps[-1]:
            return round(seen.at(step))
        (before, start), (last, end) = list(zip(seen.steps, seen.values, strict=True))[-2:]
        return round(end + (step - last) * (end - start) / (last - before))

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """Names of the metrics, in the order they first appear."""
        return tuple(dict.fromkeys(tag for point in self.points for tag in point if tag != "step"))

    def series(self, tag: str) -> Series:
        """Series of the finite values of one metric; of several at one step the last counts."""
        found = {point["step"]: point[tag] for point in self.points if is_number(point.get(tag))}
        return Series(tuple(found), tuple(map(float, found.values())))

    def speeds(self, tag: str) -> Series:
        """Series of a metric of speed or memory since layout, device and batch are those of the run's end."""
        found = self.series(tag)
        first = bisect.bisect_right(found.steps, self.timed_after)
        return Series(found.steps[first:], found.values[first:])

    @property
    def timed_after(self) -> int:
        """Last step at which layout, device or batch were not those of the run's end; 0: they never changed."""
        grown = last_smaller_batch(self.points) if self.settings.get("training.double_batch_after") else 0
        return max(self.resumed_after, grown)

    @property
    def resumed_after(self) -> int:
        """Step after which the run was last resumed with another layout, device or batch; 0: never."""
        timed = self.about.get(TIMED)
        after = timed.get("after_step") if isinstance(timed, Mapping) else None
        return after if isinstance(after, int) else 0

    def not_finite(self, tag: str) -> int:
        """Number of logged values of a metric that are NaN or infinite."""
        return sum(isinstance(value := point.get(tag), float) and not math.isfinite(value) for point in self.points)

    def held_out_tags(self) -> dict[str, str]:
        """Held-out loss tags by track; the trained weights are the track `none`."""
        tags = {"none": HELD_OUT_LOSS} if HELD_OUT_LOSS in self.tags else {}
        for tag in self.tags:
            parts = tag.split("/")
            if len(parts) == 3 and parts[0] == "validation_metrics" and parts[2] == "loss":
                tags[parts[1]] = tag
        return tags

    @property
    def weighted_error_tag(self) -> str:
        """Tag of the weighted error, which is comparable between runs with and without further terms of the loss."""
        return WEIGHTED_ERROR if WEIGHTED_ERROR in self.tags else TRAINING_LOSS

    def bin_tags(self) -> dict[int, str]:
        """Tags of the training error by number of the timestep bin."""
        tags = [tag for tag in self.tags if re.fullmatch(r"loss_by_bin/[0-9]{1,3}", tag)]
        return dict(sorted((int(tag.split("/")[1]), tag) for tag in tags))

    @cached_property
    def bin_edges(self) -> list[float] | None:
        """Edges in t of the timestep bins, [K + 1] from 0 to 1; None where the configuration does not give them."""
        import torch

        from torchtitan.diffusion.objectives import OBJECTIVES, build_objective

        try:
            bins = self.config["metrics"]["loss_bins"]
            if not 1 <= bins <= 1000:
                return None
            quantiles = torch.arange(1, bins, dtype=torch.float64) / bins
            table = self.config["objective"]
            kind = OBJECTIVES[table.get("name", "denoising")]
            objective = build_objective(filled_in(kind.Config(), table), seed=0)
            return [0.0, *objective.timestep_sampler.density.quantile(quantiles).tolist(), 1.0]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            return None  # of another version of the program

    def _summary_step(self) -> int:
        return (self.summary or {}).get("step", 0)


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        RunRecordError: there is no such folder, or no file of a run in it.
    """
    if not folder.is_dir():
        raise RunRecordError(f"{folder}: no such folder" if not folder.exists() else f"{folder}: not a folder")
    if not any((folder / name).is_file() for name in RUN_FILES):
        runs = any(path.is_file() for name in RUN_FILES for path in folder.glob(f"*/{name}"))
        advice = f"give its runs: {folder}/*" if runs else "no config.toml, metrics.jsonl or summary.json in it"
        raise RunRecordError(f"{folder}: not a run's folder ({advice})")
    run = RunRecord(folder, folder.resolve().name)
    try:
        run.config = read_toml(folder / "config.toml")
    except (OSError, ValueError) as error:
        run.problems.append(_unread("config.toml", error))
    try:
        run.summary = read_json(folder / "summary.json", dict)
    except DamagedFile as error:
        if (folder / "summary.json").exists():
            run.problems.append(str(error))
    with suppress(DamagedFile):
        run.session = read_json(folder / SESSION_FILE, dict)
    with suppress(DamagedFile):
        run.ended = read_json(folder / STATUS_FILE, dict)
    try:
        read = read_points(folder / "metrics.jsonl")
        run.points, run.damaged_lines, run.stride = read.points, read.damaged, read.stride
    except OSError as error:
        run.problems.append(_unread("metrics.jsonl", error))
    try:
        run.evaluated = evaluated(folder / "evaluation.json", run.last_step)
    except (DamagedFile, KeyError, TypeError, ValueError, AttributeError) as error:
        run.problems.append(f"evaluation.json cannot be read ({unwrapped(error)})")
    log_freq = run.settings.get("metrics.log_freq", math.inf)
    ahead = 0 if run.summary else log_freq if is_number(log_freq) else math.inf
    for path in sorted((folder / "samples").glob("step-*.png")):
        number = path.stem.removeprefix("step-")
        # Later ones than the last step, or the next logged point, are of steps that the run went back from.
        if number.isdecimal() and (not (run.points or run.summary) or int(number) <= run.last_step + ahead):
            run.samples[int(number)] = path
    return run


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """Read several runs, a repeated one once; equal names are distinguished by the folders above.

    Raises:
        RunRecordError: with one line per folder without a run.
    """
    runs: dict[Path, RunRecord] = {}
    problems = []
    for folder in folders:
        try:
            runs.setdefault(folder.resolve(), read_run(folder))
        except RunRecordError as error:
            problems.append(str(error))
    if problems:
        raise RunRecordError("\n".join(dict.fromkeys(problems)))
    _tell_apart(runs)
    return list(runs.values())


@dataclass(frozen=True)
class RunGroup:
    """Group of runs with the same settings and different seeds; often one run alone."""

    name: str
    runs: tuple[RunRecord, ...]

    @property
    def at_end(self) -> tuple[RunRecord, ...]:
        """Runs that have reached the last step of the farthest: the others' losses are of earlier training."""
        last = max(run.last_step for run in self.runs)
        return tuple(run for run in self.runs if run.last_step == last)

    def interval(self, values: Iterable[float | None]) -> Interval | None:
        """Interval of the mean over the runs that have a value; None where none has."""
        present = [value for value in values if value is not None]
        return mean_interval(present) if present else None

    def rate_interval(self, values: Iterable[float | None]) -> Interval | None:
        """Interval of a positive rate's geometric mean over the runs that have a value; None where none has."""
        present = [value for value in values if value is not None]
        return positive_interval(present) if present else None


def hardware_name(run: RunRecord) -> str | None:
    """Name of a run's devices, as `8 x NVIDIA H100`, of processors with the maker's name; None where none is recorded."""
    hardware: dict[str, Any] = run.about.get("hardware") or {}
    device, count = hardware.get("device") or run.about.get("device"), hardware.get("num_devices", 1)
    if not device:
        return None
    if not str(device).startswith("CPU"):
        return f"{count} x {device}" if count > 1 else str(device)
    name = f"{hardware['cpu']}, {device}" if hardware.get("cpu") else str(device)
    return f"{name}, {count} processes" if count > 1 else name


def _settings_text(run: RunRecord) -> str:
    """Settings that make a run another training than others, as text; "" where it has no configuration."""
    settings = {key: value for key, value in run.compared.items() if not key.startswith(_NOT_A_SETTING)}
    changed = {"changed while it trained": run.about["config_changes"]} if "config_changes" in run.about else {}
    changed |= {"plugins": run.plugins} if run.plugins else {}
    return json.dumps(settings | changed, sort_keys=True, default=str) if settings else ""


def group_by_seed(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Group runs of one hardware that differ in debug.seed only (and in [job]: name, folder).

    A repeated seed says nothing about the variation between seeds: that run is a group of its own, as is one without a
    configuration. Groups are in the order of their first runs, runs in that of their seeds.
    """
    groups: dict[tuple, list[RunRecord]] = {}
    repeats: dict[tuple, int] = {}
    settings = [_settings_text(run) for run in runs]
    known = {text: hardware for text, run in zip(settings, runs, strict=True) if (hardware := hardware_name(run))}
    for text, run in zip(settings, runs, strict=True):
        if not text:
            groups["alone", str(run.folder.resolve())] = [run]
            continue
        same = text, hardware_name(run) or known.get(text)  # of a run in progress it is not known yet
        repeat = repeats.get((same, run.seed), 0)
        repeats[same, run.seed] = repeat + 1
        alone = ("repeat", str(run.folder.resolve())) if repeat else ("group", same)
        groups.setdefault(alone, []).append(run)
    names: set[str] = set()
    found = []
    for members in groups.values():
        name = _group_name([run.name for run in members])
        while name in names:
            name += "'"
        names.add(name)
        found.append(RunGroup(name, tuple(sorted(members, key=lambda run: (run.seed or 0, run.name)))))
    return found


def align(series: Sequence[Series], rates: bool = False) -> list[tuple[int, Interval]]:
    """Align and average series at every step that one of them logged and all of them reach.

    Between its points a series counts as a straight line, so that those of unequal steps can be averaged. Empty ones
    do not count.

    Args:
        rates: values are positive rates: geometric means, intervals over logarithms.

    Returns:
        step and interval of the mean, steps rising.
    """
    present = [one for one in series if len(one)]
    if not present:
        return []
    first, last = max(one.steps[0] for one in present), min(one.steps[-1] for one in present)
    steps = sorted({step for one in present for step in one.steps if first <= step <= last})
    interval = positive_interval if rates else mean_interval
    return [(step, interval([one.at(step) for one in present])) for step in steps]


def coinciding(series: Mapping[str, Series]) -> str:
    """Sentence on the names with coinciding series, of which a chart shows one line; "" where there are none."""
    alike: list[list[str]] = []
    for name, one in series.items():
        found = next((names for names in alike if one.coincides(series[names[0]])), None)
        if found:
            found.append(name)
        elif one:
            alike.append([name])
    equal = {", ".join(names): all(series[name] == series[names[0]] for name in names) for names in alike if len(names) > 1}
    told = "; ".join(names if exact else f"{names} (to 1e-6)" for names, exact in equal.items())
    return f"Equal at every logged point, one line on another: {told}." if told else ""


def differing_settings(runs: Sequence[RunRecord]) -> tuple[list[str], list[str]]:
    """Split the configurations' keys into differing and common ones.

    Returns:
        keys of which two runs have different values, or only one of them has a value; and keys all agree on.
        Runs without a configuration do not count.
    """
    known = [run.compared for run in runs if run.settings]
    keys = list(dict.fromkeys(key for settings in known for key in settings))
    common = [key for key in keys if all(key in one and one[key] == known[0][key] for one in known)]
    return [key for key in keys if key not in set(common)], common


def _unread(name: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no {name}"
    return f"{name} cannot be read ({unwrapped(error)})"


def _tell_apart(runs: dict[Path, RunRecord]) -> None:
    for longer in (lambda path: "/".join(path.parts[-2:]), str):
        names = [run.name for run in runs.values()]
        for path, run in runs.items():
            if names.count(run.name) > 1:
                run.name = longer(path)


def _group_name(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    common = names[0]
    while not all(name.startswith(common) for name in names):
        common = common[:-1]
    stem = common.rstrip("-_. /")
    for word in ("seed", "s", "r"):  # r: a repeat of a grid
        if stem.endswith(("-" + word, "_" + word)):
            stem = stem[: -len(word)].rstrip("-_. /")
    return f"{stem or names[0]} ({len(names)} seeds)"
