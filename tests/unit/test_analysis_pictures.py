"""Pictures of the analysis: what a panel holds, and how fine they are."""

import csv
import itertools
import json
import statistics

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN, CARETUP

from tests import analysis_outputs as planted
from torchtitan.pictures.colours import SOFT
from torchtitan.pictures.markdown import Markdown, inline, markdown_table
from torchtitan.pictures.style import SCREEN_DPI, colour, new_figure, note, save
from torchtitan.runs.analysis import batch_pictures, loss_pictures, memory_pictures, ranks_pictures
from torchtitan.runs.analysis.axes import add_further_axes
from torchtitan.runs.analysis.batch_pictures import draw_over_batch, fit_memory
from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.effects import scaling
from torchtitan.runs.analysis.findings import Results, headlines, markdown
from torchtitan.runs.analysis.loss_pictures import draw_loss
from torchtitan.runs.analysis.memory_pictures import draw_memory_parts
from torchtitan.runs.analysis.ranks_pictures import draw_over_ranks
from torchtitan.runs.analysis.report import analyse, write_report
from torchtitan.statistics.interval import Interval

NAMED = {
    "model": "m", "patch": 2, "local_batch": 8, "global_batch": 8, "layout": "ddp", "mesh": None, "world_size": 1, "ac": "none",
    "compile": "false", "dtype": "bfloat16", "device": "d",
}  # fmt: skip


def test_long_titles_and_notes_are_within_the_picture(tmp_path):
    text = "a long title " * 12
    figure, axes = new_figure(text, size=(4, 3))
    axes[0, 0].plot([0, 1])
    note(figure, text)
    save(figure, tmp_path / "x.png")
    for each in figure.texts:
        assert each.get_window_extent(dpi=SCREEN_DPI).width <= SCREEN_DPI * 4
    assert figure.texts[-1].get_window_extent(dpi=SCREEN_DPI).width <= 0.95 * SCREEN_DPI * 4


def test_what_would_be_markdown_is_escaped():
    shown = {
        "a|b": r"a\|b", "`c`": r"\`c\`", "<b>": "&lt;b>", "_x_": r"\_x\_", "max_reserved": "max_reserved",
        "two\nlines": "two lines",
        "1,234 [1,200, 1,260]": "1,234 [1,200, 1,260]", "\\": r"\\",
    }  # fmt: skip
    assert {text: str(inline(text)) for text in shown} == shown
    assert inline(Markdown("**sure**")) == "**sure**"
    assert markdown_table(["n|m"], [["a\nb"], [Markdown("**c**")]]) == "| n\\|m |\n|---|\n| a b |\n| **c** |\n\n"


def test_a_report_without_pictures_has_no_heading_for_them():
    run = Run("r", None, NAMED, 0, "timeout")
    results = Results([run], [Cell(NAMED, [run], {})], [], [], [])
    text = markdown(results, [])
    assert "## Pictures" not in text and "1 run (1 timeout), 0 of 1 cell measured." in text
    assert markdown(results, [("a", "a.png")]).endswith("## Pictures\n\n![a](a.png)\n")


def test_findings_of_one_machine_name_it():
    runs = [Run(name, None, NAMED | {"device": "H200"}, 0, "ok") for name in ("a", "b")]
    first, *_ = headlines(Results(runs, [Cell(NAMED, runs, {})], [], [], []))
    assert first.endswith("measured, all on H200.")
    runs[0].axes["device"] = "A100"
    assert "all on" not in headlines(Results(runs, [Cell(NAMED, runs, {})], [], [], []))[0]


@pytest.fixture
def drawn(monkeypatch) -> dict[str, Figure]:
    """Figures by the names of their files, which are not written."""
    figures: dict[str, Figure] = {}
    for module in (batch_pictures, ranks_pictures, loss_pictures, memory_pictures):
        monkeypatch.setattr(module, "save", lambda figure, path, dpi: figures.setdefault(path.name, figure) and path)
    return figures


def measured(metric: str = "memory_gib", value: float = 1.0, **axes) -> Cell:
    found = {metric: Interval(value)}
    return Cell(NAMED | axes, [Run("r", None, NAMED | axes, 0, "ok", measures=found)], found)


def lines_of(panel: Axes, colour: str) -> list[list[float]]:
    """Heights of the lines of a colour through several points, not of marks, ends of intervals and the legend."""
    found = [line for line in panel.lines if line.get_color() == colour and line.get_linestyle() != "None"]
    return [list(line.get_ydata()) for line in found if len(line.get_ydata()) > 1]


def texts_of(figure: Figure) -> list[str]:
    panels = [panel.get_legend() for panel in figure.axes]
    return [text.get_text() for legend in (*figure.legends, *filter(None, panels)) for text in legend.texts]


def test_a_part_with_one_batch_size_is_not_drawn_and_said(tmp_path, drawn):
    remarks = []
    axes = {"objective.timesteps.mean": 0.0}, {"objective.timesteps.mean": 0.8}
    cells = [measured(local_batch=8, **axes[0]), *(measured(local_batch=batch, **axes[1]) for batch in (8, 16))]
    draw_over_batch(cells, tmp_path, remarks)
    assert remarks == ["Not drawn over the batch size, as there is one batch size: m, objective.timesteps.mean=0.0."]
    assert {name.partition("_over_")[2] for name in drawn} == {"batch_2_mean=0.8.png"}
    assert draw_over_batch([measured(local_batch=8, **each) for each in axes], tmp_path, remarks) == [] and len(remarks) == 1


def test_a_legend_names_the_arms_where_there_are_several(tmp_path, drawn):
    draw_over_batch([measured("mfu_percent", local_batch=batch) for batch in (8, 16)], tmp_path, [])
    assert texts_of(drawn.pop("mfu_percent_over_batch.png")) == []
    arms = itertools.product((8, 16), ("none", "full"))
    draw_over_batch([measured("mfu_percent", local_batch=batch, ac=ac) for batch, ac in arms], tmp_path, [])
    assert texts_of(drawn["mfu_percent_over_batch.png"]) == ["no AC", "AC full"]


def test_layouts_are_lines_of_one_panel_with_the_rate_of_each_process_and_of_all(tmp_path, drawn):
    rates = {"ddp": (100.0, 180.0), "fsdp": (90.0, 170.0)}
    draw_over_batch(
        [measured("images_per_second", rate, layout=layout, local_batch=batch, world_size=4)
         for layout, both in rates.items() for batch, rate in zip((8, 16), both, strict=True)], tmp_path, []
    )
    figure = drawn["images_per_second_over_batch.png"]
    (panel,) = figure.axes
    assert [lines_of(panel, colour(n)) for n in range(2)] == [[[25.0, 45.0]], [[22.5, 42.5]]]
    low, high = panel.get_ylim()
    assert high - low < 1.2 * (45 - 22.5)  # the axis is that of the points
    figure.draw_without_rendering()
    assert panel.child_axes[0].get_ylim() == pytest.approx((4 * low, 4 * high))


def test_the_peak_memory_is_fitted_over_the_batch(tmp_path, drawn):
    cells = [measured(value=3.0 + 0.25 * batch, local_batch=batch) for batch in (8, 16, 64)]
    assert fit_memory(cells) == pytest.approx((3.0, 0.25)) and fit_memory(cells[:2]) is None
    falling = [measured(value=3.0 - 0.001 * batch, local_batch=batch) for batch in (8, 16, 64)]
    assert fit_memory(falling) == pytest.approx((3.0 - 0.001 * 88 / 3, 0.0))  # no batch takes less than none
    draw_over_batch(cells, tmp_path, [])
    figure = drawn["memory_gib_over_batch.png"]
    assert texts_of(figure) == ["3.00 GiB + 256 MiB an image"]
    figure.draw_without_rendering()
    (panel,) = figure.axes
    legend, below = panel.get_legend().get_window_extent(), panel.xaxis.label.get_window_extent()
    assert legend.y1 < below.y0  # on no interval
    drawn.clear()
    draw_over_batch([measured(value=3.0 - 1e-6 * batch, local_batch=batch) for batch in (8, 16, 64)], tmp_path, [])
    assert texts_of(drawn["memory_gib_over_batch.png"]) == ["3.00 GiB at any batch"]


def test_memory_is_divided_into_what_a_step_holds_and_the_rest_of_the_peak(tmp_path, drawn):
    cells = [measured(value=value, layout=layout, local_batch=batch) for layout, batch, value in (
        ("ddp", 8, 6.0), ("ddp", 16, 9.0), ("fsdp", 16, 5.0), ("hsdp", 16, 7.0),
    )]  # fmt: skip
    for cell, scale in zip(cells, (1.0, 1.0, 0.25), strict=False):  # the last was written before runs said it
        cell.runs[0].held = {"weights": scale, "gradients": scale, "optimizer": 2 * scale, "averages": scale}
    draw_memory_parts(cells, tmp_path)
    assert list(drawn) == ["memory_over_parts.png"]
    figure = drawn["memory_over_parts.png"]
    (panel,) = figure.axes
    of_ddp, of_fsdp = ([bars[n].get_width() for bars in panel.containers] for n in range(2))
    assert of_ddp == [1, 1, 2, 1, 4] and of_fsdp == [0.25, 0.25, 0.5, 0.25, 3.75]
    assert panel.containers[-1][0].get_x() == 5.0 and panel.get_xlim()[0] == 0
    assert [text.get_text() for text in panel.get_yticklabels()] == ["ddp, local batch 16", "fsdp, local batch 16"]
    assert texts_of(figure)[-1] == "activations and all else"


def test_scaling_draws_the_numbers_of_the_table_and_linear_scaling(tmp_path, drawn):
    write_report(analyse([planted.write_scaling(tmp_path)]), tmp_path)
    rates: dict[tuple, list[float]] = {}
    with open(tmp_path / "results.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rates.setdefault((row["layout"], int(row["world_size"])), []).append(float(row["images_per_second"]))
    mean = {key: statistics.geometric_mean(values) for key, values in rates.items()}
    start, ranks = mean["single", 1], (2, 4, 8)
    assert set(drawn) == {"weak_scaling_over_ranks.png"}
    _, each, whole = drawn["weak_scaling_over_ranks.png"].axes
    for n, layout in enumerate(("ddp", "fsdp"), start=1):  # of all layouts one process is the first
        (of_all,), (of_each,) = lines_of(whole, colour(n)), lines_of(each, colour(n))
        assert of_all == pytest.approx([start, *(mean[layout, count] for count in ranks)])
        assert of_each == pytest.approx([start, *(mean[layout, count] / count for count in ranks)])
    assert lines_of(whole, SOFT) == [pytest.approx([start, 8 * start])] * 2
    assert lines_of(each, SOFT) == [pytest.approx([start, start])] * 2


def test_the_loss_is_drawn_over_images_flops_and_hours(tmp_path, drawn):
    for name, data, loss in (("a", "digits", 2.0), ("b", "digits", 1.0), ("b2", "digits", 1 + 1e-8), ("c", "latents", -1.0)):
        (tmp_path / name).mkdir()
        seconds = 3600.0 if data == "latents" else 36.0
        points = [
            {"step": step, "loss_metrics/global_avg_loss": loss / step, "n_images_seen": 8 * step,
             "clock/train(s)": seconds * step, "throughput(img/s)": 1.0} for step in (1, 2, 3)
        ]  # fmt: skip
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, points)))
        (tmp_path / name / "config.toml").write_text(f'[data]\nname = "{data}"')
        (tmp_path / name / "summary.json").write_text('{"status": "completed", "step": 3, "flops_per_image": 5}')
    draw_loss(analyse([tmp_path]).runs, tmp_path)
    assert list(drawn) == ["loss_over_cost_1_digits.png", "loss_over_cost_2_latents.png"]
    first, second = drawn.values()
    curves = [[loss / step for step in (1, 2, 3)] for loss in (1, 1 + 1e-8, 2)]
    assert [list(line.get_ydata()) for line in first.axes[0].lines] == curves
    title = " ".join(first.legends[0].get_title().get_text().split())
    assert title.endswith(" of the loss. Equal at every logged point, one line on another: b, b2 (to 1e-6).")
    first.draw_without_rendering()
    for panel in first.axes:
        labels = [text for text in panel.get_xticklabels(which="both") if text.get_text()]
        boxes = sorted((text.get_window_extent() for text in labels), key=lambda box: box.x0)
        assert len(boxes) > 1 and all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))
    for figure, label, times in ((first, "seconds of training", [36, 72, 108]), (second, "hours of training", [1, 2, 3])):
        assert [panel.get_xlabel() for panel in figure.axes] == ["images", "FLOPs", label]
        expected = [[8, 16, 24], [40, 80, 120], times]
        assert [list(panel.lines[0].get_xdata()) for panel in figure.axes] == [pytest.approx(xs) for xs in expected]
    assert (first.axes[0].get_yscale(), second.axes[0].get_yscale()) == ("log", "linear")


def test_names_are_short_and_the_titles_complete(tmp_path, drawn):
    """Of keys that differ; those of a feature that is switched off are no axis."""
    runs = []
    for enabled, bins, interval in ((False, 10, 5), (False, 20, 5), (True, 10, 25), (True, 20, 5)):
        settings = {"gns.enable": enabled, "gns.num_bins": bins, "gns.log_interval": interval}
        runs += [(NAMED | {"local_batch": batch}, settings) for batch in (8, 16)]
    add_further_axes(runs)
    titles = dict(draw_over_batch([measured("images_per_second", **axes) for axes, _ in runs], tmp_path, []))
    assert list(drawn) == [
        "images_per_second_over_batch_1.png", "images_per_second_over_batch_2_num_bins=10.png",
        "images_per_second_over_batch_3_num_bins=20.png",
    ]  # fmt: skip
    every = ", gns.enable=true, gns.num_bins=20, gns.log_interval=5"
    assert {title.partition("m, ")[2] for title in titles} == {"gns.enable=false"} | {
        every[2:], "gns.enable=true, gns.num_bins=10, gns.log_interval=25",
    }  # fmt: skip
    keys = {f"a_section.a_key_of_a_long_name_{n}" for n in range(9)}
    drawn.clear()
    for_each = itertools.product((8, 16), "abcdefghijkl")
    cells = [measured(local_batch=batch, **dict.fromkeys(keys, value + 30 * "x")) for batch, value in for_each]
    draw_over_batch(cells, tmp_path, [])
    assert len(drawn) == 12 and all(len(name) < 60 for name in drawn)


def test_a_flat_line_is_not_enlarged_to_its_noise_and_an_arm_of_another_column_is_not_missing(tmp_path, drawn):
    places = [("ddp", 2), ("ddp", 4), ("hsdp", 4)]
    draw_over_batch(
        [measured(value=8.0 + 1e-5 * batch, layout=layout, world_size=ranks, local_batch=batch)
         for layout, ranks in places for batch in (8, 16)], tmp_path, []
    )
    two, four = drawn["memory_gib_over_batch.png"].axes
    assert not two.texts and not four.texts
    low, high = two.get_ylim()
    assert high - low == pytest.approx(0.08, rel=1e-3)


def test_axes_span_the_values_and_longer_intervals_end_in_arrows(tmp_path, drawn):
    cells = [measured("mfu_percent", value, local_batch=batch) for batch, value in ((8, 30.0), (16, 40.0))]
    for cell, interval in zip(cells, (Interval(30.0, 2.1, 681.0), Interval(40.0, 38.0, 42.0)), strict=True):
        cell.measures.update({"mfu_percent": interval, "images_per_second": Interval(1.0)})
    draw_over_batch(cells, tmp_path, [])
    (panel,) = drawn["mfu_percent_over_batch.png"].axes
    assert panel.get_ylim() == pytest.approx((25.0 - 1.0, 45.0 + 1.0))  # half of the span on both sides, and a margin of 5 %
    arrows = [line for line in panel.lines if line.get_marker() in (CARETUP, CARETDOWN)]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in arrows] == [(8, pytest.approx(24.0)), (8, pytest.approx(46.0))]
    text = markdown(Results([], cells, [], [], []), [])
    assert "30.00 [2.100, 100.0]" in text and "681" not in text


def test_a_layout_has_one_colour_in_all_pictures_of_a_report(tmp_path, drawn):
    every = itertools.product(("m", "n"), (("single", 1), ("ddp", 2), ("fsdp", 2)), (8, 16))
    cells = [
        measured("images_per_second", 10.0 * batch, model=model, layout=layout, world_size=ranks, local_batch=batch,
                 global_batch=batch * ranks)
        for model, (layout, ranks), batch in every if (model, layout) not in (("n", "single"), ("n", "ddp"))
    ]  # fmt: skip
    ddp = {"model": "n", "layout": "ddp"}
    cells += [measured("images_per_second", 9.0, world_size=ranks, global_batch=8 * ranks, **ddp) for ranks in (2, 4)]
    draw_over_batch(cells, tmp_path, [])
    draw_over_ranks(scaling(cells), cells, tmp_path)
    lines = [line for figure in drawn.values() for legend in figure.legends for line in legend.legend_handles]
    found = [(line.get_label(), line.get_color()) for line in lines]
    assert {each for each in found if each[0] in ("ddp", "fsdp")} == {("ddp", colour(1)), ("fsdp", colour(2))}
    assert len(drawn) == 5
    assert {len(figure.axes) for name, figure in drawn.items() if "scaling" in name} == {2}  # none of an MFU that no run has


def test_only_runs_with_a_value_have_a_panel_and_the_fastest_of_several_global_batches_a_point(tmp_path, drawn):
    cells = [measured("mfu_percent", value, local_batch=batch, global_batch=both) for batch, both, value in (
        (8, 8, 30.0), (16, 16, 40.0), (16, 32, 45.0),
    )]  # fmt: skip
    for cell, rate in zip(cells, (3.0, 5.0, 4.0), strict=True):
        cell.measures["images_per_second"] = Interval(rate)
    cells += [measured("images_per_second", 1.0, patch=4, local_batch=batch) for batch in (8, 16)]
    draw_over_batch(cells, tmp_path, [])
    (panel,) = drawn["mfu_percent_over_batch.png"].axes
    assert lines_of(panel, colour(0)) == [[30.0, 40.0]]
    assert len(drawn["images_per_second_over_batch.png"].axes) == 2
