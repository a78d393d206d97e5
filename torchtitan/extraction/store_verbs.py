"""Verbs of the extraction's command on stores: convert published latents, show and verify stores."""

import argparse
import itertools
import sys
from pathlib import Path

import pydantic
from tqdm import tqdm

from torchtitan.config.latent_cache import is_finished
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.describe import describe_store
from torchtitan.extraction.published_latents import convert, open_source, plan_conversion
from torchtitan.files.regular import read_text
from torchtitan.latents.bucketed import BUCKET, BUCKETS_FILE, open_stores
from torchtitan.latents.index import PARTIAL_FOLDER, first_problem, read_index
from torchtitan.latents.store import verify_shards
from torchtitan.latents.writer import PLAN_FILE
from torchtitan.processes.command_line import OneLineParser, at_least
from torchtitan.programs import program

VERBS = ("convert", "show", "verify")


def run_verb(words: list[str]) -> int:
    """Run a verb; return its exit code: 0; 1: verify found damage; 2: refused, and the same command resumes."""
    arguments = _parse(words)
    try:
        return arguments.verb(arguments)
    except LatentStoreError as error:
        print(error, file=sys.stderr)
    except pydantic.ValidationError as failure:
        print(first_problem(failure), file=sys.stderr)
    except UnicodeDecodeError:
        print(f"{arguments.class_names}: not a text file", file=sys.stderr)
    except OSError as error:
        print(f"{error.filename or 'the store'}: {error.strerror or error}", file=sys.stderr)
    return 2


def _parse(words: list[str]) -> argparse.Namespace:
    parser = OneLineParser(prog=program("extract_latents"), description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verb = verbs.add_parser("convert", help="write a store from published latents")
    verb.set_defaults(verb=_convert)
    verb.add_argument("source", type=Path, help="int8 safetensors file, folder of *_features and *_labels, or "
                      "folder of safetensors files with latents, latents_flip and labels")
    verb.add_argument("--output", type=Path, required=True, metavar="STORE", help="folder to write or to resume")
    verb.add_argument("--num-classes", type=at_least(0), default=1000, help="classes of the labels (default 1000); 0: no labels")
    verb.add_argument("--class-names", type=Path, metavar="FILE", help="text file, one class name a line")
    verb.add_argument("--normalization", choices=("measured", "source"), default="measured",
                      help="normalization of the store: mean 0 and variance 1 of each channel (default), or "
                      "that of the source's makers")
    verb.add_argument("--images-per-shard", type=at_least(0), help="images per file (default: 64 to 1024 by their "
                      "number, or as many as make 1,000 files)")

    verb = verbs.add_parser("show", help="show a store's content")
    verb.set_defaults(verb=_show)
    verb.add_argument("store", type=Path)

    verb = verbs.add_parser("verify", help="read every byte of stores")
    verb.set_defaults(verb=_verify)
    verb.add_argument("stores", type=Path, nargs="+", metavar="STORE")
    return parser.parse_args(words)


def _convert(arguments: argparse.Namespace) -> int:
    source, names = open_source(arguments.source), arguments.class_names
    plan = plan_conversion(
        source, num_classes=arguments.num_classes, class_names=read_text(names).splitlines() if names else [],
        measured=arguments.normalization == "measured", shard_images=arguments.images_per_shard,
    )  # fmt: skip
    print("\n".join(describe_store(arguments.output, convert(source, arguments.output, plan))))
    return 0


def _is_store(folder: Path) -> bool:
    """Whether a folder is a store, finished or begun, of one shape or of several."""
    if is_finished(folder) or (folder / PARTIAL_FOLDER / PLAN_FILE).is_file():
        return True
    buckets = [each for each in folder.iterdir() if BUCKET.fullmatch(each.name)] if folder.is_dir() else []
    return not all(map(is_finished, buckets))  # else each is looked at by itself


def _splits(folder: Path) -> list[Path]:
    """Stores in a folder, finished or begun, as a run's cache has one for each split; the folder itself of a store."""
    if _is_store(folder) or not folder.is_dir():
        return [folder]
    return sorted(each for each in folder.iterdir() if _is_store(each)) or [folder]


def _show(arguments: argparse.Namespace) -> int:
    for folder in _splits(arguments.store):
        for store in open_stores(folder):
            print("\n".join(describe_store(store.folder, store.index)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    damaged = False
    for folder in itertools.chain(*map(_splits, arguments.stores)):
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
