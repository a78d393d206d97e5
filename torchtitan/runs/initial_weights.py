"""Initial weights of a run, checked by its ranks together: each reads its share of the tensors.

With more ranks than tensors a rank reads one, whatever the size of the network is.
"""

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.checkpoint.checkpointer import checkpoint_path, checkpoint_steps, newest_good, read_state
from torchtitan.checkpoint.shared_verification import shares_of
from torchtitan.config.job import JobConfig
from torchtitan.data.base import DatasetInfo
from torchtitan.distributed.collectives import from_first_rank, of_all_ranks, on_all_ranks
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import WeightsError, check_fits, each_tensor, refuse_not_finite, tensor_sizes
from torchtitan.files.weight_hash import joined_sha256, tensor_sha256
from torchtitan.models.base import DiffusionModel
from torchtitan.runs.network import check_base, frozen_sha256, network_on_meta

logger = logging.getLogger(__name__)


def check_initial_weights(config: JobConfig, info: DatasetInfo, checkpoints: AnyPath) -> str:
    """Check that a run's initial weights fit, are finite and, of a run that trained adapters before, are those that it
    trained them with; collective, before the run's folder is made. They are not read where the run does not need them.

    Args:
        checkpoints: of the run.

    Returns:
        the hash of frozen ones; "" where there are none, or they are drawn.

    Raises:
        CheckpointError: on every rank.
    """
    path, frozen = config.checkpoint.initial_weights, config.lora.enable
    if not path or not from_first_rank(lambda: frozen or not checkpoint_steps(checkpoints)):
        return ""
    model = network_on_meta(config, info)
    try:
        if not config.checkpoint.initial_weights_strict:
            for line in from_first_rank(check_fits, Path(path), model, False):
                logger.warning(f"checkpoint.initial_weights: {path}: {line}")
        digest = check_together(Path(path), model, hashed=frozen, strict=config.checkpoint.initial_weights_strict)
    except WeightsError as error:
        advice = " (--checkpoint.initial_weights_strict false accepts that)"
        lines = (f"{line}{advice if ' tensors are ' in line else ''}" for line in str(error).splitlines())
        raise WeightsError("\n".join(f"checkpoint.initial_weights: {line}" for line in lines)) from error
    if frozen:
        from_first_rank(_check_base, checkpoints, frozen_sha256(config, digest), path)
    return digest


def check_together(path: Path, model: DiffusionModel, *, hashed: bool, strict: bool = True) -> str:
    """Check that a safetensors file has a model's weights, all finite; collective.

    Args:
        path: the file.
        model: on any device.
        hashed: whether its hash is wanted.

    Returns:
        `file_sha256` of it; "" if it is not wanted.

    Raises:
        WeightsError: on every rank.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def own_share() -> tuple[list[str], dict[str, str]]:
        check_fits(path, model, strict)
        return inspect(path, share_of(path, rank, world_size), hashed=hashed)

    found = of_all_ranks(on_all_ranks(own_share, (WeightsError,), None))
    refuse_not_finite(path, sorted(name for bad, _ in found for name in bad))
    return joined_sha256({name: digest for _, digests in found for name, digest in digests.items()}) if hashed else ""


def share_of(path: Path, rank: int, world_size: int) -> list[str]:
    """Share of a rank: names of its tensors; each is one rank's, and all ranks have about as many elements."""
    sizes = {name: {"size": size} for name, size in tensor_sizes(path).items()}
    return shares_of(sizes, world_size)[rank]


def inspect(path: Path, names: list[str], *, hashed: bool) -> tuple[list[str], dict[str, str]]:
    """Read some tensors of a file, one at a time: names of those that are not finite, and the hashes of all if wanted.

    Raises:
        WeightsError: it cannot be read.
    """
    bad, digests = [], {}
    for name, tensor in each_tensor(path, names):
        if not tensor.to(torch.float32).isfinite().all():
            bad.append(name)
        if hashed:
            digests[name] = tensor_sha256(name, tensor)
    return bad, digests


def _check_base(checkpoints: AnyPath, digest: str, path: str) -> None:
    step = newest_good(checkpoints)[0]
    if step is not None:
        checkpoint = checkpoint_path(checkpoints, step)
        check_base(read_state(checkpoint), digest, str(checkpoint), path)
