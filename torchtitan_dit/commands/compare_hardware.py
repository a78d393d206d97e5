"""Compare hardware by runs of one configuration: scripts/compare_hardware.py RUN RUN... [--output hardware.html] [--open]

The page is a single file without any connection to the network; its tables are written in Markdown beside it. Runs on the
same hardware are pooled, those of equal seeds paired; the first run's hardware is the reference of the speed-ups. Before,
on each machine: scripts/compare_hardware.py measure RUN --batch-size 1 4 measures the seconds an image at inference.
"""

import argparse
import sys
import webbrowser
from pathlib import Path
from typing import NoReturn

from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.processes.command_line import OneLineParser, run_program
from torchtitan.runs.record import RunRecordError

MEASURE = "measure"
_MOST = 100_000  # images of a batch, and drawings


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    return measure(words[1:]) if words[:1] == [MEASURE] else compare_runs(words)


# ---------------------------------------------------------------------- the page


def compare_runs(words: list[str]) -> int:
    from torchtitan.runs.hardware.clocked_runs import read_clocked_runs
    from torchtitan.runs.hardware.page import MARKDOWN_START, PAGE_START, compare, hardware_markdown, hardware_page

    arguments = parse_comparison(words)
    files = {arguments.output: PAGE_START, arguments.output.with_suffix(".md"): MARKDOWN_START}
    if len(files) == 1:
        print(f"{arguments.output}: is the name of the tables in Markdown (give --output another ending, as .html)",
              file=sys.stderr)  # fmt: skip
        return 2
    place = arguments.output
    try:
        runs = read_clocked_runs(arguments.runs, arguments.same)
        for place, start in files.items():
            refuse_foreign_file(place, start.encode())
        comparison = compare(runs, arguments.published)
        contents = hardware_page(comparison, arguments.smoothing), hardware_markdown(comparison)
        make_folder(arguments.output.parent)
        for place, content in zip(files, contents, strict=True):
            replace_file(place, content)
    except RunRecordError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{place}: cannot be written: {error.strerror or error} (give another --output)", file=sys.stderr)
        return 2
    for note in comparison.notes:
        print(note)
    columns, rows = comparison.speed
    for row in rows:
        print(row[0] + ": " + "; ".join(f"{head} {value}" for head, value in zip(columns[1:], row[1:], strict=True)))
    for place in files:
        print(place)
    if arguments.open:
        webbrowser.open(arguments.output.resolve().as_uri())
    return 0


def parse_comparison(words: list[str]) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="folder of a completed run, as outputs/digits")
    add("--output", type=Path, default=Path("hardware.html"),
        help="file to write, the Markdown beside it as .md (default: hardware.html)")
    add("--published", action="store_true", help="also the published table of Flux Schnell on A100 and A40, as marked rows")
    add("--same", metavar="KEY", action="append", default=[],
        help="key of a place that may differ between the runs because both places hold the same, as data.path; repeatable")
    add("--smoothing", type=number_from(0), metavar="STEPS",
        help="steps of the running mean of the loss by timestep; 0: none (default: 10 %% of the longest run)")
    add("--open", action="store_true", help="show the page in the browser")
    return parser.parse_args(words)


# ---------------------------------------------------------------------- inference


def measure(words: list[str]) -> int:
    from torchtitan.autoencoders.base import AutoencoderError
    from torchtitan.checkpoint.checkpointer import CheckpointError
    from torchtitan.config.job import ConfigError
    from torchtitan.runs.hardware import inference
    from torchtitan.sampling.set_settings import method_of
    from torchtitan.sampling.setup import open_setup
    from torchtitan.weights.trained_model import WeightsError

    arguments = parse_measurement(words)
    try:
        if not (arguments.source / "config.toml").is_file():
            raise WeightsError(f"{arguments.source}: not a run's folder (no config.toml in it)")
        file = inference.check_writable(arguments.source)
        sizes = arguments.batch_size
        drawing = open_setup(argparse.Namespace(**vars(arguments) | {"batch_size": max(sizes)}))
    except (AutoencoderError, ConfigError, CheckpointError, WeightsError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{arguments.source}: {error.strerror or error}", file=sys.stderr)
        return 2
    for warning in drawing.warnings:
        print(warning, file=sys.stderr)
    found = []
    for one in inference.measure(drawing, sizes, arguments.warm_up, arguments.repeats):
        found.append(one)
        each = one.seconds_an_image
        width = f" +- {each.half_width:.2g}" if each.bounded else ""
        print(f"batch {one.batch_size}: {each.value:.4g}{width} s an image ({len(one.seconds)} drawings)", flush=True)
    try:
        inference.write_inference(file, method_of(drawing), found)
    except OSError as error:
        print(f"{file}: cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    print(file)
    return 0


def parse_measurement(words: list[str]) -> argparse.Namespace:
    from torchtitan.sampling.setup import add_setup_options

    parser = OneLineParser(
        prog=f"compare_hardware.py {MEASURE}", conflict_handler="resolve",
        description="Measure the seconds an image at inference with a run's weights on this machine, in one process, and keep "
        "them in the run's folder for the comparison.",
    )  # fmt: skip
    add = parser.add_argument
    add("source", metavar="RUN", type=Path, help="folder of a run with a checkpoint")
    add_setup_options(parser)
    add("--batch-size", type=number_from(1), nargs="+", default=[1, 4], help="images drawn together (default: 1 4)")
    add("--warm-up", type=number_from(0), default=2, help="drawings of each batch size before those that count (default: 2)")
    add("--repeats", type=number_from(1), default=5, help="drawings of each batch size that count (default: 5)")
    return parser.parse_args(words)


def number_from(least: int):
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= _MOST:
            raise argparse.ArgumentTypeError(f"must be in {least}..{_MOST}, is {value}")
        return value

    return number


def run() -> NoReturn:
    """Run as a program, and end the process."""
    run_program(main)
