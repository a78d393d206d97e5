"""Inception-2015 against torch-fidelity's values, hand-written blocks and its published size; its file of weights."""

import dataclasses
import hashlib
import importlib.util
import pickle
import sys

import pytest
import torch

from tests.refusals import one_line
from tests.unit.published_state_dicts import inception_state_dict, noise_images
from torchtitan.errors import EvaluationError
from torchtitan.fidelity.extractors import open_extractor
from torchtitan.fidelity.feature_extractor import read_published
from torchtitan.fidelity.inception import Inception2015
from torchtitan.fidelity.published import INCEPTION

# Of torch-fidelity 0.4.0's FeatureExtractorInceptionV3 with these weights and images; `spatial` is the mean over the
# places of its Mixed_6d.branch1x1.
TORCH_FIDELITY = {
    "pooled": [[0.02339371, 0.8854148, 0.2978763, 4.223145], [0.01208801, 0.7603048, 0.3597549, 3.992403]],
    "logits": [[9.732856, -6.206304, -0.007135868, -11.91591], [9.627344, -6.016905, 0.03509808, -11.69335]],
    "spatial": [
        [0.4257722, 1.584619, 0.000111362, 0.2239155, 1.205411, 0.9933342, 0.01472462],
        [0.4591578, 1.598243, 0.002079995, 0.2248456, 1.157321, 0.9653789, 0.01274608],
    ],
}


@pytest.fixture(scope="module")
def state_dict():
    return inception_state_dict()


@pytest.fixture(scope="module")
def extractor(state_dict):
    return Inception2015(state_dict, torch.device("cpu"))


@pytest.fixture(scope="module")
def features(extractor):
    return extractor.extract(noise_images(2, 3, 40, 56))


def test_features_are_those_of_torch_fidelity(features):
    found = {
        "pooled": features["pooled"][:, ::512],
        "logits": features["logits"][:, ::252],
        "spatial": features["spatial"].reshape(2, 17 * 17, 7).mean(1),
    }
    for name, values in found.items():
        expected = torch.tensor(TORCH_FIDELITY[name])
        assert (values - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_features_are_those_of_torch_fidelity_where_it_is_installed(state_dict, extractor, tmp_path, monkeypatch):
    found = importlib.util.find_spec("torch_fidelity")
    if not found:
        pytest.skip("could not import 'torch_fidelity'")
    # Not executed: the package imports all its networks, some of which need torchvision.
    monkeypatch.setitem(sys.modules, "torch_fidelity", importlib.util.module_from_spec(found))
    theirs = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
    torch.save(state_dict, tmp_path / "weights.pth")
    network = theirs.FeatureExtractorInceptionV3("x", ["2048", "logits_unbiased"], str(tmp_path / "weights.pth"))
    spatial = []
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, inputs, output: spatial.append(output[:, :7]))
    images = noise_images(2, 3, 320, 300)
    pooled, logits = network(images)
    found = extractor.extract(images)
    for name, expected in (("pooled", pooled), ("logits", logits), ("spatial", spatial[0].permute(0, 2, 3, 1).flatten(1))):
        assert (found[name] - expected).norm() <= 1e-5 * expected.norm(), name


def test_an_image_has_the_same_features_in_another_batch_and_in_gray(extractor, features):
    alone = extractor.extract(noise_images(2, 3, 40, 56)[1:])
    for name, values in features.items():
        assert (alone[name][0] - values[1]).abs().max() <= 1e-5 * values.abs().max(), name
    gray = noise_images(2, 1, 30, 30)
    rgb = extractor.extract(gray.repeat(1, 3, 1, 1))
    assert all(torch.equal(values, rgb[name]) for name, values in extractor.extract(gray).items())


def test_a_process_that_allows_lower_precision_has_the_same_features(extractor, features):
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = extractor.extract(noise_images(2, 3, 40, 56))
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before
    assert all(torch.equal(values, found[name]) for name, values in features.items())


def test_a_missing_or_other_file_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = one_line(EvaluationError, open_extractor, "inception")
    assert line.startswith("inception: downloads/inception/pt_inception-2015-12-05-6726825d.pth: no such file of weights")
    assert ".venv/bin/python scripts/download.py inception fetches it, 96 MB" in line
    other = tmp_path / "other.pth"
    torch.save({"fc.weight": torch.zeros(3)}, other)
    found = hashlib.sha256(other.read_bytes()).hexdigest()
    line = one_line(EvaluationError, open_extractor, "inception", other)
    assert f"{other}: is not the published file: SHA-256 {found[:12]}..., not 6726825d0af5..." in line
    assert "cannot be read" in one_line(EvaluationError, open_extractor, "inception", tmp_path)


def test_a_file_with_the_hash_is_still_read_without_running_it(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps({"fc.weight": Evil()}))
    pinned = dataclasses.replace(INCEPTION, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    one_line(EvaluationError, read_published, pinned, path)
    assert not (tmp_path / "ran").exists()
