"""Base class of diffusion networks, and the registry entry of a family.

A model file describes mathematics on one device. Sharding, checkpointing, compilation and mixed precision are put
around it from outside, through the few methods below.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from torch import Tensor, nn

from torchtitan.conditions import Condition, ConditionKind, Unconditional
from torchtitan.settings import setting

if TYPE_CHECKING:
    from torchtitan.models.adapters.layouts import AdapterLayout
    from torchtitan.models.adapters.target import Target
    from torchtitan.models.published_layouts import PublishedLayout

# How often a linear is applied to one image: once, to a vector; or to every token, as a narrow projection into or
# out of the token stream (small), or inside the blocks (token).
LinearRole = Literal["vector", "small", "token"]


@dataclass(frozen=True)
class ProbePoint:
    """Output of a module from which a linear probe reads features of an image.

    Attributes:
        module: qualified name of the module, which runs once in a forward.
        channel_dim: dimension of the features in its output: 1 of maps [B, D, H, W], 2 of tokens [B, T, D].
        first_place: place of the image's first token in the output; before it are others, as of a text.
    """

    module: str
    channel_dim: int
    first_place: int = 0

    def tokens(self, output: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Features of an image's places, row by row [B, T, D]; of several outputs, the first is taken."""
        features = output if isinstance(output, Tensor) else output[0]
        return features.movedim(self.channel_dim, -1).flatten(1, -2)[:, self.first_place :]

    def pooled(self, output: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Global average pool: mean over all places of each image, float32 [B, D]; of several outputs, the first is pooled."""
        features = output if isinstance(output, Tensor) else output[0]
        return features.detach().float().movedim(self.channel_dim, 1).flatten(2)[:, :, self.first_place :].mean(2)


class TokenExchange(Protocol):
    """Exchange between processes that have the same images, and each some of their tokens (context parallelism)."""

    def split(self, tokens: Tensor) -> Tensor:
        """Take this process's tokens of [B, T, ...]: [B, T / C, ...]."""

    def gather(self, tokens: Tensor) -> Tensor:
        """Gather the tokens [B, T / C, ...] of all processes: [B, T, ...]."""

    def all_tokens_of_own_heads(self, heads: Tensor) -> Tensor:
        """Exchange [S, B, N, T / C, D / N], as queries, keys and values, for [S, B, N / C, T, D / N]."""

    def own_tokens_of_all_heads(self, heads: Tensor) -> Tensor:
        """Exchange back: [B, N / C, T, D / N] for [B, N, T / C, D / N]."""


class DiffusionModel(nn.Module):
    """Base of all networks that the trainer trains.

    A model is built on any device, the meta device included, and holds no values until `init_weights` has run.
    Weights may be bfloat16 while x and t are float32: the model casts x to its weights' dtype by itself, and t
    and every table keep float32 until they are used. So wrappers of the model must not cast its inputs.

    Attributes:
        image_shape: (C, H, W) of the input.
        out_channels: C_out of the output.
        condition_kind: kind of the network's conditions; by default none.
    """

    image_shape: tuple[int, int, int]
    out_channels: int
    condition_kind: ConditionKind = Unconditional()

    def forward(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        """Apply the network.

        Args:
            x: noisy images [B, C, H, W].
            t: the objective's c_noise per image [B], float32.
            condition: of the model's `condition_kind`, null where dropped: of classes int64 [B]; None if unconditional.

        Returns:
            [B, C_out, H, W], float32 at least.

        Raises:
            ValueError: x is not of the shape that the model was built for, or condition does not fit the model.
        """
        raise NotImplementedError

    def init_weights(self) -> None:
        """Initialise every parameter and every buffer, from torch's global random state alone.

        Where it changes parameters whole and in place, a sharded model is drawn shard by shard.
        """
        raise NotImplementedError

    def init_buffers(self) -> None:
        """Initialise the buffers that no checkpoint holds; for a model with loaded instead of drawn parameters."""
        raise NotImplementedError

    def draw_dropout(self, seed: int, samples: Tensor, attempt: int = 0, steps_left: int | None = None) -> None:
        """Draw what the following forwards in training drop, activations or tokens; without dropout and routing nothing.

        Args:
            samples: sample numbers of the images of these forwards [B], int64, on the model's device.
            steps_left: up to the run's end, this one included, for `ModelConfig.routed_blocks`; None: the end is far.
        """

    def set_guidance(self, scale: float | None, interval: tuple[float, float] = (0.0, 1.0)) -> None:
        """Set the guidance of the following forwards, in models with a guidance embedding.

        scale: None: `ModelConfig.guidance`, at all times; interval: times of guidance, where the model takes these too.
        """

    def split_tokens(self, exchange: TokenExchange) -> None:
        """Divide the tokens of each image between processes, in the forwards of training; in evaluation each has all."""
        raise NotImplementedError

    def blocks(self) -> list[nn.Module]:
        """List the units of checkpointing, compilation and sharding, in the order of the forward."""
        raise NotImplementedError

    def fan_in_ratios(self) -> dict[str, float]:
        """Fan-in over that of a base network of the maximal update parametrisation, by a parameter's name; where it has one."""
        return {}

    def probe_points(self) -> dict[str, ProbePoint]:
        """Outputs of blocks that a linear probe reads, by name, in the order of the forward; by default none."""
        return {}

    def linear_roles(self) -> dict[str, LinearRole]:
        """Roles of the linears, modules with `in_features` and `out_features`, by qualified name."""
        raise NotImplementedError

    def tokens_per_image(self, image_shape: tuple[int, int, int]) -> int:
        """Number of tokens T of an image (C, H, W)."""
        raise NotImplementedError

    def attention_macs(self, num_tokens: int) -> int:
        """Multiply-accumulates of all attention products (queries x keys, scores x values) of one image."""
        raise NotImplementedError

    def applications(self, image_shape: tuple[int, int, int]) -> dict[str, int]:
        """Times that each layer multiplies its weight with an input for one image (C, H, W), by qualified name.

        A linear is applied once per token, or once per image where it acts on one vector per image (adaLN, timestep
        embedding); counting those per token overstates a DiT by nearly half.
        """
        num_tokens = self.tokens_per_image(image_shape)
        return {name: 1 if role == "vector" else num_tokens for name, role in self.linear_roles().items()}

    def forward_macs_per_image(self, image_shape: tuple[int, int, int]) -> int:
        """Multiply-accumulates of one image's forward: matrix products only, embeddings and norms not counted."""
        layers = self.applications(image_shape).items()
        macs = sum(math.prod(cast(Tensor, self.get_submodule(name).weight).shape) * times for name, times in layers)
        return self.attention_macs(self.tokens_per_image(image_shape)) + macs

    def training_macs_per_image(self, image_shape: tuple[int, int, int], steps: int | None = None) -> int:
        """Multiply-accumulates of one image's forward in training, where blocks may see some of the tokens.

        Args:
            steps: of the run, over which they are the mean; None: all are alike.
        """
        return self.forward_macs_per_image(image_shape)

    def flops_per_image(
        self, image_shape: tuple[int, int, int], untrained_forwards: int = 0, steps: int | None = None
    ) -> int:
        """Floating-point operations of training on one image: MFU divides them by time.

        2 per multiply-accumulate, and the backward has two products for each one of the forward. Recomputation
        in checkpointing or in attention kernels is not counted.

        Args:
            untrained_forwards: forwards without backward, as `Objective.untrained_forwards` of the run.
            steps: as of `training_macs_per_image`.
        """
        return (3 + untrained_forwards) * 2 * self.training_macs_per_image(image_shape, steps)

    def introduction(self, steps: int) -> Iterator[tuple[int, str]]:
        """Lines for the start of a run of so many steps, with logging's level of each: on methods that are on."""
        yield from ()

    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)


@dataclass(kw_only=True)
class ModelConfig:
    """`[model]`: the keys of every family, and the optional abilities of a family.

    A name below without a type is no key: a family with that ability declares a setting of that name, and every other
    family keeps the constant value here.

    Attributes:
        label_dropout: probability of replacing the condition by the null one in training; 0 trains no guidance.
        learned_variance: whether the network also predicts the variance of a DDPM's step.
        num_predictions: images that the network predicts for each input, one for each of `objective.heads`.
        dropout: probability of dropping an activation in training, see `DiffusionModel.draw_dropout`.
        guidance_embedding: whether the network takes a guidance scale as an input, see `DiffusionModel.set_guidance`.
        guidance: that scale where none is set.
        duration_embedding: whether its forward takes, after the condition, a duration [B] as `Draw.duration`; None is 0. With
            guidance_embedding also a guidance [B, 3] as `Draw.guidance`; None is what `set_guidance` has set.
    """

    name: str = setting("", "model family")
    flavor: str = setting("", "row of the family's table of sizes; the keys below override its fields")

    label_dropout = 0.0
    learned_variance = False
    num_predictions = 1
    dropout = 0.0
    guidance_embedding = False
    guidance = 1.0
    duration_embedding = False

    @property
    def depth(self) -> int | None:
        """Number of units in `blocks`; None if the configuration does not determine it."""
        return None

    @property
    def routed_blocks(self) -> range:
        """Blocks, from 1, that see a part of an image's tokens in training."""
        return range(0)

    @property
    def head_width(self) -> int | None:
        """Channels of an attention head; None if there is no attention, or the heads differ."""
        return None

    def of_depth(self, depth: int) -> "ModelConfig | None":
        """Same model with another number of blocks, if all blocks are alike; None if they are not."""
        return None

    def sampling_defaults(self, path_name: str) -> dict[str, Any]:
        """Defaults of `[sampling]` for this network, where they differ from those of all networks.

        Args:
            path_name: path of the objective, a key of PATHS.

        Returns:
            key of `[sampling]`, or `schedule.name` or `solver.name` -> value of that key if it is not given.
        """
        return {}

    @property
    def normalizes_weights(self) -> bool:
        """Whether raw weights are normalised before each step (see models/magnitude.py), which leaves decay no effect."""
        return False


@dataclass(frozen=True)
class ModelFamily:
    """Family of networks: one entry of MODELS.

    Attributes:
        config_class: dataclass of the `[model]` section: ModelConfig and the family's own fields.
        build: (config, image_shape (C, H, W), condition kind, one of `conditions`) -> model without values.
        problems: (config, image_shape) -> one line per impossible combination, none if it can be built.
        conditions: kinds of condition that its networks take. `Unconditional` alone: any data, conditions ignored.
        layouts: published layouts of its weights by name, which no other family has too.
        condition_problems: (config, kind of a type in `conditions`) -> one line per reason why the network of that
            configuration cannot take conditions of that kind, as another width.
        many_shapes: whether a network takes images of any shape without `problems`, not only the one it was built for.
        splits_tokens: whether a network has `split_tokens`, and its configuration `num_heads` and `patch_size`.
        adapter_sets: published sets of layers with low-rank adapters, by name: network -> targets.
        adapter_layouts: layouts of files of such adapters, by name, besides this program's own.
    """

    config_class: type[ModelConfig]
    flavors: dict[str, Any]
    build: Callable[[Any, tuple[int, int, int], ConditionKind], DiffusionModel]
    problems: Callable[[Any, tuple[int, int, int]], list[str]]
    conditions: tuple[type[ConditionKind], ...] = (Unconditional,)
    layouts: Mapping[str, "PublishedLayout"] = field(default_factory=dict)
    condition_problems: Callable[[Any, ConditionKind], list[str]] = lambda config, kind: []
    many_shapes: bool = False
    splits_tokens: bool = False
    adapter_sets: Mapping[str, "Callable[[Any], list[Target]]"] = field(default_factory=dict)
    adapter_layouts: Mapping[str, "AdapterLayout"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises TypeError: the configuration's flavor is none of these."""
        default = getattr(self.config_class, "flavor", "")
        if self.flavors and default and default not in self.flavors:
            owner = self.config_class.__name__
            raise TypeError(f"flavor: the default {default!r} of {owner} is none of {', '.join(self.flavors)}")

    def takes(self, kind: ConditionKind) -> bool:
        """Check whether the family's networks can be trained on data with conditions of a kind."""
        return isinstance(kind, self.conditions) or self.conditions == (Unconditional,)
