"""Fixed noisy training images with their posterior means: the estimates of the optimal denoiser, kept for later runs."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from torchtitan import philox
from torchtitan.conditions import Classes, ConditionKind
from torchtitan.data.base import Batch, DataConfig, Dataset, DatasetInfo, Draws, TrainingForm, UnreadableImage
from torchtitan.diffusion.objective import Draw, Objective
from torchtitan.diffusion.posterior_mean import EVERY, Posterior, PosteriorSums
from torchtitan.distributed.collectives import from_first_rank, group_for_work, of_all_ranks
from torchtitan.errors import first_line
from torchtitan.evaluation.validation import held_out_draw
from torchtitan.files.durable import make_folder, replacing
from torchtitan.files.shard_files import write_tensors
from torchtitan.training.buckets import require_one_shape
from torchtitan.training.data_loading import ReplacingReader, mirrored_by_chance

logger = logging.getLogger(__name__)

OPTIMAL_FOLDER = "optimal_losses"  # in the folder of all runs
SEED = 0  # of every run, so that runs are compared on the same images, times and noise
# Sample numbers beyond those of any training, and draws apart from those of held-out images.
_FIRST_SAMPLE, _FIRST_IMAGE = 1 << 41, 1 << 42
_BLOCK_BYTES = 32 << 20
_VERSION = 1  # of what is kept


@dataclass(frozen=True)
class OptimalDraws:
    """Training images as training draws them, each with a fixed time and noise, and the posterior of the clean image.

    Attributes:
        batch: images float32 [M, C, H, W] and their conditions.
        draw: of their times and noise.
        posterior: of the clean image given the noisy one, and its class where the network has classes; the mean as float32.
    """

    batch: Batch
    draw: Draw
    posterior: Posterior

    def __len__(self) -> int:
        return len(self.draw.t)


@dataclass(frozen=True)
class TrainingSet:
    """Training set as a distribution: images that training draws equally likely, in each of its forms.

    Attributes:
        dataset, info, config: of the training split.
        kind: of the network's condition.
    """

    dataset: Dataset
    info: DatasetInfo
    config: DataConfig
    kind: ConditionKind

    def groups(self, batch: Batch) -> Tensor | None:
        """Class of each image, where the network is told it; None: it is told nothing."""
        return batch["class"] if isinstance(self.kind, Classes) else None

    def drawn(self, count: int) -> Batch:
        """Different images, chosen at random, as training draws them."""
        order = torch.arange(len(self.dataset)) + _FIRST_IMAGE
        indices = philox.uniform(SEED, "validation", order).argsort()[:count].sort().values  # neighbours are read together
        draws = Draws(SEED, torch.arange(count) + _FIRST_SAMPLE)
        batch, _, _ = ReplacingReader(self.dataset, self.info).read(indices.numpy(), draws)
        if self.config.horizontal_flip:
            batch["images"] = mirrored_by_chance(batch["images"], draws)
        return batch

    def blocks(self, rank: int, world_size: int, bar: str = "") -> Iterator[tuple[int, list[TrainingForm]]]:
        """Number and forms of each block of images; of every `world_size`-th block."""
        reader = ReplacingReader(self.dataset, self.info)
        size = max(1, _BLOCK_BYTES // (4 * int(np.prod(self.info.image_shape))))
        numbers = range(rank, -(-len(self.dataset) // size), world_size)
        for number in tqdm(numbers, bar, unit="block", delay=2, leave=False, disable=None if rank == 0 else True):
            indices = np.arange(number * size, min((number + 1) * size, len(self.dataset)))
            try:
                forms = self.dataset.training_forms(indices)
            except UnreadableImage:  # in training others take their places
                forms = [TrainingForm(reader.read(indices)[0])]
            yield number, forms + ([_mirrored(form) for form in forms] if self.config.horizontal_flip else [])


def optimal_draws(
    training_set: TrainingSet,
    objective: Objective,
    *,
    count: int,
    timesteps: tuple[float, ...],
    rank: int,
    world_size: int,
    device: torch.device,
    folder: Path,
    advance: Callable[[], Any] = lambda: None,
) -> OptimalDraws:
    """Draw training images, times and noise, and compute the posterior, or read it where it is kept; collective.

    Every call reads the training set once, each rank its share: what is kept holds for a set with the same content.

    Args:
        training_set: of the images.
        objective: of the path and the density of times.
        count: number of images M; of a smaller set, all.
        timesteps: as of `held_out_draw`.
        rank, world_size: of this process.
        device: of the computation.
        folder: where posteriors are kept, for all runs.
        advance: called after each block of the set.

    Raises:
        DatasetError: an image cannot be read, or images are in buckets.
    """
    require_one_shape(training_set.dataset, "the optimal loss")
    count = min(count, len(training_set.dataset))
    batch = training_set.drawn(count)
    draw = held_out_draw(objective, SEED, torch.arange(count), count, tuple(batch["images"].shape[1:]), timesteps)
    found = OptimalDraws(batch, draw, Posterior(torch.empty(0), torch.empty(0)))
    path = folder / f"{_key(training_set, objective, found)}.safetensors"
    group = group_for_work()
    try:
        kept: tuple[Posterior, str] | None = from_first_rank(_read, path, group=group)
        sums = None if kept else _sums(training_set, objective, found, device)
        digest = _go_through(training_set, sums, rank, world_size, device, group, advance)
        if kept and kept[1] == digest:
            return replace(found, posterior=kept[0])
        if sums is None:  # another set with the same images drawn
            sums = _sums(training_set, objective, found, device)
            _go_through(training_set, sums, rank, world_size, device, group, advance)
        sums.over_ranks(group)
        exact = sums.posterior()
        posterior = Posterior(exact.mean.to("cpu", torch.float32).view(batch["images"].shape), exact.variance.cpu())
        from_first_rank(_write, path, posterior, digest, group=group)
        return replace(found, posterior=posterior)
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def _sums(training_set: TrainingSet, objective: Objective, draws: OptimalDraws, device: torch.device) -> PosteriorSums:
    """Empty sums of the noisy images."""
    a, b = objective.path.coefficients(draws.draw.t.to(torch.float64))
    x0, noise = (values.flatten(1).to(torch.float64) for values in (draws.batch["images"], draws.draw.noise))
    groups = training_set.groups(draws.batch)
    groups = torch.full_like(draws.draw.t, EVERY, dtype=torch.int64) if groups is None else groups
    return PosteriorSums(*(each.to(device) for each in (a[:, None] * x0 + b[:, None] * noise, a, b, groups)))


def _go_through(
    training_set: TrainingSet, sums: PosteriorSums | None, rank: int, world_size: int, device: torch.device,
    group: dist.ProcessGroup | None, advance: Callable[[], Any],
) -> str:  # fmt: skip
    """Read the training set, add it to the sums if there are any, and hash its content; collective."""
    digests = {}
    for number, forms in training_set.blocks(rank, world_size, "optimal loss"):
        hashed = hashlib.sha256()
        for form in forms:
            values = (form.batch["images"], training_set.groups(form.batch), form.deviations)
            for each in values:
                hashed.update(b"-" if each is None else each.contiguous().numpy().tobytes())
            if sums is not None:
                images, groups, deviations = (None if each is None else each.to(device) for each in values)
                assert images is not None
                sums.add(images.flatten(1), groups, None if deviations is None else deviations.flatten(1))
        digests[number] = hashed.hexdigest()
        advance()
    of_blocks = {number: digest for part in of_all_ranks(digests, group) for number, digest in part.items()}
    return hashlib.sha256("".join(of_blocks[number] for number in sorted(of_blocks)).encode()).hexdigest()


def _mirrored(form: TrainingForm) -> TrainingForm:
    deviations = None if form.deviations is None else form.deviations.flip(-1)
    return TrainingForm(form.batch | {"images": form.batch["images"].flip(-1)}, deviations)


def _key(training_set: TrainingSet, objective: Objective, draws: OptimalDraws) -> str:
    """Name of what is kept: a hash of all that decides the posterior but the images that are not drawn."""
    described = [_VERSION, objective.config.path, len(training_set.dataset), training_set.config.horizontal_flip]
    hashed = hashlib.sha256(json.dumps(described).encode())
    for values in (draws.batch["images"], training_set.groups(draws.batch), draws.draw.t):
        hashed.update(b"-" if values is None else values.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:32]


def _read(path: Path) -> tuple[Posterior, str] | None:
    """Posterior that is kept, and the hash of its set; None where there is none that can be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return Posterior(file.get_tensor("mean"), file.get_tensor("variance")), file.metadata()["training_set"]
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        logger.warning(f"{path}: cannot be read and is computed anew: {first_line(error)}")
        return None


def _write(path: Path, posterior: Posterior, training_set: str) -> None:
    """Keep a posterior, if the disk allows."""
    tensors = {"variance": posterior.variance, "mean": posterior.mean}
    entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    try:
        make_folder(path.parent)
        with replacing(path) as unfinished:
            write_tensors(unfinished, entries, tensors.values(), {"training_set": training_set})
    except OSError as error:
        logger.warning(f"{path}: the optimal loss cannot be kept for other runs: {first_line(error)}")
