"""Encode a dataset of images: scripts/extract_latents.py --output STORE --autoencoder NAME --data.name DATASET ...

    torchrun --nproc_per_node N scripts/extract_latents.py ...    shares the work among N processes
    --part K/N                                                   writes a part of the files, as a task of an sbatch array
    --data.KEY VALUE                                              keys of the dataset's [data] section, as of train.py
    scripts/extract_latents.py convert SOURCE --output STORE      writes a store from published latents
    scripts/extract_latents.py show STORE, verify STORE ...       show a store's content, read every byte of stores

An interrupted extraction resumes when the same command is given again, on any number of processes; the store is the
same. Exit codes: 0; 1: failed at work, finished shards stay; 2: refused, nothing lost.
"""

import argparse
import functools
import os
import sys

# Before torch is imported. An encoder's activations are large and fresh each time: on the CPU a third of its time went
# into their page faults, half of which large pages save.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.distributed as dist

from torchtitan.alignment.config import ENCODERS
from torchtitan.autoencoders.base import Autoencoder, AutoencoderError
from torchtitan.config.job import ConfigError, load_data_section
from torchtitan.config.toml_file import read_toml
from torchtitan.data.base import DataConfig, DatasetError
from torchtitan.distributed.collectives import group_for_work, on_all_ranks
from torchtitan.distributed.config import CommConfig
from torchtitan.distributed.failures import is_lost_rank, is_out_of_memory
from torchtitan.distributed.mesh import compute_device, init_process_group
from torchtitan.errors import LatentStoreError, first_line, unwrapped
from torchtitan.extraction.describe import describe_store
from torchtitan.extraction.extraction import (
    CaptionOptions,
    PlannedStore,
    begin_stores,
    finish_store,
    finish_stores,
    plan_stores,
    write_store,
)
from torchtitan.extraction.extraction_plan import WHOLE, ExtractionOptions, Part, estimated_size
from torchtitan.extraction.image_source import open_sources
from torchtitan.extraction.shard_encoding import DamagedImages
from torchtitan.extraction.store_verbs import VERBS, run_verb
from torchtitan.files.regular import user_path
from torchtitan.latents.captions import CAPTION_DTYPES
from torchtitan.latents.index import MOST_SHARDS
from torchtitan.processes.command_line import FirstRankParser, at_least, readable_size, refusing, sides
from torchtitan.processes.exit_codes import FAILED, REFUSED
from torchtitan.processes.launch import launch_number
from torchtitan.settings.sources import split_keys
from torchtitan.texts.opening import OPTIONS, TextEncoderError, TextEncoders, open_encoders
from torchtitan_dit.commands.cosmos_latent_decoder import DTYPES, add_autoencoder_options, open_decoder

UNUSABLE = (AutoencoderError, DatasetError, LatentStoreError, TextEncoderError, OSError)
TEXT_LENGTH = 256
MOST_WORKERS = 8
BATCH_SIZES = {"cuda": 16, "cpu": 4}

# Keys of [data] that only training reads, and what does the like here.
OF_TRAINING = {"num_workers": "--num-workers", "horizontal_flip": "--mirror or --no-mirror"}


@refusing(stopped="interrupted; the same command resumes")
def main(words: list[str] | None = None) -> int:
    """Run as one of the started processes; return the exit code."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] in VERBS:
        return run_verb(words)
    return extract(*parse_arguments(words))


def extract(arguments: argparse.Namespace, data_words: list[str]) -> int:
    torch.set_num_threads(arguments.threads)
    try:
        config, info = load_data_section(data_words, arguments.config)
        warn_of_training_keys(arguments.config)
        init_process_group(CommConfig())
        group = group_for_work()
        options = options_of(arguments, config)
        sources = on_all_ranks(lambda: open_sources(config, info, arguments.split), UNUSABLE, group)
        autoencoder = on_all_ranks(lambda: open_autoencoder(arguments), UNUSABLE, group)
        encoders = on_all_ranks(lambda: open_text_encoders(arguments), UNUSABLE, group)
        captions = caption_options(arguments)
        plan = functools.partial(plan_stores, arguments.output, sources, autoencoder, encoders, options, captions)
        stores = on_all_ranks(plan, UNUSABLE, group)
        begin_stores(arguments.output, stores, group)
    except ConfigError as error:
        return refuse(*error.problems)
    except UNUSABLE as error:
        return refuse(one_line(error))
    except (RuntimeError, MemoryError) as error:
        return fail(error)
    for store in stores:
        if (code := write_and_report(arguments, store, autoencoder, encoders, options, group)) != 0:
            return code
    try:
        if options.part.whole:
            finish_stores(arguments.output, stores, group)
    except UNUSABLE as error:
        return refuse(one_line(error), code=FAILED)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def write_and_report(
    arguments: argparse.Namespace, store: PlannedStore, autoencoder: Autoencoder, encoders: TextEncoders | None,
    options: ExtractionOptions, group: dist.ProcessGroup | None,
) -> int:  # fmt: skip
    """Write what is missing of a store; return the exit code."""
    plan = store.plan
    if is_first() and store.pending:
        size = readable_size(estimated_size(plan))
        held_out = arguments.split == "train" and store.source.info.has_validation
        left_out = ", without those held out (--split validation)" if held_out else ""
        left_out = ", held-out ones too," if arguments.split == "all" and store.source.info.has_validation else left_out
        images = f"{len(store.source):,} images{left_out}"
        files = f"{plan.num_shards:,} file{'s' * (plan.num_shards != 1)}"
        print(f"{store.folder}: {images} in {files}, about {size} in all", flush=True)
    part = options.part
    try:
        cut, speed = write_store(store, autoencoder, encoders, options, group)
    except (*UNUSABLE, RuntimeError, MemoryError) as error:
        return fail(error)
    if cut and is_first():
        length = f"{arguments.text_length or TEXT_LENGTH} tokens (--text-length)"
        text = f"{len(cut):,} {'caption is' if len(cut) == 1 else 'captions are'} longer than {length}, and cut"
        print(f"{store.folder}: {text}", file=sys.stderr)
    if not part.whole:
        if is_first():
            text = f"part {part.number + 1} of {part.count} is written; a start without --part writes the index"
            print(f"{store.folder}: {text}\n{speed}")
        return 0
    try:
        index = finish_store(store, options.max_skipped_share, group)
        if is_first():
            print("\n".join([*describe_store(store.folder, index), speed]))
    except UNUSABLE as error:
        return refuse(one_line(error), code=REFUSED if isinstance(error, DamagedImages) else FAILED)
    return 0


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own options, and those of the dataset."""
    parser = FirstRankParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=user_path, required=True, metavar="STORE", help="folder to write, or to resume")
    add_autoencoder_options(add, required=False)
    add("--features", choices=tuple(ENCODERS), metavar="TEACHER", help="instead of --autoencoder: features of this teacher of an "
        f"alignment, with --path as alignment.path; one of {', '.join(ENCODERS)}")
    add("--grid", type=sides, metavar="HEIGHTxWIDTH", help="tokens of the network that will be aligned with the features, as "
        "16x16 for 256 pixels as latents of 32 x 32 in patches of 2")
    add("config", nargs="?", metavar="CONFIG", help="file with a [data] section, which the --data keys override")
    add("--split", choices=("train", "validation", "all"), default="train",
        help="of the dataset; all: training images, then held-out ones (default: train)")
    add("--mirror", action=argparse.BooleanOptionalAction, help="keep the latents of mirror images too (default: yes, but "
        "not with captions of the images' own, which may speak of left and right)")
    add("--store-dtype", choices=("float16", "bfloat16", "int8"), default="float16", help="of the stored values")
    add("--normalization", choices=("measured", "autoencoder"), default="measured",
        help="normalization of the store: mean 0 and variance 1 of each channel (default), or the autoencoder's "
        "own configuration")
    add("--batch-size", type=at_least(1),
        help=f"images encoded at once (default: {BATCH_SIZES['cuda']} on a GPU, {BATCH_SIZES['cpu']} on the CPU, "
        "where more of them need more memory and are not faster)")
    add("--num-workers", type=at_least(0), default=default_workers(),
        help=f"processes that decode images, for each rank (here: {default_workers()}); 0: the encoding process "
        "decodes")
    add("--images-per-shard", type=at_least(1),
        help="images per file (default: 64 to 1024 by their number, or as many as make 1,000 files)")
    add("--threads", type=at_least(1), default=1, help="of each rank's encoder on the CPU (default: 1; start a rank "
        "per core). The last bits of latents depend on it, and on --batch-size")
    add("--text-encoder", default="", metavar="ENCODER", help="keep captions too, their tokens encoded by this: folder "
        "or hub name of a T5 encoder or a CLIP text model, or stub:WIDTH, a stand-in with a random vector per word")
    add("--pooled-encoder", default="", metavar="ENCODER", help="encoder of each whole caption: a CLIP text model, or "
        "stub:WIDTH")
    add("--text-length", type=at_least(1), metavar="TOKENS", help="of every caption (default: 256, as for FLUX.1 "
        "[schnell]; [dev] takes 512)")
    add("--text-dtype", choices=tuple(DTYPES), help="of the text encoders' compute (default: bfloat16)")
    add("--text-store-dtype", choices=tuple(CAPTION_DTYPES), help="of the stored embeddings (default: bfloat16)")
    add("--class-captions", metavar="TEMPLATE", help="make captions of the classes; {} becomes the class's name: "
        "'a photo of a {}' (default: the images' own captions)")
    add("--null-caption", metavar="TEXT", help="caption that stands for no condition (default: the empty text)")
    add("--prompts", nargs="+", metavar="TEXT", help="for the grids of samples that training draws (default: the "
        "captions of the classes, or of the first images)")
    add("--part", type=part_of, default=WHOLE, metavar="K/N", help="write every N-th file only, from the K-th on; when all N "
        "parts are written, a start without --part writes the index")
    own, data_words = split_keys(words, "data")
    arguments = parser.parse_args(own)
    if bool(arguments.autoencoder) == bool(arguments.features):
        parser.error("--autoencoder: give this or --features")
    if bool(arguments.features) != bool(arguments.grid):
        parser.error("--grid: --features needs it" if arguments.features else "--grid: has no effect without --features")
    if arguments.features and (arguments.tile or arguments.normalization == "autoencoder"):
        parser.error(f"{'--tile' if arguments.tile else '--normalization'}: has no effect on features (leave it out)")
    if bool(arguments.text_encoder) != bool(arguments.pooled_encoder):
        given, other = OPTIONS.values() if arguments.text_encoder else reversed(OPTIONS.values())
        parser.error(f"{given}: needs {other} too")
    of_captions = ("text_length", "text_dtype", "text_store_dtype", "class_captions", "null_caption", "prompts")
    if idle := [name for name in of_captions if not arguments.text_encoder and getattr(arguments, name) is not None]:
        parser.error(f"--{idle[0].replace('_', '-')}: has no effect without --text-encoder and --pooled-encoder")
    if arguments.overlap is not None and arguments.tile is None:
        parser.error("--overlap: has no effect without --tile")
    for word in data_words:
        if (instead := OF_TRAINING.get(word.removeprefix("--data.").partition("=")[0])) is not None:
            parser.error(f"{word.partition('=')[0]}: is for training; here it is {instead}")
    return arguments, data_words


def part_of(text: str) -> Part:
    """Type of options: K/N, 1 <= K <= N."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= MOST_SHARDS):
        raise argparse.ArgumentTypeError(f"must be K/N, a part of N from 1 to N, is {text!r}")
    return Part(int(number) - 1, int(count))


def default_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, max(1, cores // launch_number("LOCAL_WORLD_SIZE", 1)))


def warn_of_training_keys(path: str | None) -> None:
    """Warn of keys for training in the [data] section of a file, which are not used."""
    given = read_toml(path)[0].get("data", {}) if path else {}
    found = {key: instead for key, instead in OF_TRAINING.items() if key in given}
    if found and speaks():
        listed = ", ".join(f"{key} ({instead})" for key, instead in found.items())
        print(f"{path}: keys of [data] for training, which have other options here: {listed}", file=sys.stderr)


def options_of(arguments: argparse.Namespace, config: DataConfig) -> ExtractionOptions:
    own_captions = bool(arguments.text_encoder) and arguments.class_captions is None
    mirrored = not own_captions if arguments.mirror is None else arguments.mirror
    return ExtractionOptions(
        mirrored=mirrored, dtype=arguments.store_dtype, normalization=arguments.normalization,
        batch_size=arguments.batch_size or BATCH_SIZES[compute_device().type], shard_images=arguments.images_per_shard,
        threads=arguments.threads, num_workers=arguments.num_workers, max_skipped_share=config.max_corrupt_share,
        part=arguments.part,
    )  # fmt: skip


def open_autoencoder(arguments: argparse.Namespace) -> Autoencoder:
    """Open the autoencoder, or the teacher that stands in for it."""
    if not arguments.features:
        return open_decoder(arguments).autoencoder
    from torchtitan.alignment.feature_store import FeatureEncoder

    dtype = DTYPES.get(arguments.dtype)
    return FeatureEncoder(arguments.features, arguments.path, arguments.grid, dtype, compute_device())


def open_text_encoders(arguments: argparse.Namespace) -> TextEncoders | None:
    """Open the text encoders; None if none are asked for."""
    if not arguments.text_encoder:
        return None
    dtype = DTYPES[arguments.text_dtype or "bfloat16"]
    length = arguments.text_length or TEXT_LENGTH
    return open_encoders(arguments.text_encoder, arguments.pooled_encoder, length, dtype, compute_device())


def caption_options(arguments: argparse.Namespace) -> CaptionOptions:
    return CaptionOptions(
        template=arguments.class_captions,
        null_caption=arguments.null_caption or "",
        prompts=arguments.prompts or (),
        dtype=arguments.text_store_dtype or "bfloat16",
    )


def refuse(*lines: str, code: int = REFUSED) -> int:
    """Refuse with a message known to all ranks, on one of them, or before they are joined on one of each machine."""
    if speaks():
        print(*lines, sep="\n", file=sys.stderr)
    return code


def fail(error: BaseException) -> int:
    """Report this rank's own failure at work."""
    if is_out_of_memory(error):
        text = "out of memory (in a new store: a smaller --batch-size; of latents also --tile)"
    elif is_lost_rank(error):
        text = f"lost another rank: {first_line(error)}"
    elif isinstance(error, UNUSABLE):
        text = one_line(error)
    else:
        raise error
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    damaged = isinstance(error, DamagedImages)
    print(f"{rank}{text}{'' if damaged else '; finished shards stay, and the same command resumes'}", file=sys.stderr)
    return REFUSED if damaged else FAILED


def one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and (file := error.filename2 or error.filename):
        text = f"{file}: {error.strerror}"
    return unwrapped(text)


def speaks() -> bool:
    return is_first() if dist.is_initialized() else os.environ.get("LOCAL_RANK", "0") == "0"


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
