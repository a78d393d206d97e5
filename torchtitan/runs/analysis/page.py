"""Report as one static HTML file: pictures inside, no script, light and dark."""

from collections.abc import Sequence
from pathlib import Path

from torchtitan.runs.analysis.batch_pictures import EXPLANATION
from torchtitan.runs.analysis.findings import HOW_MEASURED, HOW_PAIRED, HOW_TESTED, Results, cautions, headlines, tables
from torchtitan.runs.pages import png_source, render_page


def report_page(results: Results, pictures: Sequence[tuple[str, Path]], title: str) -> str:
    """Write the page.

    Args:
        pictures: title and PNG file of each.
        title: of the page.
    """
    return render_page(
        "report.html", title=title, headlines=headlines(results), cautions=cautions(results),
        methods=(HOW_MEASURED, HOW_PAIRED, HOW_TESTED), explanation=EXPLANATION, tables=tables(results),
        pictures=[(name, png_source(path.read_bytes())) for name, path in pictures],
    )  # fmt: skip
