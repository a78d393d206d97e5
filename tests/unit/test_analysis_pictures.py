"""Pictures of the analysis: what a panel holds, and how fine they are."""

import itertools

import pytest
from PIL import Image

from torchtitan.pictures.style import SCREEN_DPI, new_figure, note, save
from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.effects import ScalingCurve, ScalingPoint
from torchtitan.runs.analysis.findings import Results, markdown
from torchtitan.runs.analysis.scaling_picture import curves_in_panels, draw_scaling
from torchtitan.statistics.interval import Interval

NAMED = {
    "model": "m", "patch": 2, "local_batch": 8, "global_batch": 8, "layout": "ddp", "mesh": None, "world_size": 1, "ac": "none",
    "compile": "false", "dtype": "bfloat16", "device": "d",
}  # fmt: skip


def cell(images: float, **axes) -> Cell:
    found = {"images_per_second": Interval(images, 0.98 * images, 1.02 * images, 9)}
    return Cell(NAMED | axes, [Run("r", None, NAMED | axes, 0, "ok", measures=found)], found)


def curve(kind: str = "strong", **axes) -> ScalingCurve:
    points = [ScalingPoint(ranks, cell(100.0 * ranks, world_size=ranks, **axes), Interval(0.9)) for ranks in (1, 2, 4)]
    return ScalingCurve(kind, points[0].cell.axes | {"layout": axes.get("layout", "ddp")}, tuple(points))


def test_many_arms_are_spread_over_panels_of_few_curves():
    values = itertools.product(("false", "true"), ("none", "selective"), ("ddp", "fsdp"), (2, 4))
    curves = [curve(kind, **dict(zip(("compile", "ac", "layout", "patch"), each, strict=True)))
              for each in values for kind in ("weak", "strong")]  # fmt: skip
    inner, outer, rows = curves_in_panels(curves)
    assert (inner, outer) == (["compile", "ac"], ["patch", "layout"])
    assert [(kind, [len(panel) for panel in panels]) for kind, panels in rows] == [("weak", [4] * 4), ("strong", [4] * 4)]
    for _, panels in rows:
        for panel in panels:
            assert len({(each.axes["layout"], each.axes["patch"]) for each in panel}) == 1


def test_pictures_have_200_dots_an_inch(tmp_path):
    draw_scaling([curve(), curve(layout="fsdp")], tmp_path / "scaling.png")
    with Image.open(tmp_path / "scaling.png") as picture:
        assert picture.info["dpi"] == pytest.approx((200, 200), abs=0.5 * 0.0254) and picture.width >= 1000


def test_long_titles_and_notes_are_within_the_picture(tmp_path):
    text = "three words at " + "y" * 150
    figure, axes = new_figure(text, size=(4, 3))
    axes[0, 0].plot([0, 1])
    note(figure, text)
    save(figure, tmp_path / "x.png")
    for each in figure.texts:
        extent = each.get_window_extent(dpi=SCREEN_DPI)
        assert each.get_text().replace("\n", "").replace(" ", "") == text.replace(" ", "")
        assert each.get_text().count("\n") >= 1 and extent.width <= SCREEN_DPI * 4


def test_a_report_without_pictures_has_no_heading_for_them():
    run = Run("r", None, NAMED, 0, "timeout")
    results = Results([run], [Cell(NAMED, [run], {})], [], [], [])
    text = markdown(results, [])
    assert "## Pictures" not in text and "1 run (1 timeout) in 1 cell, 0 of them measured." in text
    assert markdown(results, [("a", "a.png")]).endswith("## Pictures\n\n![a](a.png)\n")
