"""A run that measures its gradient noise: it trains as before, survives being killed, and leaves what it should."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.end_to_end.gns_runs import CHECKPOINT_INTERVAL, GNS, MEASURED_EVERY, STEPS
from tests.end_to_end.runs import checkpoint_tensors, write_config
from tests.faults.forked import ForkedRun
from tests.launcher import run_on_ranks
from torchtitan.gns.raw_sums import raw_files, read_sums
from torchtitan.runs.compare.noise import noise_scales
from torchtitan.runs.record import read_run
from torchtitan.training.config import LRSchedulerConfig
from torchtitan.training.schedules import lr_factor

# Step of the checkpoint from which a run resumes. Intervals count in steps of the first batch: the grown run needs fewer.
CHECKPOINTS = {"killed measured": CHECKPOINT_INTERVAL, "killed grown": 14, "killed allocated": CHECKPOINT_INTERVAL}
LAYOUTS = {1: {"replicas": 1, "shards": 1}, 2: {"replicas": 2, "shards": 1}}
SCHEDULE = LRSchedulerConfig(warmup_steps=5, decay_type="cosine")  # of every run
RANKS = ["--gns.rank_gradients", "true"]
# Muon is measured in the plain geometry, where a few steps already tell the bins apart; an objective that hardly counts
# small timesteps makes them so unequal that the shares change before the first checkpoint.
ALLOCATE = [
    "--gns.allocate_timesteps", "true", "--gns.allocation_warmup", "320", "--gns.allocation_interval", "3",
    "--gns.num_bins", "2", "--optimizer.name", "Muon", "--objective.timesteps.name", "uniform",
    "--objective.spread", "stratified",
    "--objective.weighting.name", "p2", "--objective.weighting.gamma", "3", "--training.global_batch_size", "64",
]  # fmt: skip


def runs_of(ranks: int) -> dict[str, dict]:
    """Runs that are done straight, and once more killed and resumed."""
    layout = LAYOUTS[ranks]
    # In one process rank gradients are microbatches', of which there must be two.
    measured = {"measured": layout | {"accumulation": 4 // ranks, "overrides": [*GNS, *RANKS]}}
    if ranks == 1:
        return measured | {"allocated": layout | {
            "accumulation": 1, "overrides": [*GNS, *ALLOCATE, "--training.local_batch_size", "64"],
        }}
    return measured | {
        "grown": layout | {"accumulation": 1, "steps": 60, "overrides": [
            *GNS, "--training.double_batch_after", "[48, 120]",
            "--gns.num_bins", "2", "--training.global_batch_size", "4", "--training.local_batch_size", "2",
        ]},
    }  # fmt: skip


def unmeasured_of(ranks: int) -> dict[str, dict]:
    """The same trainings with and without measurement: as a single process, and sharded."""
    if ranks == 1:
        return {"off": LAYOUTS[1] | {"accumulation": 4, "overrides": []}}
    sharded = {"replicas": 1, "shards": 2, "accumulation": 1, "steps": 7}  # two of them measured
    return {"off": sharded | {"overrides": []}, "on": sharded | {"overrides": [*GNS, *RANKS]}}


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request, tmp_path_factory) -> Path:
    """Of every run of one number of processes, all completed; those called `killed ...` at the second attempt."""
    ranks = request.param
    path = tmp_path_factory.mktemp(f"gns{ranks}")
    killed = [{"name": f"killed {name}", **run} for name, run in runs_of(ranks).items()]
    with pytest.raises(AssertionError, match="exit code -9"):
        run_on_ranks("tests.end_to_end.gns_runs:abandon", ranks, {"folder": str(path), "runs": killed})
    for run in killed:
        checkpoints = [found.name for found in (path / run["name"] / "checkpoint").iterdir()]
        assert checkpoints == [f"step-{CHECKPOINTS[run['name']]:08d}"] and not (path / run["name"] / "summary.json").exists()
    straight = [{"name": name, **run} for name, run in (runs_of(ranks) | unmeasured_of(ranks)).items()]
    run_on_ranks("tests.end_to_end.gns_runs:complete", ranks, {"folder": str(path), "runs": straight + killed})
    return path


def points(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def noise_points(run: Path) -> list[dict]:
    """Step and noise tags of every point that has any."""
    found = [
        {tag: value for tag, value in point.items() if tag == "step" or tag.startswith("gns/")} for point in points(run)
    ]
    return [point for point in found if len(point) > 1]


def curve(run: Path) -> list[tuple]:
    found = [point for point in points(run) if "grad_norm" in point]
    return [(point["step"], point["loss_metrics/global_avg_loss"], point["grad_norm"]) for point in found]


def raw_rows(run: Path) -> list[dict]:
    """Sums as bytes, so that what is no number equals itself."""
    return [
        {"step": step}
        | {name: None if value is None else value.numpy().tobytes() for name, value in vars(sums).items()}
        for step, sums in read_sums(run / "gns")
    ]


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoint").iterdir())


def same_tensors(run: Path, other: Path, without: str = "none") -> bool:
    found, wanted = (
        {
            name: tensor for name, tensor in checkpoint_tensors(last_checkpoint(path)).items()
            if name.split(".")[0] != without
        }
        for path in (run, other)
    )  # fmt: skip
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("folder", "name"), [(1, "measured"), (1, "allocated"), (2, "measured"), (2, "grown")], indirect=["folder"],
    scope="module",  # or the runs would be made anew for each
)  # fmt: skip
def test_killed_between_measured_steps_and_resumed_run_equals_straight_run_bit_for_bit(folder, name):
    assert CHECKPOINTS[f"killed {name}"] % MEASURED_EVERY and STEPS % MEASURED_EVERY
    straight, killed = folder / name, folder / f"killed {name}"
    assert curve(killed) == curve(straight)
    assert same_tensors(killed, straight)
    assert len(raw_files(killed / "gns")) > 1
    rows, wanted = raw_rows(killed), raw_rows(straight)
    assert [row["step"] for row in wanted] == list(range(1, int(last_checkpoint(straight).name[-8:]) + 1))
    different = [
        (row["step"], key) for row, right in zip(rows, wanted, strict=True) for key in right if row[key] != right[key]
    ]
    assert different == []
    assert noise_points(killed) == noise_points(straight)
    state, wanted_state = (json.loads((last_checkpoint(run) / "state.json").read_text()) for run in (killed, straight))
    for found in (state, wanted_state):
        del found["config"], found["reports"]  # the run's name, and times
    assert state["gns"] and state == wanted_state


@pytest.mark.parametrize("folder", [2], indirect=True)
def test_batch_grows_on_both_sides_of_the_kill_and_the_images_stay_as_many(folder):
    logged = [point for point in points(folder / "killed grown") if "grad_norm" in point]
    sizes = [point["global_batch_size"] for point in logged]
    assert sizes[0] == 4 and 4 < sizes[CHECKPOINTS["killed grown"] - 1] < max(sizes) and sizes[:-1] == sorted(sizes[:-1])
    assert [point["n_images_seen"] for point in logged] == [sum(sizes[: n + 1]) for n in range(len(sizes))]
    assert sum(sizes) == 240
    done = [sum(sizes[:n]) / 4 for n in range(len(sizes))]  # in steps of the first batch
    rates = [lr_factor(SCHEDULE, int(n) + 1, 60) * 3e-3 * math.sqrt(size / 4) for n, size in zip(done, sizes, strict=True)]
    assert [point["lr"] for point in logged] == pytest.approx(rates, rel=1e-12)
    summary = json.loads((folder / "killed grown" / "summary.json").read_text())
    assert (summary["step"], summary["progress"], summary["n_images_seen"]) == (len(sizes), 60, 240)


@pytest.mark.parametrize("folder", [1], indirect=True)
def test_allocation_changes_the_shares_on_both_sides_of_the_kill(folder):
    shares = {point["step"]: point["gns/shares/0"] for point in noise_points(folder / "killed allocated")}
    assert shares[1] == pytest.approx(0.5)
    assert 0.05 < shares[CHECKPOINT_INTERVAL] < 0.4
    sampler = json.loads((last_checkpoint(folder / "killed allocated") / "state.json").read_text())["timestep_sampler"]
    assert sampler["shares"][0] == shares[STEPS]


def test_measuring_does_not_change_training(folder):
    on = folder / "on" if (folder / "on").exists() else folder / "measured"
    assert noise_points(on) and not noise_points(folder / "off")
    assert curve(on) == curve(folder / "off")
    assert same_tensors(on, folder / "off", without="gns")


@pytest.mark.parametrize("folder", [1], indirect=True)
def test_tags_name_geometry_estimator_and_bin(folder):
    quantities = {"signal", "noise", "b_simple", "lower", "upper", "samples", "lag"}
    tags = {tag for point in noise_points(folder / "measured") for tag in point if tag != "step"}
    for geometry in ("plain", "adam"):
        for estimator in ("sketch", "composite", "modulation"):
            for k in range(4):
                prefix = f"gns/{geometry}/{estimator}/{k}/"
                found = {tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)}
                # An interval without an end has no upper one to log.
                assert quantities - {"upper"} <= found <= quantities, prefix
    half = {tag for tag in tags if tag.startswith("gns/half_progress/")}
    assert {f"gns/half_progress/{k}/lower" for k in range(4)} <= half
    assert all(re.fullmatch(r"gns/half_progress/\d/(batch|lower|upper)", tag) for tag in half)
    tags -= half | {"gns/bins", "gns/more_steps", *(f"gns/edges/{k}" for k in range(3))}
    samplers = {tag for tag in tags if tag.startswith("gns/samplers/")}
    assert "gns/samplers/neyman/lower" in samplers
    tags -= samplers
    tags.discard("gns/reductions_per_step")
    assert all(re.fullmatch(r"gns/(plain|adam)/(sketch|composite|modulation|ranks)/(\d|all)/\w+", tag) for tag in tags)
    assert {tag.split("/")[1] for tag in noise_points(folder / "allocated")[-1] if tag != "step"} - {"more_steps"} == {
        "bins", "edges", "plain", "shares", "samplers",
    }  # fmt: skip
    whole = noise_points(folder / "measured")[-1]
    for geometry in ("plain", "adam"):
        headline = [whole[f"gns/{geometry}/{estimator}/all/headline"] for estimator in ("sketch", "composite", "modulation")]
        assert headline in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    assert whole["gns/plain/sketch/all/noise"] > 0 and whole["gns/plain/ranks/all/noise"] > 0


def test_picture_is_drawn_and_warnings_and_conclusions_are_printed(tmp_path):
    arguments = ["--training.steps", "9", "--sampling.enable", "false", "--checkpoint.enable", "false"]
    arguments += ["--training.local_batch_size", "4", "--gns.allocation_warmup", "10000", "--gns.allocate_timesteps", "true"]
    run = ForkedRun(write_config(tmp_path), "drawn", *GNS, *arguments)
    output = run.finish()[0]
    assert "of a microbatch of 4 images the rarest of" in output and "gns.allocation_warmup: 10,000" in output
    picture = run.folder / "gns" / "noise_scale.png"
    assert f"noise scale  {picture}" in output
    assert "not enough signal to judge batch" in output or "gradient noise scale" in output
    record = read_run(run.folder)  # for the page of the run
    (noise,) = noise_scales(["drawn"], [record])
    assert len(noise.conclusions) == 2 and all(conclusion in output for conclusion in noise.conclusions)
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width == 900 and image.height >= 400
        assert len(image.convert("L").getcolors()) > 50
