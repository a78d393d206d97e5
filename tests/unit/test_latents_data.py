"""The dataset that reads a latent store: what it draws, from what, and that nothing else changes it."""

import pickle

import numpy as np
import pytest
import torch

from tests.configurations import problems
from tests.encoded_images import assert_resumes_in_mid_epoch, read_samples
from tests.latent_stores import SHAPE, images, plan_of, write_store
from tests.refusals import one_line
from torchtitan import philox
from torchtitan.data import DatasetError
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.latents import LatentStore, Normalization
from torchtitan.training.data_loading import validation_batches
from torchtitan.training.sample_order import SampleOrder

COUNT = 72  # steps of 12 make whole epochs
NORMALIZATION = Normalization(shift=[1.0, 0.5, 0.0, -1.0], scale=[0.5, 0.25, 2.0, 1.0], source="given")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    write_store(folder, plan_of(COUNT, normalization=NORMALIZATION, class_names=list("abcdefghij")))
    return str(folder)


def config_of(path, **keys):
    return LatentsConfig(**{"path": path, "validation_fraction": 0.0} | keys)


def read_epochs(config, epochs=1):
    """Everything that is read in whole epochs, in order."""
    return read_samples(Latents(config, "train"), config, Latents.info(config), steps=epochs * COUNT // 12)[0]


def normalised(raw):
    shift, scale = torch.tensor(NORMALIZATION.shift), torch.tensor(NORMALIZATION.scale)
    return (raw - shift[:, None, None]) * scale[:, None, None]


def moments(path):
    """Means and deviations as stored, float32 [N, V, C, h, w] each."""
    store = LatentStore(path)
    values = torch.stack([store.read(np.arange(COUNT), np.full(COUNT, view))[0] for view in (0, 1)], dim=1)
    return values[:, :, 0], values[:, :, 1]


def epochs_by_image(read, path, seed=3):
    """Images as read [E, N, C, h, w] in the store's order, and sample numbers [E, N]."""
    samples = read["samples"]
    order = SampleOrder(COUNT, seed, 0).indices(samples.numpy())
    epochs = len(samples) // COUNT
    found, numbers = torch.empty(epochs, COUNT, *SHAPE), torch.empty(epochs, COUNT, dtype=torch.int64)
    found[samples // COUNT, order], numbers[samples // COUNT, order] = read["images"], samples
    return found, numbers


def test_training_draws_view_and_posterior_of_each_sample_number(path):
    means, stds = moments(path)
    found, samples = epochs_by_image(read_epochs(config_of(path), epochs=2), path)
    plain, _ = epochs_by_image(read_epochs(config_of(path, sample_posterior=False), epochs=2), path)
    for epoch in range(2):
        views = (philox.uniform(3, "horizontal_flip", samples[epoch]) < 0.5).long()
        noise = philox.normal(3, "posterior", samples[epoch], SHAPE)
        rows = torch.arange(COUNT)
        wanted = normalised(means[rows, views] + stds[rows, views] * noise)
        torch.testing.assert_close(found[epoch], wanted)
        assert torch.equal(plain[epoch], normalised(means[rows, views]))


def test_what_is_read_does_not_depend_on_ranks_workers_or_a_resume(path):
    assert_resumes_in_mid_epoch(Latents, config_of(path))


def test_validation_images_are_the_same_each_time_and_unmirrored_samples(path):
    means, stds = moments(path)
    dataset = Latents(config_of(path, validation_fraction=0.5), "validation")
    batches = list(validation_batches(dataset, Latents.info(config_of(path)), COUNT // 2, 5, 0, 1))
    found = torch.cat([batch["images"] for batch in batches])[: COUNT // 2]
    rows = torch.arange(1, COUNT, 2)
    noise = philox.normal(0, "posterior", rows, SHAPE)
    torch.testing.assert_close(found, normalised(means[rows, 0] + stds[rows, 0] * noise))
    assert torch.equal(pickle.loads(pickle.dumps(dataset)).fetch(np.arange(COUNT // 2))["images"], found)


def test_held_out_images_are_spread_evenly_and_left_out_of_training(path):
    for fraction in (0.05, 0.1, 1 / 3, 0.9):
        config = config_of(path, validation_fraction=fraction)
        trained, held_out = Latents(config, "train"), Latents(config, "validation")
        assert len(held_out) == int(COUNT * fraction + 1e-9) and len(trained) + len(held_out) == COUNT
        gaps = np.diff(held_out._numbers)
        assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
        assert sorted([*trained._numbers, *held_out._numbers]) == list(range(COUNT))
    with pytest.raises(DatasetError, match="validation_fraction: 0.0 leaves no image for validation"):
        Latents(config_of(path), "validation")


def test_validation_store_is_normalised_as_the_trained_one(path, tmp_path):
    other = Normalization(shift=[9.0] * 4, scale=[9.0] * 4, source="given")
    write_store(tmp_path / "val", plan_of(16, normalization=other, class_names=list("abcdefghij"), mirrored=False))
    keys = {"path": path, "validation_path": str(tmp_path / "val"), "sample_posterior": False}
    held_out = Latents(LatentsConfig(**keys), "validation")
    wanted = LatentStore(tmp_path / "val").read(np.arange(16))[0][:, 0]
    torch.testing.assert_close(held_out.fetch(np.arange(16))["images"], normalised(wanted))
    assert len(held_out) == 16 and len(Latents(LatentsConfig(**keys), "train")) == COUNT


def test_latents_without_posterior_or_mirror_are_read_as_they_are(tmp_path):
    plan = plan_of(8, normalization=NORMALIZATION, posterior=False, mirrored=False, num_classes=0, dtype="bfloat16")
    write_store(tmp_path, plan)
    config = config_of(str(tmp_path))
    dataset = Latents(config, "train")
    batch = dataset.fetch(np.arange(8))
    found = batch["images"]
    torch.testing.assert_close(found, normalised(images(plan, 0, 8)[0][:, 0, 0].bfloat16().float()))
    assert set(batch) == {"images"} and Latents.info(config).num_classes == 0
    with pytest.raises(DatasetError, match="^data.sample_posterior: .* keeps no .*; leave the key out$"):
        Latents.info(config_of(str(tmp_path), sample_posterior=True))


def test_stores_that_cannot_be_read_are_refused_in_one_line(path, tmp_path):
    write_store(tmp_path / "val", plan_of(16, autoencoder={"name": "another"}, class_names=list("abcdefghij")))
    for keys, message in {
        (("path", ""),): "data.path: not given; latents needs a latent store",
        (("path", str(tmp_path)),): f"data.path: {tmp_path}: no latent store, it has no index.json",
        (("validation_path", str(tmp_path / "x")),): f"data.validation_path: {tmp_path / 'x'}: no such folder",
        (("validation_path", str(tmp_path / "val")),): "its autoencoder is not that of",
    }.items():
        said = one_line(DatasetError, Latents.info, config_of(**{"path": path} | dict(keys)))
        assert said.startswith("data.") and message in said


def test_keys_of_latents_are_refused_by_other_datasets_and_where_they_have_no_effect(path, caplog):
    said = problems(arguments=["--model.flavor", "debug", "--data.name", "digits", "--data.sample_posterior", "true"])
    assert "data.sample_posterior: unknown key" in "\n".join(said)
    words = ["--data.name", "latents", "--data.path", path, "--data.validation_path", path]
    said = problems(arguments=["--model.flavor", "debug", *words, "--data.validation_fraction", "0.1"])
    caplog.clear()
    assert "data.validation_fraction: has no effect when data.validation_path =" in "\n".join(said)
    Latents.info(config_of(path, validation_path=f"{path}/."))
    assert caplog.messages == [f"{path}/.: the held-out images are those that are trained on (data.validation_path)"]


def test_noise_of_a_large_batch_is_that_of_its_samples(path, monkeypatch):
    config = config_of(path)
    whole = read_epochs(config)["images"]
    monkeypatch.setattr("torchtitan.data.latents.NUMBERS_AT_A_TIME", 2 * 4 * 8 * 8)  # two images at a time, of batches of three
    torch.testing.assert_close(read_epochs(config)["images"], whole)
