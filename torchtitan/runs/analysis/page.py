"""The report as one static HTML file: pictures inside, no script, light and dark."""

import base64
from collections.abc import Sequence
from pathlib import Path

from torchtitan.pictures.svg_charts import Markup, element
from torchtitan.runs.analysis.batch_pictures import EXPLANATION
from torchtitan.runs.analysis.findings import HOW_MEASURED, HOW_PAIRED, Results, Table, cautions, headlines, tables
from torchtitan.runs.compare.style import STYLE

# The pictures are drawn on white; in dark mode they are on a white card.
_OWN_STYLE = """
.picture { background:#fff; border-radius:6px; padding:6px; max-width:100%; overflow-x:auto; width:fit-content; }
.picture img { max-width:100%; height:auto; display:block; }
section figure { margin:0 0 22px; } th, td { text-align:left; } #findings li { margin:3px 0; max-width:110ch; }
"""


def report_page(results: Results, pictures: Sequence[tuple[str, Path]], title: str) -> str:
    """Write the page.

    Args:
        pictures: title and PNG file of each.
        title: of the page.
    """
    head = element(
        "head", element("meta", charset="utf-8"), element("title", title),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("style", Markup(STYLE + _OWN_STYLE)),
    )
    lines = element("ul", *(element("li", line) for line in headlines(results)))
    known = [element("li", line) for line in cautions(results)]
    findings = element(
        "section", element("h2", "Findings"), lines, element("ul", *known, class_="notes") if known else None,
        element("p", HOW_MEASURED, class_="note"), element("p", HOW_PAIRED, class_="note"), id="findings",
    )
    found = tables(results)
    main = element(
        "main", findings,
        element("section", element("h2", "Pictures"), element("p", EXPLANATION, class_="note"),
                *(_picture(*one) for one in pictures), id="pictures"),
        *(_table(table) for table in found),
    )
    body = element("body", element("header", element("h1", title)), main)
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _picture(title: str, path: Path) -> Markup:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    image = element("img", src=f"data:image/png;base64,{data}", alt=title)
    return element("figure", element("h3", title), element("div", image, class_="picture"))


def _table(table: Table) -> Markup:
    head = element("thead", element("tr", *(element("th", name) for name in table.columns)))
    rows = [
        element("tr", element("th", row[0]), *(element("td", text) for text in row[1:])) for row in table.rows
    ]
    return element(
        "section", element("h2", table.heading), element("p", table.note, class_="note") if table.note else None,
        element("div", element("table", head, element("tbody", *rows)), class_="scroll"),
    )
