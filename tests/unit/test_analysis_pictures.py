"""Pictures of the analysis: what a panel holds, and how fine they are."""

import itertools

import pytest
from PIL import Image

from torchtitan.runs.analysis.bar_pictures import draw_bars
from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.effects import ScalingCurve, ScalingPoint, all_effects
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
    cells = [cell(100.0), cell(130.0, compile="true"), cell(90.0, ac="full"), cell(99.0, ac="full", compile="true")]
    drawn = draw_bars(all_effects(cells), tmp_path)
    assert [path.name for _, path in drawn] == ["effect_bars_compile-false-true.png", "effect_bars_ac-none-full.png"]
    for path in (tmp_path / "scaling.png", *(path for _, path in drawn)):
        with Image.open(path) as picture:
            assert picture.info["dpi"] == pytest.approx((200, 200), abs=0.5 * 0.0254) and picture.width >= 1000
