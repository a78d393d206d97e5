"""Linear classifiers of features: fitted to all of them at once, or by Adam from batch to batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan import philox

# Penalties that are tried, the strongest first; the features have unit variance.
PENALTIES = tuple(10.0**power for power in range(2, -6, -1))
_MAX_ITERATIONS = 500
_TOLERANCE = 1e-6  # on the largest element of the gradient, in the scaled weights of a fit
_LARGEST_ROTATION = 4096  # features, whose principal axes are found in seconds


@dataclass(frozen=True)
class LinearClassifier:
    """Linear classifier of D features into C classes.

    Attributes:
        weight: [C, D].
        bias: [C].
        penalty: with which it was fitted; None without one.
    """

    weight: Tensor
    bias: Tensor
    penalty: float | None = None

    def predict(self, features: Tensor) -> Tensor:
        """Most probable classes [N] of features [N, D]."""
        return F.linear(features, self.weight, self.bias).argmax(1)


def fit_logistic(
    features: Tensor, labels: Tensor, num_classes: int, penalty: float, start: LinearClassifier | None = None
) -> LinearClassifier:
    """Fit multinomial logistic regression by L-BFGS: mean cross-entropy + penalty / 2 x |weight|^2, biases free.

    Args:
        features: [N, D] of mean 0; the fit is in their dtype, and fastest where they are not correlated.
        labels: int64 [N].
        num_classes: C.
        penalty: positive, so that there is one minimum.
        start: a classifier to begin with; zeros by default.
    """
    # In weights over `scale` the curvature is about 1 in all directions: 1 / C stands for the probabilities' p (1 - p).
    scale = (features.square().mean(0) / num_classes + penalty).rsqrt()  # [D]
    weight = features.new_zeros(num_classes, features.shape[1]) if start is None else start.weight / scale
    bias = features.new_zeros(num_classes) if start is None else start.bias.clone()
    optimizer = torch.optim.LBFGS(
        [weight.requires_grad_(), bias.requires_grad_()], max_iter=_MAX_ITERATIONS, tolerance_grad=_TOLERANCE,
        tolerance_change=0.0, history_size=20, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Tensor:
        optimizer.zero_grad()
        scaled = weight * scale
        value = F.cross_entropy(F.linear(features, scaled, bias), labels) + 0.5 * penalty * scaled.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return LinearClassifier(weight.detach() * scale, bias.detach(), penalty)


def choose_and_fit(features: Tensor, labels: Tensor, num_classes: int, held_out: Tensor) -> LinearClassifier:
    """Fit logistic regression to standardised features, with the penalty that is best on held-out ones.

    PENALTIES are fitted to the rest of the images in turn, until the cross-entropy on the held-out ones has risen twice;
    that of the lowest is then fitted to all. Features that do not vary are left out.

    Args:
        features: [N, D].
        labels: int64 [N].
        num_classes: C.
        held_out: bool [N]: all features of an image are held out together.

    Returns:
        classifier of features as they were given.
    """
    dtype, features = features.dtype, features.double()
    mean, deviation = features.mean(0), features.std(0)
    scale = torch.where(deviation > 1e-6 * (mean.abs() + deviation.max()), 1.0 / deviation, 0.0)
    standardised = (features - mean) * scale
    axes = _principal_axes(standardised)
    if axes is not None:
        standardised = standardised @ axes  # which leaves lengths of weights, and so penalties, as they are
    seen, unseen = standardised[~held_out], standardised[held_out]
    tried: list[tuple[float, LinearClassifier]] = []
    found = None
    for penalty in PENALTIES:
        found = fit_logistic(seen, labels[~held_out], num_classes, penalty, found)
        tried.append((F.cross_entropy(F.linear(unseen, found.weight, found.bias), labels[held_out]).item(), found))
        if len(tried) > 2 and tried[-1][0] > tried[-2][0] > tried[-3][0]:
            break
    _, best = min(tried, key=lambda entry: entry[0])
    assert best.penalty is not None
    fitted = fit_logistic(standardised, labels, num_classes, best.penalty, best)
    weight = (fitted.weight if axes is None else fitted.weight @ axes.T) * scale
    return LinearClassifier(weight.to(dtype), (fitted.bias - weight @ mean).to(dtype), best.penalty)


def _principal_axes(features: Tensor) -> Tensor | None:
    """Orthonormal axes [D, D] along which features [N, D] of mean 0 are not correlated; None where D is too large."""
    if features.shape[1] > _LARGEST_ROTATION:
        return None
    return torch.linalg.eigh(features.T @ features / len(features)).eigenvectors


class AdamClassifiers:
    """Linear classifiers of several features, trained side by side by Adam on batches, as one batched linear.

    Features of different sizes are padded by zeros, whose weights stay as they are and have no effect.

    Args:
        dims: size of the features D, by name.
        num_classes: C.
        learning_rate: of the first epoch; it falls by a half cosine from epoch to epoch.
        epochs: number of them.
        seed: of the first weights and biases, uniform in +- 1 / sqrt(D), as torch draws those of a linear.
        device: of the features.
    """

    def __init__(
        self, dims: Mapping[str, int], num_classes: int, *, learning_rate: float, epochs: int, seed: int, device: torch.device
    ) -> None:
        self._dims, self._rate, self._epochs = dict(dims), learning_rate, epochs
        width = max(dims.values())
        self._weight = torch.zeros(len(dims), width, num_classes)  # [K, D, C]
        self._bias = torch.zeros(len(dims), 1, num_classes)
        for number, dim in enumerate(dims.values()):
            drawn = philox.uniform(seed, "probe", torch.arange((dim + 1) * num_classes) + (1 << 42), number)
            drawn = (2.0 * drawn - 1.0).to(torch.float32).view(dim + 1, num_classes) / math.sqrt(dim)
            self._weight[number, :dim], self._bias[number, 0] = drawn[:-1], drawn[-1]
        self._weight = self._weight.to(device).requires_grad_()
        self._bias = self._bias.to(device).requires_grad_()
        self._optimizer = torch.optim.Adam([self._weight, self._bias], lr=learning_rate)

    def train(self, features: Mapping[str, Tensor], labels: Tensor, epoch: int) -> None:
        """Take a step on the features [B, D] of a batch and its labels, int64 [B], in an epoch, from 0."""
        for group in self._optimizer.param_groups:
            group["lr"] = 0.5 * self._rate * (1.0 + math.cos(math.pi * epoch / self._epochs))
        with torch.enable_grad():
            logits = torch.baddbmm(self._bias, self._padded(features), self._weight)  # [K, B, C]
            per_image = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(self._dims)), reduction="none")
            loss = per_image.view(len(self._dims), -1).mean(1).sum()
            self._optimizer.zero_grad()
            loss.backward()
        self._optimizer.step()

    def classifiers(self) -> dict[str, LinearClassifier]:
        """Classifier of each of the features, by name."""
        return {
            name: LinearClassifier(self._weight[number, :dim].detach().T, self._bias[number, 0].detach())
            for number, (name, dim) in enumerate(self._dims.items())
        }

    def state(self) -> dict[str, Tensor]:
        """State after an epoch, as tensors by name."""
        found = {"weight": self._weight.detach(), "bias": self._bias.detach()}
        for name, parameter in (("weight", self._weight), ("bias", self._bias)):
            for key, value in self._optimizer.state[parameter].items():
                found[f"{name}.{key}"] = torch.as_tensor(value)
        return {name: tensor.cpu().contiguous() for name, tensor in found.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        for name, parameter in (("weight", self._weight), ("bias", self._bias)):
            parameter.copy_(state[name])
            prefix = f"{name}."
            of_adam = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            self._optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device) for key, value in of_adam.items()
            }

    def _padded(self, features: Mapping[str, Tensor]) -> Tensor:
        width = self._weight.shape[1]
        return torch.stack([F.pad(features[name], (0, width - dim)) for name, dim in self._dims.items()])
