"""Reading runs: intervals against closed forms, grouping by seed, alignment of unequal steps, damaged files."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from torchtitan.evaluation.sample_plans import SetPlan, choices_of
from torchtitan.runs.compare import page
from torchtitan.runs.compare.lines import group_lines
from torchtitan.runs.compare.tables import COSTS, _steps, hardware_table
from torchtitan.runs.record import (
    TRAINING_LOSS,
    RunGroup,
    RunRecord,
    RunRecordError,
    Series,
    align,
    differing_settings,
    group_by_seed,
    read_run,
)
from torchtitan.training.metric_points import read_points


def run(name: str, seed: int | None = 0, **settings) -> RunRecord:
    config = {"job": {"name": name}, "optimizer": {"lr": 1e-3} | settings, "debug": {"seed": seed}}
    return RunRecord(Path("/nowhere") / name, name, config)


def test_running_mean_is_centred_and_takes_what_there_is_at_the_end():
    series = Series((10, 20, 30, 40, 50), (1.0, 4.0, 1.0, 7.0, 5.0))
    assert series.smoothed(0) == series.smoothed(19) == series
    assert series.smoothed(20).values == pytest.approx((1.0, 2.0, 4.0, 13 / 3, 12 / 2))
    assert series.smoothed(40).values == pytest.approx((1.0, 2.0, 18 / 5, 17 / 4, 13 / 3))


def test_series_of_unequal_steps_are_averaged_where_all_of_them_reach():
    coarse, fine = Series((0, 10, 20), (0.0, 10.0, 40.0)), Series((5, 10, 15, 18), (1.0, 2.0, 3.0, 4.0))
    means = {step: interval.value for step, interval in align([coarse, fine, Series()])}
    assert means == pytest.approx({5: (5 + 1) / 2, 10: (10 + 2) / 2, 15: (25 + 3) / 2, 18: (34 + 4) / 2})
    assert align([Series((1, 2), (1.0, 1.0)), Series((3, 4), (1.0, 1.0))]) == []
    assert align([]) == []


def test_runs_that_differ_in_seed_and_name_only_are_one_group():
    runs = [run("a-seed1", 1), run("b", 0, lr=2e-3), run("a-seed0", 0), run("c", 2, lr=1e-3, beta1=0.8)]
    groups = group_by_seed(runs)
    assert [[one.name for one in group.runs] for group in groups] == [["a-seed0", "a-seed1"], ["b"], ["c"]]
    assert [group.name for group in groups] == ["a (2 seeds)", "b", "c"]
    runs[0].summary = {"device": "H100", "hardware": {"num_devices": 8}}  # the other one is in progress
    assert [group.name for group in group_by_seed(runs)] == ["a (2 seeds)", "b", "c"]
    runs[2].summary = {"device": "H100", "hardware": {"num_devices": 4}}
    assert [group.name for group in group_by_seed(runs)] == ["a-seed1", "b", "a-seed0", "c"]


def test_a_seed_that_is_repeated_and_runs_without_configuration_stand_alone():
    runs = [run("x", 0), run("y", 1), run("z", 1), RunRecord(Path("/p"), "p"), RunRecord(Path("/q"), "q")]
    assert [[one.name for one in group.runs] for group in group_by_seed(runs)] == [["x", "y"], ["z"], ["p"], ["q"]]


def test_a_cached_store_counts_by_its_digest_wherever_it_lies():
    def on(place: str, digest: str, seed: int) -> RunRecord:
        folder = f"{place}/pictures-{digest}"
        stores = {"path": f"{folder}/train", "validation_path": f"{folder}/validation"}
        return RunRecord(Path(place), place, {"data": stores, "debug": {"seed": seed}})

    first, second, other = on("/a/latents", "0123456789abcdef", 0), on("/b", "0123456789abcdef", 1), on("/b", "f" * 16, 1)
    assert differing_settings([first, second])[0] == ["debug.seed"]
    assert differing_settings([first, other])[0] == ["data.path", "data.validation_path", "debug.seed"]
    assert [len(group.runs) for group in group_by_seed([first, second, other])] == [2, 1]
    assert first.settings["data.path"] == "/a/latents/pictures-0123456789abcdef/train"  # shown as it is


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    good = '{"step": 2, "a": 1}'
    bad = ["{", "[1]", '{"a": 3}', '{"step": "4"}', "\ufffd\0", "123", '{"step": 7, "a"']
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"step": 5, "a": NaN}', good, "", *bad]))
    read = read_points(tmp_path / "metrics.jsonl")
    assert [point["step"] for point in read.points] == [2, 5] and read.damaged == len(bad)
    record = RunRecord(Path("/p"), "p", points=read.points)
    assert record.series("a") == Series((2,), (1.0,)) and record.not_finite("a") == 1


def test_bin_edges_hold_equal_shares_of_the_timesteps():
    def edges(bins: int, **objective) -> list[float] | None:
        return RunRecord(Path("/p"), "p", {"objective": objective, "metrics": {"loss_bins": bins}}).bin_edges

    assert edges(4, timesteps={"name": "uniform"}) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    logits = [-0.4 + 1.2 * statistics.NormalDist().inv_cdf(u) for u in (0.25, 0.5, 0.75)]
    expected = [0, *(1 / (1 + math.exp(-logit)) for logit in logits), 1]
    assert edges(4, timesteps={"name": "logit_normal", "mean": -0.4, "std": 1.2}) == pytest.approx(expected)
    assert edges(3, key_of_another_version=1) is None and edges("many") is None
    assert RunRecord(Path("/p"), "p").bin_edges is None


def test_a_folder_is_read_with_whatever_is_there(tmp_path):
    with pytest.raises(RunRecordError, match="no such folder"):
        read_run(tmp_path / "none")
    with pytest.raises(RunRecordError, match="not a run's folder"):
        read_run(tmp_path)
    (tmp_path / "grid" / "one").mkdir(parents=True)
    (tmp_path / "grid" / "one" / "metrics.jsonl").touch()
    with pytest.raises(RunRecordError, match=r"grid: not a run's folder \(give its runs: .*grid/\*\)"):
        read_run(tmp_path / "grid")
    (tmp_path / "config.toml").write_text("[half")
    (tmp_path / "summary.json").write_text("[]")
    (tmp_path / "samples").mkdir()
    for name in ("step-00000010.png", "step-x.png", "other.png"):
        (tmp_path / "samples" / name).write_text("")
    record = read_run(tmp_path)
    assert [problem.split(" (")[0] for problem in record.problems] == [
        "config.toml cannot be read", "summary.json is damaged", "no metrics.jsonl"
    ]
    assert list(record.samples) == [10] and record.last_step == 0 and record.images_per_step is None


def test_grids_of_steps_that_a_run_went_back_from_are_left_out(tmp_path):
    (tmp_path / "config.toml").write_text("metrics.log_freq = 10")
    (tmp_path / "metrics.jsonl").write_text('{"step": 60}\n')
    (tmp_path / "samples").mkdir()
    for step in (20, 65, 80):
        (tmp_path / "samples" / f"step-{step:08d}.png").touch()
    assert list(read_run(tmp_path).samples) == [20, 65]
    (tmp_path / "config.toml").write_text("metrics = 3")
    assert list(read_run(tmp_path).samples) == [20, 65, 80]
    (tmp_path / "summary.json").write_text('{"step": 60}')
    assert list(read_run(tmp_path).samples) == [20]


def test_a_batch_that_grows_is_placed_by_its_images():
    """Two steps of 8 images, then of 16."""
    grown, other = run("grown"), run("other", seed=1)
    for one in (grown, other):
        one.config["training"] = {"steps": 10, "global_batch_size": 8, "double_batch_after": [16]}
    grown.points = [{"step": step, TRAINING_LOSS: 1.0 / step, "n_images_seen": n} for step, n in ((2, 16), (4, 48), (6, 80))]
    assert [grown.images_at(step) for step in (0, 1, 2, 3, 5, 6, 7)] == [0, 8, 16, 32, 64, 80, 96]
    (curve,) = group_lines(0, RunGroup("grown", (grown,)), TRAINING_LOSS, 0, False, over_images=True, faint_raw=True)
    assert curve.points == [(16, 0.5), (48, 0.25), (80, 1 / 6)]
    other.points = [{"step": step, TRAINING_LOSS: 1.0 / step, "n_images_seen": n} for step, n in ((2, 16), (5, 80))]
    *_, mean = group_lines(0, RunGroup("both", (grown, other)), TRAINING_LOSS, 0, False, over_images=True, faint_raw=True)
    assert mean.points == [(16, 0.5), (48, pytest.approx((0.25 + 0.35) / 2)), (80, pytest.approx((1 / 6 + 0.2) / 2))]
    assert _steps(grown) == "6"
    grown.points.pop()
    assert _steps(grown) == "4 (60% of the images)"


def test_table_and_bars_show_the_same_costs(tmp_path, monkeypatch):
    points = [{"step": n, **{tag: value * factor for value, tag in enumerate(COSTS, 1)}}
              for n, factor in enumerate((9.0, 5.0, 3.0, 2.0), 1)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    found = read_run(tmp_path)
    shown = []
    monkeypatch.setattr(page, "bar_chart", lambda bars, unit: shown.extend(bar.value for bar in bars))
    page.compare_page([found])
    _, [row] = hardware_table([page.Name("x", 0)], [found])
    assert shown == [2.5, 5.0, 7.5, 10.0, 45.0, 54.0, 63.0]  # medians of 3 and 2; memory: the highest
    assert list(map(float, row[4:10])) == [shown[0], shown[1], shown[3], *shown[4:]]


def test_sets_that_are_drawn_in_other_ways_have_names_of_their_own(tmp_path):
    def recorded(choices):
        return SetPlan(torch.arange(10), choices, 1, {}).record()["choices"]

    drawn = {
        "seeds": "0-9", "weights": {"label": "step 6, ema"}, "guide": None, "solver": {"name": "euler"}, "num_steps": 3,
        "guidance_scale": 2.0, "guidance_interval": [0.0, 1.0],
    }  # fmt: skip
    changes = {
        "plain": {}, "track": {"weights": {"label": "step 6, short"}}, "interval": {"guidance_interval": [0.2, 0.8]},
        "seeds": {"seeds": "10-19"}, "classes": {}, "earlier": {},
        "two adapters": {"weights": {"label": "step 6, ema, a:0.5, b"}},
        "churn": {"solver": {"name": "edm_heun", "churn": 40.0, "churn_noise": 1.003},
                  "schedule": {"name": "edm", "sigma_max": 80.0}},
        "dtype": {"dtype": "bfloat16", "guide": {"label": "step 2, ema"}, "clip_x0": True},
        "own guide": {"guide": {"label": "step 6, long"}},
        "head": {"guide": {"label": "head"}, "null_guidance_scale": 3.0, "null_guidance_interval": [0.0, 0.5]},
        "in turn": {"num_classes": 5, "choices": recorded(torch.arange(10) % 5)},
        "chosen": {"num_classes": 5, "choices": recorded(torch.ones(10, dtype=torch.int64))},
        "by seed": {"num_classes": 5, "choices": recorded(choices_of(torch.arange(10), 5, []))},
    }  # fmt: skip
    evaluations = [
        {
            "samples": {
                "count": 10, "place": f"run/sets/{name}", "set": drawn | change,
                "source": {"step": 4 if name == "earlier" else 6} | ({"guide": "outputs/bad"} if name == "dtype" else {}),
            },
            "reference": None,
            "results": {"x": {"extractor": "x", "values": {"fd": {"value": 2.0, "lower": 1.0, "upper": 3.0}}}},
        }
        for name, change in changes.items()
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n')
    (tmp_path / "evaluation.json").write_text(json.dumps({"evaluations": evaluations}))
    found, churn, chosen = read_run(tmp_path).evaluated, "churn 40", changes["chosen"]["choices"][:6]
    assert list(found) == [f"fd (x, 10 samples{how})" for how in (
        " by euler in 3 steps, guidance 2", " of short by euler in 3 steps, guidance 2",
        " by euler in 3 steps, guidance 2 at t from 0.2 to 0.8", " by euler in 3 steps, guidance 2, seeds 10-19",
        " by euler in 3 steps, guidance 2, classes", " by euler in 3 steps, guidance 2, at step 4",
        " of ema, a:0.5, b by euler in 3 steps, guidance 2",
        f" by edm_heun ({churn}) in 3 steps of the schedule edm, guidance 2",
        " by euler in 3 steps, guidance 2 by bad, step 2, ema, clipped, in bfloat16",
        " by euler in 3 steps, guidance 2 by long",
        " by euler in 3 steps, guidance 2 by head, null guidance 3 at t from 0 to 0.5",
        " by euler in 3 steps, guidance 2, classes by turns",
        f" by euler in 3 steps, guidance 2, other classes ({chosen})", " by euler in 3 steps, guidance 2, by seed",
    )]  # fmt: skip
    assert all((value.value, value.lower, value.upper) == (2.0, 1.0, 3.0) for value in found.values())
    evaluations[-1]["samples"]["set"]["seeds"] = "9-3"
    (tmp_path / "evaluation.json").write_text(json.dumps({"evaluations": evaluations}))
    assert read_run(tmp_path).problems[-1].startswith("evaluation.json cannot be read (--seeds: 9-3 runs backwards")
