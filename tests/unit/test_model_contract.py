"""A family of networks that is not the transformer: what the program asks of it, and what it is told."""

import runpy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from tests.configurations import problems
from torchtitan.conditions import Classes, ConditionKind, Unconditional
from torchtitan.config.job import load_config
from torchtitan.distributed import parallelize
from torchtitan.distributed.compile import compile_blocks
from torchtitan.gns.raw_sums import read_sums
from torchtitan.models import MODELS
from torchtitan.models.base import DiffusionModel, ModelConfig, ModelFamily
from torchtitan.models.flops import MiscountedModel, check_macs, counted_macs_per_image
from torchtitan.run import run
from torchtitan.settings import has_key, setting


@dataclass(kw_only=True)
class ToyConfig(ModelConfig):
    name: Literal["toy"] = setting("toy", "model family")
    flavor: str = setting("small", "row of the family's table of sizes")
    width: int = setting(8, "channels", ge=1)


class Toy(DiffusionModel):
    """Two convolutions and an embedding of classes, without guidance."""

    def __init__(self, config: ToyConfig, image_shape: tuple[int, int, int], kind: ConditionKind) -> None:
        super().__init__()
        self.image_shape, self.out_channels = image_shape, image_shape[0]
        self.condition_kind = kind
        self.first = nn.Conv2d(image_shape[0], config.width, 3, padding=1)
        self.label_embed = nn.Embedding(kind.choices + 1, config.width)
        self.time_embed = nn.Linear(1, config.width)
        self.last = nn.Conv2d(config.width, image_shape[0], 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        c = self.time_embed(t[:, None])
        if condition is not None:
            c = c + self.label_embed(condition)
        return self.last(torch.relu(self.first(x) + c[:, :, None, None]))

    def init_weights(self) -> None: ...

    def init_buffers(self) -> None: ...

    def blocks(self) -> list[nn.Module]:
        return []

    def linear_roles(self) -> dict[str, str]:
        return {"time_embed": "vector"}

    def tokens_per_image(self, image_shape: tuple[int, int, int]) -> int:
        return image_shape[1] * image_shape[2]

    def attention_macs(self, num_tokens: int) -> int:
        return 0


class CountedToy(Toy):
    """The same, with its convolutions counted."""

    def forward_macs_per_image(self, image_shape: tuple[int, int, int]) -> int:
        convolutions = sum(layer.weight.numel() for layer in (self.first, self.last))
        return super().forward_macs_per_image(image_shape) + convolutions * self.tokens_per_image(image_shape)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    family = ModelFamily(ToyConfig, {"small": ToyConfig()}, Toy, problems=lambda config, image_shape: [], conditions=(Classes,))
    monkeypatch.setitem(MODELS, "toy", family)


def problems_of(*arguments: str) -> list[str]:
    return problems(arguments=["--model.name", "toy", *arguments])


# --- floating-point operations


def test_convolutions_that_a_formula_leaves_out_are_refused():
    with torch.device("meta"):
        forgetful, right = (kind(ToyConfig(), (3, 16, 24), Classes(10)) for kind in (Toy, CountedToy))
    by_hand = 8 * 1 + 2 * 3 * 8 * 9 * 16 * 24
    assert counted_macs_per_image(forgetful) == right.forward_macs_per_image((3, 16, 24)) == by_hand
    check_macs(right, "toy")
    with pytest.raises(MiscountedModel, match=rf"model.name = toy: .* says 8 multiply.* torch counts {by_hand:,}; every MFU"):
        check_macs(forgetful, "toy")


# --- what the family does not declare


def test_a_family_of_classes_need_not_drop_labels():
    config = load_config(["--model.name", "toy"], 1)
    assert config.model.label_dropout == 0.0 and config.sampling.guidance_scale == 1.0
    (problem,) = problems_of("--sampling.guidance_scale", "3")
    assert "model.name = toy trains no unconditional prediction to guide away from" in problem


@pytest.mark.parametrize(("key", "value"), [
    ("label_dropout", "0.1"), ("patch_size", "2"),
])  # fmt: skip
def test_a_key_of_another_family_is_said_to_be_one(key, value):
    families = [name for name, family in MODELS.items() if has_key(family.config_class(), key)]
    assert "dit" in families and "toy" not in families
    assert problems_of(f"--model.{key}", value) == [
        f"command line: --model.{key}: unknown key (it is a key of model.name = {' or '.join(families)})"
    ]


def test_a_key_of_other_datasets_is_said_to_be_one(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[data]\nname = "digits"\nlabel_column = "x"\nimage_sise = 3\n')
    first, second = problems_of("--job.config_file", str(path))
    assert "data.label_column: unknown key (it is a key of data.name = " in first
    assert "data.image_sise: unknown key (--help data lists its keys)" in second


@pytest.mark.parametrize(("network", "more", "line"), [
    (Toy, [], "model.name = toy: forward_macs_per_image says 8 multiply-accumulates"),
    (CountedToy, ["--gns.enable", "true"], "gns.single_pass: first.weight belongs to a Conv2d; single gradients are measured at"),
])  # fmt: skip
def test_miscounted_products_and_single_gradients_of_convolutions_are_refused_before_a_folder_is_made(
    network, more, line, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(MODELS, "toy", replace(MODELS["toy"], build=network))
    arguments = ["--model.name", "toy", "--data.name", "synthetic", "--job.dump_folder", str(tmp_path), "--job.name", "one"]
    assert run(load_config([*arguments, *more], 1)) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "one").exists()


# --- the example of a family


@pytest.fixture
def example() -> Iterator[ModelFamily]:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "patch_mlp.py"))
    yield MODELS["patch_mlp"]
    del MODELS["patch_mlp"]


def test_the_example_keeps_the_contract(example):
    image = (3, 4, 6)
    with torch.device("meta"):
        model = example.build(example.flavors["small"], image, Unconditional())
    assert model.forward_macs_per_image(image) == counted_macs_per_image(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    output = model.bfloat16()(torch.randn(2, *image), torch.rand(2))
    assert output.shape == (2, *image) and output.dtype == torch.float32 and output.isfinite().all()


def test_the_example_trains_compiled_in_bfloat16_with_its_gradient_noise_measured(example, tmp_path, monkeypatch):
    monkeypatch.setattr(parallelize, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
    monkeypatch.setattr(parallelize, "compile_objective", lambda objective: None)
    (tmp_path / "one.toml").write_text(
        f'job.dump_folder = "{tmp_path}"\nmodel.name = "patch_mlp"\ndata.name = "digits"\nsampling.enable = false\n'
        'checkpoint.enable = false\ngns.enable = true\ngns.interval = 1\ngns.num_bins = 4\ncompile.enable = true\n'
        'training.mixed_precision_param = "bfloat16"\ntraining.steps = 2\ntraining.global_batch_size = 32\n'
        "training.local_batch_size = 32\n"
    )
    assert run(load_config(["--job.config_file", str(tmp_path / "one.toml")], 1)) == 0
    steps = list(read_sums(tmp_path / "one" / "gns"))
    assert all(sums.measured and (sums.squares[2:, 0].sum(1) > 0).all() for _, sums in steps) and len(steps) == 2
