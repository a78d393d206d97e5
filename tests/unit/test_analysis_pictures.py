"""Pictures of the analysis: what a panel holds, and how fine they are."""

import itertools

import pytest

from torchtitan.pictures.style import SCREEN_DPI, new_figure, note, save
from torchtitan.runs.analysis import batch_pictures
from torchtitan.runs.analysis.batch_pictures import draw_over_batch
from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.findings import Results, markdown
from torchtitan.statistics.interval import Interval

NAMED = {
    "model": "m", "patch": 2, "local_batch": 8, "global_batch": 8, "layout": "ddp", "mesh": None, "world_size": 1, "ac": "none",
    "compile": "false", "dtype": "bfloat16", "device": "d",
}  # fmt: skip


def cell(images: float, **axes) -> Cell:
    found = {"images_per_second": Interval(images, 0.98 * images, 1.02 * images, 9)}
    return Cell(NAMED | axes, [Run("r", None, NAMED | axes, 0, "ok", measures=found)], found)


@pytest.mark.parametrize("text", ["word " * 30, "iW" * 80, "three words at " + "y" * 150], ids=["words", "word", "both"])
def test_long_titles_and_notes_are_within_the_picture(tmp_path, text):
    figure, axes = new_figure(text, size=(4, 3))
    axes[0, 0].plot([0, 1])
    note(figure, text)
    save(figure, tmp_path / "x.png")
    for each in figure.texts:
        extent = each.get_window_extent(dpi=SCREEN_DPI)
        assert each.get_text().replace("\n", "").replace(" ", "") == text.replace(" ", "")
        assert each.get_text().count("\n") >= 1 and extent.width <= SCREEN_DPI * 4


def measured(metric: str, value: float, **axes) -> Cell:
    found = {metric: Interval(value)}
    return Cell(NAMED | axes, [Run("r", None, NAMED | axes, 0, "ok", measures=found)], found)


def test_files_over_batch_end_between_words_and_differ(tmp_path):
    device = "a device of many words " * 8
    cells = [measured("memory_gib", 1.0, local_batch=batch, device=device + last) for batch in (8, 16) for last in "xyz"]
    names = [path.stem for _, path in draw_over_batch(cells, tmp_path)]
    first = names[0].removeprefix("memory_gib_over_batch_")
    assert 90 < len(first) <= 120 and set(first.split("-")) <= set(device.split())
    assert [name.removeprefix("memory_gib_over_batch_") for name in names] == [first, f"{first}-2", f"{first}-3"]


def test_a_legend_names_the_arms_where_there_are_several(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(batch_pictures, "save", lambda figure, path, dpi: drawn.append(figure))
    draw_over_batch([measured("memory_gib", 1.0, local_batch=batch) for batch in (8, 16)], tmp_path)
    arms = itertools.product((8, 16), ("none", "full"))
    draw_over_batch([measured("memory_gib", 1.0, local_batch=batch, ac=ac) for batch, ac in arms], tmp_path)
    assert [[text.get_text() for legend in figure.legends for text in legend.texts] for figure in drawn] == [
        [], ["no AC", "AC full"],
    ]  # fmt: skip


def test_a_report_without_pictures_has_no_heading_for_them():
    run = Run("r", None, NAMED, 0, "timeout")
    results = Results([run], [Cell(NAMED, [run], {})], [], [], [])
    text = markdown(results, [])
    assert "## Pictures" not in text and "1 run (1 timeout) in 1 cell, 0 of them measured." in text
    assert markdown(results, [("a", "a.png")]).endswith("## Pictures\n\n![a](a.png)\n")


def test_the_highest_mark_over_batch_is_whole(tmp_path, monkeypatch):
    drawn = []
    save_picture = batch_pictures.save
    monkeypatch.setattr(batch_pictures, "save", lambda figure, *of: (drawn.append(figure), save_picture(figure, *of))[1])
    draw_over_batch([measured("memory_gib", value, local_batch=batch) for batch, value in ((8, 10.0), (16, 10.01))], tmp_path)
    low, high = drawn[0].axes[0].get_ylim()
    assert low == 0 and high >= 1.05 * 10.01
