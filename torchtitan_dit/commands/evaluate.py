"""Measure samples by FID and others: scripts/evaluate.py RUN|FOLDER|NPZ --reference REF --metrics fid,kid,is,prdc

    evaluate.py RUN ...            draws a set of samples from the run first, as scripts/sample.py --count does
    evaluate.py FOLDER|NPZ ...     reads the images of a folder, or of an npz file (arr_0)
    evaluate.py reference SOURCE --name NAME ...    makes a reference of a dataset, a folder or an npz file

Under torchrun the ranks share drawing and features; the result is that of one process. Drawing resumes when the same command is
given again. Results are kept in evaluation.json, and in the run's TensorBoard. Exit codes: 0; 1: failed at work; 2: refused.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.checkpoint.manifest import MANIFEST, checkpoint_steps
from torchtitan.config.job import ConfigError, load_data_section
from torchtitan.data import DATASETS, DatasetError
from torchtitan.distributed.collectives import from_first_rank, group_for_work, on_all_ranks
from torchtitan.distributed.config import CommConfig
from torchtitan.distributed.mesh import compute_device, init_process_group
from torchtitan.errors import CheckpointError, EvaluationError, unwrapped
from torchtitan.evaluation.dataset_images import DatasetImages
from torchtitan.evaluation.sample_plans import SampleNotFinite, SampleSetError
from torchtitan.fidelity.extraction import BATCH_SIZE, extract_images
from torchtitan.fidelity.extractors import EXTRACTORS, open_extractor
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.images import SET_RECORD, ImageSet, open_images
from torchtitan.fidelity.measuring import (
    DEFAULT_EXTRACTOR,
    METRICS,
    Request,
    check_classes,
    check_request,
    features_of_samples,
    known_metrics,
    measure,
    reference_features,
)
from torchtitan.fidelity.references import (
    REFERENCES,
    Reference,
    kept_outputs,
    new_reference,
    open_reference,
    reference_path,
    write_reference,
)
from torchtitan.fidelity.results import EVALUATION_FILE, EvaluationFile, describe, table_lines
from torchtitan.processes.command_line import FirstRankParser, at_least, refusing
from torchtitan.processes.exit_codes import FAILED, REFUSED
from torchtitan.programs import program
from torchtitan.runs.folder import versions
from torchtitan.sampling.method_options import option
from torchtitan.sampling.run_samples import draw_samples, is_run, log_scalars, origin
from torchtitan.sampling.setup import SamplingSetup, add_drawing_options, chosen_classes, open_prompted
from torchtitan.settings.sources import split_keys

FIRST = os.environ.get("RANK", "0") == "0"
UNUSABLE = (AutoencoderError, CheckpointError, ConfigError, DatasetError, EvaluationError, SampleSetError)
COUNT = 50_000
DEFAULT_METRICS = "fid,kid,is,prdc"
OTHER_METRICS = "fd,kid,is,prdc"
WEIGHTS = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@refusing(stopped="stopped; the same command resumes")
def main(words: list[str] | None = None) -> int:
    """Run as one of the started processes; return the exit code."""
    words = sys.argv[1:] if words is None else words
    try:
        if words[:1] == ["reference"]:
            own, of_data = split_keys(words[1:], "data")
            arguments = parse_reference(own)
            init_process_group(CommConfig())
            make_reference(arguments, of_data)
        else:
            arguments = parse_evaluation(words)
            init_process_group(CommConfig())
            evaluate(arguments)
    except SampleNotFinite as error:  # of this rank alone
        print(unwrapped(error), file=sys.stderr)
        return REFUSED
    except UNUSABLE as error:
        if FIRST:
            print(unwrapped(error), file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"{error.filename}: {error.strerror or error}; the same command resumes", file=sys.stderr)
        return FAILED
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def parse_evaluation(words: list[str]) -> argparse.Namespace:
    parser = FirstRankParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("source", type=Path, metavar="RUN|FOLDER|NPZ", help="a run, a file of weights (with CONFIG), or images")
    add("--reference", metavar="REF", help="name of a reference, or path of one, of an npz file or of images")
    add("--metrics", help=f"names with commas between, of {', '.join(METRICS)} (default: {DEFAULT_METRICS}; fd instead of fid"
        " with another --extractor)")
    add("--held-out", metavar="REF", help="images that were not trained on, for the threshold of memorisation")
    add("--seed", type=at_least(0), default=0, help="of subsets and intervals (default: 0)")
    add("--allow-small", action="store_true", help="measure covariances of fewer images than features")
    add("--output", type=Path, metavar="FILE.json", help="file of the results (default: RUN/evaluation.json)")
    add_extractor_options(parser, "network of the features of metrics that do not name their own")
    add("--count", type=int, help=f"samples: as many are drawn (default: {COUNT}), or the first ones are read (default: all)")
    drawn = parser.add_argument_group("samples of a run or of weights")
    add_drawn_options(drawn)
    arguments = parser.parse_args(words)
    arguments.extractor = arguments.extractor or DEFAULT_EXTRACTOR
    default = DEFAULT_METRICS if arguments.extractor == DEFAULT_EXTRACTOR else OTHER_METRICS
    arguments.metrics = (arguments.metrics or default).replace(" ", "").split(",")
    return arguments


def add_drawn_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--seeds", metavar="SEEDS", help="draw these seeds, as 0-49999 (default: 0 to count - 1)")
    parser.add_argument("--classes", nargs="+", help="names or numbers, or all, by turns (default: drawn for each seed)")
    add_drawing_options(parser)


def parse_reference(words: list[str]) -> argparse.Namespace:
    parser = FirstRankParser(
        prog=f"{program('evaluate')} reference", allow_abbrev=False,
        description="Make a reference: features of a dataset's, a folder's or an npz file's images, named and hashed.",
    )  # fmt: skip
    add = parser.add_argument
    add("source", metavar="DATASET|FOLDER|NPZ", help=f"a dataset ({', '.join(DATASETS)}) with its --data.KEY VALUE, or images")
    add("--name", required=True, help="of the reference, in every result")
    add("--split", choices=("train", "validation", "all"), help="of the dataset (default: train)")
    add("config", nargs="?", metavar="CONFIG", help="file with a [data] section, which the --data keys override")
    add("--count", type=int, help="the first images only (default: all)")
    add("--output", type=Path, metavar="FILE.npz", help=f"of the reference (default: {REFERENCES}/NAME.npz)")
    add_extractor_options(parser, "networks of the features, with commas between")
    arguments = parser.parse_args(words)
    if not NAME.fullmatch(arguments.name):
        parser.error(f"--name: {arguments.name[:40]!r} is no name of letters, digits, '.', '_' and '-'")
    if arguments.output is None and arguments.name in ("train", "validation"):
        parser.error(f"--name: {arguments.name!r} is a split of the run's own data in evaluation.reference (give another)")
    arguments.extractor = list(dict.fromkeys((arguments.extractor or DEFAULT_EXTRACTOR).split(",")))
    return arguments


def add_extractor_options(parser: argparse.ArgumentParser, text: str) -> None:
    add = parser.add_argument
    add("--extractor", metavar="NAME", help=f"{text}, of {', '.join(EXTRACTORS)} (default: {DEFAULT_EXTRACTOR})")
    add("--weights", action="append", default=[], metavar="[NAME=]FILE", help="of an extractor, if not where "
        f"{program('download')} puts them; once for each extractor")
    add("--feature-batch-size", type=at_least(1), default=BATCH_SIZE,
        help=f"images at a time, of features (default: {BATCH_SIZE})")


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure samples, print the results and keep them. Raises UNUSABLE, Busy, OSError."""
    group = group_for_work()
    source: Path = arguments.source
    drawn = source.is_dir() and is_run(source) or source.suffix == WEIGHTS
    request = request_of(arguments)
    if not source.exists():
        raise EvaluationError(f"{source}: no such run, file of weights, folder of images or npz file")
    if not drawn and source.is_dir() and ((source / MANIFEST).is_file() or checkpoint_steps(source)):
        raise EvaluationError(f"{source}: holds checkpoints, no images (give the run, and --step N)")
    if not drawn:
        refuse_drawing_options(arguments)
    output = arguments.output or default_output(source)
    file = EvaluationFile(output)
    from_first_rank(file.check, group=group)
    extractors = on_all_ranks(lambda: open_extractors(request.extractors(), arguments.weights), UNUSABLE, group)
    reference, held_out = on_all_ranks(
        lambda: [each and open_reference(*each) for each in given_references(arguments)], UNUSABLE, group
    )
    if drawn:
        setup = on_all_ranks(lambda: open_prompted(arguments), UNUSABLE, group)
        images = draw(arguments, request, extractors, [reference, held_out], setup, group)
    else:
        images = on_all_ranks(lambda: open_images(source).first(arguments.count), UNUSABLE, group)
        if "accuracy" in request.metrics and images.classes() is None:
            advice = "of a set, or arr_1 of an npz; or leave it out"
            raise EvaluationError(f"{source}: accuracy needs the class that each was drawn for ({advice})")
        check_classes(request, extractors, images.num_classes)
    check_request(request, extractors, len(images), images.size, reference, held_out)
    work = {"batch_size": arguments.feature_batch_size, "group": group, "progress": True}
    rows = extract_images(images, extractors, request.outputs(), **work)
    compared, calibrating = (
        reference_features(request, extractors, each, held_out=each is held_out, **work) if each else {}
        for each in (reference, held_out)
    )
    measured = from_first_rank(
        lambda: measure(request, features_of_samples(rows, images.classes()), compared, calibrating), group=group
    )
    if FIRST:
        for name, needed in (("reference", "reference"), ("held_out", "needs_held_out")):
            if getattr(arguments, name) and not any(getattr(METRICS[metric], needed) for metric in arguments.metrics):
                print(f"--{name.replace('_', '-')}: has no effect on {', '.join(arguments.metrics)}", file=sys.stderr)
        print("\n".join(table_lines(request, len(images), reference, measured)))
        source_of_samples = origin(setup) if drawn else {}
        entry = describe(request, extractors, images, reference, held_out, measured, versions(), source_of_samples)
        file.add(entry)
        if drawn and is_run(source) and setup.trained.config.metrics.enable_tensorboard:
            log_scalars(source, setup.trained.step or 0, entry)
        print(output)


def request_of(arguments: argparse.Namespace) -> Request:
    """Request of the options. Raises EvaluationError: a metric is unknown, or is not of the extractor."""
    extractor = arguments.extractor
    metrics = known_metrics(arguments.metrics)
    if "fid" in metrics and extractor != DEFAULT_EXTRACTOR:
        raise EvaluationError(f"--metrics: fid is of {DEFAULT_EXTRACTOR} features (with --extractor {extractor} it is fd)")
    return Request(metrics, extractor, arguments.allow_small, arguments.seed, str(compute_device()))


def refuse_drawing_options(arguments: argparse.Namespace) -> None:
    """Refuse options of drawing for images that are there. Raises EvaluationError."""
    parser = argparse.ArgumentParser()
    add_drawn_options(parser)
    for name in vars(parser.parse_args([])):
        if getattr(arguments, name) not in (None, ""):
            raise EvaluationError(f"{option(name)}: has no effect on images that are there (leave it out, or give a run)")


def given_references(arguments: argparse.Namespace) -> list[tuple[str, str] | None]:
    """Reference and held-out images, each with its option. Raises EvaluationError: one is a run."""
    given = (arguments.reference, "--reference"), (arguments.held_out, "--held-out")
    for text, name in given:
        refuse_run(reference_path(text or os.devnull), name)
    return [(text, name) if text is not None else None for text, name in given]


def refuse_run(path: Path, name: str) -> None:
    """Refuse a run: its pictures are grids and charts, not images to compare with. Raises EvaluationError."""
    if is_run(path):
        raise EvaluationError(f"{name}: {path} is a run (give a set of its samples, of {program('sample')} --count)")


def open_extractors(names: Sequence[str], weights: Sequence[str]) -> dict[str, FeatureExtractor]:
    """Open extractors by name on this process's device. Raises EvaluationError."""
    files: dict[str, Path] = {}
    for text in weights:
        name, separator, path = text.partition("=")
        if not separator or name not in names:
            if len(names) > 1:
                raise EvaluationError(f"--weights: {text}: of which extractor? (NAME={text}; NAME is {' or '.join(names)})")
            name, path = names[0], text
        if name in files:
            raise EvaluationError(f"--weights: two files for {name} (give one)")
        files[name] = Path(path)
    return {name: open_extractor(name, files.get(name), compute_device()) for name in names}


def draw(
    arguments: argparse.Namespace, request: Request, extractors: dict[str, FeatureExtractor],
    references: list[Reference | None], setup: SamplingSetup, group: dist.ProcessGroup | None,
) -> ImageSet:  # fmt: skip
    """Draw the samples that are missing, once it is known that they can be measured; collective."""
    for warning in setup.warnings if FIRST else ():
        print(warning, file=sys.stderr)
    check_classes(request, extractors, setup.trained.info.num_classes)
    classes = [*range(len(arguments.prompt))] if arguments.prompt else chosen_classes(arguments.classes or [], setup.trained)
    count = COUNT if arguments.count is None and arguments.seeds is None else arguments.count
    plan = setup.plan(arguments.seeds, count, classes)
    downscale = setup.decoder.downscale if setup.decoder else 1
    height, width = (side * downscale for side in setup.image_shape[1:])
    check_request(request, extractors, len(plan.seeds), (height, width), *references)
    return draw_samples(setup, plan, group, progress=True)


def default_output(source: Path) -> Path:
    """File of results: in a run's folder or a set's, or beside other images."""
    if source.is_dir() and (is_run(source) or (source / SET_RECORD).exists()):
        return source / EVALUATION_FILE
    whole = Path(os.path.abspath(source))
    return whole.with_name(f"{whole.name}.{EVALUATION_FILE}")


def make_reference(arguments: argparse.Namespace, data_words: list[str]) -> None:
    """Make a reference. Raises UNUSABLE, OSError."""
    path = new_reference(arguments.name, arguments.output)
    group = group_for_work()
    images = on_all_ranks(lambda: source_of(arguments, data_words).first(arguments.count), UNUSABLE, group)
    extractors = on_all_ranks(lambda: open_extractors(arguments.extractor, arguments.weights), UNUSABLE, group)
    outputs = {name: list(kept_outputs(extractor)) for name, extractor in extractors.items()}
    rows = extract_images(images, extractors, outputs, arguments.feature_batch_size, group, progress=True)
    from_first_rank(
        lambda: write_reference(path, arguments.name, images, extractors, rows, versions()), group=group
    )
    if FIRST:
        print(f"{path}: reference {arguments.name} of {len(images):,} images")
        print(f"holds {open_reference(str(path)).contents()}")


def source_of(arguments: argparse.Namespace, data_words: list[str]) -> ImageSet:
    """Images of a reference. Raises EvaluationError, ConfigError, DatasetError."""
    if arguments.source in DATASETS:
        config, info = load_data_section(["--data.name", arguments.source, *data_words], arguments.config)
        images = DatasetImages(config, info, arguments.split or "train")
        images.check()
        return images
    for name, given in (("--split", arguments.split), ("CONFIG", arguments.config), ("--data keys", data_words)):
        if given:
            plugin = ", or give its plugin with --job.plugins" if arguments.config else ""
            raise EvaluationError(f"{name}: of a dataset, and {arguments.source} is none (leave it out{plugin})")
    refuse_run(Path(arguments.source), "reference")
    return open_images(Path(arguments.source))
