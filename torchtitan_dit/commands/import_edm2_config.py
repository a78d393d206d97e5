"""Import a configuration of EDM2's multi-GPU port: scripts/import_edm2_config.py YAML [--output TOML]

Reads the port's keys (diffusion, network, linear, ...), and writes the same training as TOML for this program, or prints
it. Keys that cannot be honoured are named with the reason. The TOML is loaded and checked before it is written; no file is
replaced. See docs/edm2.md.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import tomli_w

from torchtitan.config.edm2_yaml import Edm2YamlError, Imported, import_edm2
from torchtitan.config.job import ConfigError, load_config
from torchtitan.errors import reason
from torchtitan.files.durable import new_file
from torchtitan.files.plain_yaml import MAX_CHARACTERS, PlainYamlError, read_plain_yaml
from torchtitan.files.regular import read_text
from torchtitan.processes.command_line import OneLineParser, run_program
from torchtitan.processes.exit_codes import FAILED, REFUSED


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    source = arguments.yaml
    try:
        if arguments.output:
            refuse_unless_new(arguments.output)
        imported = read(source, arguments.per_process, arguments.data_path)
        text = head(source, imported) + tomli_w.dumps(imported.tables)
        check(source, text, imported, arguments.data_path)
    except Edm2YamlError as error:
        print(error, file=sys.stderr)
        return REFUSED
    for note in imported.notes:
        print(f"{source}: not honoured: {note}", file=sys.stderr)
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        with new_file(arguments.output) as file:
            file.write(text.encode())
    except OSError as error:
        print(f"{arguments.output}: cannot be written: {reason(error)}", file=sys.stderr)
        return FAILED
    more = "" if arguments.data_path else " --data.path FOLDER"
    print(f"{arguments.output}: train with scripts/train.sh {arguments.output}{more}")
    return 0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="import_edm2_config.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("yaml", type=Path, metavar="YAML", help="configuration of the port")
    parser.add_argument("--output", type=Path, metavar="TOML", help="new file; default: print it")
    parser.add_argument("--data-path", default="", metavar="PATH", help="the dataset's place (data.path), checked too")
    parser.add_argument(
        "--per-process", type=_count, default=1, metavar="N",
        help="batch_size and lrate are those of each of N processes, as in the port's first version (default: of all)",
    )
    return parser.parse_args(words)


def refuse_unless_new(output: Path) -> None:
    """Refuse an output that exists, or has no folder. Raises Edm2YamlError."""
    if os.path.lexists(output):
        raise Edm2YamlError([f"{output}: exists already; nothing is replaced (give another --output)"])
    if not output.parent.is_dir():
        raise Edm2YamlError([f"{output}: {output.parent} is no folder (make it, or give another --output)"])


def read(source: Path, processes: int, data_path: str) -> Imported:
    """Read and translate a YAML file. Raises Edm2YamlError."""
    try:
        imported = import_edm2(read_plain_yaml(read_text(source, 4 * MAX_CHARACTERS)), processes)
    except OSError as error:
        raise Edm2YamlError([f"{source}: cannot be read: {reason(error)}"]) from error
    except UnicodeDecodeError as error:
        raise Edm2YamlError([f"{source}: is not UTF-8 text, see byte {error.start} (save it as UTF-8)"]) from error
    except PlainYamlError as error:
        raise Edm2YamlError([f"{source}: {error}"]) from error
    except Edm2YamlError as error:
        raise Edm2YamlError([f"{source}: {problem}" for problem in error.problems]) from error
    if data_path:
        imported.tables["data"]["path"] = data_path
    return imported


def head(source: Path, imported: Imported) -> str:
    """Comment that begins the TOML."""
    model = imported.tables["model"]
    name = source.name if source.name.isprintable() else repr(source.name)
    lines = [f"Configuration {model['config']} of EDM2's multi-GPU port, imported from {name} by import_edm2_config.py."]
    lines += [f"Not honoured: {note}" for note in imported.notes]
    return "".join(f"# {line}\n" for line in lines)


def check(source: Path, text: str, imported: Imported, data_path: str) -> None:
    """Load the TOML as training does, on images of the dataset's shape where its place is not given. Raises Edm2YamlError.
    """
    stand_in = ["--data.name", "synthetic", "--data.shape", str(list(imported.image_shape))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imported.toml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(["--job.config_file", str(path), *([] if data_path else stand_in)], 1)
        except ConfigError as error:
            problems = [problem.removeprefix(f"{path}: ") for problem in error.problems]
            raise Edm2YamlError([f"{source}: becomes {problem}" for problem in problems]) from error


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"must be 1 to {1 << 20}, is {text}")
    return value


def run() -> NoReturn:
    """Run as a program, and end the process."""
    run_program(main)
