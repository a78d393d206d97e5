"""Checks of the network: that it fits data, objective, adapters and the noise scale."""

from collections.abc import Callable, Iterator

from torchtitan.alignment.config import alignment_problems
from torchtitan.conditions import Embeddings
from torchtitan.config.sampling_checks import data_text, unconditional, without_null
from torchtitan.config.view import ConfigView, in_section, nearest_sizes
from torchtitan.data import LATENT_DATASETS
from torchtitan.data.base import FEATURES
from torchtitan.diffusion.objectives import OBJECTIVES
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.registry import SAMPLERS
from torchtitan.gns.config import WITHOUT_TAPS
from torchtitan.models import MODELS
from torchtitan.settings import has_key
from torchtitan.settings.schema import Problem, quoted


def _model_fits_images(checked: ConfigView) -> Iterator[Problem]:
    model, info = checked.whole("model"), checked.dataset()
    family = MODELS[model.name]
    if info.bucket_shapes and not family.many_shapes:
        others = " or ".join(name for name, other in MODELS.items() if other.many_shapes) or "another model"
        text = f"{model.name} takes images of one shape, and data.name = {checked.data.name} has {len(info.shapes)}"
        yield Problem("model.name", f"{text} (choose {others}, or data without buckets)")
        return
    lines = [line for shape in info.shapes for line in family.problems(model, shape)]
    for line in dict.fromkeys(lines):
        key, _, text = line.partition(": ")
        yield Problem(key, f"{text}{nearest_sizes(checked) if key == 'model.patch_size' else ''}")


def _condition(checked: ConfigView) -> Iterator[Problem]:
    name, kind = checked.model.name, checked.dataset().condition_kind
    if MODELS[name].takes(kind):
        if isinstance(kind, MODELS[name].conditions):
            for line in MODELS[name].condition_problems(checked.whole("model"), kind):
                key, _, text = line.partition(": ")
                yield Problem(key, text)
        return
    taken = " or ".join(condition.wanted for condition in MODELS[name].conditions)
    others = " or ".join(other for other, family in MODELS.items() if family.takes(kind))
    remedies = [others] if others else []
    if isinstance(kind, Embeddings) and checked.data.name in LATENT_DATASETS:
        remedies.append("data.condition = class where the store has classes")
    elif Embeddings in MODELS[name].conditions:
        remedies.append("captions encoded as docs/fine_tuning.md describes")
    remedy = "choose " + ", or ".join([*remedies, "other data"])
    yield Problem("model.name", f"{name} takes {taken}, and data.name = {checked.data.name} gives {kind.wanted} ({remedy})")


def _learned_variance(checked: ConfigView) -> Iterator[Problem]:
    path, objective = checked.objective.path, checked.objective.name
    if not checked.whole("model").learned_variance:
        return
    if not OBJECTIVES[objective].learns_variance:
        yield Problem("model.learned_variance", f"objective.name = {objective} does not train it (set it to false)")
    elif not PATHS[path]().discrete:
        text = f"objective.path = {path} has no integer steps, whose variance it would be (set it to false)"
        yield Problem("model.learned_variance", text)


def _heads(checked: ConfigView) -> Iterator[Problem]:
    model, heads = checked.whole("model"), checked.whole("objective").heads_of_network()
    if heads and not has_key(model, "num_predictions"):
        yield Problem("objective.heads", f"model.name = {model.name} makes one prediction (leave them out)")
        return
    if heads and model.learned_variance:
        yield Problem("model.learned_variance", "is for a network of one prediction, without objective.heads (set it to false)")
    wanted = max(len(heads), 1)
    if "model.num_predictions" in checked.given and model.num_predictions != wanted:
        text = f"{model.num_predictions} is not {wanted}, the number of objective.heads (leave it out: it follows)"
        yield Problem("model.num_predictions", text)


def _two_times(checked: ConfigView) -> Iterator[Problem]:
    model, objective, key = checked.whole("model"), checked.whole("objective"), "model.duration_embedding"
    if key in checked.given and model.duration_embedding != objective.two_times:
        text = f"follows from objective.name = {objective.name}, which has {'two times' if objective.two_times else 'one time'}"
        yield Problem(key, f"{text} (leave it out)")
    guided, key = objective.guidance_max > 1, "model.guidance_embedding"
    if model.name == "dit" and key in checked.given and model.guidance_embedding != guided:
        yield Problem(key, f"follows from objective.guidance_max = {objective.guidance_max:g} (leave it out)")
    if not objective.two_times:
        return
    if guided and without_null(checked):
        text = "needs classes and model.label_dropout above 0, for what the scale guides away from (leave it out)"
        yield Problem("objective.guidance_max", text)
    if (objective.tangent == "head") != (getattr(model, "intermediate_head", None) is not None):
        text = "and model.intermediate_head, which predicts the velocity at t, need each other (give both or neither)"
        yield Problem("objective.tangent", f"{objective.tangent} {text}" if objective.tangent == "head" else f"head {text}")
    if not has_key(model, "duration_embedding"):
        text = f"mean velocities are over two times, and model.name = {model.name} takes one (use dit)"
        yield Problem("objective.name", text)
        return
    for name in ("magnitude_preserving", "embedding_per_block"):
        if getattr(model, name):
            text = f"has no embedding of a second time, and objective.name = {objective.name} has two (set it to false)"
            yield Problem(f"model.{name}", text)


def _time_features(checked: ConfigView) -> Iterator[Problem]:
    fourier = getattr(checked.whole("model"), "timestep_frequencies", "") == "fourier"
    given = checked.objective.preconditioning
    if fourier and given not in ("identity", "index"):
        text = f"fourier is for times in 0..1000, and objective.preconditioning = {given} gives others (use identity there)"
        yield Problem("model.timestep_frequencies", text)


def _intermediate_head(checked: ConfigView) -> Iterator[Problem]:
    objective = checked.whole("objective")
    block = getattr(checked.whole("model"), "intermediate_head", None)
    if block is None:
        if getattr(objective, "intermediate_share", None) is not None:
            yield Problem("objective.intermediate_share", "has no effect without model.intermediate_head (give that too)")
    elif objective.two_times:
        return
    elif not has_key(objective, "intermediate_share"):
        yield Problem("model.intermediate_head", f"objective.name = {objective.name} does not train it (leave it out)")
    elif objective.intermediate_share is None:
        yield Problem("objective.intermediate_share", "model.intermediate_head needs a share of the loss (give one, as 0.5)")
    elif objective.heads_of_network():
        yield Problem("model.intermediate_head", "is for a network of one prediction, without objective.heads (leave it out)")


def _label_dropout(checked: ConfigView) -> Iterator[Problem]:
    explicit = "model.label_dropout" in checked.given and checked.model.label_dropout > 0
    if explicit and unconditional(checked):
        text = f"{data_text(checked.whole('data'))} has no classes to drop (remove it or set it to 0)"
        yield Problem("model.label_dropout", text)


def _lora(checked: ConfigView) -> Iterator[Problem]:
    if not checked.lora.enable:
        return
    from torchtitan.models.quantized import quantization_problems

    sets = MODELS[checked.model.name].adapter_sets
    if not checked.lora.patterns and checked.lora.targets not in ("blocks", *sets):
        text = f"{quoted(checked.lora.targets)} is no set of layers of model.name = {checked.model.name}"
        yield Problem("lora.targets", f"{text} (one of {', '.join(('blocks', *sets))}, or give lora.patterns)")
    for text in () if checked.elsewhere else quantization_problems(checked.lora.base_dtype):
        yield Problem("lora.base_dtype", text)
    if not checked.checkpoint.initial_weights_strict:
        text = "lora trains on frozen weights, and those that the file lacks would be drawn (remove it)"
        yield Problem("checkpoint.initial_weights_strict", text)
    if checked.float8.enable:
        yield Problem("float8.enable", "computes products of weights that train, and lora freezes them (set it to false)")
    if checked.whole("model").routed_blocks:
        yield Problem("model.routing.name", "is for weights that train, and lora trains adapters (set it to none)")
    if getattr(checked.whole("model"), "mup_base_dim", None) and not checked.whole("model").mup_base_heads:
        yield Problem("model.mup_base_dim", "is for weights that train, and lora trains adapters (remove it)")
    if checked.gns.enable and checked.gns.single_pass:
        yield Problem("gns.single_pass", f"taps gradients of whole layers, and lora trains adapters ({WITHOUT_TAPS})")


def _normalized_weights(checked: ConfigView) -> Iterator[Problem]:
    if not checked.whole("model").normalizes_weights:
        return
    if checked.optimizer.weight_decay > 0:
        text = "has no effect on weights that are normalised before each step, as the model's are (set it to 0)"
        yield Problem("optimizer.weight_decay", text)
    if checked.gns.enable and checked.gns.single_pass:
        yield Problem("gns.single_pass", f"single gradients of normalised weights are not measured ({WITHOUT_TAPS})")


def _alignment(checked: ConfigView) -> Iterator[Problem]:
    info, compiled = checked.dataset(), checked.compile.enable and checked.compile.scope == "model"
    encodes = checked.autoencoder.encode  # then batches keep their pixels
    features = FEATURES in info.training_entries
    read = checked.whole("alignment").teacher == "stored" or OBJECTIVES[checked.objective.name].reads_features
    if features and not read:
        yield Problem("data.features_path", "has no effect without alignment.teacher = stored (set that, or leave it out)")
    yield from in_section("alignment", alignment_problems(
        checked.whole("alignment"), tracks=[track.name for track in checked.ema.tracks],
        channels=3 if encodes else info.image_shape[0],
        latents=checked.data.name in LATENT_DATASETS or checked.cache.enable, features=features,
        buckets=bool(info.bucket_shapes),
        context_parallel=checked.parallelism.context_parallel_degree > 1, whole_graph=compiled,
        routed=checked.whole("model").routed_blocks,
    ))  # fmt: skip


# What an objective and a network of two times in an image have; of other families nothing is known.
_OF_DUAL_TIMES = {
    "model.name": "dit", "model.embedding_per_block": False, "model.magnitude_preserving": False, "model.class_tokens": 0,
    "model.wide_dim": 0, "model.learned_variance": False, "objective.name": "denoising", "objective.path": "rectified_flow",
    "objective.weighting.name": "none", "objective.learned_uncertainty": False, "objective.cosine_weight": 0.0,
    "objective.contrastive_weight": 0.0, "objective.heads": [], "gns.enable": False,
}  # fmt: skip


def _dual_times(checked: ConfigView) -> Iterator[Problem]:
    if not checked.whole("alignment").dual_share:
        return
    for key, wanted in _OF_DUAL_TIMES.items():
        section, *names = key.split(".")
        found = checked.whole(section)
        for name in names:
            found = getattr(found, name, wanted)
        if found != wanted:
            text = f"images of two times need {key} = {quoted(wanted)}, not {quoted(found)} (set that, or leave this out)"
            yield Problem("alignment.dual_share", text)
            return
    if checked.whole("objective").preconditioning not in ("identity", "data_time", "sit"):
        text = "images of two times need an objective.preconditioning without scales (use identity, or leave this out)"
        yield Problem("alignment.dual_share", text)
    if checked.whole("objective").timesteps.name in SAMPLERS or checked.whole("model").routed_blocks:
        text = "images of two times need a plain density as objective.timesteps, and no model.routing (or leave this out)"
        yield Problem("alignment.dual_share", text)


MODEL_CHECKS: list[Callable[[ConfigView], Iterator[Problem]]] = [
    _model_fits_images, _condition, _learned_variance, _heads, _two_times, _time_features, _intermediate_head,
    _label_dropout, _alignment, _dual_times,
]  # fmt: skip
ADAPTER_CHECKS: list[Callable[[ConfigView], Iterator[Problem]]] = [_lora, _normalized_weights]
