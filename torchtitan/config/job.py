"""Configuration of a run: JobConfig, read from a TOML file and the command line, strictly.

python -m torchtitan.config FILE    write the JSON schema of a configuration file, for editors
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torchtitan.alignment.config import AlignmentConfig
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.config.checks import find_problems, resolve
from torchtitan.config.latent_cache import CacheConfig, say_uncached
from torchtitan.config.toml_file import load_named_plugins, read_configuration, shown_file
from torchtitan.config.view import ConfigView
from torchtitan.data import DATASETS, DataConfig, DatasetInfo
from torchtitan.data.image_files import own_pictures_advice
from torchtitan.diffusion.objective import ObjectiveConfig
from torchtitan.diffusion.objectives import OBJECTIVES
from torchtitan.distributed.config import ActivationCheckpointConfig, CommConfig, CompileConfig, ParallelismConfig
from torchtitan.errors import ConfigError
from torchtitan.evaluation.config import AutoencoderConfig, EvaluationConfig, SamplingConfig, ValidationConfig
from torchtitan.gns.config import GNSConfig
from torchtitan.models import MODELS
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.float8 import Float8Config
from torchtitan.profiling.config import ProfilingConfig
from torchtitan.settings import Choice, choice, has_key, key_types, section_of, setting
from torchtitan.settings.record import unmet_condition
from torchtitan.settings.reference import UnknownTopic, build_json_schema, describe
from torchtitan.settings.schema import Problem, expanded, nearest, parse_text, quoted, shown_name, validate_section
from torchtitan.settings.sections import all_sections, choices, flattened, keys, put_section, section_at
from torchtitan.settings.sources import read_command_line, suggestion, synonym
from torchtitan.training.config import EMAConfig, LRSchedulerConfig, MetricsConfig, OptimizerConfig, TrainingConfig

logger = logging.getLogger(__name__)

_SHAPES_SAMPLES = ("model.", "objective.", "autoencoder.", "sampling.", "lora.")  # sections that decide what is sampled
_MODEL = Choice(MODELS, "dit", make=lambda family: family.config_class(), flavors=lambda family: family.flavors)
_DATA = Choice(DATASETS, "digits", make=lambda dataset: dataset.Config())
_OBJECTIVE = Choice(OBJECTIVES, "denoising", make=lambda objective: objective.Config())


@dataclass(kw_only=True)
class JobSection:
    """`[job]`"""

    config_file: str = setting("", "TOML file with the keys below", trajectory=False, path=True)
    dump_folder: str = setting("outputs", "folder that holds the run folders", trajectory=False, writes="run", path=True)
    name: str = setting(
        "", "name of the run and of its folder; default: the TOML's file name", trajectory=False, writes="run"
    )
    plugins: list[str] = setting(
        [], "Python files (or entry points of packages) that register networks, datasets and the like", trajectory=False
    )
    allow_config_change: bool = setting(
        False, "resume a run folder although keys that change the training differ", trajectory=False
    )


@dataclass(kw_only=True)
class DebugConfig:
    """`[debug]`"""

    seed: int = setting(0, "seed of weights, noise, timesteps, data order: everything random", ge=0, lt=2**63)
    deterministic: bool = setting(False, "use only deterministic kernels", trajectory=False)


@dataclass(kw_only=True)
class JobConfig:
    """Configuration of a whole run, a section per field.

    `model` is the section of the family that `model.name` selects from MODELS, `data` that of the dataset that
    `data.name` selects from DATASETS, and `objective` that of OBJECTIVES.
    """

    job: JobSection = section_of(JobSection, "name of the run, its folder, its TOML file")
    model: Any = choice(_MODEL, "family of networks")
    data: Any = choice(_DATA, "dataset")
    cache: CacheConfig = section_of(CacheConfig, "latent store of the dataset, encoded before training")
    autoencoder: AutoencoderConfig = section_of(AutoencoderConfig, "decoder of latents, for grids of images")
    objective: ObjectiveConfig = choice(_OBJECTIVE, "path, prediction, weighting, timesteps of the loss")
    alignment: AlignmentConfig = section_of(AlignmentConfig, "alignment of tokens with a teacher's features, beside the loss")
    optimizer: OptimizerConfig = section_of(OptimizerConfig, "update rule, learning rate, decay, parameter groups")
    lr_scheduler: LRSchedulerConfig = section_of(LRSchedulerConfig, "warm-up and decay of the learning rate")
    training: TrainingConfig = section_of(TrainingConfig, "steps, batch sizes, precision, clipping, skipped steps")
    parallelism: ParallelismConfig = section_of(ParallelismConfig, "copies of the model, processes per copy")
    compile: CompileConfig = section_of(CompileConfig, "torch.compile of the blocks or of the whole model")
    activation_checkpoint: ActivationCheckpointConfig = section_of(
        ActivationCheckpointConfig, "recomputation of activations in backward"
    )
    float8: Float8Config = section_of(Float8Config, "float8 matrix products in the blocks")
    lora: LoRAConfig = section_of(LoRAConfig, "low-rank adapters of a frozen network")
    ema: EMAConfig = section_of(EMAConfig, "averages of the weights")
    gns: GNSConfig = section_of(GNSConfig, "gradient noise scale of each timestep bin, and its uses")
    checkpoint: CheckpointConfig = section_of(CheckpointConfig, "saving, resuming, initial weights")
    metrics: MetricsConfig = section_of(MetricsConfig, "logging: console, TensorBoard, Weights & Biases")
    sampling: SamplingConfig = section_of(SamplingConfig, "grids of samples while training")
    evaluation: EvaluationConfig = section_of(EvaluationConfig, "metrics of drawn samples against a reference")
    validation: ValidationConfig = section_of(ValidationConfig, "loss on held-out images")
    profiling: ProfilingConfig = section_of(ProfilingConfig, "traces of steps, snapshots of memory")
    comm: CommConfig = section_of(CommConfig, "timeouts of collectives, flight recorder")
    debug: DebugConfig = section_of(DebugConfig, "seed, deterministic kernels")

    @property
    def draws_pictures(self) -> bool:
        """True if the run draws images: samples, or held-out ones."""
        return self.sampling.enable or self.evaluation.enable or self.validation.enable


def load_config(
    argv: list[str], world_size: int, *, elsewhere: bool = False, info: DatasetInfo | None = None, earlier: bool = False
) -> JobConfig:
    """Read, check and resolve a configuration.

    Args:
        argv: command line without the program's name: `--section.key value` or `--section.key=value`.
            `--job.config_file` names the TOML file that they override.
        elsewhere: the run is of another machine: packages, compilers and devices of this one are not judged.
        info: properties of data that are elsewhere, which are not opened; None: the dataset is opened.
        earlier: the file is what an earlier version wrote of its run: keys that are no more are left out, and those that
            shape samples are named in a warning.

    Returns:
        the configuration with -1 and defaults that depend on other keys replaced by their values.

    Raises:
        ConfigError: with all problems at once.
    """
    flags, path, document = _read(argv)
    filled = _fill(document, flags, path, earlier)
    checked = filled.checked(world_size, elsewhere, info)
    filled.refuse(find_problems(checked, filled.known))
    resolve(checked, filled.config)
    return filled.config


def unchecked_config(argv: list[str]) -> JobConfig:
    """Read a configuration without the checks across its sections. Raises ConfigError."""
    flags, path, document = _read(argv)
    filled = _fill(document, flags, path)
    filled.refuse([])
    return filled.config


def load_data_section(argv: list[str], path: str | None = None) -> tuple[DataConfig, DatasetInfo]:
    """Read and check `[data]` alone, for programs that read a dataset and train nothing.

    Args:
        path: a TOML file whose section they override; its other sections are ignored.

    Returns:
        the section of the dataset that `data.name` selects, and the dataset's properties.

    Raises:
        ConfigError: with all problems at once.
    """
    flags, path, document = _read([*argv, "--job.config_file", path] if path is not None else argv)
    filled = _fill({section: table for section, table in document.items() if section == "data"}, flags, path)
    if not filled.problems and "data.name" not in filled.origins:
        raise ConfigError([f"data.name: not given (one of {', '.join(DATASETS)})"])
    checked = filled.checked(world_size=1)
    # Checks of other sections see their defaults here, which say nothing of this dataset.
    filled.refuse([problem for problem in find_problems(checked, filled.known) if problem.key.startswith("data.")])
    return filled.config.data, checked.dataset()


def _read(argv: list[str]) -> tuple[dict[str, str], str | None, dict[str, Any]]:
    """Read the command line's keys, its file, and the file's content. Raises ConfigError."""
    flags, unreadable = read_command_line(argv)
    path = expanded(flags.pop("job.config_file", None))
    document: dict[str, Any] = {}
    if path is not None:
        document, failure = read_configuration(path)
        recorded = Path(path) / "config.toml"
        advice = f"this run's: {recorded}" if recorded.is_file() else own_pictures_advice(path) if failure else ""
        unreadable += [f"{line} ({advice})" if advice else line for line in failure]
    if unreadable:
        raise ConfigError(unreadable)
    load_named_plugins(flags, path, document)
    return flags, path, document


@dataclass
class _Filled:
    """Unchecked configuration; origins: dotted key -> where it was given, "file" or "command line"."""

    config: JobConfig
    path: str | None
    known: dict[str, dataclasses.Field] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def checked(self, world_size: int, elsewhere: bool = False, info: DatasetInfo | None = None) -> ConfigView:
        return ConfigView(self.config, world_size, self.origins, self.refused, elsewhere, info)

    def refuse(self, further: list[Problem]) -> None:
        """Refuse a configuration with problems: these and further ones. Raises ConfigError."""
        if problems := [*dict.fromkeys(self.problems), *further]:
            raise ConfigError([_line(problem, self.origins, self.known, self.path) for problem in problems])


def _fill(document: dict[str, Any], flags: dict[str, str], path: str | None, earlier: bool = False) -> _Filled:
    """Fill a configuration with what is given, the command line's over the file's over the defaults.

    The one rule of precedence: the command line overrules the file. A key of the file that means nothing in a class, or has
    no effect under a switch, of the command line is left aside; within one source, it is a mistake and is reported.
    """
    config = JobConfig()
    filled = _Filled(config, path)
    given: dict[str, Any] = dict(flattened(document))
    filled.origins = dict.fromkeys(given, "file") | dict.fromkeys(flags, "command line")
    for place, options in _choices(config):  # outer ones first, inner ones as they are by then
        _choose(filled, given, flags, place, options)
    filled.known = {f"{name}.{key.name}": key for name, section in all_sections(config) for key in keys(section)}
    values: dict[str, dict[str, Any]] = {name: {} for name, _ in all_sections(config)}
    dropped = []
    for dotted, value in (given | flags).items():
        section, _, key = dotted.rpartition(".")
        if filled.origins[dotted] == "file" and dotted == "job.config_file":
            filled.problems.append(Problem(dotted, "is for the command line only (remove it)"))
        elif dotted in filled.known:
            of_key = key_types(type(section_at(config, section)))[key]
            values[section][key] = parse_text(value, of_key) if dotted in flags else value
        elif earlier:
            dropped.append(f"{dotted} = {quoted(value)}")
        else:
            filled.problems.append(_unknown(filled, dotted, value))
            filled.refused.add(dotted)
    if said := [line for line in dropped if line.startswith(_SHAPES_SAMPLES)]:
        logger.warning(f"{shown_file(path or '')}: keys of an earlier version are left out: {', '.join(said)}")
    defaults = {section: section_at(config, section) for section in values}
    for section, of_section in values.items():
        checked, wrong = validate_section(section, defaults[section], of_section)
        put_section(config, section, checked)
        filled.problems += wrong
        filled.refused |= {problem.key for problem in wrong}
    config.job.config_file = path or ""
    if "job.name" not in filled.origins:
        config.job.name = Path(path).stem if path else "run"
    _drop_overruled(filled, defaults)
    return filled


def _choose(filled: _Filled, given: dict[str, Any], flags: dict[str, str], place: str, options: Choice) -> None:
    """Choose the class of a section by name, a model's with its flavor's values; drop the file's keys that it cannot have."""
    in_file = given.get(f"{place}.name", options.default)
    name, flavor = (flags.get(f"{place}.{key}", given.get(f"{place}.{key}")) for key in ("name", "flavor"))
    name = options.default if name is None else name
    if not (isinstance(name, str) and name in options.registry):
        filled.problems.append(_not_one_of(f"{place}.name", name, options.registry))
        filled.refused.add(place)
        for keys_of in (given, flags):  # nobody knows what they would mean
            for dotted in [each for each in keys_of if each.startswith(f"{place}.")]:
                del keys_of[dotted]
        return
    flavors = options.flavors(options.registry[name])
    if flavors and flavor is not None and not (isinstance(flavor, str) and flavor in flavors):
        filled.problems.append(_not_one_of(f"{place}.flavor", flavor, flavors))
        filled.refused.add(place)
        flavor = None
    if name != in_file and isinstance(in_file, str) and in_file in options.registry:
        replaced = _replaced_keys(options.section(in_file), options.section(name), shared_by_name="." not in place)
        for dotted in [each for each in given if each.startswith(f"{place}.")]:
            if dotted[len(place) + 1 :].partition(".")[0] in replaced:
                del given[dotted]
                if dotted not in flags:
                    del filled.origins[dotted]
    section = options.section(name, flavor)
    if "__annotations__" in vars(type(section)) and "__dataclass_fields__" not in vars(type(section)):  # a plugin's
        text = f"{name}: the keys of {type(section).__name__} are not read (decorate it with @dataclass(kw_only=True))"
        filled.problems.append(Problem(f"{place}.name", text))
    put_section(filled.config, place, section)


def report_and_exit(error: ConfigError) -> NoReturn:
    """Print the problems to stderr, on the first rank of each machine, and exit with code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # files of one machine may be others than those of the rest
        print(*error.problems, sep="\n", file=sys.stderr, flush=True)
    raise SystemExit(2)


def help_text(topics: Sequence[str] = (), argv: Sequence[str] = ()) -> str:
    """Format the text of `--help`: the sections, or the keys of those named.

    Args:
        argv: the command line beside, by which plugins are loaded.

    Raises:
        ConfigError: an unknown name, or a plugin that cannot be loaded.
    """
    _read([*argv])
    try:
        return describe(JobConfig(), topics)
    except UnknownTopic as error:
        raise ConfigError([str(error)]) from error


def json_schema() -> dict[str, Any]:
    """Build the JSON schema of a configuration file, for completion in editors."""
    return build_json_schema(JobConfig())


def _choices(section: Any, prefix: str = "") -> Iterator[tuple[str, Choice]]:
    """Choices: dotted name and choice of every section whose keys depend on a name, inner ones as they are by then."""
    for name in [each.name for each in dataclasses.fields(section)]:
        if name in choices(section):
            yield prefix + name, choices(section)[name]
        if dataclasses.is_dataclass(inner := getattr(section, name)):
            yield from _choices(inner, f"{prefix}{name}.")


def _not_one_of(key: str, value: Any, known: Mapping[str, Any]) -> Problem:
    guess = nearest(value, known) if isinstance(value, str) else ""
    advice = f"did you mean {guess}?" if guess else "if a plugin has it, name its file in job.plugins"
    return Problem(key, f"must be one of {', '.join(known)}, is {quoted(value)} ({advice})")


def _replaced_keys(old: Any, new: Any, shared_by_name: bool) -> set[str]:
    """Keys of a class that mean nothing, or something else, in another; of datasets, `path` is the same in all."""
    before, after = old.__dataclass_fields__, new.__dataclass_fields__
    return {key for key in before if key not in after or not (shared_by_name or before[key] is after[key])}


def _drop_overruled(filled: _Filled, defaults: dict[str, Any]) -> None:
    """Drop the file's keys without effect because the command line overrules them; in place.

    `--gns.enable false` is meant to overrule a file that says how to measure. Within one source, a key
    without effect is a mistake and stays for the checks to report.
    """
    config, origins = filled.config, filled.origins
    chosen = dict(_choices(config))
    overruled = {dotted for dotted, origin in origins.items() if origin == "command line"}  # and, in turn, what it drops
    for dotted, field_ in filled.known.items():
        section, _, key = dotted.rpartition(".")
        unmet = unmet_condition(config, section, field_, overruled) if origins.get(dotted) == "file" else None
        if not unmet or unmet[0] not in overruled:
            continue
        overruled.add(dotted)
        if section in chosen and key == "name":  # its keys with it
            put_section(config, section, chosen[section].section(chosen[section].default))
            for each in [name for name in origins if name.startswith(f"{section}.") and origins[name] == "file"]:
                del origins[each]
        else:
            setattr(section_at(config, section), key, getattr(defaults[section], key))
            del origins[dotted]
    uncached = origins.get("cache.enable") == "command line" and config.data.name != "synthetic"
    if uncached and "autoencoder.name" in overruled - origins.keys():
        say_uncached()
    if "evaluation.metrics" in overruled and config.evaluation.enable:  # a metric, not a key's declaration, says what it needs
        for key, needing in config.evaluation.images_needed.items():
            if not needing and origins.get(f"evaluation.{key}") == "file":
                setattr(config.evaluation, key, "")
                del origins[f"evaluation.{key}"]


def _unknown(filled: _Filled, dotted: str, value: Any) -> Problem:
    """Problem of a key that there is not; of an unknown section in the file one for all of its keys."""
    section, _, key = dotted.rpartition(".")
    sections, first = dict(all_sections(filled.config)), dotted.partition(".")[0]
    if filled.origins[dotted] == "command line":
        pictures = own_pictures_advice(value) if dotted == "data.path" else ""
        return Problem(dotted, f"unknown key ({pictures or _advice(dotted, filled, '--')})")
    if dotted in sections:
        return Problem(dotted, f"must be a table, is {quoted(value)} (write [{dotted}] and its keys)")
    outer, _, name = section.rpartition(".")
    if section in filled.known and isinstance(getattr(section_at(filled.config, outer), name), list):
        filled.origins[section] = "file"
        return Problem(section, f"must be a list of tables, is one table (write [[{section}]])")
    if not section:
        return Problem(shown_name(dotted), f"is in no section ({suggestion(dotted, filled.known)})")
    if first not in sections:
        guess = nearest(first, [name for name in sections if "." not in name])
        advice = synonym(f"{first}.*") or (f"did you mean {guess}?" if guess else "--help lists all")
        return Problem(shown_name(first), f"unknown section ({advice})")
    return Problem(f"{section}.{shown_name(key)}", f"unknown key ({_advice(dotted, filled)})")


def _advice(dotted: str, filled: _Filled, prefix: str = "") -> str:
    """Advice on an unknown key: it may be one under another name of its section, or one that has moved."""
    for section, options in _choices(filled.config):
        if dotted == section:
            return synonym(section, prefix) or f"it is a section; {prefix}{section}.name chooses its keys"
        key = dotted.removeprefix(f"{section}.").partition(".")[0]
        owners = [name for name in options.registry if has_key(options.section(name), key)]
        if dotted.startswith(f"{section}.{key}") and owners and not has_key(section_at(filled.config, section), key):
            return f"it is a key of {section}.name = {' or '.join(owners)}"
    return suggestion(dotted, filled.known, prefix)


def _line(problem: Problem, origins: dict[str, str], known: dict[str, Any], path: str | None) -> str:
    """Format a problem with the place of its value: command line, file, or default; a missing value has none."""
    origin = origins.get(problem.key, "default" if problem.key in known else "file")
    if origin == "default" and problem.text.startswith("not given"):
        return f"{problem.key}{problem.within}: {problem.text}"
    place = {"command line": "command line: --", "file": f"{shown_file(path or '')}: ", "default": "default: "}[origin]
    key = shown_name(problem.key) if origin == "command line" else problem.key
    return f"{place}{key}{problem.within}: {problem.text}"
