"""Earlier keys: moved since, so that old files, saved configurations and command lines still load."""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torchtitan.settings.sections import flattened, table_at
from torchtitan.settings.sources import shown_file


class Move(NamedTuple):
    """Move of a key to its present place.

    Attributes:
        sections: dotted names of the sections that may have it.
        key: its name there.
        names: required `name` of such a section; empty where the section has the key under every name.
    """

    sections: tuple[str, ...]
    key: str
    names: tuple[str, ...] = ()


_TIMESTEPS, _BASE = "objective.timesteps", "objective.timesteps.base"
_WEIGHTING, _COMBINE = "objective.weighting", "objective.combine"
_SOLVER, _SCHEDULE = "sampling.solver", "sampling.schedule"
_DENSITY = (_TIMESTEPS, _BASE)
_BINNED = ("time_warping", "adaptive_log_snr")

MOVED = {
    "objective.timestep_sampler": Move((_TIMESTEPS,), "name"),
    "objective.base_density": Move((_BASE,), "name"),
    "objective.logit_mean": Move(_DENSITY, "mean", ("logit_normal",)),
    "objective.logit_std": Move(_DENSITY, "std", ("logit_normal",)),
    "objective.p_mean": Move(_DENSITY, "p_mean", ("lognormal_sigma",)),
    "objective.p_std": Move(_DENSITY, "p_std", ("lognormal_sigma",)),
    "objective.laplace_mean": Move(_DENSITY, "mean", ("laplace",)),
    "objective.laplace_scale": Move(_DENSITY, "scale", ("laplace",)),
    "objective.mode_scale": Move(_DENSITY, "scale", ("mode",)),
    "objective.cubic_towards": Move((_TIMESTEPS,), "towards", ("cubic",)),
    "objective.beta_a": Move((_TIMESTEPS,), "a", ("beta",)),
    "objective.beta_b": Move((_TIMESTEPS,), "b", ("beta",)),
    "objective.speed_ratio": Move((_TIMESTEPS,), "ratio", ("speed",)),
    "objective.slot_edges": Move((_TIMESTEPS,), "edges", ("slots",)),
    "objective.slot_edges_path": Move((_TIMESTEPS,), "edges_path", ("slots",)),
    "objective.slot_importance": Move((_TIMESTEPS,), "importance", ("slots",)),
    "objective.loss_half_life": Move((_TIMESTEPS,), "half_life", _BINNED),
    "objective.combine": Move((_COMBINE,), "name"),
    "objective.head_temperature": Move((_COMBINE,), "temperature", ("soft_minimum",)),
    "objective.handover_snr": Move((_COMBINE,), "snr", ("snr_handover",)),
    "objective.weighting": Move((_WEIGHTING,), "name"),
    "objective.snr_gamma": Move((_WEIGHTING,), "gamma", ("min_snr", "soft_min_snr")),
    "objective.p2_k": Move((_WEIGHTING,), "k", ("p2",)),
    "objective.p2_gamma": Move((_WEIGHTING,), "gamma", ("p2",)),
    "sampling.solver": Move((_SOLVER,), "name"),
    "sampling.ddim_eta": Move((_SOLVER,), "eta", ("ddim",)),
    "sampling.ddpm_variance": Move((_SOLVER,), "variance", ("ddpm",)),
    "sampling.churn": Move((_SOLVER,), "churn", ("edm_heun",)),
    "sampling.churn_min": Move((_SOLVER,), "churn_min", ("edm_heun",)),
    "sampling.churn_max": Move((_SOLVER,), "churn_max", ("edm_heun",)),
    "sampling.churn_noise": Move((_SOLVER,), "churn_noise", ("edm_heun",)),
    "sampling.diffusion": Move((_SOLVER,), "diffusion", ("euler_maruyama",)),
    "sampling.diffusion_scale": Move((_SOLVER,), "diffusion_scale", ("euler_maruyama",)),
    "sampling.schedule": Move((_SCHEDULE,), "name"),
    "sampling.shift": Move((_SCHEDULE,), "shift", ("uniform",)),
    "sampling.sigma_min": Move((_SCHEDULE,), "sigma_min", ("edm",)),
    "sampling.sigma_max": Move((_SCHEDULE,), "sigma_max", ("edm",)),
    "sampling.rho": Move((_SCHEDULE,), "rho", ("edm",)),
}
# Section -> its name where a file of an earlier version gives none.
_DEFAULT_NAMES = {
    _TIMESTEPS: "logit_normal",
    _BASE: "uniform",
    _WEIGHTING: "none",
    _COMBINE: "inverse_variance",
    _SOLVER: "euler",
    _SCHEDULE: "uniform",
}


def in_present_keys(
    document: dict[str, Any], flags: dict[str, str], path: str | None
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Move earlier keys of a file and a command line to their present places; reported once for either.

    Args:
        document: the tables of the TOML file.
        flags: dotted key -> text of the command line.
        path: of the file, for messages.

    Returns:
        both with present keys, and a line for either that holds earlier and present keys of one section.
    """
    in_file = _moves(dict(flattened(document)), _names(flags))
    in_flags = _moves(flags, _names(dict(flattened(_moved(document, in_file)))))
    twice = [
        *_given_twice(f"{shown_file(path or '')}: ", in_file, lambda name: bool(table_at(document, name))),
        *_given_twice("command line: --", in_flags, lambda name: any(key.startswith(f"{name}.") for key in flags)),
    ]
    if not twice:
        _tell(f"{shown_file(path or '')}: ", "", in_file)
        _tell("command line: --", "--", in_flags)
    return _moved(document, in_file), {in_flags.get(key, key): text for key, text in flags.items()}, twice


def with_present_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Move the earlier keys of a recorded configuration's tables to their present places."""
    return _moved(tables, _moves(dict(flattened(tables)), {}))


def where_now(key: str) -> str:
    """Present place of an earlier key, for advice; "" for any other key."""
    if key not in MOVED:
        return ""
    sections, name, owners = MOVED[key]
    return f"it is now {sections[0]}.{name}" + (f" with {sections[0]}.name = {' or '.join(owners)}" if owners else "")


def _moves(given: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> dict[str, str]:
    """Moves (earlier key -> present key) of sections under the names chosen here, elsewhere or by default."""
    earlier = {key: value for key, value in given.items() if key in MOVED}
    here = _names(given)
    found = {}
    for key in earlier:
        move = MOVED[key]
        for names in ({**_DEFAULT_NAMES, **elsewhere, **here}, {**_DEFAULT_NAMES, **here}):
            sections = [section for section in move.sections if not move.names or names[section] in move.names]
            if sections and not _is_taken(given, sections[0]):
                found[key] = f"{sections[0]}.{move.key}"
                break
    return found


def _is_taken(given: Mapping[str, Any], section: str) -> bool:
    """Check whether the place of a section, or of an outer one, has a value that is no table and no earlier key."""
    places = [section.rsplit(".", inner)[0] for inner in range(section.count("."))]
    return any(place in given and place not in MOVED for place in places)


def _names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Names: section -> the name that one of the given keys chooses for it."""
    present = {key: f"{move.sections[0]}.name" for key, move in MOVED.items() if move.key == "name"}
    chosen = {present.get(key, key): value for key, value in given.items()}
    return {section: chosen[f"{section}.name"] for section in _DEFAULT_NAMES if f"{section}.name" in chosen}


def _moved(tables: Mapping[str, Any], moves: Mapping[str, str]) -> dict[str, Any]:
    """Move the values of some keys in tables, earlier -> present; the given tables stay unchanged."""
    changed = dict(tables)
    for earlier in moves:
        changed[earlier.partition(".")[0]] = dict(tables[earlier.partition(".")[0]])
    values = {}
    for earlier, present in moves.items():
        section, _, key = earlier.partition(".")
        values[present] = changed[section].pop(key)
    for present, value in values.items():
        place = changed
        *outer, last = present.split(".")
        for part in outer:
            place[part] = dict(place[part]) if isinstance(place.get(part), dict) else {}
            place = place[part]
        place[last] = value
    return changed


def _given_twice(place: str, moves: Mapping[str, str], is_given: Callable[[str], bool]) -> Iterator[str]:
    for earlier, present in moves.items():
        section = present.rpartition(".")[0]
        if is_given(section):
            yield f"{place}{earlier}: is now {present}, and {section} is given too (write the present key alone)"
            return


def _tell(place: str, prefix: str, moves: Mapping[str, str]) -> None:
    if moves and os.environ.get("RANK", "0") == "0":
        earlier, present = next(iter(moves.items()))
        count = f"mapped {len(moves)} key{'s' if len(moves) > 1 else ''}"
        _print_once(f"{place}{earlier} is now {prefix}{present} ({count})")


@functools.cache
def _print_once(line: str) -> None:
    """Print a line to stderr; not again for a file that is read several times."""
    print(line, file=sys.stderr, flush=True)
