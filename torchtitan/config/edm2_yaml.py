"""Configurations of EDM2's public multi-GPU port (FutureXiang/edm2): their YAML keys as sections of this program's TOML."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchtitan.programs import program
from torchtitan.settings.schema import nearest, quoted

CHURN_PER_ETA = 18 * (math.sqrt(2.0) - 1.0)  # of the port's sampler, whose eta is a share of the largest gamma
EPOCHS_BETWEEN_SAVES = 100

# Learning rate of u over the network's, with which Adam moves u per step as the port's head moves it: its waves have
# amplitude 1 (C) where ours have norm 1, and weights that are normalised (E, G), with amplitude sqrt(2) in G.
UNCERTAINTY_LR_SCALES = {"C": 11.3, "E": 0.71, "G": 1.0}


class Edm2YamlError(Exception):
    """Configuration that cannot be imported.

    Attributes:
        problems: the reasons, a line each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Imported(NamedTuple):
    """Imported configuration.

    Attributes:
        tables: sections as TOML has them.
        image_shape: of the dataset.
        notes: keys that are not honoured, with the reason, a line each.
    """

    tables: dict[str, Any]
    image_shape: tuple[int, int, int]
    notes: list[str]


class _Key(NamedTuple):
    """Key of the YAML: the kind of its value, one of KINDS, and whether the port starts without it."""

    kind: str
    optional: bool = False


class _Dataset(NamedTuple):
    name: str
    images: int  # of training
    side: int
    flavor: str


DATASETS = {
    "cifar": _Dataset("cifar10", 50_000, 32, "cifar"),
    "cifar100": _Dataset("cifar100", 50_000, 32, "cifar"),
    "tiny": _Dataset("tinyimagenet", 100_000, 64, "tiny_imagenet"),
}
NETWORKS = {"UNetC": "C", "UNetE": "E", "UNetG": "G"}
RULES = ("Adam", "AdamW")

KEYS = {
    "dataset": _Key("text"),
    "classes": _Key("integer", optional=True),
    "model_type": _Key("text"),
    "net_type": _Key("text"),
    **{f"diffusion.{name}": _Key("number") for name in ("sigma_data", "p_mean", "p_std", "sigma_min", "sigma_max", "rho")},
    **{f"diffusion.{name}": _Key("number", optional=True) for name in ("S_min", "S_max", "S_noise")},
    "network.image_shape": _Key("integers"),
    "network.n_channels": _Key("integer"),
    "network.ch_mults": _Key("integers"),
    "network.is_attn": _Key("booleans"),
    "network.attn_channels_per_head": _Key("integer", optional=True),
    "network.dropout": _Key("number"),
    "network.n_blocks": _Key("integer"),
    "n_epoch": _Key("integer"),
    "batch_size": _Key("integer"),
    "lrate": _Key("number"),
    "warm_epoch": _Key("integer"),
    "tref_epoch": _Key("integer", optional=True),
    "load_epoch": _Key("integer", optional=True),
    "flip": _Key("boolean"),
    "ema": _Key("number"),
    "optim": _Key("text", optional=True),
    "optim_args.betas": _Key("numbers", optional=True),
    "optim_args.eps": _Key("number", optional=True),
    "optim_args.weight_decay": _Key("number", optional=True),
    "optim_args.amsgrad": _Key("boolean", optional=True),
    "n_sample": _Key("integer", optional=True),
    "save_dir": _Key("text", optional=True),
    "save_model": _Key("boolean", optional=True),
    "linear.n_epoch": _Key("integer", optional=True),
    "linear.batch_size": _Key("integer", optional=True),
    "linear.lrate": _Key("number", optional=True),
    "linear.timestep": _Key("integer", optional=True),
    "linear.blockname": _Key("text", optional=True),
}
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}
# Where an image is halved at each level, and numbers that are multiplied: what no configuration has.
_MOST_LEVELS, _MOST = 16, 10**12

KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "integer": (int, "a whole number"), "number": ((int, float), "a number"), "boolean": (bool, "true or false"),
    "text": (str, "a text"),
}  # fmt: skip


def import_edm2(document: Mapping[str, Any], processes: int = 1) -> Imported:
    """Translate a configuration of the port.

    Args:
        document: the YAML's content.
        processes: that `batch_size` and `lrate` count for, each alone: 1 for the port as it is now, where they are global.

    Raises:
        Edm2YamlError: with all problems at once.
    """
    values, problems = _flatten(document)
    problems = problems or list(_problems(values))
    if problems:
        raise Edm2YamlError(problems)
    dataset = DATASETS[values["dataset"]]
    config, batch = NETWORKS[values["net_type"]], values["batch_size"] * processes
    interval = -(-EPOCHS_BETWEEN_SAVES * dataset.images // batch)
    tables: dict[str, Any] = {
        "job": _job(values),
        "model": _model(values, config, dataset),
        "data": {"name": dataset.name, "labels": False, "horizontal_flip": values["flip"]},
        "objective": _objective(values, config),
        "optimizer": {"lr": float(values["lrate"] * processes)} | _rule(values),
        "lr_scheduler": _schedule(values, dataset.images),
        "training": {
            "steps": -(-values["n_epoch"] * dataset.images // batch),
            "local_batch_size": -1,
            "global_batch_size": batch,
            "max_norm": 0.0,
        },
        "parallelism": {"data_parallel_replicate_degree": -1, "data_parallel_shard_degree": 1},
        "ema": {"tracks": [{"name": "ema", "decay": float(values["ema"]), "warmup_power": 2.0 / 3.0}]},
        "checkpoint": {"interval": interval, "keep_latest_k": 0} if values.get("save_model", True) else {"enable": False},
        "sampling": _sampling(values, interval),
    }
    filled = {section: table for section, table in tables.items() if table}
    return Imported(filled, (3, dataset.side, dataset.side), list(_notes(values)))


def _flatten(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values by dotted key, without those that are null, and a line for each key that is unknown or of another type."""
    given: dict[str, Any] = {}
    problems = [f"{name}: unknown key (it is a key within a mapping)" for name in document if "." in name and name in KEYS]
    for name, value in document.items():
        if name in GROUPS and isinstance(value, dict):
            given |= {f"{name}.{inner}": each for inner, each in value.items()}
        elif not (name in GROUPS and value is None):
            given[name] = value
    given = {key: value for key, value in given.items() if value is not None or key not in KEYS}
    for key, value in given.items():
        if key in GROUPS:
            problems.append(f"{key}: must be a mapping, is {quoted(value)}")
        elif key not in KEYS:
            guess = nearest(key, KEYS)
            problems.append(f"{quoted(key)[1:-1]}: unknown key" + (f" (did you mean {guess}?)" if guess else ""))
        elif wrong := _wrong_kind(KEYS[key].kind, value):
            problems.append(f"{key}: must be {wrong}, is {quoted(value)}")
    problems += [f"{key}: is missing" for key, kind in KEYS.items() if not (kind.optional or key in given)]
    return given, problems


def _wrong_kind(kind: str, value: Any) -> str:
    """Name the kind that a value is not of; "" if it is."""
    several = kind.endswith("s")
    accepted, name = KINDS[kind.removesuffix("s") if several else kind]
    entries = value if several and isinstance(value, list) else [value]
    right = several == isinstance(value, list) and all(
        isinstance(entry, accepted) and (accepted is bool or not isinstance(entry, bool)) and _is_finite(entry)
        for entry in entries
    )
    return "" if right else f"a list, each entry {name}" if several else name


def _is_finite(value: Any) -> bool:
    return not isinstance(value, int | float) or abs(value) <= _MOST


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Values that the program has no place for; ranges of the others are those of its own keys."""
    choices = {"dataset": DATASETS, "model_type": ("EDM",), "net_type": NETWORKS, "optim": RULES}
    for key, known in choices.items():
        if key in values and values[key] not in known:
            yield f"{key}: must be one of {', '.join(known)}, is {quoted(values[key])}"
    least = {"n_epoch": 1, "batch_size": 1, "warm_epoch": 0, "tref_epoch": 1, "network.n_blocks": 2, "n_sample": 1}
    for key, bound in least.items():
        if values.get(key, bound) < bound:
            yield f"{key}: must be at least {bound}, is {values[key]}"
    mults, attending = values["network.ch_mults"], values["network.is_attn"]
    if not 1 <= len(mults) <= _MOST_LEVELS:
        yield f"network.ch_mults: has {len(mults)} levels, not 1 to {_MOST_LEVELS}"
    if len(attending) != len(mults):
        yield f"network.is_attn: has {len(attending)} entries for the {len(mults)} levels of network.ch_mults"
    if len(values.get("optim_args.betas", [0, 0])) != 2:
        yield f"optim_args.betas: must be two numbers, is {quoted(values['optim_args.betas'])}"
    dataset = DATASETS.get(values["dataset"])
    if dataset and values["network.image_shape"] != (shape := [3, dataset.side, dataset.side]):
        yield f"network.image_shape: {quoted(values['network.image_shape'])} is not {shape}, that of dataset: {values['dataset']}"


def _job(values: Mapping[str, Any]) -> dict[str, Any]:
    """Folder and name of the run, from `save_dir`."""
    folder, _, name = values.get("save_dir", "").rstrip("/").rpartition("/")
    return {"dump_folder": folder or ".", "name": name} if name else {}


def _model(values: Mapping[str, Any], config: str, dataset: _Dataset) -> dict[str, Any]:
    sides = [dataset.side >> level for level, attends in enumerate(values["network.is_attn"]) if attends]
    return {
        "name": "edm2",
        "flavor": dataset.flavor,
        "config": config,
        "channels": values["network.n_channels"],
        "channel_mults": values["network.ch_mults"],
        "num_blocks": values["network.n_blocks"] - 1,  # the port's decoder has n_blocks, its encoder one less
        "attention_resolutions": sides,
        "channels_per_head": values.get("network.attn_channels_per_head", 0),
        "dropout": float(values["network.dropout"]),
    }


def _objective(values: Mapping[str, Any], config: str) -> dict[str, Any]:
    return {
        "path": "edm",
        "prediction": "edm",
        "preconditioning": "edm",
        "sigma_data": float(values["diffusion.sigma_data"]),
        "learned_uncertainty": True,
        "uncertainty_features": 256,
        "uncertainty_lr_scale": UNCERTAINTY_LR_SCALES[config],
        "weighting": {"name": "edm"},
        "timesteps": {
            "name": "lognormal_sigma",
            "p_mean": float(values["diffusion.p_mean"]),
            "p_std": float(values["diffusion.p_std"]),
        },
    }


def _rule(values: Mapping[str, Any]) -> dict[str, Any]:
    """Constants of Adam, which the port reads with `optim` only."""
    if "optim" not in values:
        return {}
    beta1, beta2 = values.get("optim_args.betas", (0.9, 0.999))
    found = {"beta1": float(beta1), "beta2": float(beta2), "eps": float(values.get("optim_args.eps", 1e-8))}
    return found | ({"weight_decay": _decay(values)} if _decay(values) and not _normalizes_weights(values) else {})


def _decay(values: Mapping[str, Any]) -> float:
    """Decoupled weight decay of the port's optimizer."""
    return float(values.get("optim_args.weight_decay", 0.01)) if values.get("optim") == "AdamW" else 0.0


def _normalizes_weights(values: Mapping[str, Any]) -> bool:
    return NETWORKS[values["net_type"]] != "C"


def _schedule(values: Mapping[str, Any], images: int) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": "images", "warmup_images": values["warm_epoch"] * images, "epoch_images": images}
    if "tref_epoch" in values:
        found |= {"decay_type": "inverse_sqrt", "reference_images": values["tref_epoch"] * images}
    return found


def _sampling(values: Mapping[str, Any], interval: int) -> dict[str, Any]:
    shape = {key: float(values[f"diffusion.{key}"]) for key in ("sigma_min", "sigma_max", "rho")}
    found: dict[str, Any] = {"interval": interval, "num_steps": 18, "clip_x0": True, "state_dtype": "float64"}
    if "n_sample" in values:
        found["images_per_class"] = values["n_sample"]
    return found | {"solver": {"name": "edm_heun"}, "schedule": {"name": "edm"} | shape}


def _notes(values: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are not honoured, with the reason."""
    if "classes" in values:
        yield "classes: the port's network is unconditional; its number of classes is for the linear probe"
    if churn := [key for key in ("S_min", "S_max", "S_noise") if f"diffusion.{key}" in values]:
        flags = {"S_min": "--churn-min", "S_max": "--churn-max", "S_noise": "--churn-noise"}
        given = " ".join(f"{flags[key]} {values[f'diffusion.{key}']:g}" for key in churn)
        yield (
            f"diffusion.{', diffusion.'.join(churn)}: have an effect with churn only, as in the port (for its --eta 1:"
            f" {program('sample')} --churn {CHURN_PER_ETA:.4f} {given})"
        )
    if values.get("load_epoch", -1) != -1:
        yield f"load_epoch: {values['load_epoch']} is a checkpoint of the port; a run here resumes from its own newest one"
    rule, arguments = values.get("optim"), [key for key in values if key.startswith("optim_args.")]
    if arguments and rule is None:
        yield f"{', '.join(arguments)}: without optim, the port ignores them too"
    if rule == "Adam" and values.get("optim_args.weight_decay", 0):
        yield "optim_args.weight_decay: Adam adds it to the gradient; decay here is AdamW's (set optimizer.weight_decay)"
    if _decay(values) and _normalizes_weights(values):
        yield f"optim_args.weight_decay: {_decay(values):g} has no effect on weights that are normalised before each step"
    if rule and values.get("optim_args.amsgrad"):
        yield "optim_args.amsgrad: there is no AMSGrad"
    if probe := [key for key in values if key.startswith("linear.")]:
        options = {"blockname": "--blocks", "timestep": "--levels", "n_epoch": "--passes", "batch_size": "--batch-size"}
        given = " ".join(
            f"{flag} {values[f'linear.{key}']}" for key, flag in options.items()
            if re.fullmatch(r"\w{1,40}", str(values.get(f"linear.{key}", "")))
        )
        yield (
            f"{', '.join(probe)}: of the linear probe, no keys of a run ({program('study')} linear_probe RUN --weights ema"
            f" --probe port {given}; its learning rate is 1e-3 for a batch of 128)"
        )
