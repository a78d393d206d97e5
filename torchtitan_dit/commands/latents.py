"""Manage latent stores: convert published latents, show, verify and measure stores.

Exit codes: 0; 1: verify found damage; 2: refused, nothing lost: the same command resumes.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import NoReturn

import pydantic
from tqdm import tqdm

from torchtitan.errors import LatentStoreError
from torchtitan.extraction.convert import convert, measure, plan_conversion
from torchtitan.extraction.describe import describe_store
from torchtitan.extraction.sources import open_source
from torchtitan.files.regular import read_regular
from torchtitan.latents.bucketed import BUCKETS_FILE, open_stores
from torchtitan.latents.index import INDEX_FILE, Normalization, first_problem, read_index, write_sealed
from torchtitan.latents.store import LatentStore, verify_shards
from torchtitan.processes.command_line import OneLineParser, run_program

MAX_NAMES_BYTES = 16 << 20  # of a file of class names


def main(words: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = parse_arguments(words)
    try:
        return arguments.command(arguments)
    except LatentStoreError as error:
        print(error, file=sys.stderr)
    except pydantic.ValidationError as failure:
        print(first_problem(failure), file=sys.stderr)
    except OSError as error:
        print(f"{error.filename or 'the store'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 2


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("convert", help="write a store from published latents")
    command.set_defaults(command=convert_source)
    command.add_argument("source", type=Path, help="int8 safetensors file, folder of *_features and *_labels, or "
                         "folder of safetensors files with latents, latents_flip and labels")
    command.add_argument("--output", type=Path, required=True, metavar="STORE", help="folder to write or to resume")
    command.add_argument("--dtype", choices=("float16", "bfloat16", "int8"),
                         help="of the stored values (default: int8 where the source is, else float16)")
    command.add_argument("--num-classes", type=count, default=1000, help="of the labels (default 1000); 0: no labels")
    command.add_argument("--class-names", type=Path, metavar="FILE", help="text file, one class name a line")
    command.add_argument("--normalization", choices=("measured", "source"), default="measured",
                         help="normalization of the store: mean 0 and variance 1 of each channel (default), or "
                         "that of the source's makers")
    command.add_argument("--images-per-shard", type=positive, help="images per file (default: 1024, or as many as make "
                         "1,000 files)")

    command = commands.add_parser("info", help="show a store's content")
    command.set_defaults(command=show)
    command.add_argument("store", type=Path)

    command = commands.add_parser("verify", help="read every byte of stores")
    command.set_defaults(command=verify)
    command.add_argument("stores", type=Path, nargs="+", metavar="STORE")

    command = commands.add_parser("measure", help="compute mean and standard deviation of each channel of a store")
    command.set_defaults(command=measure_store)
    command.add_argument("store", type=Path)
    command.add_argument("--update", action="store_true", help="make these the store's normalization")
    return parser.parse_args(words)


def convert_source(arguments: argparse.Namespace) -> int:
    source = open_source(arguments.source)
    plan = plan_conversion(
        source,
        dtype=arguments.dtype,
        num_classes=arguments.num_classes,
        class_names=read_names(arguments.class_names) if arguments.class_names else None,
        measured=arguments.normalization == "measured",
        shard_images=arguments.images_per_shard,
    )
    print("\n".join(describe_store(arguments.output, convert(source, arguments.output, plan))))
    return 0


def show(arguments: argparse.Namespace) -> int:
    for store in open_stores(arguments.store):
        print("\n".join(describe_store(store.folder, store.index)))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    damaged = False
    for folder in arguments.stores:
        if not folder.is_dir():
            raise LatentStoreError(f"{folder}: no such folder")
        try:
            stores = open_stores(folder) if (folder / BUCKETS_FILE).is_file() else []
            indexes = {store.folder: store.index for store in stores} or {folder: read_index(folder)}
            found = itertools.chain(*(verify_shards(part, index) for part, index in indexes.items()))
            count = sum(len(index.files()) for index in indexes.values())
            problems = list(filter(None, tqdm(found, total=count, unit="shard")))
        except LatentStoreError as error:
            problems = [str(error)]
        damaged |= bool(problems)
        print("\n".join(problems or [f"{folder}: good"]))
    return 1 if damaged else 0


def measure_store(arguments: argparse.Namespace) -> int:
    if (arguments.store / BUCKETS_FILE).is_file():
        raise LatentStoreError(f"{arguments.store}: has images of several shapes (measure a folder of it, as 512x768)")
    if arguments.update and (arguments.store.absolute().parent / BUCKETS_FILE).is_file():
        raise LatentStoreError(f"{arguments.store}: is of images of several shapes, with one normalization (leave --update out)")
    store = LatentStore(arguments.store)
    moments, before = measure(store), store.index.normalization
    print("channel        mean         std  normalised to mean, std")
    for channel, (mean, std) in enumerate(zip(moments.mean, moments.std, strict=True)):
        shift, scale = before.shift[channel], before.scale[channel]
        print(f"{channel:>7}  {mean:>10.5f}  {std:>10.5f}  {(mean - shift) * scale:>10.5f}  {std * scale:>10.5f}")
    if arguments.update:
        set_normalization(store, moments.normalization())
    return 0


def set_normalization(store: LatentStore, normalization: Normalization) -> None:
    index = store.index.model_copy(update={"normalization": normalization})
    write_sealed(store.folder / INDEX_FILE, index.model_dump(mode="json"))


def read_names(path: Path) -> list[str]:
    try:
        return read_regular(path, MAX_NAMES_BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise LatentStoreError(f"{path}: not a text file") from error


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of classes")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of images, 1 or more")
    return int(text)


def run() -> NoReturn:
    """Run as a program, and end the process."""
    run_program(main)
