"""Data with embeddings and a network that takes them: both registered by name, trained, validated, sampled, resumed."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from research.offline_gradients import WHOLE, Gradients
from torchtitan import philox
from torchtitan.conditions import Classes, Condition, ConditionKind, Embeddings
from torchtitan.config.job import ConfigError, load_config
from torchtitan.data import DATASETS, DataConfig, Dataset, DatasetError, DatasetInfo, UnreadableImage
from torchtitan.diffusion.objectives import build_objective
from torchtitan.extraction.image_source import ImageSource
from torchtitan.models import MODELS
from torchtitan.models.base import DiffusionModel, ModelConfig, ModelFamily
from torchtitan.run import run
from torchtitan.settings import setting
from torchtitan.training.data_loading import TrainingData

TOKENS, WIDTH, NULL = 3, 8, 7.0
SHAPE = (1, 4, 4)


def brightness_of(indices: np.ndarray) -> Tensor:
    return torch.from_numpy(indices % 11).to(torch.float32) / 5 - 1


def embedded(brightness: Tensor) -> dict[str, Tensor]:
    """The brightness in every channel of the first two tokens; the third is padding."""
    embeddings = brightness[:, None, None].repeat(1, TOKENS, WIDTH)
    mask = torch.tensor([True, True, False]).repeat(len(brightness), 1)
    return {"embeddings": embeddings, "mask": mask}


@dataclass(kw_only=True)
class CaptionsConfig(DataConfig):
    name: Literal["captions"] = setting("captions", "dataset")
    horizontal_flip: bool = setting(True, "mirror each training image with probability 1/2")
    unreadable: int = setting(-1, "image that cannot be decoded")


class Captions(Dataset):
    """Even images whose embeddings say how bright they are."""

    Config = CaptionsConfig

    @staticmethod
    def info(config):
        nulls = {"embeddings": torch.full((TOKENS, WIDTH), NULL), "mask": torch.zeros(TOKENS, dtype=torch.bool)}
        prompts = embedded(torch.tensor([-0.8, 0.8]))
        return DatasetInfo(SHAPE, Embeddings(nulls, prompts, names=("dark", "bright")))

    def __init__(self, config, split):
        self._length, self._unreadable = (40 if split == "train" else 12), config.unreadable

    def __len__(self):
        return self._length

    def fetch(self, indices):
        if self._unreadable in indices:
            raise UnreadableImage(self._unreadable, f"{self._unreadable}.png", "truncated")
        brightness = brightness_of(indices)
        images = brightness[:, None, None, None].expand(-1, *SHAPE).contiguous()
        return {"images": images, "number": torch.from_numpy(indices)} | embedded(brightness)


@dataclass(kw_only=True)
class ReaderConfig(ModelConfig):
    name: Literal["reader"] = setting("reader", "model family")
    flavor: str = setting("small", "row of the family's table of sizes")
    width: int = setting(16, "hidden width", ge=1)
    label_dropout: float = setting(0.25, "probability of dropping the text in training", ge=0, lt=1)


class Reader(DiffusionModel):
    """A perceptron over the pixels, the time and the mean of the tokens that the mask leaves."""

    seen: list[dict[str, Tensor]] = []

    def __init__(self, config: ReaderConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__()
        self.image_shape, self.out_channels, self.condition_kind = image_shape, image_shape[0], condition_kind
        _, width = condition_kind.entries["embeddings"][0]
        pixels = image_shape[0] * image_shape[1] * image_shape[2]
        self.pixels, self.time = nn.Linear(pixels, config.width), nn.Linear(1, config.width)
        self.text, self.output = nn.Linear(width, config.width), nn.Linear(config.width, pixels)

    def forward(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        assert isinstance(condition, dict) and condition["embeddings"].device == x.device
        if x.device.type != "meta":
            self.seen.append({name: value.clone() for name, value in condition.items()})
        mask = condition["mask"][..., None].to(x.dtype)
        text = (condition["embeddings"] * mask).sum(1) / mask.sum(1).clamp(min=1)  # [B, D]
        hidden = self.pixels(x.flatten(1)) + self.time(t[:, None] / 1000) + self.text(text)
        return self.output(torch.tanh(hidden)).view_as(x)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def init_buffers(self) -> None:
        pass

    def blocks(self) -> list[nn.Module]:
        return []

    def linear_roles(self) -> dict[str, str]:
        return dict.fromkeys(("pixels", "time", "text", "output"), "vector")

    def tokens_per_image(self, image_shape: tuple[int, int, int]) -> int:
        return 1

    def attention_macs(self, num_tokens: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    family = ModelFamily(ReaderConfig, {"small": ReaderConfig()}, Reader, lambda config, shape: [], (Embeddings,))
    monkeypatch.setitem(MODELS, "reader", family)
    monkeypatch.setitem(DATASETS, "captions", Captions)
    monkeypatch.setattr(Reader, "seen", [])


def train(folder: Path, *more: str) -> list[dict]:
    arguments = [
        "--data.name", "captions", "--model.name", "reader", "--job.dump_folder", str(folder), "--job.name", "one",
        "--training.steps", "6", "--training.local_batch_size", "4", "--training.global_batch_size", "8",
        "--metrics.log_freq", "1", "--optimizer.lr", "0.01", "--checkpoint.interval", "3", "--checkpoint.enable", "true",
        "--validation.enable", "true", "--validation.interval", "3", "--validation.num_images", "10",
        "--validation.batch_size", "4", "--sampling.interval", "3", "--sampling.num_steps", "3",
        "--sampling.images_per_class", "2", "--sampling.guidance_scale", "2.5", "--sampling.ema_track", "none",
    ]  # fmt: skip
    assert run(load_config([*arguments, *more], 1)) == 0
    return [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]


def values_of(points: list[dict]) -> list[dict]:
    kept = ("step", "loss", "grad_norm", "validation_metrics")
    return [{tag: value for tag, value in point.items() if tag.startswith(kept)} for point in points]


def test_training_drops_validates_samples_and_resumes(tmp_path):
    points = train(tmp_path)
    assert [point["step"] for point in points if "grad_norm" in point] == [1, 2, 3, 4, 5, 6]
    assert len([point for point in points if "validation_metrics/loss" in point]) == 2

    # The first microbatches saw the embeddings of their samples, null where the draw by the sample number says so.
    dropped = philox.uniform(0, "label_drop", torch.arange(48)) < 0.25
    first = Reader.seen[:2]
    found = {name: torch.cat([each[name] for each in first]) for name in ("embeddings", "mask")}
    assert dropped[:8].any() and torch.equal((found["embeddings"] == NULL).all((1, 2)), dropped[:8])
    assert torch.equal(found["mask"].any(1), ~dropped[:8])
    assert set(found["embeddings"][~dropped[:8]].flatten().tolist()) <= set(brightness_of(np.arange(40)).tolist())

    # A guided forward of the grid: two rows of two images of a prompt each, and as many null conditions.
    (guided, *_) = [each for each in Reader.seen if len(each["mask"]) == 8 and (each["embeddings"][4:] == NULL).all()]
    wanted = embedded(torch.tensor([-0.8, -0.8, 0.8, 0.8]))
    assert torch.equal(guided["embeddings"][:4], wanted["embeddings"]) and not guided["mask"][4:].any()
    grids = sorted((tmp_path / "one" / "samples").glob("step-*.png"))
    assert len(grids) == 2 and np.asarray(Image.open(grids[1])).std() > 0

    again = tmp_path / "again"
    shutil.copytree(tmp_path / "one", again / "one")
    shutil.rmtree(again / "one" / "checkpoint" / "step-00000006")
    (again / "one" / "summary.json").unlink()
    assert values_of(train(again)) == values_of(points)
    assert (again / "one" / "samples" / grids[1].name).read_bytes() == grids[1].read_bytes()


def test_a_network_that_is_told_does_better_than_one_that_is_not(tmp_path, monkeypatch):
    """Near t = 1 the text alone says what the image is."""
    longer = ("--training.steps", "40", "--optimizer.lr", "0.05", "--model.label_dropout", "0", "--sampling.guidance_scale", "1",
              "--sampling.interval", "40", "--validation.interval", "40", "--checkpoint.interval", "40")  # fmt: skip
    told = train(tmp_path / "told", *longer)[-1]
    fetch, same_text = Captions.fetch, embedded(torch.zeros(1))
    repeated = lambda count: {name: value.expand(count, *value.shape[1:]) for name, value in same_text.items()}  # noqa: E731
    monkeypatch.setattr(Captions, "fetch", lambda self, indices: fetch(self, indices) | repeated(len(indices)))
    untold = train(tmp_path / "untold", *longer)[-1]
    assert told["validation_metrics/loss"] < 0.9 * untold["validation_metrics/loss"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_entry_travels_and_is_replaced_with_its_image(num_workers):
    config = CaptionsConfig(unreadable=5, num_workers=num_workers)
    data = TrainingData(
        Captions(config, "train"), config, info=Captions.info(config), seed=3, end_sample=80, global_batch_size=8,
        local_batch_size=4, rank=0, world_size=1,
    )  # fmt: skip
    batches = [data.next_batch() for _ in range(20)]
    data.close()
    for batch, repeated in zip(batches[4:6], data.again(first_sample=16, attempt=0, microbatches=2), strict=True):
        assert batch.keys() == repeated.keys() and all(torch.equal(batch[name], repeated[name]) for name in batch)
    met = torch.cat([batch["number"] for batch in batches])
    assert 5 not in met and met.bincount(minlength=40)[6] == 4  # image 6 stands for image 5 in both epochs
    for batch in batches:
        wanted = embedded(brightness_of(batch["number"].numpy()))
        assert set(batch) == {"images", "number", "embeddings", "mask", "samples"}
        assert all(torch.equal(batch[name], value) for name, value in wanted.items())
        assert torch.equal(batch["images"][:, 0, 0, 0], wanted["embeddings"][:, 0, 0])


def test_offline_gradients_drop_embeddings():
    config = load_config(["--data.name", "captions", "--model.name", "reader"], 1)
    model = Reader(config.model, SHAPE, Captions.info(config.data).condition_kind)
    model.init_weights()
    gradients = Gradients(
        model, build_objective(config.objective, 0), Captions(config.data, "train"), label_dropout=0.5, horizontal_flip=False,
        seed=0, device=torch.device("cpu"),
    )  # fmt: skip
    _, condition, _ = gradients._samples(WHOLE, 0, torch.arange(2000))
    gone = (condition["embeddings"] == NULL).all((1, 2))
    assert gone.float().mean().item() == pytest.approx(0.5, abs=0.05) and torch.equal(gone, ~condition["mask"].any(1))
    assert gradients.group_norms(WHOLE, [8, 8], stream=1).mean_square_norm > 0


# --- what is refused


def problems_of(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(list(arguments), 1)
    return error.value.problems


@pytest.mark.parametrize(("model", "data", "message"), [
    ("dit", "captions", "model.name: dit takes no condition or a class, and data.name = captions gives embeddings "
     "(choose flux or reader, or other data)"),
    ("reader", "digits", "model.name: reader takes embeddings, and data.name = digits gives a class "
     "(choose dit or edm2, or captions encoded as docs/text.md describes, or other data)"),
])  # fmt: skip
def test_a_model_that_does_not_take_what_data_give_is_refused_in_one_line(model, data, message):
    (problem,) = problems_of("--model.name", model, "--data.name", data)
    assert problem.endswith(message)


def test_a_prompt_that_is_not_there_is_refused():
    (problem,) = problems_of("--data.name", "captions", "--model.name", "reader", "--sampling.classes", "[1, 2]")
    assert problem.endswith("[2] is not in data.name = captions, which has the prompts 0 to 1")


def test_a_latent_store_does_not_keep_embeddings():
    info = DatasetInfo((3, 4, 4), Captions.info(None).condition_kind)
    with pytest.raises(DatasetError, match="data.name: captions gives embeddings, and a latent store keeps classes only"):
        ImageSource(CaptionsConfig(), info, "train")


@pytest.mark.parametrize(("broken", "message"), [
    (lambda batch: {name: value for name, value in batch.items() if name != "mask"}, "and no mask, which the dataset"),
    (lambda batch: batch | {"mask": batch["mask"].float()}, r"mask: torch.float32 \[1, 3\], not torch.bool \[1, 3\]"),
    (lambda batch: batch | {"number": batch["number"][1:]}, "number: 0 rows for 1 images"),
    (lambda batch: batch | {"samples": batch["number"]}, "a batch has samples, which the loader adds"),
    (lambda batch: batch | {"number": ["a"]}, "number: is a list, not a tensor of 1 rows"),
    (lambda batch: (batch["images"], batch["number"]), "fetch gives a tuple, not a mapping"),
])  # fmt: skip
def test_a_batch_that_breaks_its_declaration_is_named(monkeypatch, broken, message):
    fetch = Captions.fetch
    monkeypatch.setattr(Captions, "fetch", lambda self, indices: broken(fetch(self, indices)))
    config = CaptionsConfig()
    data = TrainingData(
        Captions(config, "train"), config, info=Captions.info(config), seed=3, end_sample=80, global_batch_size=4,
        local_batch_size=4, rank=0, world_size=1,
    )  # fmt: skip
    with pytest.raises(DatasetError, match=message):
        data.next_batch()


def test_classes_are_not_embeddings():
    assert not MODELS["reader"].takes(Classes(3)) and MODELS["reader"].takes(Captions.info(None).condition_kind)
