"""Names of runs and keys, and reasons, are shown as they are in Markdown, HTML, CSV and pictures: they make nothing."""

import csv
import json

import pytest

from torchtitan.pictures.markdown import Markdown, bullet, inline, markdown_table
from torchtitan.pictures.style import new_figure, save
from torchtitan.runs.analysis.results_table import write_csv
from torchtitan_dit.commands.compare import main as compare
from torchtitan_dit.commands.optimization_analysis import main as analyse

NAMES = [
    "a|b `code` **bold**", "<script>alert(1)</script>", "![x](http:||e) [y](z)", "$\\frac$ $x", "esc\x1b[2J\u202e",
    "# not a heading", "line\nbreak", "&lt;b&gt; \"quoted\" '",
]  # fmt: skip


def test_what_would_be_markdown_is_escaped():
    shown = {
        "a|b": r"a\|b", "`c`": r"\`c\`", "<b>": "&lt;b>", "&lt;": "&amp;lt;", "[x](y)": r"[x]\(y)", "[x]: y": r"[x]\: y",
        "_x_": r"\_x\_", "max_reserved": "max_reserved", "1,234 [1,200, 1,260]": "1,234 [1,200, 1,260]", "-": "-",
        "two\nlines": "two lines", "\x1b[2J": r"\\x1b[2J", "\\": r"\\",
    }  # fmt: skip
    assert {text: str(inline(text)) for text in shown} == shown
    assert inline(Markdown("**sure**")) == "**sure**"
    assert list(map(bullet, ("# x", "1. x", "> x", "- x", "5 runs"))) == [r"- \# x", r"- 1\. x", r"- \> x", r"- \- x", "- 5 runs"]
    assert markdown_table(["n|m"], [["a\nb"], [Markdown("**c**")]]) == "| n\\|m |\n|---|\n| a b |\n| **c** |\n\n"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Runs of hostile names in a folder; they differ in a key and failed for reasons that are as bad."""
    folder = tmp_path_factory.mktemp("outputs")
    for number, name in enumerate(NAMES):
        run = folder / name.replace("/", "|")
        run.mkdir()
        (run / "config.toml").write_text(f'[model]\nflavor = {json.dumps("=1+1" + name)}\n[training]\nsteps = 8\n')
        points = [{"step": step, "throughput(img/s)": 9.0 + number, name: 1.0, "loss_metrics/global_avg_loss": 0.5}
                  for step in range(1, 9)]  # fmt: skip
        (run / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
        status = "completed" if number % 2 else "failed"
        summary = {"status": status, "step": 8, "reason": name, "device": name, "versions": {"torch": name}}
        (run / "summary.json").write_text(json.dumps(summary))
    assert analyse([str(folder)]) == 0
    runs = sorted(str(path) for path in folder.iterdir() if path.name != "analysis")
    assert compare([*runs, "--output", str(folder / "analysis" / "compare.html")]) == 0
    return folder / "analysis"


def test_texts_of_tables_are_no_formulas(outputs, tmp_path):
    rows = [{"name": "=cmd()", "@key": "-1+1", "value": -1.5, "steps": -2, "ok": True, "reason": "+x, \"y\"\n@z", "none": None}]
    write_csv(rows, tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        header, row = csv.reader(file)
    assert header[1] == "'@key" and row == ["'=cmd()", "'-1+1", "-1.5", "-2", "true", "'+x, \"y\" @z", ""]
    with open(outputs / "results.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(NAMES) and all(row["model"].startswith("'=1+1") for row in found)


def test_names_in_pictures_are_no_formulas(tmp_path):
    title = "run $\\frac$ and $x"
    figure, axes = new_figure(title)
    axes[0, 0].plot([1, 10, 1000], [1, 2, 3], label="$\\bad{$")
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_yticks([1, 2, 3], ["$\\frac$", "b$", "esc\x1b"])
    axes[0, 0].legend()
    save(figure, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert any("mathdefault" in label.get_text() for label in axes[0, 0].get_xticklabels())  # powers of ten stay


def test_probabilities_of_a_logit_axis_are_formulas(tmp_path):
    figure, axes = new_figure("loss over t")
    axes[0, 0].plot([0.001, 0.5, 0.999], [1, 2, 3])
    axes[0, 0].set_xscale("logit")
    save(figure, tmp_path / "x.png")
    formulas = [label for label in axes[0, 0].get_xticklabels() if "mathdefault" in label.get_text()]
    assert len(formulas) > 2 and all(label.get_parse_math() for label in formulas)
