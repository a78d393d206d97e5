"""The latent store: what is written is what is read, whoever writes it and however often it is interrupted."""

import json
import multiprocessing
import os
import pickle
import signal

import numpy as np
import pytest
import torch

from tests.extractions import content, die_at_rename
from tests.latent_stores import images, plan_of, write_shard, write_store
from torchtitan.errors import LatentStoreError
from torchtitan.latents import LatentStore, SkippedImage, StoreWriter, check_autoencoder, verify_shards
from torchtitan.latents import images_per_shard as default_images_per_shard
from torchtitan.latents.index import PARTIAL_FOLDER, SKIPPED_FILE


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """What the system has taken survives any process; only the order of calls is of interest here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("posterior", [True, False])
@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize(("dtype", "largest_error"), [
    ("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("int8", 0.5 / 127)
])  # fmt: skip
def test_values_are_read_to_half_a_step_of_their_dtype(tmp_path, dtype, largest_error, mirrored, posterior):
    plan = plan_of(dtype=dtype, mirrored=mirrored, posterior=posterior)
    write_store(tmp_path, plan)
    order = np.array([19, 3, 8, 7, 0, 3, 16])
    views = np.array([0, 1, 1, 0, 0, 1, 0]) % plan.views
    values, labels = LatentStore(tmp_path).read(order, views)
    all_values, all_labels = images(plan, 0, 20)
    wanted = all_values[order, views]  # [B, P, C, h, w]
    assert labels.tolist() == all_labels[order].tolist()
    assert values.shape == wanted.shape == (7, 1 + posterior, 4, 8, 8) and values.dtype == torch.float32
    # Half a step: relative to the value, but with int8 to the largest value of its image and channel.
    size = wanted.abs().amax(dim=(-2, -1), keepdim=True) if dtype == "int8" else wanted.abs()
    assert ((values - wanted).abs() <= size * largest_error * (1 + 1e-6)).all()
    assert not torch.equal(values, wanted)


def test_int8_with_a_step_keeps_multiples_of_it_exactly_and_refuses_what_is_beyond(tmp_path):
    plan = plan_of(8, dtype="int8", int8_step=16 / 255, posterior=False, mirrored=False)
    steps = torch.arange(8 * 256).reshape(8, 1, 1, 4, 8, 8) % 256 - 128
    values = steps * (16 / 255)
    writer = StoreWriter(tmp_path, plan)
    writer.write(0, values.float(), torch.zeros(8, dtype=torch.int64))
    writer.finish()
    store = LatentStore(tmp_path)
    stored, scales, _ = store.read_stored(np.arange(8))
    assert np.array_equal(stored, steps[:, 0].numpy())
    assert torch.equal(store.read(np.arange(8))[0], (steps[:, 0] * torch.tensor(16 / 255)).float())
    assert len(np.unique(scales)) == 1
    values[5, 0, 0, 2, 1, 1] = 129 * 16 / 255
    with pytest.raises(LatentStoreError, match="^image 5: 8.09412 is beyond an int8 of step"):
        StoreWriter(tmp_path / "other", plan).write(0, values.float(), torch.zeros(8, dtype=torch.int64))


def test_shards_by_several_writers_in_any_order_give_the_same_bytes(tmp_path):
    write_store(tmp_path / "one")
    writers = [StoreWriter(tmp_path / "many", plan_of()) for _ in range(2)]
    for writer, number in zip((writers[0], writers[1], writers[0]), (2, 0, 1), strict=True):
        assert number in writer.pending()
        write_shard(writer, number)
    writers[1].finish()
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert sorted(content(tmp_path / "one")) == ["index.json", *(f"shard-0000{n}.safetensors" for n in range(3))]


def die_while_writing(folder, moment):
    """Write a store until a call of os.replace, counted from 0, and end there as SIGKILL does."""
    die_at_rename(moment)
    write_store(folder)


def test_killed_writer_goes_on_without_repeating_and_ends_with_the_same_bytes(tmp_path):
    write_store(tmp_path / "straight")
    moments = 8  # the plan; shard and note of each of three; the index
    for moment in range(moments):
        folder = tmp_path / f"killed-{moment}"
        process = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(folder, moment))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with pytest.raises(LatentStoreError, match="not finished; run the command that writes it again"):
            LatentStore(folder)
        # A shard without its note is written again.
        assert len(StoreWriter(folder, plan_of()).pending()) == min(3, 3 - (moment - 1) // 2)
        write_store(folder)
        assert content(folder) == content(tmp_path / "straight")
    process = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(tmp_path / "x", moments))
    process.start()
    process.join()
    assert process.exitcode == 0  # there was no further moment


def test_every_file_is_on_the_disk_before_it_gets_its_name_and_the_index_comes_last(tmp_path, monkeypatch):
    calls, replace = [], os.replace

    def put(draft, final):
        calls.append(f"name {final.name}")
        replace(draft, final)

    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("sync"))
    monkeypatch.setattr(os, "replace", put)
    write_store(tmp_path, plan_of(8))
    names = ["plan.json", "shard-00000.safetensors", "shard-00000.safetensors.json", "index.json"]
    # The folder of the plan; then the content, the new name, and the folder that lists it.
    assert calls == ["sync", *(call for name in names for call in ("sync", f"name {name}", "sync"))]


def test_note_or_shard_that_a_crash_damaged_is_written_again(tmp_path):
    writer = StoreWriter(tmp_path, plan_of())
    for number in range(3):
        write_shard(writer, number)
    note = tmp_path / PARTIAL_FOLDER / "shard-00000.safetensors.json"
    note.write_bytes(note.read_bytes()[:-20])
    (tmp_path / "shard-00002.safetensors").write_bytes(b"")
    assert writer.pending() == [0, 2]
    with pytest.raises(LatentStoreError, match="2 of 3 shards are not written yet"):
        writer.finish()


def test_finished_store_is_left_alone_by_the_same_writer_and_refused_to_another(tmp_path):
    write_store(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = StoreWriter(tmp_path, plan_of())
    assert again.pending() == [] and again.finish().num_images == 20
    with pytest.raises(LatentStoreError, match="holds a store with dtype = 'float16', this would be 'bfloat16'"):
        StoreWriter(tmp_path, plan_of(dtype="bfloat16"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_store_that_was_begun_otherwise_and_a_folder_of_other_files_are_refused(tmp_path):
    write_shard(StoreWriter(tmp_path / "store", plan_of()), 0)
    message = "was begun with num_source_images = 20, this would be 21; give another folder"
    with pytest.raises(LatentStoreError, match=message):
        StoreWriter(tmp_path / "store", plan_of(21))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("")
    with pytest.raises(LatentStoreError, match="holds .*, which is not a latent store's"):
        StoreWriter(tmp_path / "taken", plan_of())
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("posterior", [True, False])
def test_measured_normalization_is_that_of_the_posterior_samples(tmp_path, posterior):
    index = write_store(tmp_path, plan_of(150, images_per_shard=70, posterior=posterior))
    values, _ = LatentStore(tmp_path).read(np.repeat(np.arange(150), 2), np.tile([0, 1], 150))
    means = values[:, 0].double()
    mean = means.mean(dim=(0, 2, 3))
    variance = (means - mean[:, None, None]).square().mean(dim=(0, 2, 3))
    if posterior:
        variance += values[:, 1].double().square().mean(dim=(0, 2, 3))
    assert index.normalization.source == "measured"
    assert index.normalization.shift == pytest.approx(mean.tolist(), rel=1e-9)
    assert index.normalization.scale == pytest.approx((1 / variance.sqrt()).tolist(), rel=1e-9)


def test_store_of_imagenet_has_at_most_a_thousand_files():
    assert plan_of(1_281_167, images_per_shard=default_images_per_shard(1_281_167)).num_shards == 1000
    assert [default_images_per_shard(number) for number in (5, 4_000, 100_000)] == [64, 250, 1024]


def test_pickled_store_reads_the_same_and_takes_no_latents_along(tmp_path):
    write_store(tmp_path)
    store = LatentStore(tmp_path)
    first = store.read(np.arange(20))[0]
    copy = pickle.dumps(store)
    assert len(copy) < 5000
    assert torch.equal(pickle.loads(copy).read(np.arange(20))[0], first)


def test_shards_are_mapped_when_they_are_read_not_at_opening(tmp_path):
    write_store(tmp_path)
    store = LatentStore(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    store.read(np.array([0, 19]))  # of the first and the last shard
    with pytest.raises(LatentStoreError, match="shard-00001.safetensors: cannot be read"):
        store.read(np.array([8]))


def test_store_of_another_autoencoder_is_refused(tmp_path):
    write_store(tmp_path)
    store = LatentStore(tmp_path)
    check_autoencoder(store.index, str(store.folder), {"name": "tiny", "sha256": "0" * 64})
    with pytest.raises(LatentStoreError, match="made with the autoencoder 'tiny', not 'large'"):
        check_autoencoder(store.index, str(store.folder), {"name": "large"})
    with pytest.raises(LatentStoreError, match="another 'tiny' than this one \\(sha256 differ\\)"):
        check_autoencoder(store.index, str(store.folder), {"name": "tiny", "sha256": "1" * 64})
    write_store(tmp_path / "converted", plan_of(autoencoder={"name": "unknown"}))
    check_autoencoder(LatentStore(tmp_path / "converted").index, "x", {"name": "large"})


SKIPPED = [0, 5, *range(8, 16), 23, 24]  # of shards of 8 images: some, all, the last, and the first of the next


def write_with_gaps(folder, plan, skipped):
    """Write the images of a plan that are not to be skipped."""
    writer = StoreWriter(folder, plan)
    for number in writer.pending():
        numbers = plan.source_images_of(number)
        values, labels = images(plan, numbers.start, numbers.stop)
        kept = [slot for slot, image in enumerate(numbers) if image not in skipped]
        left_out = [SkippedImage(image=n, path=f"{n}.png", reason="truncated") for n in numbers if n in skipped]
        writer.write(number, values[kept], labels[kept], left_out)
    return writer.finish()


def test_images_that_are_left_out_leave_the_others_in_their_order(tmp_path):
    plan = plan_of(30)
    index = write_with_gaps(tmp_path, plan, SKIPPED)
    kept = [image for image in range(30) if image not in SKIPPED]
    assert (index.num_images, index.num_source_images) == (len(kept), 30)
    assert [shard.num_images for shard in index.shards] == [6, 0, 7, 5]
    store = LatentStore(tmp_path)
    assert len(store) == len(kept)
    order = np.random.default_rng(0).permutation(len(kept))
    values, labels = store.read(order, order % 2)
    wanted, wanted_labels = images(plan, 0, 30)
    source = np.array(kept)[order]
    assert torch.equal(values, wanted.half().float()[source, order % 2]) and torch.equal(labels, wanted_labels[source])
    assert list(verify_shards(tmp_path, index)) == [""] * 4
    lines = [json.loads(line) for line in (tmp_path / SKIPPED_FILE).read_text().splitlines()]
    assert lines == [{"image": image, "path": f"{image}.png", "reason": "truncated"} for image in SKIPPED]
