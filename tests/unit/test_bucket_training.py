"""A run on images of several shapes: trained, validated, sampled, resumed; its rates and its graphs follow the shapes."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from research.offline_gradients import Gradients
from research.timestep_errors import fixed_samples
from tests.bucketed_images import SHAPES, Bucketed, BucketedConfig, registered
from tests.distributed.cases import compiler
from torchtitan.config.job import ConfigError, load_config
from torchtitan.data import DatasetError
from torchtitan.distributed import compile as compile_module
from torchtitan.estimate.roofline import recomputed_share, training_flops_per_image
from torchtitan.evaluation.dataset_images import DatasetImages
from torchtitan.models import build_model
from torchtitan.run import run
from torchtitan.trainer import Trainer
from torchtitan.training.rates import Rates

ARGUMENTS = (
    "--data.name", "bucketed", "--model.name", "flux", "--model.flavor", "debug", "--model.num_double_layers", "1",
    "--model.num_single_layers", "1", "--job.name", "one", "--training.local_batch_size", "4", "--training.global_batch_size",
    "8", "--metrics.log_freq", "1", "--metrics.enable_tensorboard", "false", "--validation.enable", "true",
    "--validation.batch_size", "3",
    "--sampling.num_steps", "2", "--sampling.images_per_class", "2", "--sampling.ema_track", "none",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bucketed():
    with registered():
        yield


def train(folder: Path, *more: str) -> list[dict]:
    assert run(load_config([*ARGUMENTS, "--job.dump_folder", str(folder), *more], 1)) == 0
    return [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_validates_samples_and_resumes(tmp_path, monkeypatch):
    tried, backward = [], Trainer._discarded_backward
    monkeypatch.setattr(Trainer, "_discarded_backward", lambda self, *given: tried.append(given[0]) or backward(self, *given))
    more = ("--training.steps", "8", "--checkpoint.interval", "3", "--validation.interval", "4",
            "--sampling.interval", "8")  # fmt: skip
    points = train(tmp_path, *more)
    assert tried == [SHAPES[1]]  # memory of the largest, before the first step
    steps = [point for point in points if "grad_norm" in point]
    assert [point["step"] for point in steps] == list(range(1, 9))
    assert len([point for point in points if "validation_metrics/loss" in point]) == 2
    # Grids are of the largest shape: 4 x 8 pixels, two columns.
    (grid,) = (tmp_path / "one" / "samples").glob("step-*.png")
    assert np.asarray(Image.open(grid)).std() > 0

    # Tokens and operations are those of the shape of each step.
    config = load_config([*ARGUMENTS, *more], 1)
    info = Bucketed.info(None)
    with torch.device("meta"):
        model = build_model(config.model, info.image_shape, info.condition_kind)
    found = {(round(p["throughput(tps)"] / p["throughput(img/s)"], 6), round(p["tflops"] / p["throughput(img/s)"] * 1e12))
             for p in steps}  # fmt: skip
    wanted = {shape: (model.tokens_per_image(shape), model.flops_per_image(shape)) for shape in SHAPES}
    assert found == {wanted[SHAPES[0]], wanted[SHAPES[1]]} | ({wanted[SHAPES[3]]} & found) and len(found) > 1
    counts = dict(zip(SHAPES, [11, 5, 0, 2], strict=True))
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["flops_per_image"] == round(sum(counts[shape] * wanted[shape][1] for shape in SHAPES) / 18)
    assert summary["flops_per_image"] == training_flops_per_image(config, model)
    config.activation_checkpoint.mode = "full"
    assert recomputed_share(config, model) == pytest.approx(1 / 3)

    again = tmp_path / "again"
    shutil.copytree(tmp_path / "one", again / "one")
    for step in (6, 8):
        shutil.rmtree(again / "one" / "checkpoint" / f"step-{step:08d}")
    (again / "one" / "summary.json").unlink()
    kept = ("step", "loss", "grad_norm", "validation")
    straight, resumed = (
        [{tag: value for tag, value in point.items() if tag.startswith(kept)} for point in each]
        for each in (points, train(again, *more))
    )
    assert resumed == straight


def test_few_graphs_for_all_shapes_are_compiled_before_the_first_step(tmp_path, caplog, monkeypatch):
    shapes = tuple((2, 2 * rows, 2 * columns) for rows in (2, 1, 3) for columns in (1, 3, 4))
    monkeypatch.setattr("tests.bucketed_images.SHAPES", shapes)
    counts = json.dumps([8] * len(shapes))
    more = ("--training.steps", "9", "--data.counts", counts, "--checkpoint.enable", "false", "--data.held_out", counts)
    eager = train(tmp_path / "eager", *more)
    with compiler("eager", objective=True), caplog.at_level(logging.WARNING):
        points = train(tmp_path / "compiled", *more, "--compile.enable", "true")
    (recompiles,) = {point["compile/recompiles"] for point in points if "grad_norm" in point}  # all before the first step
    # Two kinds of block with at most a graph for the first size, one for any, and one for a single token; three graphs of the
    # objective for the first shape, for one more that changes in a side, and for any.
    assert 2 + 3 <= recompiles <= 4 + 6
    assert not [record for record in caplog.records if record.name == compile_module.__name__]
    summary = json.loads((tmp_path / "compiled" / "one" / "summary.json").read_text())
    # Without gradients, for validation and samples, a kind of block has at most as many graphs once more.
    in_all = summary["compile"]["recompiles"]
    assert recompiles < in_all <= recompiles + 4 + 2
    assert summary["compile"] == {"graphs": in_all + 5, "recompiles": in_all, "graph_breaks": 0}
    norms = [[point["grad_norm"] for point in each if "grad_norm" in point] for each in (eager, points)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_rates_are_sums_over_the_shapes_that_were_seen(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    data = SimpleNamespace(images_by_shape={}, data_seconds=0.0)
    rates = Rates(
        data, flops_of=lambda shape: shape[1] * 10**12, tokens_of=lambda shape: shape[1], world_size=2, peak_tflops=100.0
    )
    data.images_by_shape = {(1, 2, 2): 4, (1, 5, 5): 8}
    clock[0] = 2.0
    found = rates.lap(3)
    assert found["throughput(img/s)"] == 6 and found["throughput(tps)"] == 24 and found["tflops"] == found["mfu(%)"] == 12
    with rates.excluded_step():
        data.images_by_shape = {(1, 2, 2): 8, (1, 5, 5): 8}
    data.images_by_shape = {(1, 2, 2): 8, (1, 5, 5): 12}
    clock[0] = 3.0
    found = rates.lap(5)
    assert found["throughput(img/s)"] == 4 and found["throughput(tps)"] == 20 and found["tflops"] == 10


# --- what is refused


def test_a_model_of_one_shape_is_refused():
    with pytest.raises(ConfigError) as error:
        load_config(["--data.name", "bucketed", "--model.name", "dit"], 1)
    assert any("dit takes images of one shape, and data.name = bucketed has 4" in line for line in error.value.problems)


def test_readers_of_one_shape_refuse_buckets():
    config = BucketedConfig()
    dataset, message = Bucketed(config, "validation"), r"data.name = bucketed: .* takes images of one shape"
    model = torch.nn.Linear(1, 1)
    for read in (
        lambda: fixed_samples(dataset, 2, 0),
        lambda: Gradients(model, None, dataset, label_dropout=0, horizontal_flip=False, seed=0, device=torch.device("cpu")),
    ):
        with pytest.raises(DatasetError, match=message):
            read()
    info = Bucketed.info(config)
    monkey = type(info)((3, 4, 8), info.condition_kind, bucket_shapes=info.bucket_shapes)
    with pytest.raises(DatasetError, match=message):
        DatasetImages(config, monkey, "train")
