"""Pictures of the analysis: what a panel holds, and how fine they are."""

import itertools

from torchtitan.pictures.markdown import Markdown, inline, markdown_table
from torchtitan.pictures.style import SCREEN_DPI, new_figure, note, save
from torchtitan.runs.analysis import batch_pictures
from torchtitan.runs.analysis.batch_pictures import draw_over_batch
from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.findings import Results, headlines, markdown
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
    assert "## Pictures" not in text and "1 run (1 timeout) in 1 cell, 0 of them measured." in text
    assert markdown(results, [("a", "a.png")]).endswith("## Pictures\n\n![a](a.png)\n")


def test_findings_of_one_machine_name_it():
    runs = [Run(name, None, NAMED | {"device": "H200"}, 0, "ok") for name in ("a", "b")]
    first, *_ = headlines(Results(runs, [Cell(NAMED, runs, {})], [], [], []))
    assert first.endswith("measured, all on H200.")
    runs[0].axes["device"] = "A100"
    assert "all on" not in headlines(Results(runs, [Cell(NAMED, runs, {})], [], [], []))[0]


def test_a_legend_names_the_arms_where_there_are_several(tmp_path, monkeypatch):
    def measured(**axes) -> Cell:
        found = {"memory_gib": Interval(1.0)}
        return Cell(NAMED | axes, [Run("r", None, NAMED | axes, 0, "ok", measures=found)], found)

    drawn = []
    monkeypatch.setattr(batch_pictures, "save", lambda figure, path, dpi: drawn.append(figure))
    draw_over_batch([measured(local_batch=batch) for batch in (8, 16)], tmp_path)
    draw_over_batch([measured(local_batch=batch, ac=ac) for batch, ac in itertools.product((8, 16), ("none", "full"))], tmp_path)
    assert [[text.get_text() for legend in figure.legends for text in legend.texts] for figure in drawn] == [
        [], ["no AC", "AC full"],
    ]  # fmt: skip
