"""Tables of the comparison page: columns and rows of texts."""

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.checkpoint.manifest import checkpoint_steps
from torchtitan.data import LATENT_DATASETS
from torchtitan.distributed.degrees import DEGREE_KEYS
from torchtitan.errors import CheckpointError, StoreError
from torchtitan.files.remote_path import RemotePath
from torchtitan.pictures.number_text import counted, ends_text
from torchtitan.programs import pasted
from torchtitan.runs.compare.lines import cost, held_out
from torchtitan.runs.compare.text import (
    as_number,
    count_text,
    interval_text,
    lowest_text,
    setting_text,
    settings_text,
    track_name,
    value_text,
)
from torchtitan.runs.evaluated import at_step, measured_interval
from torchtitan.runs.record import TRAINING_LOSS, RunGroup, RunRecord, differing_settings
from torchtitan.statistics.interval import Interval, mean_interval

Rows = list[Sequence[str]]
Table = tuple[Sequence[str], Rows]  # columns, rows
# Sections of keys, and keys, that decide what a loss is.
_OF_LOSSES = ("objective.", "data.", "alignment.", "autoencoder.encode", "autoencoder.statistics", "model.learned_variance")
_OF_NO_LOSS = frozenset({
    "data.num_workers", "data.max_corrupt_share", "data.trigger_word", "validation.enable", "validation.interval",
    "validation.batch_size", "objective.spread", "objective.preconditioning",
})  # fmt: skip
_OF_PREDICTION = ("objective.name", "objective.prediction", "objective.heads", "objective.combine", "objective.sigma_data")
_OF_TRAINING_LOSS = (  # alone, of which the held-out one has nothing
    "alignment.", "data.horizontal_flip", "objective.cosine_weight", "objective.contrastive_weight",
    "objective.intermediate_share", "objective.learned_uncertainty", "objective.uncertainty_",
)

COSTS = {
    "throughput(img/s)": ("Throughput", "images per second, all processes"),
    "time_metrics/end_to_end(s)": ("Step time", "seconds per step"),
    "time_metrics/data_loading(%)": ("Waiting for data", "% of the step's time"),
    "mfu(%)": ("Model FLOPs utilisation", "% of the device's peak"),
    "memory/max_active(GiB)": ("Memory, active", "GiB of the first device, peak since the last point"),
    "memory/max_reserved(GiB)": ("Memory, reserved", "GiB of the first device, peak since the last point"),
    "memory/max_resident(GiB)": ("Memory, resident", "GiB of the first process, peak so far"),
}


class Name(str):
    """Name of a run or group, shown with the colour of its group's number."""

    group: int

    def __new__(cls, text: str, group: int) -> "Name":
        name = super().__new__(cls, text)
        name.group = group
        return name


def notes(runs: Sequence[RunRecord]) -> list[str]:
    """Notes on data that were left out, failed, or cannot be compared."""
    found = []
    for run in runs:
        if run.damaged_lines:
            found.append(f"{run.name}: {counted(run.damaged_lines, 'line')} of metrics.jsonl could not be read and left out")
        if run.stride > 1:
            found.append(f"{run.name}: metrics.jsonl is very large: one in {run.stride} of its points counts")
        if lost := run.not_finite(TRAINING_LOSS):
            found.append(f"{run.name}: training loss not finite at {counted(lost, 'logged point')}, left out")
        found += [f"{run.name}: {problem}" for problem in run.problems]
        if not run.points and not any("metrics.jsonl" in problem for problem in run.problems):
            found.append(f"{run.name}: nothing logged{'' if run.summary else ' yet'}")
        if changes := run.about.get("config_changes"):
            found.append(f"{run.name}: keys were changed while it trained: {'; '.join(map(str, changes))}")
        if run.reason:
            found.append(f"{run.name}: {run.status}: {run.reason}")
    found += _plugin_notes(runs)
    if changed := _differing(runs, _OF_LOSSES):
        if _held_out_alike(runs):
            text = "training losses do not rank them; held-out ones, at equal times, do"
            return [*found, f"The runs differ in {', '.join(changed)}: {text}."]
        text = "their losses are means over other timesteps, weights or images and do not rank them"
        cached = all(run.compared.get("data.path") != run.settings.get("data.path") for run in runs)
        if cached and {*changed} <= {"data.path", "data.validation_path"}:
            text = f"unless their caches differ in the prompts of previews alone, {text}"
        say = "the loss by timestep and the samples say more"
        of_path = "objective.path" in changed and any(run.settings.get("objective.prediction") == "v" for run in runs)
        if of_path or any(key.startswith(_OF_PREDICTION) for key in changed):
            what = "of other objectives" if "objective.name" in changed else "errors of other predictions"
            text, say = f"their losses, by timestep too, are {what} and do not rank them", "samples say more"
            if not any(key.startswith(("objective.path", "data.")) for key in changed):
                say += ", and research prediction_types, which measures errors of one prediction"
        found.append(f"The runs differ in {', '.join(changed)}: {text}; {say}.")
    elif others := _differing(runs, ("validation.",)):
        text = "held-out losses are of other images or times and do not rank them"
        found.append(f"The runs differ in {', '.join(others)}: {text}.")
    return found


def _plugin_notes(runs: Sequence[RunRecord]) -> list[str]:
    """Note each plugin of which the runs have different files."""
    names = dict.fromkeys(name for run in runs for name in run.plugins)
    differing = [name for name in names if len({run.plugins.get(name) for run in runs}) > 1]
    return [f"Plugin {name}: the runs have different files of it, or some have none." for name in differing]


def _held_out_alike(runs: Sequence[RunRecord]) -> bool:
    """Whether held-out losses are of one objective, data and times; given times are equal whatever densities train."""
    changed = [key for key in _differing(runs, (*_OF_LOSSES, "validation.")) if not key.startswith(_OF_TRAINING_LOSS)]
    drawn = all(key.startswith("objective.timesteps.") for key in changed)
    return not changed or drawn and all(run.settings.get("validation.timesteps") for run in runs)


def _differing(runs: Sequence[RunRecord], sections: tuple[str, ...]) -> list[str]:
    """Differing keys of some sections that decide what a loss is."""
    return [key for key in differing_settings(runs)[0] if key.startswith(sections) and key not in _OF_NO_LOSS]


def group_table(groups: Sequence[RunGroup], tracks: Sequence[str]) -> Table:
    """Means over the seeds that reached the last step; where held-out losses are comparable, differences paired by seed too."""
    columns = ["group", "runs", "steps", "training loss", *(f"held-out, {track_name(track)}" for track in tracks), "images/s"]
    alike = _held_out_alike([run for group in groups for run in group.runs])
    paired = [track for track in tracks if alike and any(_difference(group, groups[0], track) for group in groups)]
    columns += [f"less the first group's, {track_name(track)}" for track in paired]
    rows: Rows = []
    for n, group in enumerate(groups):
        runs, count = group.at_end, len(group.runs)
        values = [[run.series(TRAINING_LOSS).tail_median() for run in runs]]
        means = [interval_text(group.interval(one)) for one in values]
        means += [_held_out_text(group, track) for track in tracks]
        rate = group.rate_interval(cost(run, "throughput(img/s)") for run in runs)
        differences = [interval_text(_difference(group, groups[0], track)) for track in paired]
        shown = str(count) if len(runs) == count else f"{len(runs)} of {count}"
        rows.append([Name(group.name, n), shown, _steps(runs[0]), *means, interval_text(rate), *differences])
    return columns, rows


def _last_held_out(group: RunGroup, track: str) -> dict[int | None, tuple[int, float]]:
    """Last step with a held-out loss, and the loss, by seed; of the runs at the group's end that have the latest such step."""
    found = {run.seed: (loss.steps[-1], loss.values[-1]) for run in group.at_end if (loss := held_out(run, track))}
    latest = max((step for step, _ in found.values()), default=0)
    return {seed: pair for seed, pair in found.items() if pair[0] == latest}


def _held_out_text(group: RunGroup, track: str) -> str:
    found = _last_held_out(group, track)
    text = interval_text(group.interval(loss for _, loss in found.values()))
    steps, last = {step for step, _ in found.values()}, group.at_end[0].last_step
    fewer = f", of {counted(len(found), 'run')}" if 0 < len(found) < len(group.at_end) else ""
    return text + (f" at {steps.pop():,}" if steps and last not in steps else "") + fewer


def _difference(group: RunGroup, first: RunGroup, track: str) -> Interval | None:
    """Mean difference of held-out losses of one step over the seeds of both groups; None of fewer than two, and of the first."""
    of_first, own = _last_held_out(first, track), _last_held_out(group, track)
    pairs = [(pair, of_first[seed]) for seed, pair in own.items() if seed in of_first]
    found = [loss - other for (step, loss), (of_other, other) in pairs if step == of_other]
    return mean_interval(found) if len(found) > 1 and group is not first else None


def result_table(names: Sequence[Name], runs: Sequence[RunRecord], tracks: Sequence[str]) -> Table:
    columns = ["run", "seed", "status", "steps", "images seen", "training loss (tail median)", "lowest logged"]
    for track in tracks:
        columns += [f"held-out, {track_name(track)}", "its lowest"]
    rows: Rows = []
    for name, run in zip(names, runs, strict=True):
        loss = run.series(TRAINING_LOSS)
        images = run.images_at(run.last_step) if run.images_per_step else None
        row = [
            name, setting_text(run.seed), run.status, _steps(run), count_text(images), value_text(loss.tail_median()),
            lowest_text(loss),
        ]  # fmt: skip
        for track in tracks:
            loss = held_out(run, track)
            earlier = f" at {loss.steps[-1]:,}" if loss and loss.steps[-1] != run.last_step else ""
            row += [value_text(loss.final()) + earlier, lowest_text(loss)]
        rows.append(row)
    return columns, rows


def hardware_table(names: Sequence[Name], runs: Sequence[RunRecord]) -> Table:
    memory = [tag for tag in COSTS if tag.startswith("memory/") and any(tag in run.tags for run in runs)]
    columns = ["run", "layout", "device", "parameters", "images/s", "s/step", "MFU %"]
    columns += [COSTS[tag][0].lower() + ", GiB" for tag in memory] + ["commit", "torch"]
    rows: Rows = []
    for name, run in zip(names, runs, strict=True):
        summary = run.about
        versions = summary.get("versions", {})
        rates = ("throughput(img/s)", "time_metrics/end_to_end(s)", "mfu(%)")
        values = [cost(run, tag) for tag in (*rates, *memory)]
        rows.append([
            name, setting_text(summary.get("layout")), setting_text(summary.get("device")),
            count_text(as_number(summary.get("num_parameters"))), *(value_text(value, 3) for value in values),
            setting_text(versions.get("git_commit")), setting_text(versions.get("torch")),
        ])  # fmt: skip
    return columns, rows


def quality_table(groups: Sequence[RunGroup]) -> Table | None:
    """Table of the last metrics of samples: one column per evaluated run, before a group's runs its mean."""
    keys = list(dict.fromkeys(key for group in groups for run in group.runs for key in _evaluated(run)))
    heads: list[str] = ["sample quality"]
    columns: list[list[str]] = []
    for n, group in enumerate(groups):
        values = {run.name: [_evaluated(run).get(key) for key in keys] for run in group.runs}
        if not any(value is not None for column in values.values() for value in column):
            continue
        if len(group.runs) > 1:
            heads.append(Name(group.name, n))
            rows = zip(*(values[run.name] for run in group.at_end), strict=True)
            columns.append([interval_text(group.interval([value and value.value for value in row])) for row in rows])
        heads += [Name(name, n) for name in values]
        columns += [[ends_text(value) for value in column] for column in values.values()]
    return (heads, list(zip(keys, *columns, strict=True))) if keys else None


def _evaluated(run: RunRecord) -> dict[str, Interval | None]:
    """Values of the last metrics of samples, by name: while training, and by the command in its evaluation.json."""
    measured = run.about.get("evaluation") or {}
    how = (measured.get("how", "") + at_step(measured.get("step"), run.last_step)).removeprefix(", ")
    found = {
        f"{name} ({how})" if how else name: measured_interval(value)
        for name, value in measured.items() if isinstance(value, dict)  # others say how
    }  # fmt: skip
    return found | run.evaluated


def configuration(runs: Sequence[RunRecord], groups: Sequence[RunGroup]) -> dict[str, Any] | None:
    """Keys that differ, a column a group, and those that all runs have in common; None without any config.toml."""
    known = [(n, group) for n, group in enumerate(groups) if group.runs[0].settings]
    if not known:
        return None
    differing, common = differing_settings(runs)
    rows = [
        [key, *(settings_text([run.settings.get(key) for run in group.runs]) for _, group in known)]
        for key in differing if key != "job.name"
    ]  # fmt: skip
    columns = ["differing keys", *(Name(group.name, n) for n, group in known)]
    settings = known[0][1].runs[0].settings
    return {
        "differing": (columns, rows) if rows else None,
        "common": [[key, settings_text([settings[key]])] for key in common],
    }


def next_steps(run: RunRecord) -> Rows:
    """Commands that use a run: what to do, and the words of the command; without a checkpoint, a comparison alone."""
    folder, values = shlex.quote(str(run.folder)), run.settings
    data = values.get("data.name", "NAME")
    extractor = f" --extractor {values['evaluation.extractor']}" if values.get("evaluation.extractor") else ""
    layout = "diffusers" if values.get("model.name") == "flux" else "native"
    form = f"--adapter {layout}" if values.get("lora.enable") else "--format safetensors"
    file, longer = shlex.quote(f"{run.name}.safetensors"), 2 * (as_number(values.get("training.steps")) or run.last_step)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.folder.resolve().name).lstrip("._-")[:90]  # runs may be of other data
    name = f"{data}-{name}".strip("-") if name in ("", "train", "validation") else name
    plugins = f" --job.plugins {shlex.quote(','.join(map(str, found)))}" if (found := values.get("job.plugins")) else ""
    made = f"{pasted('evaluate')} reference {data} {folder}/config.toml --name {name}{extractor}{plugins}"
    against = [
        ["make a reference of the data", made],
        ["evaluate against it", f"{pasted('evaluate')} {folder} --reference {name}{extractor}{plugins}"],
    ]
    place = Path(str(values.get("job.dump_folder", "outputs"))) / str(values.get("job.name", run.name))
    moved = place.resolve() != run.folder.resolve()  # it was copied, and its own key names where it was
    goes_on = run.summary and not (moved and values.get("checkpoint.folder"))  # a folder elsewhere is of the name that it had
    here = f" --job.dump_folder {shlex.quote(str(run.folder.parent))} --job.name {shlex.quote(run.folder.name)}" if moved else ""
    degrees = (as_number(values.get(key)) or 1 for key in DEGREE_KEYS)
    processes, train = math.prod(degrees), pasted("train")
    if processes > 1:
        launcher = f"torchrun --standalone --nproc_per_node {processes:.0f} -m torchtitan_dit train"
        train = f"NGPU={processes:.0f} {train}" if train.startswith("scripts/") else launcher
    compare = ["compare with another run", f"{pasted('compare')} {folder} OTHER_RUN"]
    if not _has_checkpoint(run):
        return [compare]
    return [
        ["draw samples", f"{pasted('sample')} {folder}{plugins}"],
        ["export the weights", f"{pasted('checkpoint')} export {folder} {form} --output {file}{plugins}"],
        *(against if data not in LATENT_DATASETS and not values.get("data.resolutions") else []),  # of one shape alone
        compare,
        *([["train longer", f"{train} {folder}/config.toml --training.steps {longer:.0f}{here}{plugins}"]] if goes_on else []),
    ]


def _has_checkpoint(run: RunRecord) -> bool:
    try:
        folder = run_checkpoints(run.folder)
        return isinstance(folder, RemotePath) or bool(checkpoint_steps(folder))  # a store is not asked for a page
    except (CheckpointError, StoreError, OSError):
        return False


def _steps(run: RunRecord) -> str:
    planned, batch = (as_number(run.settings.get(f"training.{key}")) for key in ("steps", "global_batch_size"))
    if run.settings.get("training.double_batch_after") and planned and batch:
        done = run.images_at(run.last_step) / (planned * batch)
        return f"{run.last_step:,}" + ("" if done >= 1 else f" ({done:.0%} of the images)")
    return f"{run.last_step:,}" + ("" if planned is None or planned == run.last_step else f" of {planned:,}")
