"""Lines of the console at a run's start and end."""

import logging
import time
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.cases import make_trainer
from torchtitan.conditions import Classes, Embeddings, Unconditional
from torchtitan.console import _images
from torchtitan.data import DatasetInfo
from torchtitan.data.digits import DigitsConfig
from torchtitan.data.image_folder import ImageFolder, ImageFolderConfig
from torchtitan.reports import Reports


@pytest.mark.parametrize(("kind", "said"), [
    (Unconditional(), "without classes"), (Classes(1), "in 1 class"), (Classes(1000), "in 1,000 classes"),
    (Embeddings({"text": torch.zeros(3)}), "with embeddings"),
])  # fmt: skip
def test_the_images_found_are_counted(kind, said):
    state = SimpleNamespace(config=SimpleNamespace(data=DigitsConfig()), info=DatasetInfo((1, 8, 8), kind), images_per_epoch=1234)
    assert _images(state) == f"1,234 images to train on, beside those held out, {said}"


def test_the_held_out_pictures_of_a_folder_are_counted(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.png").touch()
    data = ImageFolderConfig(path=str(tmp_path), image_size=8)
    info, train = DatasetInfo((3, 8, 8)), ImageFolder(data, "train")
    state = SimpleNamespace(config=SimpleNamespace(data=data), info=info, images_per_epoch=len(train))
    assert _images(state) == "38 images to train on and 2 held out, without classes"


def test_work_is_named_once_it_has_taken_long(monkeypatch):
    said, deadline = [], time.monotonic() + 20
    reports = SimpleNamespace(_first=True, _state=SimpleNamespace(step=7), _say=said.append)
    monkeypatch.setattr("torchtitan.reports._SILENT_SECONDS", 0.2)
    with Reports.named(reports, "short work"):
        pass
    with Reports.named(reports, "saving the checkpoint"):
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said == ["step      7  saving the checkpoint ..."]


ALIGNED = "--alignment.teacher=self --alignment.block=1 --alignment.teacher_block=3 --alignment.stop_steps=2"
ROUTED = "--model.routing.name=tread --model.routing.first_block=2 --model.routing.last_block=2"
HEAD = "--model.intermediate_head=1 --objective.intermediate_share=0.5"
WIDE = "--model.wide_dim=96 --model.wide_layers=1 --model.wide_heads=4"
MEAN_FLOW = "--objective.name=mean_flow --objective.tangent=head --model.intermediate_head=1"


@pytest.mark.parametrize(("words", "lines"), [
    ("", []),
    (ALIGNED, ['alignment: block 1 with block 3 of the average "ema", weight 0.5, until step 2']),
    (
        "--alignment.teacher=digits --alignment.block=1 --alignment.stop_images=32 --training.double_batch_after=[16]",
        ["alignment: block 1 with digits, weight 0.5, until 32 images"],
    ),
    # Of 2,174,976 products a block has 16 x 40,960 + 2 x 16^2 x 64; with 8 tokens 352,256 fewer, with one 647,040.
    (ROUTED, ["routing: blocks 2 to 2 of 3 see 50 % of the tokens: 0.84 times the FLOPs"]),
    (
        f"{ROUTED} --model.routing.finish_steps=2",
        ["routing: blocks 2 to 2 of 3 see 50 % of the tokens, in the last 2 steps all: 0.92 times the FLOPs"],
    ),
    (
        f"{ROUTED} --model.routing.finish_steps=4",
        ["model.routing.finish_steps: 4 is no less than training.steps = 4: no step is routed (lower it)"],
    ),
    (
        f"{ROUTED} --model.routing.keep=0.05",
        [
            "model.routing.keep: 0.05 keeps 1 of an image's 16 tokens (raise it, or lower model.patch_size)",
            "routing: blocks 2 to 2 of 3 see 5 % of the tokens: 0.70 times the FLOPs",
        ],
    ),
    (WIDE, ["wide head: the last 1 of 4 blocks, of width 96 (the others: 64)"]),
    (HEAD, ["intermediate head: behind block 1 of 3, loss x 0.5"]),
    (f"{MEAN_FLOW} --sampling.guidance_scale=1", ["mean flow:", "intermediate head: behind block 1 of 3, loss x 1"]),
    (
        "--objective.cosine_weight=1 --objective.contrastive_weight=0.05",
        ["terms of the velocity, in the training loss alone: cosine 1, contrastive 0.05"],
    ),
    (
        "--model.mup_base_dim=32",
        ["maximal updates: rates and initial weights of width 32 with a feed-forward of 64 are scaled to 64 with 128"],
    ),
])  # fmt: skip
def test_the_start_names_the_methods_that_are_on(words, lines, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    make_trainer(str(tmp_path), "run", steps=4, replicas=1, shards=1, accumulation=1, overrides=tuple(words.split()))
    begins = ("alignment", "routing", "model.", "wide head", "intermediate", "mean flow", "terms of", "maximal")
    said = [line for line in caplog.messages if line.startswith(begins)]
    assert len(said) == len(lines) and all(map(str.startswith, said, lines)), said


def test_the_step_at_which_a_method_ends_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    words = (*ALIGNED.split(), *ROUTED.split(), "--model.routing.finish_steps=1")
    make_trainer(str(tmp_path), "run", steps=4, replicas=1, shards=1, accumulation=1, overrides=words).train()
    said = [line for line in caplog.messages if "ends" in line]
    assert said == ["step      2  alignment ends", "step      3  routing ends: every block sees every token"]
