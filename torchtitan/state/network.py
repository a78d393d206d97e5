"""Network of a run as it trains: built or read, frozen and adapted, with taps, in float8, sharded and compiled."""

import logging
from collections.abc import Mapping

from torch import Tensor

from torchtitan.config.job import JobConfig
from torchtitan.data.base import DatasetInfo
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import attach
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import bytes_on, local, named_parameters, parallelize, release_unsharded
from torchtitan.distributed.shard_drawing import place_shards
from torchtitan.files.weight_files import saved_buffers
from torchtitan.models.base import DiffusionModel
from torchtitan.models.float8 import convert_to_float8
from torchtitan.models.magnitude import normalize_rows, normalized_weights
from torchtitan.weights.network import new_network, sharded_network

logger = logging.getLogger(__name__)


class RunNetwork:
    """Network of a run, on every layout with the same weights.

    Attributes:
        train_module: what a train step calls: the network, sharded or replicated, and compiled.
        parameters: those that train, by name.
        taps: of the gradient noise in a single pass; None without.
        normalizes_weights: whether it preserves magnitudes by weights that are normalised at the start of each step.
        gathers_float8: whether the updated weights are gathered in float8, by scales.
        base_sha256: of the frozen network of adapters; "" without.
        flops_beside: floating-point operations of training on one image outside of the network.
    """

    flops_beside = 0

    def __init__(
        self, config: JobConfig, info: DatasetInfo, layout: Layout, objective: Objective, edges: Tensor | None,
        *, num_shapes: int, base_sha256: str, new: bool,
    ) -> None:  # fmt: skip
        """Build the network and attach the objective to it; collective.

        Args:
            edges: of the bins of the gradient noise; None: it is not measured.
            num_shapes: number of shapes of images, each of which is a graph.
            base_sha256: of the frozen network's file; "": not known.
            new: the run has no checkpoint to resume from.

        Raises:
            WeightsError, AdapterError, CannotMeasure: on every rank.
        """
        self._adapted, self._cost = config.lora.enable, (objective.untrained_forwards, config.training.steps)
        self.model, shards = _built(config, info, layout, new)
        self.fan_in_ratios = self.model.fan_in_ratios()
        attach(objective, self.model, info.trained_entries)
        objective.to(layout.device)
        self.taps = None
        if edges is not None and config.gns.single_pass:
            from torchtitan.gns.build import build_taps

            self.taps = build_taps(config, self.model, edges, layout)
        if config.float8.enable:
            convert_to_float8(self.model, config.float8)
        self.train_module = parallelize(
            self.model,
            layout,
            checkpointing=config.activation_checkpoint,
            compiling=config.compile,
            objective=objective,
            sharding=config.parallelism,
            param_dtype=config.training.mixed_precision_param,
            reduce_dtype=config.training.mixed_precision_reduce,
            num_shapes=num_shapes,
            cpu_offload=config.training.enable_cpu_offload,
        )
        if shards:
            place_shards(self.model, shards, on_host=config.training.enable_cpu_offload)
        self._device, self._num_bytes = layout.device, bytes_on(layout.device, [*self.model.parameters(), *self.model.buffers()])
        self.base_sha256 = ""
        self.parameters = named_parameters(self.model)
        if config.lora.enable:
            from torchtitan.models.adapters.adapters import trained_parameters
            from torchtitan.weights.adapted_network import drawn_sha256, frozen_sha256

            self.parameters = trained_parameters(self.parameters)
            self.base_sha256 = frozen_sha256(config, base_sha256 or drawn_sha256(self.model))
        self._normalized = normalized_weights(self.model)
        self.normalizes_weights = bool(self._normalized)
        self.gathers_float8 = config.float8.enable and config.float8.enable_fsdp_float8_all_gather

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint by name: the parameters that train, and the buffers."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()} | self.buffers()

    def buffers(self) -> dict[str, Tensor]:
        """Buffers that belong to the weights, by name."""
        return saved_buffers(self.model)

    def normalize_weights(self) -> None:
        """Normalise the raw weights of a magnitude-preserving network in place, as at the start of each step."""
        if self._normalized:
            normalize_rows([local(weight.detach()) for weight in self._normalized])
            release_unsharded(self.model)

    def flops_of(self, shape: tuple[int, ...]) -> int:
        """Floating-point operations of training on one image of a shape (C, H, W)."""
        channels, height, width = shape
        if not self._adapted:
            return self.flops_beside + self.model.flops_per_image((channels, height, width), *self._cost)
        from torchtitan.models.adapters.flops import training_flops

        return self.flops_beside + training_flops(self.model, (channels, height, width), *self._cost)

    def held_gib(self, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
        """GiB on this rank's device of its weights and tables, frozen ones included, and of other tensors by part."""
        held = {name: bytes_on(self._device, tensors.values()) for name, tensors in parts.items()}
        return {name: size / 2**30 for name, size in ({"weights": self._num_bytes} | held).items()}

    def tokens_of(self, shape: tuple[int, ...]) -> int:
        """Tokens of the network for one image of a shape (C, H, W)."""
        channels, height, width = shape
        return self.model.tokens_per_image((channels, height, width))


def _built(config: JobConfig, info: DatasetInfo, layout: Layout, new: bool) -> tuple[DiffusionModel, dict[str, Tensor]]:
    """Network with the same weights on any layout; and its shards if it is still to be sharded on meta."""
    shards: dict[str, Tensor] = {}
    initial_weights = config.checkpoint.initial_weights if new or config.lora.enable else ""
    if config.lora.enable and new and not initial_weights and layout.rank == 0:
        logger.warning("lora: the frozen network is drawn at random (checkpoint.initial_weights names a trained one)")
    if initial_weights and layout.rank == 0:
        logger.info(f"reading {initial_weights}")
    if config.lora.enable and new and config.lora.initial_adapter and layout.rank == 0:
        logger.info(f"lora: begins as the adapter {config.lora.initial_adapter}")
    if layout.sharded and not config.lora.quantized_kind:
        model, shards = sharded_network(config, info, layout, initial_weights)
    else:
        model = new_network(config, info, layout.device, initial_weights)
    if config.lora.enable:
        from torchtitan.weights.adapted_network import add_adapters

        add_adapters(model, config, info, layout.device)
    return model.train(), shards
