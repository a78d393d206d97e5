import itertools
import json
import math
import shutil
import statistics

import pytest

from tests import analysis_outputs as planted
from torchtitan.runs.analysis.axes import add_further_axes, label
from torchtitan.runs.analysis.cells import join_repeats
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.effects import Effect, all_effects, effect_of, mean_ratio, scaling, switches_of
from torchtitan.runs.analysis.findings import Results, _effect_line, _scaling_line, cautions, headlines
from torchtitan.runs.analysis.report import analyse, write_report
from torchtitan.statistics.interval import Interval

T_OF_2, T_OF_3 = 4.302652729911275, 3.182446305284263  # 0.975 quantiles of Student's t, from tables


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return analyse([planted.write_sweep(tmp_path_factory.mktemp("outputs"))])


def effect(results, switch, before, after, at="equal batch"):
    wanted = switch, before, after, at
    return next(one for one in results.effects if (one.switch, one.before, one.after, one.at) == wanted)


def cell_of(results, planned):
    return next(
        cell for cell in results.cells
        if (cell.axes["patch"], cell.axes["layout"], cell.axes["ac"], cell.axes["compile"], cell.axes["local_batch"])
        == (planned.patch, planned.layout, planned.ac, str(planned.compiled).lower(), planned.batch)
    )


def covers(ratio, truth):
    return ratio.lower <= truth <= ratio.upper


def test_planted_effects_lie_in_their_intervals(results):
    # Compiling counts for less under selective checkpointing: the mean over pairs is that of both kinds of pairs.
    compiling = effect(results, "compile", "false", "true")
    slower = sum(before.axes["ac"] == "selective" for before, _ in compiling.pairs) / len(compiling.pairs)
    truth = planted.COMPILE * planted.COMPILED_SELECTIVE**slower
    assert covers(compiling.ratios["images_per_second"], truth)
    assert covers(compiling.ratios["mfu_percent"], truth)
    assert covers(compiling.ratios["memory_gib"], 1.0)

    selective = effect(results, "ac", "none", "selective")
    compiled = sum(before.axes["compile"] == "true" for before, _ in selective.pairs) / len(selective.pairs)
    truth = planted.SELECTIVE * planted.COMPILED_SELECTIVE**compiled
    assert covers(selective.ratios["images_per_second"], truth)
    assert selective.ratios["memory_gib"].value == pytest.approx(planted.SELECTIVE_MEMORY, abs=1e-4)

    for layout in ("fsdp", "hsdp"):
        sharding = effect(results, "layout", "ddp", layout)
        assert covers(sharding.ratios["images_per_second"], planted.LAYOUT_SPEED[layout])
        assert sharding.ratios["memory_gib"].value == pytest.approx(planted.LAYOUT_MEMORY[layout], abs=1e-4)
    assert covers(effect(results, "patch", 2, 4).ratios["images_per_second"], planted.PATCH_SPEED[4])


def test_pairs_at_equal_batch_are_equal_in_everything_else(results):
    for one in results.effects:
        for before, after in one.pairs:
            differing = {name for name in before.axes if before.axes[name] != after.axes[name]}
            allowed = {one.switch} | ({"mesh"} if one.switch == "layout" else set())
            if one.at == "best batch":
                allowed |= {"local_batch", "global_batch"}
            assert one.switch in differing <= allowed


def test_best_batch_takes_each_arm_at_its_own(results):
    # DDP at patch 2 without checkpointing runs out of memory at 64, with it at 128.
    pair = next(
        (before, after) for before, after in effect(results, "ac", "none", "selective", "best batch").pairs
        if (before.axes["layout"], before.axes["patch"], before.axes["compile"]) == ("ddp", 2, "true")
    )
    assert [cell.axes["local_batch"] for cell in pair] == [32, 64]


def test_cells_without_partner_are_counted_by_its_status(results):
    alone = effect(results, "ac", "none", "selective").alone
    # Patch 2 DDP at 64 (eager and compiled) ran with checkpointing only; the arm that is missing has four batches.
    assert alone == {"oom": 2, "none": 4, "timeout": 1}


def test_outcomes_of_the_sweep_are_kept(results):
    status = {(run.name.split(",repeat")[0], run.repeat): run.status for run in results.runs}
    assert status[planted.FAILED.cell, 0] == "failed" and status[planted.FAILED.cell, 1] == "ok"
    assert status[planted.TIMED_OUT.cell, 2] == "timeout"
    assert status[planted.DAMAGED.cell, 0] == "damaged" and status[planted.DAMAGED.cell, 1] == "ok"
    assert status[planted.Planned(2, "ddp", "none", False, 64).cell, 0] == "oom"
    skipped = next(run for run in results.runs if run.cell == planted.Planned(2, "ddp", "none", False, 128).cell)
    assert (skipped.status, skipped.reason, skipped.folder) == ("skipped", "a smaller batch ran out of memory", None)
    assert cell_of(results, planted.FAILED).not_ok == "1 failed"
    assert cell_of(results, planted.SINGLE).single and not cell_of(results, planted.FAILED).single
    assert [line for line in results.remarks if planted.DAMAGED.cell in line and "cannot be read" in line]


def run(images, memory=10.0, repeat=0, status="ok", **axes) -> Run:
    named = {"model": "m", "patch": 2, "local_batch": 8, "global_batch": 8, "layout": "ddp", "mesh": None,
             "world_size": 1, "ac": "none", "compile": "false", "dtype": "bfloat16", "device": "d"}
    values = {"images_per_second": images, "memory_gib": memory} if status == "ok" else {}
    measures = {name: Interval(value, value * 0.99, value * 1.01, 9, 0.96) for name, value in values.items()}
    return Run(f"r{repeat}", None, named | axes, repeat, status, measures=measures)


def test_repeats_are_joined_with_students_interval():
    (cell,) = join_repeats([run(images, repeat=n) for n, images in enumerate((98.0, 100.0, 105.0))])
    logs = [math.log(images) for images in (98, 100, 105)]
    mean, half = sum(logs) / 3, T_OF_2 * statistics.stdev(logs) / math.sqrt(3)
    found = cell.measures["images_per_second"]
    wanted = [math.exp(end) for end in (mean, mean - half, mean + half)]
    assert (found.value, found.lower, found.upper) == pytest.approx(wanted, rel=1e-9)


def test_a_metric_that_one_repeat_lacks_is_none_of_the_cell():
    runs = [run(100.0), run(110.0, repeat=1)]
    del runs[1].measures["memory_gib"]  # as the MFU of a run that does not know its device's peak
    (cell,) = join_repeats(runs)
    assert cell.measures.keys() == {"images_per_second"} and cell.measures["images_per_second"].count == 2


def test_a_finding_says_which_of_its_pairs_are_of_other_batches_and_no_interval_of_one_peak():
    pairs = [(run(100.0, local_batch=a), run(200.0, local_batch=b, layout="fsdp", memory=20.0)) for a, b in ((4, 16), (8, 8))]
    for each in itertools.chain(*pairs):
        each.measures["memory_gib"] = Interval(each.measures["memory_gib"].value)
    cells = [tuple(join_repeats([each])[0] for each in pair) for pair in pairs]
    ratios = {name: mean_ratio(cells, name) for name in ("images_per_second", "memory_gib")}
    text = _effect_line(Effect("layout", "ddp", "fsdp", "best batch", ratios, tuple(cells), {}))
    assert "at best batch (4 → 16 images a process in 1 of 2 pairs): images/s +100.0 % [" in text, text
    ratios = {name: mean_ratio(cells[:1], name) for name in ("images_per_second", "memory_gib")}
    text = _effect_line(Effect("layout", "ddp", "fsdp", "best batch", ratios, tuple(cells[:1]), {}))
    assert "(4 → 16 images a process): images/s" in text and "memory +100.0 %‡, 1 pair" in text, text


def test_effects_whose_intervals_contain_none_are_no_findings():
    runs = [run(images * (1 + on), ac=ac, compile=str(bool(on)).lower(), local_batch=batch)
            for ac, batch, images in (("none", 8, 100.0), ("full", 8, 90.0), ("none", 16, 100.0), ("full", 16, 130.0))
            for on in (0, 1)]  # fmt: skip
    cells = join_repeats(runs)
    lines = headlines(Results(runs, cells, all_effects(cells), [], []))
    assert [line for line in lines if "compile" in line and "+100.0 % [" in line]
    (unclear,) = (line for line in lines if line.startswith("No difference of images/s is shown"))
    assert unclear.endswith(": no AC → AC full at equal batch.")


def test_runs_of_different_data_are_told_apart_and_not_compared():
    settings = [
        {"data.name": "digits", "optimizer.lr": 1e-3, "gns.enable": True},
        {"data.name": "digits", "optimizer.lr": 2e-3, "gns.enable": True},
        {"data.name": "synthetic", "data.shape": [1, 32, 32], "optimizer.lr": 1e-3, "gns.enable": True},
        {"data.name": "synthetic", "data.shape": [3, 64, 64], "optimizer.lr": 1e-3, "gns.enable": True},
    ]
    tracks = [[{"name": "ema", "decay": 0.99}], [{"name": "ema", "decay": 0.999}, {"name": "slow", "decay": 0.9999}]]
    runs = [run(100.0 * (n + 1)) for n in range(4)]
    for n, each in enumerate(settings):
        each["ema.tracks"] = tracks[n == 1]
    assert add_further_axes([(each.axes, given) for each, given in zip(runs, settings, strict=True)]) == ["data", "ema.tracks"]
    labels = [label(each.axes, ["data"]) for each in runs]
    assert labels == ["digits", "digits", "synthetic (shape=[1, 32, 32])", "synthetic (shape=[3, 64, 64])"]
    assert label(runs[1].axes, ["ema.tracks"]) == "ema.tracks=ema, slow"
    cells = join_repeats(runs)
    assert "data" not in switches_of(cells) and not [effect for effect in all_effects(cells) if effect.switch == "data"]


def test_geometric_mean_and_interval_of_ratios():
    ratios = (1.2, 1.3, 1.35, 1.4)
    runs = [run(100.0 * batch, local_batch=batch) for batch in range(1, 5)]
    runs += [run(100.0 * n * ratio, local_batch=n, compile="true") for n, ratio in enumerate(ratios, 1)]
    found = effect_of(join_repeats(runs), "compile", "false", "true", "equal batch").ratios["images_per_second"]
    logs = [math.log(ratio) for ratio in ratios]
    half = T_OF_3 * statistics.stdev(logs) / 2
    mean = statistics.fmean(logs)
    expected = math.exp(mean), math.exp(mean - half), math.exp(mean + half)
    assert (found.value, found.lower, found.upper) == pytest.approx(expected, rel=1e-9)


def test_one_pair_has_the_interval_of_its_cells():
    cells = join_repeats([run(100.0), run(130.0, compile="true")])
    found = effect_of(cells, "compile", "false", "true", "equal batch").ratios["images_per_second"]
    width = math.hypot(*[math.log(1.01 / 0.99) / 2] * 2)
    assert (found.count, found.upper) == (1, pytest.approx(1.3 * math.exp(width)))


def test_efficiency_is_against_the_fewest_ranks(tmp_path):
    truth = {1: 1.0, 2: 0.98, 4: 0.95, 8: 0.9}
    results = analyse([planted.write_scaling(tmp_path, truth)])
    curves = {curve.axes["layout"]: curve for curve in results.curves}
    assert [curve.kind for curve in results.curves] == ["weak", "weak"]
    assert [point.ranks for point in curves["fsdp"].points] == [1, 2, 4, 8]  # from one process on
    for point in curves["ddp"].points[1:]:
        assert point.efficiency.lower <= truth[point.ranks] <= point.efficiency.upper
        assert point.efficiency.value == pytest.approx(truth[point.ranks], abs=0.01)


def test_sharing_tokens_scales_against_one_process_of_the_same_work():
    """Of the same global batch: strong; of the same part of a batch on each process: weak."""
    halved = {"layout": "ddp (context=2)", "world_size": 2}
    cells = join_repeats([
        run(100.0, layout="single", local_batch=8, global_batch=8), run(110.0, layout="single", local_batch=16, global_batch=16),
        run(176.0, **halved, local_batch=16, global_batch=16),
    ])
    found = {curve.kind: curve for curve in scaling(cells)}
    assert {kind: [point.ranks for point in curve.points] for kind, curve in found.items()} == {"weak": [1, 2], "strong": [1, 2]}
    assert found["weak"].points[1].efficiency.value == pytest.approx(176 / 2 / 100)
    assert found["strong"].points[1].efficiency.value == pytest.approx(176 / 2 / 110)
    assert (found["weak"].batch, found["strong"].batch) == ("8 images a process", "global batch 16")
    cells[0].measures["images_per_second"] = Interval(100.0, -math.inf, math.inf)  # of a single logged point
    (weak,) = (curve for curve in scaling(cells) if curve.kind == "weak")
    assert "2 ranks do 88.0 % of 2.00 times what 1 does" in _scaling_line(weak, [weak])


def test_runs_of_one_global_batch_have_no_weak_scaling():
    cells = join_repeats([run(100.0, layout="single", global_batch=16), run(150.0, world_size=2, global_batch=16)])
    assert [curve.kind for curve in scaling(cells)] == ["strong"]


def test_processes_with_other_threads_have_no_scaling_and_that_is_said():
    alone, two = "CPU x86_64, 2 threads", "CPU x86_64, 1 thread"
    cells = join_repeats([run(100.0, layout="single", device=alone), run(150.0, world_size=2, device=two)])
    said = [line for line in headlines(Results([], cells, [], scaling(cells), [])) if "No scaling" in line]
    assert len(said) == 1 and f"(1 on {alone}, 2 on {two})" in said[0]
    cells = join_repeats([run(100.0, layout="single", device=two), run(150.0, world_size=2, device=two)])
    assert scaling(cells) and not any("No scaling" in line for line in headlines(Results([], cells, [], scaling(cells), [])))


def test_a_sweep_without_any_result_is_reported(tmp_path):
    rows = [
        {"cell": f"batch={batch}", "name": f"batch={batch}", "axes": {"training.local_batch_size": batch}, "repeat": 0,
         "status": status, "reason": "why", "run": None, "processes": 2}
        for batch, status in ((8, "refused"), (16, "oom"), ("many", "failed"))
    ]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cut')
    results = analyse([tmp_path])
    assert [run.status for run in results.runs] == ["refused", "oom", "failed"] and results.cells == []
    assert any("1 of its lines could not be read" in line for line in results.remarks)
    write_report(results, tmp_path / "analysis")
    assert "| batch=16 | oom | why |" in (tmp_path / "analysis" / "analysis.md").read_text()
    assert not list((tmp_path / "analysis").glob("*.png"))
    (tmp_path / "analysis" / "mfu_percent_over_batch.png").touch()
    write_report(results, tmp_path / "analysis")
    text = (tmp_path / "analysis" / "analysis.md").read_text()
    assert "Of an earlier analysis, not of these runs: mfu_percent_over_batch.png." in text


def test_a_run_without_a_sweep_keeps_what_its_summary_says(tmp_path):
    planned = planted.Planned(2, "ddp", "none", False, 8)
    for name in ("good", "killed", "oom", "short", "lost"):
        planted.write_points(tmp_path / name, planned.config, 100.0, 10.0, 0)
    (tmp_path / "killed" / "summary.json").unlink()
    planted.write_summary(tmp_path / "oom", "oom", "step 3: out of memory")
    first = (tmp_path / "short" / "metrics.jsonl").read_text().splitlines()[0]
    (tmp_path / "short" / "metrics.jsonl").write_text(first + "\n")
    (tmp_path / "lost" / "metrics.jsonl").unlink()
    runs = {run.name: run for run in analyse([tmp_path]).runs}
    assert {name: run.status for name, run in runs.items()} == {
        "good": "ok", "killed": "unfinished", "oom": "oom", "short": "short", "lost": "damaged",
    }
    assert runs["good"].warmup_steps == 6  # a tenth of its steps
    assert (runs["oom"].reason, runs["lost"].reason) == ("step 3: out of memory", "no metrics.jsonl")


def test_a_repeat_that_a_sweep_was_stopped_in_belongs_to_its_cell(tmp_path):
    sweep = planted.write_sweep(tmp_path)
    rows = (sweep / "sweep.jsonl").read_text().splitlines(keepends=True)
    ok = max(number for number, line in enumerate(rows) if json.loads(line)["status"] == "ok")
    (sweep / "sweep.jsonl").write_text("".join(rows[:ok] + rows[ok + 1 :]))
    stopped = json.loads(rows[ok])["name"]
    (sweep / stopped / "summary.json").unlink()
    results = analyse([sweep])
    (cell,) = [cell for cell in results.cells if any(run.name == stopped for run in cell.runs)]
    assert len(cell.runs) > 1 and {run.axes["device"] for run in cell.runs} != {None}
    assert all(run.axes["device"] for run in results.runs if run.folder)


def test_a_copied_folder_is_no_repeat(tmp_path):
    planned = planted.Planned(2, "ddp", "none", False, 8)
    for name, seconds in (("a", 1.5), ("b", 2.5)):
        planted.write_points(tmp_path / name, planned.config, 100.0, 10.0, 0)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        more = {"clock": {"wall_seconds": seconds}, "hardware": {"cpu": name}, "plugins": {"my.py": f"{seconds}"}}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary | more | {"grown_batch_size": 4096}))
    shutil.copytree(tmp_path / "a", tmp_path / "copy of a")
    shutil.copy(tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "metrics.jsonl")  # it trained on from a copy
    results = analyse([tmp_path])
    assert [run.name for run in results.runs] == ["a", "b"] and "1 copied folder left out: copy of a" in results.remarks
    said = " ".join(cautions(results))
    assert "a, b have their first steps in common" in said and "several processors, which" in said
    assert "my.py 1.5, my.py 2.5" in said
    assert {run.axes["global_batch"] for run in results.runs} == {4096}  # at which a run of a growing batch is timed


def test_a_smoke_run_beside_others_is_left_out_and_named(tmp_path):
    planned = planted.Planned(2, "ddp", "none", False, 8)
    for name in ("mine", "mine-smoke"):
        planted.write_points(tmp_path / name, planned.config, 100.0, 10.0, 0)
    results = analyse([tmp_path])
    assert [run.name for run in results.runs] == ["mine"] and "1 smoke run left out: mine-smoke" in results.remarks
    assert [run.name for run in analyse([tmp_path / "mine-smoke"]).runs] == ["mine-smoke"]
