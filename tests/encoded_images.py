"""Small encoded images for the tests of datasets, what they decode to, and exact resumes."""

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from torchtitan.state.resume import load_position
from torchtitan.training.data_loading import TrainingData

SIDE = 8


def image_bytes(number: int, kind: str = "PNG") -> bytes:
    """An image of noise that belongs to the number."""
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def decoded(content: bytes) -> torch.Tensor:
    """What a dataset has to give for it, float32 [3, H, W]."""
    pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def everything(dataset) -> tuple[torch.Tensor, list[int]]:
    batch = dataset.fetch(np.arange(len(dataset)))
    return batch["images"], batch["class"].tolist()


def read_samples(dataset, config, info, steps: int, state=None, ranks: int = 1) -> tuple[dict, dict]:
    """Batches of 12 over all ranks from a state on, by sample number, and the state after them."""
    parts = []
    for rank in range(ranks):
        data = TrainingData(
            dataset, config, info=info, seed=3, end_sample=10_000, global_batch_size=12, local_batch_size=3, rank=rank,
            world_size=ranks,
        )  # fmt: skip
        if state:
            load_position(data, state)
        parts += [data.next_batch() for _ in range(steps * data.microbatches_per_step)]
        data.close()
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    order = joined["samples"].argsort()
    return {key: value[order] for key, value in joined.items()}, data.state_dict()


def assert_resumes_in_mid_epoch(dataset_class, config) -> dict:
    """Four loader processes on one rank, then on two, read what one process reads without a break."""
    info, dataset = dataset_class.info(config), dataset_class(config, "train")
    assert len(dataset) > 60
    straight, _ = read_samples(dataset, config, info, steps=10)
    config.num_workers = 4
    first, state = read_samples(dataset, config, info, steps=3)
    second, _ = read_samples(dataset, config, info, steps=7, state=state, ranks=2)
    for key, value in straight.items():
        assert torch.equal(torch.cat((first[key], second[key])), value)
    assert not torch.equal(straight["images"][:12], straight["images"][12:24])
    return straight
