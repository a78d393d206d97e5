"""Snapshots of the power-function averages while a run trains, from which averages of any length are put together later.

    ema/snapshots/step-00001000/   as a checkpoint's folder: shards, state.json, manifest.json

Each snapshot names those before it by the hash of their manifests, and so does every checkpoint: a run that resumes
continues its own series, and a reader sees a snapshot that is missing, damaged or of another run.
"""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.checkpoint.checkpointer import Checkpointer, read_state
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.manifest import MANIFEST, checkpoint_path, checkpoint_steps, hash_file, read_manifest
from torchtitan.checkpoint.store import store_of
from torchtitan.distributed.collectives import from_first_rank
from torchtitan.errors import CheckpointError, DamagedFile, first_line
from torchtitan.pictures.number_text import counted
from torchtitan.settings.record import config_differences, effective
from torchtitan.training.config import EMAConfig
from torchtitan.training.ema import EMABank

logger = logging.getLogger(__name__)

EMA_FOLDER = "ema"
FROZEN, AVERAGED, BESIDE = "model.", "ema.", "objective."  # prefixes of tensors in a snapshot


class EMASnapshots:
    """Snapshots of one run: written at their interval, and taken back when the run resumes from an earlier step.

    A snapshot holds the averages of `kind = "power"`, what else the network's weights need as it is (buffers, and
    parameters that are not trained), and the objective's tensors.
    One that cannot be written does not end the run: it is missing in the series. Every method is collective.
    """

    def __init__(self, run: Path, config: Any, bank: EMABank, parameters: dict[str, nn.Parameter]) -> None:
        """Open the series of a run, by its JobConfig."""
        self.folder = snapshot_folder(run)
        self._run_config, self._config = config, config.ema
        self._images_per_step = config.training.global_batch_size
        self._bank, self._parameters = bank, parameters
        self._store = store_of(self.folder)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._writer = Checkpointer(self.folder, CheckpointConfig(keep_latest_k=0), rank)
        self._written: list[tuple[int, str]] = []  # step, and the hash of the manifest; "" where writing failed

    def due(self, progress: int, images: int) -> bool:
        """Check whether a step reached a multiple of the interval."""
        interval, seen = self._config.snapshot_interval, progress * self._images_per_step
        return interval > 0 and seen // interval > (seen - images) // interval

    @property
    def enabled(self) -> bool:
        return self._config.snapshot_interval > 0

    def save(self, step: int, progress: int, buffers: dict[str, Tensor], beside: dict[str, Tensor]) -> None:
        """Save a snapshot of the present averages; returns when it is written."""
        frozen = {name: parameter.detach() for name, parameter in self._parameters.items() if not parameter.requires_grad}
        content = {FROZEN + name: tensor for name, tensor in (frozen | buffers).items()}
        content |= {BESIDE + name: tensor for name, tensor in beside.items()}
        averages = {
            f"{AVERAGED}{track}.{name}": tensor
            for track in power_tracks(self._config)
            for name, tensor in self._bank.tracks[track].items()
            if self._parameters[name].requires_grad
        }
        state = {
            "step": step, "progress": progress, "images": progress * self._images_per_step,
            "tracks": power_tracks(self._config), "dtype": self._config.snapshot_dtype, "earlier": self._written,
            "config": effective(self._run_config),
        }  # fmt: skip
        dtype = getattr(torch, self._config.snapshot_dtype)
        self._writer.save(step, content | averages, state, stored_as=dict.fromkeys(averages, dtype))
        failed = self._writer.wait()
        self._written.append((step, "" if failed else from_first_rank(self._hash, step)))

    def state_dict(self) -> list:
        return [list(entry) for entry in self._written]

    def load_state_dict(self, written: list, step: int) -> None:
        """Continue the series of a checkpoint: snapshots after its step are removed, as training writes them again.

        Those of another configuration, and damaged ones, are not known to be written again: they are set aside.

        Args:
            written: as `state_dict` returned it; empty at the start of a run.

        Raises:
            CheckpointError: the folder cannot be read or changed.
            ValueError, TypeError: it is no such state.
        """
        self._written = [(int(of_step), str(digest)) for of_step, digest in written]
        if self.enabled:
            from_first_rank(self._take_back, step)

    def _take_back(self, step: int) -> None:
        try:
            self._store.prepare()
            kept = []
            for later in (later for later in checkpoint_steps(self.folder) if later > step):
                path = checkpoint_path(self.folder, later)
                if self._is_own(path):
                    self._store.delete(later)
                elif (path / MANIFEST).exists():
                    kept.append(self._store.set_aside(later))
            if kept:
                what = f"{counted(len(kept), 'snapshot')} after step {step} of another configuration, or damaged"
                logger.warning(f"{self.folder}: {what}; kept as {kept[-1]}{' and the like' if kept[1:] else ''}")
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be changed: {first_line(error)}") from error

    def _is_own(self, path: Path) -> bool:
        try:
            read_manifest(path)
            config = read_state(path).get("config")
        except (DamagedFile, CheckpointError):
            return False
        return isinstance(config, dict) and bool(config) and not config_differences(config, self._run_config)

    def _hash(self, step: int) -> str:
        try:
            return hash_file(checkpoint_path(self.folder, step) / MANIFEST)
        except OSError:
            return ""  # it is gone already, and missing in the series


def snapshot_folder(run: Path) -> Path:
    """Folder of a run's snapshots."""
    return run / EMA_FOLDER / "snapshots"


def power_tracks(config: EMAConfig) -> dict[str, float]:
    """Standard deviations of the power-function averages, by name."""
    return {track.name: track.sigma_rel for track in config.tracks if track.kind == "power"}
