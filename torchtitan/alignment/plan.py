"""Plan of an alignment: places and sizes, known without weights and images."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.alignment.config import ENCODERS, PROJECTORS, AlignmentConfig
from torchtitan.alignment.tap import TapPlace, find_place
from torchtitan.data.base import FEATURES, PIXELS, DatasetInfo
from torchtitan.errors import ConfigError, EvaluationError
from torchtitan.models.base import DiffusionModel


class Plan:
    """Plan of an alignment.

    Attributes:
        student: place of the aligned tokens.
        teacher: place of the average's; None for an encoder and its stored features.
        channels: of the features.
        encoder_bytes: of the encoder's weights in memory.
    """

    teacher: TapPlace | None = None
    encoder_bytes = 0

    def __init__(self, config: AlignmentConfig, model: DiffusionModel, info: DatasetInfo) -> None:
        """
        Args:
            model: on the meta device.
            info: of the images or latents that are trained on.

        Raises:
            ConfigError: the network has no such block, or the teacher no such grid.
        """
        self.student = find_place(model, "block", config.block)
        roles, sizes = model.linear_roles(), dict(model.named_parameters())
        # Of a forward in which every token has a time, beyond those of a plain one.
        vectors = sum(sizes[f"{name}.weight"].numel() for name, role in roles.items() if role == "vector")
        tokens = self.student.grid[0] * self.student.grid[1]
        self._macs_by_token = (tokens - 1) * vectors if config.dual_share else 0
        self._config = config
        if config.teacher == "self":
            self.teacher = find_place(model, "teacher_block", config.teacher_block)
            self.channels, self._macs = self.teacher.dim, model.forward_macs_per_image(model.image_shape)
            if self.teacher.grid != self.student.grid:
                grids = " and ".join(_words(place.grid) for place in (self.student, self.teacher))
                text = f"blocks {config.block} and {config.teacher_block} have tokens on {grids} (choose blocks of one grid)"
                raise ConfigError([f"alignment.teacher_block: {text}"])
            return
        if config.teacher == "stored":
            self._macs, (self.channels, *grid) = 0, info.training_entries[FEATURES][0]
            if tuple(grid) != self.student.grid:
                found, wanted = _words((grid[0], grid[1])), _words(self.student.grid)
                text = f"has features on {found}, and block {config.block} of the network tokens on {wanted}"
                raise ConfigError([f"data.features_path: {text} (extract them with --grid {wanted.replace(' ', '')})"])
            return
        encoder = open_encoder(config, torch.device("meta"))
        shape, _ = info.training_entries.get(PIXELS, (model.image_shape, None))
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                features = encoder(torch.empty(1, *shape, device="meta"), self.student.grid)
        except EvaluationError as error:
            raise ConfigError([f"alignment.teacher: {config.teacher} {error}"]) from error
        self.channels, self._macs = features.shape[2], counter.get_total_flops() // 2
        self.encoder_bytes = sum(parameter.nbytes for parameter in encoder.parameters())

    def projector(self) -> nn.Module:
        """Projector with its first values, by torch's generator."""
        return PROJECTORS[self._config.projector](self.student.dim, self.channels, self.student.grid)

    def flops_per_image(self, steps: int, global_batch_size: int) -> int:
        """Floating-point operations of the projector's training and of the teacher's forward on an image.

        The mean over a run's steps, of which the alignment may have only the first.
        """
        tokens = self.student.grid[0] * self.student.grid[1]
        with torch.device("meta"):  # every weight meets every token once
            trained = tokens * sum(p.numel() for p in self.projector().parameters() if p.ndim > 1)
        share = self._config.steps(steps, global_batch_size) / steps
        return round(share * 2 * (self._macs + 4 * self._macs_by_token + 3 * trained))  # the average's forward is the fourth


def open_encoder(config: AlignmentConfig, device: torch.device) -> nn.Module:
    """Open the encoder of a teacher; on the meta device without its weights. Raises ConfigError."""
    try:
        return ENCODERS[config.teacher](config.path, device).requires_grad_(False)
    except EvaluationError as error:
        raise ConfigError([f"alignment.path: {error}"]) from error


def _words(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
