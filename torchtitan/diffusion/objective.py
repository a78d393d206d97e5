"""Training objectives: the contract of every one, whatever its loss.

An objective draws timesteps and noise for a batch, makes a loss of a network's outputs, and reads clean images and
noise off the trained network. `torchtitan.diffusion.objectives` has them by name; to add one, write its file after the
contract of `Objective`, and one line there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan import philox
from torchtitan.conditions import Condition, Entries
from torchtitan.diffusion.paths import PATHS, indexed, per_image
from torchtitan.diffusion.predictions import PRECONDITIONINGS, PREDICTIONS, target, to_x0_and_noise
from torchtitan.diffusion.timesteps.registry import TIMESTEPS, SamplerOf, build_sampler
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepsConfig
from torchtitan.settings import Choice, OneOf, choice, setting

# A diffusion network: (x [B, C, H, W], time [B], condition) -> [B, C, H, W]
Network = Callable[[Tensor, Tensor, Condition], Tensor]


@dataclass(kw_only=True)
class ObjectiveConfig:
    """Keys of `[objective]` that every objective has: path, parametrisation of the network, and timesteps."""

    name: str = setting("denoising", "objective")
    path: OneOf[str, PATHS] = setting("rectified_flow", "how data turns into noise: x_t = a(t) x0 + b(t) noise")
    prediction: OneOf[str, PREDICTIONS] = setting(
        "velocity", "target of the network's output; edm: F of EDM's preconditioning"
    )
    preconditioning: OneOf[str, PRECONDITIONINGS] = setting(
        "identity", "scaling of the network's input, output and time; index: the DDPM's index is the time; data_time: 1 - t; "
        "sit: 1 - t, and minus the velocity"
    )
    sigma_data: float = setting(
        0.5, "standard deviation of the data, for EDM", gt=0, applies={"prediction or preconditioning": ("edm",)}
    )
    noise_std: float = setting(
        1.0, "standard deviation of the noise: 2 for images of 512 x 512 pixels with the times of 256 x 256", gt=0, le=100,
        applies={"path": ("rectified_flow",), "preconditioning": ("identity", "data_time", "sit")},
    )
    timesteps: TimestepsConfig = choice(Choice(TIMESTEPS, "logit_normal"), "density or sampler of the timesteps")
    shift: float | Literal["latent_size"] = setting(
        1.0, "factor on sigma at every timestep drawn: above 1 towards noise, for larger images; latent_size: "
        "sqrt(C H W / 4096) of an image or latent", ge=0.01, le=100,
    )  # fmt: skip
    t_min: float = setting(0.0, "smallest timestep trained, in the common time t = sigma / (1 + sigma)", ge=0, lt=1)
    t_max: float = setting(1.0, "largest timestep trained; indices of other times are left out", gt=0, le=1)
    spread: Literal["none", "stratified", "low_discrepancy"] = setting(
        "none", "spread of a global batch's timesteps over the density: independent, one per interval, equally spaced"
    )

    two_times = False  # whether the network takes a duration, and t is the larger one of two draws
    guidance_max = 1.0  # above 1, the network takes guidance up to this scale as an input

    def heads_of_network(self) -> list[str]:
        """Names of the predictions that the network makes side by side; none: it makes one."""
        return []

    def sampling_defaults(self) -> dict[str, Any]:
        """Defaults of `[sampling]` for this objective, as `ModelConfig.sampling_defaults`."""
        return {}

    def resolved(self, finest_step: float) -> "ObjectiveConfig":
        """Section with values for what follows from the precision: the smallest step of a difference quotient in t."""
        return self


class Draw(NamedTuple):
    """Draw of everything random about one microbatch of training.

    Attributes:
        t: timesteps [B] in [0, 1].
        noise: normal of standard deviation `objective.noise_std`, float32, of the images' shape.
        importance: objective's density / sampling density at t, [B].
        path_index: the DDPM index that t stands for, int64 [B]; None where the path has no integer indices.
        dropping: uniform in (0, 1), float64 [B]: below the probability, no condition; None outside of training.
        duration: t less the smaller time, float32 [B]; None: 0.
        guidance: scale, and lowest and highest t with it, which the network takes as inputs, float32 [B, 3]; None: none.
        token_times: timesteps by token [B, 1, h, w], most of them t; None: t.
    """

    t: Tensor
    noise: Tensor
    importance: Tensor
    path_index: Tensor | None = None
    dropping: Tensor | None = None
    duration: Tensor | None = None
    guidance: Tensor | None = None
    token_times: Tensor | None = None


@dataclass(frozen=True)
class Microbatch:
    """What the loss of a microbatch is computed from, besides the network and the draw.

    Attributes:
        images: clean images, float32 [B, C, H, W].
        condition: one per image, the null condition where it is dropped; or None.
        entries: the batch by name, [B, ...], in which are the entries that the dataset declares.
        kept: in training, what `Objective.kept` makes of the dropped conditions; None elsewhere.
    """

    images: Tensor
    condition: Condition = None
    entries: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """Loss terms of one microbatch, each float32 [B].

    Attributes:
        loss: minimised loss; its mean over the global batch is the training loss.
        error: the plain mean squared error of the prediction, for loss by timestep; no gradient.
        weighted: importance x the weighted error with all that is added to it, never negative; no gradient.
        diagnostics: values by the names in the objective's `diagnostics`, logged as means by timestep bin; no gradient.
        head_errors: for the memory of the objective's `heads`; None without heads.
        beside: further loss that is minimised, as an alignment's: no sampler learns from it; None without.
    """

    loss: Tensor
    error: Tensor
    t: Tensor
    weighted: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    head_errors: Any = None
    beside: Tensor | None = None

    @property
    def minimised(self) -> Tensor:
        """Loss of which the mean is minimised, [B]."""
        return self.loss if self.beside is None else self.loss + self.beside

    def __post_init__(self) -> None:
        """Raises ValueError: a term is not one value per image, and would broadcast."""
        for name, term in {"loss": self.minimised, "error": self.error, "weighted": self.weighted, **self.diagnostics}.items():
            if term.shape != self.t.shape:
                raise ValueError(f"{name} of the objective is {list(term.shape)}, one per image is {list(self.t.shape)}")


class Objective(ABC):
    """Objective of a training, and estimates from the trained network.

    A subclass gives `Config` and `loss`. Its loss may call the network several times, at other times than those drawn,
    under `torch.no_grad` or a Jacobian-vector product, and may draw more than `draw` does by overriding it. What it
    trains besides the network, as a projection of features, are modules in `learned`, made in `attach` where they depend on
    the network or the data: they are in the optimizer, in the averages over ranks and in the checkpoint. Sampling,
    validation and studies read the network through `predict`.

    Attributes:
        learned: modules that are trained or measured beside the network, and belong into a checkpoint.
        diagnostics: names of per-sample values in `LossTerms.diagnostics`.
        heads: of a network with several predictions, else None.
        learns_weights: whether losses are divided by what has been learned of them, alike at all timesteps then.
        reads_by_state: why `predict` depends on state learned in training, and what to do without it; "" if it does not.
        learns_variance: whether the loss trains the variance of `model.learned_variance`.
        reads_features: whether the loss reads the features of `data.features_path`, which held-out batches lack.
        untrained_forwards: calls of the network for each sample that no gradient runs through, beside the trained one.
        loss_at_zero: whether the loss is defined at t = 0, of clean images.
        weighs_kept: whether `kept` gives weights.
        intermediate_share: share of the loss of the network's intermediate head, which has the second half of the output's
            channels and is read in training alone; None of a network without one.
    """

    Config: ClassVar[type[ObjectiveConfig]]
    learns_variance: ClassVar[bool] = False
    loss_at_zero: ClassVar[bool] = True
    reads_features: ClassVar[bool] = False
    untrained_forwards: int = 0
    diagnostics: tuple[str, ...] = ()
    heads: Any = None
    learns_weights: bool = False
    reads_by_state: str = ""
    weighs_kept: bool = False
    intermediate_share: float | None = None

    def __init__(self, config: Any, seed: int, sampler_of: SamplerOf | None = None) -> None:
        """sampler_of: makes a sampler of the configured density, used instead of the configured sampler."""
        self.config = config
        self.path = PATHS[config.path]()
        self.prediction = config.prediction
        self.sigma_data = config.sigma_data
        self.preconditioning = PRECONDITIONINGS[config.preconditioning](self.path, self.prediction, self.sigma_data)
        self.timestep_sampler = build_sampler(config, self.path, seed, sampler_of)
        self.learned = nn.ModuleDict()
        self.seed = seed

    def attach(self, model: Any, entries: Entries) -> None:  # noqa: B027  most objectives learn nothing of shapes
        """Attach to the network before it is sharded or read: make modules of its widths and those of the data, and hooks.

        Called once for each network: one on the meta device before a run is begun, the one that is trained, and each that is
        loaded. Modules are made on the CPU, from torch's generator, which is seeded for it.

        Args:
            model: a `DiffusionModel` (torchtitan/models/base.py).
            entries: what the data's batches have besides images and conditions.

        Raises:
            ConfigError: the objective cannot be trained on this network or these data; one line, with the key and the remedy.
        """

    @abstractmethod
    def loss(self, model: Network, batch: Microbatch, draw: Draw) -> LossTerms:
        """Per-sample training loss of a network."""

    @classmethod
    def problems(cls, config: Any) -> Iterator[tuple[str, str]]:
        """Find parts of a section that this objective cannot have: pairs of a dotted key and the reason."""
        yield from ()

    def problems_of_parts(self) -> Iterator[tuple[str, str]]:
        """Find problems that only the built objective shows: pairs of a dotted key and the reason."""
        yield from ()

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of methods without a call of the network; where a run is compiled, each is compiled as one graph."""
        return ("draw",) if self.timestep_sampler.of_sample_alone else ("random_numbers",)

    def to(self, device: torch.device) -> "Objective":
        """Move the objective's learned state to a device; returns the objective itself."""
        self.learned.to(device)
        return self

    def draw(self, shape: tuple[int, ...], batch: GlobalBatch, indices: Tensor) -> Draw:
        """Draw timesteps and noise for the samples `indices` [B] of a global batch; `shape` is one image's."""
        draws = self.timestep_sampler.draws(batch, indices)
        noise, dropping, bits = self.random_numbers(shape, batch.attempt, indices, draws)
        t, importance = self.timestep_sampler.sample(batch, indices, bits)
        index = indexed(self.path).t_to_index(t) if self.path.discrete else None
        return Draw(t, noise, importance, index, dropping)

    def with_duration(self, draw: Draw, seed: int, purpose: str, numbers: Tensor, attempt: int = 0) -> Draw:
        """Draw the durations of images too, by random numbers `numbers` [B] of a purpose; an objective of one time has none."""
        return draw

    def scaled(self, normal: Tensor) -> Tensor:
        """Noise of the path made of standard normal numbers.

        x_t = (1 - t) x0 + t noise_std e is noise_std times the x_t of images x0 / noise_std, of which t, sigma and weights are.
        Source: Li and He, "Back to basics: let denoising generative models denoise", arXiv 2511.13720, section 4.
        """
        return normal if self.config.noise_std == 1.0 else self.config.noise_std * normal

    def random_numbers(
        self, shape: tuple[int, ...], attempt: int, indices: Tensor, draws: tuple[tuple[str, Tensor], ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Random numbers of `draw`: noise, `Draw.dropping`, and the bits of `draws`, in two passes of Philox."""
        *bits, of_dropping = philox.uniform_bits(self.seed, (*draws, ("label_drop", indices)), attempt)
        noise = self.scaled(philox.normal(self.seed, "noise", indices, shape, attempt))
        return noise, philox.middles(of_dropping), tuple(bits)

    def kept(self, dropping: Tensor, label_dropout: float) -> Tensor | None:
        """Weights of terms for conditions that are kept, [B] of mean 1, 0 where `dropping` is below label_dropout; if any."""
        if not self.weighs_kept:
            return None
        return torch.where(dropping < label_dropout, 0.0, 1.0 / (1.0 - label_dropout)).to(torch.float32)

    def predict(self, model: Network, x_t: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Estimate the clean image and the noise at times t [B] in noisy images x_t [B, C, H, W]; float32."""
        x0, noise, _ = self.predict_with_variance(model, x_t, t, condition)
        return x0, noise

    def predict_with_variance(
        self, model: Network, x_t: Tensor, t: Tensor, condition: Condition
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Estimate the clean image, the noise, and the place of the reverse step's variance between its limits.

        Args:
            x_t: noisy images [B, C, H, W].

        Returns:
            x0, noise and the fraction of the way from the ln of the smallest variance (0) to that of the largest (1),
            float32 of x_t's shape; no fraction (None) from a network that learns none.
        """
        a, b = self.path.coefficients(per_image(t, x_t))
        output, interpolation = self._output(model, x_t, t, condition)
        if self.heads is not None:
            return *self.heads.combine(output, x_t, t), None
        x0, noise = to_x0_and_noise(self.prediction, output, x_t, a, b, self.sigma_data)
        return x0, noise, None if interpolation is None else 0.5 * (interpolation + 1.0)

    def predicted(self, model: Network, x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Estimate of the prediction's target, of heads the combined one; float32, arguments as of `predict`."""
        output, _ = self._output(model, x_t, t, condition)
        if self.heads is None:
            return output
        x0, noise = self.heads.combine(output, x_t, t)
        a, b = self.path.coefficients(per_image(t, x_t))
        return target(self.prediction, x0, noise, a, b, self.sigma_data)

    def learned_weighting(self, sigma: Tensor) -> Tensor:
        """Learned weight on the squared error of the prediction at noise levels [N]; of sigma's dtype."""
        return torch.ones_like(sigma)

    def introduction(self) -> str:
        """Line that the console shows at the start of a run; "" for none."""
        return ""

    def effective_weight(self, log_sigma: Tensor) -> Tensor | None:
        """Density of the training noise levels x weight of the noise error, at ln sigma [N]; None where there is none."""
        return None

    def observe(self, batch: GlobalBatch, indices: Tensor, terms: LossTerms) -> None:
        """Observe a microbatch's losses, for samplers and heads that learn; indices [B] as given to `draw`."""
        if self.config.timesteps.learns:
            self.timestep_sampler.observe(batch, indices, terms.t, terms.loss)
        if self.heads is not None:
            self.heads.observe(terms.head_errors, terms.t)

    def update(self, skip: Tensor) -> None:
        """Update after the backward of a whole global batch: learn from observed losses, unless `skip`; collective."""
        if self.config.timesteps.learns:
            self.timestep_sampler.update(skip)
        if self.heads is not None:
            self.heads.update(skip)

    def log_uncertainties(self, log_sigma: Tensor) -> dict[str, float]:
        """Learned ln of the loss at ln sigma [N], by tag; none where it is not learned."""
        return {}

    def lr_scales(self) -> dict[str, float]:
        """Learning rates of `parameters`, as multiples of the network's; 1 where a name is missing."""
        return {}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the objective itself, by name; whole on every rank."""
        return {f"objective.{name}": parameter for name, parameter in self.learned.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of `learned` for a checkpoint, by name; the tensors themselves."""
        return {name: tensor.detach() for name, tensor in self.learned.state_dict(keep_vars=True).items()}

    def _output(self, model: Network, x_t: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor | None]:
        """Output of the network: the prediction, and the interpolation of variances if it has twice x_t's channels."""
        images, time, c_skip, c_out = self.network_inputs(x_t, t)
        return self.read_output(model(images, time, condition), x_t, c_skip, c_out)

    def network_inputs(self, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Inputs of the network, images and time [B], and c_skip and c_out of its output, [B] each; None: 0 and 1.

        Without scales, t may also be by token [B, 1, h, w], and the time then is [B, h w].
        """
        if not self.preconditioning.scales:
            time = self.preconditioning.time(t)
            return x_t, time if time.ndim == 1 else time.flatten(1), None, None
        scaling = self.preconditioning.scaling(t)
        return per_image(scaling.c_in, x_t) * x_t, scaling.c_noise, scaling.c_skip, scaling.c_out

    def read_output(
        self, output: Tensor, x_t: Tensor, c_skip: Tensor | None, c_out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Read the network's output: as `_output`."""
        output, interpolation = output if output.dtype.itemsize >= 4 else output.to(torch.float32), None
        if self.intermediate_share is not None:
            output = output[:, : x_t.shape[1]]
        count = 1 if self.heads is None else len(self.heads.names)
        if self.heads is None and self.path.discrete and output.shape[1] == 2 * x_t.shape[1]:
            output, interpolation = output.chunk(2, dim=1)
        if output.shape != (len(x_t), count * x_t.shape[1], *x_t.shape[2:]):  # it might broadcast
            raise ValueError(f"the model's output is {list(output.shape)}, the target {count} times {list(x_t.shape)}")
        if c_skip is None or c_out is None:  # of heads too
            return output, interpolation
        return per_image(c_skip, x_t) * x_t + per_image(c_out, x_t) * output, interpolation
