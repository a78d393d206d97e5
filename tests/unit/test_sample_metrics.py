"""Metrics of samples that a training draws: their arithmetic, targets and refused configurations."""

import re
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.configurations import problems
from tests.launcher import run_on_ranks
from torchtitan.data import DATASETS
from torchtitan.data.digits import DigitsConfig
from torchtitan.errors import EvaluationError
from torchtitan.evaluation import sample_metrics
from torchtitan.evaluation.config import EvaluationConfig
from torchtitan.evaluation.dataset_images import DatasetImages
from torchtitan.evaluation.sample_metrics import SampleMetrics, measure_samples
from torchtitan.evaluation.targets import newly_reached
from torchtitan.fidelity.extractors import open_extractor
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Options
from torchtitan.fidelity.metrics import METRICS
from torchtitan.pictures.grids import to_rgb
from torchtitan.statistics.interval import Interval
from torchtitan_dit.commands import evaluate

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, str]:
    folder, found = tmp_path_factory.mktemp("references"), {}
    for split in ("train", "validation"):
        words = ["reference", "digits", "--name", split, "--split", split, "--extractor", "digits"]
        found[split] = str(folder / f"{split}.npz")
        assert evaluate.main([*words, "--output", found[split]]) == 0
    return found


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    dataset = DATASETS["digits"](DigitsConfig(), "validation")
    return to_rgb(dataset.fetch(np.arange(len(dataset)))["images"].numpy())


def features(pixels: np.ndarray) -> dict[str, np.ndarray]:
    images = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    return {name: rows.numpy() for name, rows in open_extractor("digits", None, CPU).extract(images).items()}


@pytest.mark.parametrize("made", [True, False])
def test_metrics_of_drawn_samples_are_those_of_their_features(references, pixels, made, monkeypatch, capsys, caplog):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    noisy = np.clip(pixels + np.random.default_rng(0).normal(0, 20, pixels.shape), 0, 255).astype(np.uint8)
    config = EvaluationConfig(
        metrics=["prdc", "fd", "is", "memorisation", "accuracy"], extractor="digits", count=150,
        reference=references["train"] if made else "train", held_out=references["validation"] if made else "validation",
    )  # fmt: skip
    metrics = SampleMetrics(config, CPU, (8, 8), None, open_split, num_classes=10)
    classes = DATASETS["digits"](DigitsConfig(), "validation").fetch(np.arange(150))["class"].numpy()
    found: dict[str, Interval] = {}
    for _ in range(2):  # splits are extracted once
        before, found = found, dict(metrics.measure(lambda numbers: noisy[numbers], 64, classes).values)
    assert found == before
    assert "features: " in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.setattr(sample_metrics, "_SILENT_SECONDS", -1.0)
    with caplog.at_level("INFO"):
        metrics.measure(lambda numbers: noisy[numbers], 64, classes)
    assert "drawing 150 samples: 67%" in caplog.text  # two of three batches
    training = DATASETS["digits"](DigitsConfig(), "train")
    training = features(to_rgb(training.fetch(np.arange(len(training)))["images"].numpy()))
    samples, reference, held_out = (
        FeatureSet(name, "digits", rows, classes=classes)
        for name, rows in (("samples", features(noisy[:150])), ("reference", training), ("held out", features(pixels)))
    )
    wanted: dict[str, Interval] = {}
    for name in config.metrics:
        wanted |= METRICS[name].measure(samples, reference, Options(held_out=held_out)).values
    assert list(found) == list(wanted)
    for name, interval in wanted.items():
        ends = (found[name].value, found[name].lower, found[name].upper)
        assert ends == pytest.approx((interval.value, interval.lower, interval.upper), rel=1e-4, abs=1e-6)


def open_split(split: str) -> DatasetImages:
    return DatasetImages(DigitsConfig(), DATASETS["digits"].info(DigitsConfig()), split)


def test_a_split_of_too_many_images_or_of_latents_is_refused(monkeypatch):
    monkeypatch.setattr(sample_metrics, "MOST_IMAGES", 1499)
    config = EvaluationConfig(extractor="digits", reference="train", count=80)
    with pytest.raises(EvaluationError, match=r"^evaluation.reference: dataset digits has 1,500 images, more than the 1,499"):
        SampleMetrics(config, CPU, (8, 8), None, open_split)

    def latents(split: str) -> DatasetImages:
        raise EvaluationError("dataset latents: holds latents, not images")

    with pytest.raises(EvaluationError, match="^evaluation.reference: dataset latents: holds latents"):
        SampleMetrics(config, CPU, None, None, latents)


def test_an_image_of_a_split_that_one_rank_cannot_read_is_an_error_of_all():
    found = run_on_ranks("tests.evaluations:damaged_split_on_this_rank", 2, {"images": 1500})
    assert found == ["dataset digits: image 1499 is damaged"] * 2


class Nan:
    """Sampler of images of which two in a batch are not finite."""

    @contextmanager
    def drawing(self, seed, **method):
        yield lambda choices, numbers: torch.where(numbers[:, None, None, None] % 20 == 3, torch.nan, torch.zeros(1, 1, 8, 8))


def test_samples_that_are_not_finite_are_not_measured(references, pixels):
    metrics = SampleMetrics(EvaluationConfig(extractor="digits", reference=references["train"], count=80), CPU, (8, 8), None)
    sampler = Nan()
    with pytest.raises(EvaluationError, match="^2 of 40 samples have values that are not finite$"):
        measure_samples(metrics, sampler, torch.arange(80) % 10, 0, batch_size=40)


@pytest.mark.parametrize("keys, reason", [
    ({"count": 30}, r"\[evaluation\]: fd: a covariance of 64 features from 30 images .* or evaluation.allow_small = true"),
    ({"size": (16, 16)}, r"\[evaluation\]: .*: images of 8 x 8 pixels, and the samples have 16 x 16"),
    ({"metrics": ["accuracy"], "reference": ""},
     r"\[evaluation\]: accuracy: digits knows 10 classes, and the samples are of none"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_training(references, keys, reason):
    size = keys.pop("size", (8, 8))
    config = EvaluationConfig(**({"extractor": "digits", "reference": references["train"], "count": 100} | keys))
    with pytest.raises(EvaluationError, match=f"^{reason}"):
        SampleMetrics(config, CPU, size, None)


def test_a_target_is_reached_once_and_from_the_side_that_is_better():
    config = EvaluationConfig(metrics=["fd", "is"], targets=[5.0, 2.0])
    assert newly_reached(config, {"fd": Interval(4.0)}, {}) == ["fd <= 5"]
    assert newly_reached(config, {"fd": Interval(2.0)}, {"fd <= 5": {}}) == ["fd <= 2"]
    higher = EvaluationConfig(metrics=["is"], targets=[9.0])
    assert newly_reached(higher, {"is": Interval(8.9)}, {}) == []
    assert newly_reached(higher, {"is": Interval(9.5)}, {}) == ["is >= 9"]


@pytest.mark.parametrize("keys, key, reason", [
    ('metrics = ["fid"]\nextractor = "digits"\nreference = "x"', "metrics", "fid is of inception features; .* it is fd"),
    ("", "reference", "is empty, and fd needs one"),
    ('metrics = ["is"]\nreference = "x"', "reference", "has no effect on is"),
])  # fmt: skip
def test_configurations_that_measure_nothing_are_refused(tmp_path, monkeypatch, keys, key, reason):
    monkeypatch.chdir(tmp_path)
    (line,) = problems(f"[evaluation]\nenable = true\n{keys}")
    assert re.search(rf"evaluation\.{key}\S*: .*{reason}", line), line
