"""Guidance: estimates of clean images and noise moved away from a reference, D = D_ref + scale (D - D_ref).

The reference is the network itself with the null condition, on which some of its training was (classifier-free guidance: Ho
and Salimans, arXiv 2207.12598), or a `Guide`: a weaker version of the network with the same condition (autoguidance:
Karras et al., "Guiding a diffusion model with a bad version of itself", arXiv 2406.02507), a network without conditions,
or the network's own intermediate head (internal guidance: arXiv 2512.24176), which takes no further forward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.conditions import Condition, ConditionKind
from torchtitan.diffusion.objective import Network, Objective
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.solvers.contract import Predict, Prediction

_Estimates = Callable[[Tensor, Tensor], Prediction]

HEAD = "head"  # name of the intermediate head among guides
PATH_DROP = "path_drop"  # that of the network without its routed blocks

_ROUNDING = 1e-6  # of times in 0..1; steps are a thousand times as long


@dataclass(frozen=True)
class Guidance:
    """Guidance of samples: scale, interval and channels.

    Attributes:
        scale: 1 is the plain network, 0 the reference.
        interval: times (low, high), both within, of guidance; outside it the network is the plain one. Noise levels
            sigma are the times sigma / (1 + sigma). Source: Kynkäänniemi et al., arXiv 2404.07724.
        channels: "all" of the image, or the "first_three" as in the published samples of DiT (Peebles and Xie, arXiv
            2212.09748); the other channels, and always a learned variance, are the guided network's own.
        null_scale, null_interval: of classifier-free guidance beside that by the intermediate head, which both of its
            estimates have first; of no other guidance.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    channels: str = "all"
    null_scale: float = 1.0
    null_interval: tuple[float, float] = (0.0, 1.0)


class HeadGuide:
    """Reference: the intermediate head of the network itself."""


@dataclass(frozen=True)
class Guide:
    """Reference of guidance other than the network itself.

    Attributes:
        network: on the guided network's device.
        objective: of the guide's training, on the path of the guided network's; prediction and preconditioning may differ.
        conditional: whether it takes the condition of the guided network; else it takes none.
    """

    network: Network
    objective: Objective
    conditional: bool


def guided_network(
    model: Network, kind: ConditionKind, scale: float, channels: str = "all", num_predictions: int = 1
) -> Network:
    """Guide a network: its output becomes u + scale (c - u), with c of the given and u of the null condition.

    Both come from one forward of twice the batch. scale = 1 is the plain conditional network (and one forward of the
    batch itself), 0 the unconditional one. Channels that are not guided (see `Guidance`) are c's; of a network with several
    predictions all of these are guided.
    """
    if scale == 1.0:
        return model

    def guided(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        both = kind.with_null(condition)
        conditional, unconditional = model(torch.cat((x, x)), torch.cat((time, time)), both).float().chunk(2)
        return _away(unconditional[:, : num_predictions * x.shape[1]], conditional, scale, channels)

    return guided


def head_guided_network(model: Network, scale: float, channels: str = "all") -> Network:
    """Guide a network by its intermediate head: its output [B, 2 C, ...] becomes D_head + scale (D - D_head), [B, C, ...].

    Outputs are mixed as estimates of x0 would be, which are affine in them with one slope. scale = 1 is the plain network.
    """
    if scale == 1.0:
        return model

    def guided(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        last, head = model(x, time, condition).float().chunk(2, dim=1)
        return _away(head, last, scale, channels)

    return guided


def predictor(
    objective: Objective, model: Network, kind: ConditionKind, condition: Condition, guidance: Guidance,
    guide: Guide | HeadGuide | None = None, clip_x0: bool = False,
) -> Predict:  # fmt: skip
    """Predictor for a solver: the (guided) network's estimates for fixed conditions, as read by the objective.

    Networks compute in float32, whatever the dtype of the solver's state; the rest is computed in that dtype.

    Args:
        condition: of each image, or None for an unconditional network, which only a guide can guide.
        guidance: an image is guided while its time is within the interval.
        guide: reference; None for the network itself with the null condition.
        clip_x0: whether estimates of clean images are clipped to [-1, 1], and those of the noise follow.
    """
    model = _in_float32(model)
    plain = guided = _estimates(objective, model, condition)
    if isinstance(guide, HeadGuide):
        guided = _guided_by_head(objective, model, kind, condition, guidance)
    elif guidance.scale != 1.0 and guide is not None:
        guided = _within(guidance.interval, _guided_by(guide, plain, condition, guidance), plain)
    elif guidance.scale != 1.0 and condition is not None:
        count = 1 if objective.heads is None else len(objective.heads.names)
        network = guided_network(model, kind, guidance.scale, guidance.channels, count)
        guided = _within(guidance.interval, _estimates(objective, network, condition), plain)

    def predict(x_t: Tensor, t: Tensor) -> Prediction:
        found = guided(x_t, t)
        return _clipped(objective, found, x_t, t) if clip_x0 else found

    return predict


def over_duration(model: Callable[..., Tensor], duration: Tensor) -> Network:
    """Network of one time, with the mean velocity over a duration [1] before it."""
    return lambda x, time, condition: model(x, time, condition, duration.float().expand(len(x)))


def _within(interval: tuple[float, float], guided: _Estimates, plain: _Estimates) -> _Estimates:
    """Estimates that are guided while an image's time is within an interval."""
    low, high = interval
    if low <= 0.0 and high >= 1.0:
        return guided
    # Times come in float32: one that is an end of the interval may lie beyond it by its rounding.
    low, high = low - _ROUNDING, high + _ROUNDING

    def estimates(x_t: Tensor, t: Tensor) -> Prediction:
        inside = (low <= t) & (t <= high)
        if bool(inside.all()):
            return guided(x_t, t)
        if not bool(inside.any()):
            return plain(x_t, t)
        return _chosen(per_image(inside, x_t), guided(x_t, t), plain(x_t, t))  # each image at its own time

    return estimates


def _guided_by_head(
    objective: Objective, model: Network, kind: ConditionKind, condition: Condition, guidance: Guidance
) -> _Estimates:
    def by_head(null_scale: float) -> _Estimates:
        guided, plain = (
            _estimates(objective, guided_network(network, kind, null_scale, guidance.channels), condition)
            for network in (head_guided_network(model, guidance.scale, guidance.channels), model)
        )
        return _within(guidance.interval, guided, plain)

    if guidance.null_scale == 1.0:
        return by_head(1.0)
    return _within(guidance.null_interval, by_head(guidance.null_scale), by_head(1.0))


def _chosen(inside: Tensor, guided: Prediction, plain: Prediction) -> Prediction:
    variance = guided.variance_fraction
    if variance is not None and plain.variance_fraction is not None:
        variance = torch.where(inside, variance, plain.variance_fraction)
    x0, noise = (torch.where(inside, *pair) for pair in ((guided.x0, plain.x0), (guided.noise, plain.noise)))
    return Prediction(x0, noise, variance)


def _estimates(objective: Objective, network: Network, condition: Condition) -> _Estimates:
    return lambda x_t, t: Prediction(*objective.predict_with_variance(network, x_t, t, condition))


def _guided_by(guide: Guide, own: _Estimates, condition: Condition, guidance: Guidance) -> _Estimates:
    # Networks of other predictions are alike in their estimates, which are linear in one another for one x_t.
    reference = _estimates(guide.objective, _in_float32(guide.network), condition if guide.conditional else None)

    def predict(x_t: Tensor, t: Tensor) -> Prediction:
        weak, strong = reference(x_t, t), own(x_t, t)
        return Prediction(
            _away(weak.x0, strong.x0, guidance.scale, guidance.channels),
            _away(weak.noise, strong.noise, guidance.scale, guidance.channels),
            strong.variance_fraction,
        )

    return predict


def _away(reference: Tensor, values: Tensor, scale: float, channels: str) -> Tensor:
    """Move the guided channels of `values` [B, C or more, ...] away from a reference [B, C, ...]."""
    count = min(reference.shape[1], 3) if channels == "first_three" else reference.shape[1]
    reference, guided = reference[:, :count], values[:, :count]
    return torch.cat((reference + scale * (guided - reference), values[:, count:]), dim=1)


def _clipped(objective: Objective, found: Prediction, x_t: Tensor, t: Tensor) -> Prediction:
    a, b = objective.path.coefficients(per_image(t, x_t))
    x0 = found.x0.clamp(-1.0, 1.0)
    return Prediction(x0, (x_t - a * x0) / b, found.variance_fraction)


def _in_float32(network: Network) -> Network:
    return lambda x, time, condition: network(x.float(), time.float(), condition)
