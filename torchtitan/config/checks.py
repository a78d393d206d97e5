"""Checks across sections: impossible combinations, and defaults that follow from other keys.

A check is a function of the configuration that yields problems; adding one is one function and its name in CHECKS.
No model and no process group is built here.
"""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchtitan.checkpoint.location import folder_problem
from torchtitan.config.evaluation_checks import EVALUATION_CHECKS
from torchtitan.config.latent_cache import cache_problems, stored_section
from torchtitan.config.model_checks import ADAPTER_CHECKS, MODEL_CHECKS
from torchtitan.config.sampling_checks import (
    SAMPLING_CHECKS,
    cannot_guide,
    resolved_objective,
    resolved_sampling,
    unconditional,
)
from torchtitan.config.size_checks import SIZE_CHECKS, batch_sizes, global_batch_size, local_batch_size
from torchtitan.config.speed_checks import SPEED_CHECKS, needs_plain_weights, shards_of
from torchtitan.config.view import ConfigView, RefusedValue, in_section
from torchtitan.data import LATENT_DATASETS, DatasetError
from torchtitan.diffusion.objectives import OBJECTIVES, build_objective, objective_problems
from torchtitan.diffusion.paths import PATHS
from torchtitan.distributed.config import checkpoint_problems, compile_problems
from torchtitan.errors import unwrapped
from torchtitan.evaluation.config import WITH_WEIGHTS, timesteps_problem
from torchtitan.extras import install, install_packages
from torchtitan.gns.config import gns_problems
from torchtitan.models.float8 import float8_problems
from torchtitan.profiling.config import profiling_problems
from torchtitan.programs import program
from torchtitan.settings import has_key
from torchtitan.settings.record import unmet_condition
from torchtitan.settings.schema import Problem, no_effect, quoted
from torchtitan.settings.sections import section_at
from torchtitan.training.config import UPDATE_RULES, OptimizerConfig
from torchtitan.training.schedules import decay_problems, ramp_problems

_ADAMS_RULE = "the square-root rule by which the learning rate grows is Adam's"


def find_problems(checked: ConfigView, fields: dict[str, Any]) -> list[Problem]:
    """Run every check; fields: dotted key -> its dataclass field, for every key of the configuration."""
    problems = [problem for key, field in fields.items() for problem in _problems_of(_has_effect, checked, key, field)]
    return problems + [problem for check in CHECKS for problem in _problems_of(check, checked)]


def resolve(checked: ConfigView, config: Any) -> None:
    """Resolve in place: replace -1 by numbers, defaults by values that follow from other keys, images by their finished cache."""
    layout, training = config.parallelism, config.training
    if layout.data_parallel_replicate_degree == -1:
        layout.data_parallel_replicate_degree = checked.data_ranks // layout.data_parallel_shard_degree
    if layout.data_parallel_shard_degree == -1:
        layout.data_parallel_shard_degree = checked.data_ranks // layout.data_parallel_replicate_degree
    training.local_batch_size = local_batch_size(checked)
    if training.global_batch_size == -1:
        training.global_batch_size = checked.data_ranks * training.local_batch_size
    if heads := config.objective.heads_of_network():
        config.model.num_predictions = len(heads)
    if config.objective.two_times:
        config.model.duration_embedding = True
        config.model.guidance_embedding = config.objective.guidance_max > 1
    if unconditional(checked) and has_key(config.model, "label_dropout"):
        config.model.label_dropout = 0.0
    config.sampling, config.objective = resolved_sampling(checked), resolved_objective(checked)
    if cannot_guide(checked):
        config.sampling.guidance_scale = 1.0
    config.objective.timesteps = config.objective.timesteps.resolved(PATHS[config.objective.path]())
    if config.cache.enable and (stored := stored_section(config)) is not None:
        config.data, config.cache = stored, type(config.cache)()


def _problems_of(check: Callable[..., Iterator[Problem]], *arguments: Any) -> list[Problem]:
    found = []
    try:
        for problem in check(*arguments):
            found.append(problem)
    except RefusedValue:
        pass
    return found


def _has_effect(checked: ConfigView, key: str, field: Any) -> Iterator[Problem]:
    section, _, name = key.rpartition(".")
    values = section_at(checked, section)
    if key not in checked.given or name == "enable" and not values.enable:  # off is what it is
        return
    switch = f"{section}.enable"
    if name != "enable" and switch in checked.given and values.enable:
        if unmet_condition(checked, section, values.__dataclass_fields__["enable"]):  # reported once, of the switch
            return
    unmet = unmet_condition(checked, section, field)
    if unmet:
        yield Problem(key, no_effect(*unmet, field.metadata["because"]))


def _job_name(checked: ConfigView) -> Iterator[Problem]:
    name = checked.job.name
    if name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        reason = "has a slash" if "/" in name or "\\" in name else "is no folder name"
        yield Problem("job.name", f"{quoted(name)} {reason}; it names the run's folder (set --job.name NAME)")


def _dataset_is_usable(checked: ConfigView) -> Iterator[Problem]:
    found = checked.open_dataset()
    if isinstance(found, DatasetError):
        text = unwrapped(found)
        named = re.match(r"((?:data|autoencoder)\.\w+): ", text)
        path = "data.path" if has_key(checked.whole("data"), "path") else "data.name"
        yield Problem(named[1], text[named.end() :]) if named else Problem(path, text)
        if checked.cache.enable and not checked.elsewhere:
            yield from _missing_beside_pictures(checked)


def _missing_beside_pictures(checked: ConfigView) -> Iterator[Problem]:
    """Problems of missing packages and weights, where the cache cannot be filled: a run is refused once for all of them."""
    autoencoder, text_encoder, weights = checked.autoencoder.name, checked.data.text_encoder, checked.checkpoint.initial_weights
    of_text = autoencoder == "rae" or text_encoder and not text_encoder.startswith("stub:")
    needed = {"text": ("transformers", of_text), "diffusers": ("diffusers", autoencoder == "diffusers")}
    if lacking := [extra for extra, (name, used) in needed.items() if used and importlib.util.find_spec(name) is None]:
        text = f"lacks extras: {', '.join(lacking)} ({install(*lacking)})"
        yield Problem("cache.enable", text)
    if weights and not os.path.exists(weights):
        text = f"{weights}: no such file (published weights: {program('checkpoint')} import)"
        yield Problem("checkpoint.initial_weights", text)


def _autoencoder(checked: ConfigView) -> Iterator[Problem]:
    name = checked.autoencoder.name
    of_latents = checked.data.name in LATENT_DATASETS or checked.cache.enable
    if name in WITH_WEIGHTS and not checked.autoencoder.path and of_latents and checked.has_data:
        public = f"; {program('download')} --list shows public ones" if name in ("cosmos", "diffusers") else ""
        text = f"is missing (give the folder of the weights of {name}{public})"
        yield Problem("autoencoder.path", text)


def _gns(checked: ConfigView) -> Iterator[Problem]:
    if not checked.gns.enable:
        return
    objective, ranks = resolved_objective(checked), checked.data_ranks
    if any(objective_problems(objective)) or any(batch_sizes(checked)):
        return  # they cannot be built
    local, batch = local_batch_size(checked), global_batch_size(checked)
    gns = checked.whole("gns")
    found = gns_problems(
        gns, build_objective(objective, seed=0), checked.given,
        global_batch_size=batch, microbatches=batch // (ranks * local), ranks=ranks,
    )  # fmt: skip
    # With adapters no single sample is measured, which another check says.
    bins = ("num_bins", "bin_edges") if checked.lora.enable and gns.single_pass else ()
    yield from in_section("gns", (problem for problem in found if problem[0] not in bins))
    name = checked.optimizer.name
    if not checked.gns.adam_geometry and not UPDATE_RULES[name].is_adams:
        yield Problem("gns.adam_geometry", f"has no effect with optimizer.name = {name}, which has no such geometry (remove it)")
    if checked.gns.nuclear_norm:
        yield from _nuclear_norm(checked)


def _width_transfer(checked: ConfigView) -> Iterator[Problem]:
    rule = UPDATE_RULES[checked.optimizer.name]
    if getattr(checked.whole("model"), "mup_base_dim", None) and not (rule.is_adams or rule.orthogonalises):
        text = f"knows the rates of Adam and Muon, and optimizer.name is {checked.optimizer.name}"
        yield Problem("model.mup_base_dim", f"{text} (set it to AdamW, or remove this key)")


def _nuclear_norm(checked: ConfigView) -> Iterator[Problem]:
    key, name = "gns.nuclear_norm", checked.optimizer.name
    if not UPDATE_RULES[name].orthogonalises:
        yield Problem(key, f"is the norm of Muon's step, and optimizer.name is {name} (set it to Muon, or remove nuclear_norm)")
    if shards_of(checked) > 1:
        yield Problem(key, "needs a rank's whole gradients (set parallelism.data_parallel_shard_degree to 1, or remove it)")
    elif checked.data_ranks % 2:
        text = f"compares halves of the processes, and there are {checked.data_ranks} (use an even number, or remove it)"
        yield Problem(key, text)


def _batch_ramp(checked: ConfigView) -> Iterator[Problem]:
    key, doublings = "training.double_batch_after", checked.training.double_batch_after
    for text in ramp_problems(doublings):
        yield Problem(key, text)
    if not doublings:
        return
    if not UPDATE_RULES[checked.optimizer.name].is_adams:
        yield Problem(key, f"{_ADAMS_RULE} (remove it, or set optimizer.name to AdamW)")
    if checked.gns.enable and checked.gns.bin_pure_microbatches:
        yield Problem(key, "the rotation of gns.bin_pure_microbatches is made for one batch size (remove one of the two)")


def _decay(checked: ConfigView) -> Iterator[Problem]:
    yield from in_section("lr_scheduler", decay_problems(checked.whole("lr_scheduler")))


def _held_out_images(checked: ConfigView) -> Iterator[Problem]:
    if checked.validation.enable and not checked.dataset().has_validation:
        place = ", or give images as data.validation_path" if hasattr(checked.data, "validation_path") else ""
        text = f"data.name = {checked.data.name} holds out no images here (set it to false{place})"
        yield Problem("validation.enable", text)


def _held_out_timesteps(checked: ConfigView) -> Iterator[Problem]:
    objective = checked.objective
    loss_at_zero = OBJECTIVES[objective.name].loss_at_zero
    if checked.validation.enable and (text := timesteps_problem(checked.whole("validation"), objective.path, loss_at_zero)):
        yield Problem("validation.timesteps", text)


def _ema_names(checked: ConfigView) -> Iterator[Problem]:
    names = [track.name for track in checked.ema.tracks]
    first = {name: index for index, name in reversed(list(enumerate(names)))}
    for index, name in enumerate(names):
        place = f"[{index}].name"
        if name == "none":
            yield Problem("ema.tracks", "'none' stands for the trained weights (choose another name)", place)
        elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            text = f"{quoted(name)} names a file (use up to 64 letters, digits, '.', '_' and '-', no '.' or '-' first)"
            yield Problem("ema.tracks", text, place)
        elif first[name] < index:
            yield Problem("ema.tracks", f"{quoted(name)} is the name of an earlier track", place)


def _ema_snapshots(checked: ConfigView) -> Iterator[Problem]:
    if checked.ema.snapshot_interval > 0 and all(track.kind != "power" for track in checked.ema.tracks):
        text = "there is no track of kind power to take snapshots of (add two to ema.tracks, as of sigma_rel 0.05 and 0.1)"
        yield Problem("ema.snapshot_interval", text)


def _packages(checked: ConfigView) -> Iterator[Problem]:
    packages = {"enable_tensorboard": "tensorboard", "enable_wandb": "wandb"}
    for key, package in packages.items():
        if not checked.elsewhere and getattr(checked.metrics, key) and importlib.util.find_spec(package) is None:
            text = f"the package {package} is not installed ({install_packages(package)}, or set it to false)"
            yield Problem(f"metrics.{key}", text)


def _checkpoint(checked: ConfigView) -> Iterator[Problem]:
    if problem := folder_problem(checked.checkpoint.folder):
        yield Problem("checkpoint.folder", problem)
    if checked.checkpoint.async_mode == "async_with_pinned_mem" and not checked.has_cuda:
        yield Problem("checkpoint.async_mode", "async_with_pinned_mem needs CUDA, which is not there (set it to async)")


def _parameter_groups(checked: ConfigView) -> Iterator[Problem]:
    for index, group in enumerate(checked.optimizer.param_groups):
        place = f"[{index}].pattern"
        if not group.pattern:
            yield Problem("optimizer.param_groups", "is missing (say which parameter names the group is for)", place)
        try:
            re.compile(group.pattern)
        except re.error as error:
            yield Problem("optimizer.param_groups", f"{quoted(group.pattern)} is no regular expression: {error}", place)


def _eps_of_the_optimizer(checked: ConfigView) -> Iterator[Problem]:
    name, eps = checked.optimizer.name, checked.optimizer.eps
    # A run's recorded configuration gives every key, so that the default must pass.
    if eps != OptimizerConfig.eps and not UPDATE_RULES[name].has_eps:
        yield Problem("optimizer.eps", f"has no effect with optimizer.name = {name}, which has none (remove it)")


def _low_bit_optimizer(checked: ConfigView) -> Iterator[Problem]:
    name = checked.optimizer.name
    if UPDATE_RULES[name].quantised and not checked.elsewhere:
        if importlib.util.find_spec("torchao") is None:
            command = install("lowbit")
            text = f"{name} needs the package torchao, which is not installed ({command}, or set AdamW)"
            yield Problem("optimizer.name", text)
        if _no_compiler():
            text = f"{name} is compiled: none of g++, clang++, $CXX is there (install g++, or set AdamW)"
            yield Problem("optimizer.name", text)


def _compiler(checked: ConfigView) -> Iterator[Problem]:
    if checked.compile.enable and not checked.elsewhere and _no_compiler():
        text = "the CPU needs a C++ compiler: none of g++, clang++, $CXX is there (install g++, or set it to false)"
        yield Problem("compile.enable", text)
    yield from in_section("compile", compile_problems(checked.whole("compile"), shards_of(checked), checked.has_cuda))


def _float8(checked: ConfigView) -> Iterator[Problem]:
    if not checked.float8.enable:
        return
    single_pass_taps = checked.gns.enable and checked.gns.single_pass
    found = float8_problems(
        checked.whole("float8"), checked.training.mixed_precision_param, single_pass_taps, shards_of(checked),
        needs_plain_weights(checked), elsewhere=checked.elsewhere,
    )  # fmt: skip
    yield from (Problem(key, text) for key, text in found)


def _no_compiler() -> bool:
    candidates = [os.environ.get("CXX", "").split(" ")[0], "g++", "clang++"]
    return not torch.cuda.is_available() and not any(shutil.which(name) for name in candidates if name)


CHECKS: list[Callable[[ConfigView], Iterator[Problem]]] = [
    _job_name,
    _dataset_is_usable,
    *MODEL_CHECKS,
    _autoencoder,
    lambda checked: (Problem(key, text) for key, text in cache_problems(checked)),
    lambda checked: (Problem(key, text) for key, text in objective_problems(resolved_objective(checked))),
    _gns,
    _width_transfer,
    _batch_ramp,
    _decay,
    *SIZE_CHECKS,
    _ema_names,
    _ema_snapshots,
    _packages,
    _checkpoint,
    _held_out_images,
    _held_out_timesteps,
    *SAMPLING_CHECKS,
    *EVALUATION_CHECKS,
    _parameter_groups,
    _eps_of_the_optimizer,
    _low_bit_optimizer,
    _compiler,
    lambda checked: in_section("activation_checkpoint", checkpoint_problems(
        checked.whole("activation_checkpoint"), checked.compile.enable, checked.whole("model").depth
    )),
    _float8,
    *ADAPTER_CHECKS,
    lambda checked: in_section(
        "profiling", profiling_problems(checked.whole("profiling"), checked.training.steps, checked.has_cuda)
    ),
    *SPEED_CHECKS,
]  # fmt: skip
