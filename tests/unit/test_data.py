"""Datasets and the order in which training and validation read them."""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from data import DATASETS, DataConfig, DatasetError, DatasetInfo
from data.cifar10 import Cifar10, Cifar10Config
from data.digits import Digits, DigitsConfig
from data.synthetic import Synthetic, SyntheticConfig, mode_variances, optimal_velocity_loss
from torchtitan.diffusion import philox
from torchtitan.settings import setting
from torchtitan.training.data_loading import SampleOrder, TrainingData, validation_batches

# ---------------------------------------------------------------------------------------------- order


@dataclass(kw_only=True)
class NumberedConfig(DataConfig):
    name: Literal["numbered"] = setting("numbered", "dataset")
    horizontal_flip: bool = setting(False, "mirror")


class Numbered:
    """Image i has i in its left pixel and -1 in its right one; `broken` cannot be read."""

    Config = NumberedConfig

    def __init__(self, length: int, broken: int = -1) -> None:
        self._length = length
        self._broken = broken

    @staticmethod
    def info(config):
        return DatasetInfo(image_shape=(1, 1, 2), num_classes=0)

    def __len__(self):
        return self._length

    def fetch(self, indices):
        if self._broken in indices:
            raise OSError("disk\nfell off")
        left = torch.from_numpy(indices).to(torch.float32)
        images = torch.stack((left, -torch.ones_like(left)), dim=-1)[:, None, None]
        return images, torch.zeros(len(indices), dtype=torch.int64)


def training_data(dataset, rank=0, world_size=1, *, total=120, size=12, local=2, seed=3, config=None, **keys):
    config = config or NumberedConfig(**keys)
    return TrainingData(
        dataset, config, info=dataset.info(config), seed=seed, end_sample=total, global_batch_size=size,
        local_batch_size=local, rank=rank, world_size=world_size,
    )  # fmt: skip


def read_all(data, steps):
    batches = [data.next_batch() for _ in range(steps * data.microbatches_per_step)]
    data.close()
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def read_layout(world_size, local, steps=10, **keys):
    """All ranks' batches, put in the order of sample numbers."""
    ranks = [
        read_all(training_data(Numbered(30), rank, world_size, local=local, **keys), steps)
        for rank in range(world_size)
    ]
    merged = {key: torch.cat([rank[key] for rank in ranks]) for key in ranks[0]}
    return {key: value[merged["samples"].argsort()] for key, value in merged.items()}


def image_numbers(batch):
    return batch["images"][:, 0, 0, 0].to(torch.int64)


def test_every_image_is_read_once_per_epoch_over_ranks_and_microbatches():
    batch = read_layout(world_size=3, local=2)  # 12 per step does not divide 30: steps straddle epochs
    assert batch["samples"].tolist() == list(range(120))
    epochs = image_numbers(batch).reshape(4, 30)
    assert (epochs.sort(dim=1).values == torch.arange(30)).all()
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


@pytest.mark.parametrize(("world_size", "local"), [(1, 3), (1, 1), (2, 6), (2, 3), (4, 3), (6, 1)])
def test_samples_do_not_depend_on_ranks_or_accumulation(world_size, local):
    one = read_layout(world_size=1, local=12, horizontal_flip=True)
    other = read_layout(world_size=world_size, local=local, horizontal_flip=True)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_each_step_covers_its_own_samples_microbatch_by_microbatch():
    data = training_data(Numbered(30), rank=1, world_size=2, local=3)
    assert [data.next_batch()["samples"].tolist() for _ in range(3)] == [[3, 4, 5], [9, 10, 11], [15, 16, 17]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_within_an_epoch_equals_the_uninterrupted_run(num_workers, world_size):
    straight = read_layout(world_size=1, local=12, horizontal_flip=True)
    before = training_data(Numbered(30), num_workers=num_workers, horizontal_flip=True)
    first = read_all(before, steps=4)  # 48 samples: within the second epoch
    state = pickle.loads(pickle.dumps(before.state_dict()))
    assert state == {"next_sample": 48, "attempt": 0}
    ranks = []
    for rank in range(world_size):
        after = training_data(Numbered(30), rank, world_size, num_workers=num_workers, horizontal_flip=True)
        after.next_batch()  # a loader that already runs must be replaced
        after.load_state_dict(state)
        ranks.append(read_all(after, steps=6))
    images = torch.cat([first["images"], *(rank["images"] for rank in ranks)])
    samples = torch.cat([first["samples"], *(rank["samples"] for rank in ranks)])
    assert torch.equal(images[samples.argsort()], straight["images"])


def test_state_within_a_step_is_that_of_its_beginning():
    data = training_data(Numbered(30), local=3)
    for _ in range(6):
        data.next_batch()
    assert data.state_dict()["next_sample"] == 12
    data.close()
    assert data.next_batch()["samples"][0] == 12


def test_flips_are_a_function_of_the_sample_number():
    data = training_data(Numbered(30), total=4000, size=400, local=400, horizontal_flip=True)
    batch = read_all(data, steps=10)
    flipped = batch["images"][:, 0, 0, 0] == -1
    assert torch.equal(flipped, philox.uniform(3, "horizontal_flip", torch.arange(4000)) < 0.5)
    assert 0.46 < flipped.float().mean() < 0.54
    plain = read_all(training_data(Numbered(30), total=4000, size=400, local=400), steps=10)
    assert (plain["images"][:, 0, 0, 1] == -1).all()
    assert torch.equal(batch["images"][flipped].flip(-1), plain["images"][flipped])
    assert torch.equal(batch["images"][~flipped], plain["images"][~flipped])


def test_another_attempt_or_seed_gives_another_order_and_other_flips():
    def read(attempt, seed):
        data = training_data(Numbered(30), seed=seed, horizontal_flip=True)
        data.load_state_dict({"next_sample": 0, "attempt": attempt})
        return read_all(data, steps=10)

    runs = [read(attempt, seed) for attempt, seed in ((0, 3), (1, 3), (0, 4))]
    assert torch.equal(runs[0]["images"], read(0, 3)["images"])
    for number, run in enumerate(runs):
        for other in runs[:number]:
            left, right = run["images"].amax(dim=(1, 2, 3)), other["images"].amax(dim=(1, 2, 3))
            assert (left != right).float().mean() > 0.8  # the order: which image
            assert 0.3 < ((run["images"][..., 0] == -1) != (other["images"][..., 0] == -1)).float().mean() < 0.7


def test_the_order_is_the_same_on_every_machine():
    assert SampleOrder(10, 5, 1).indices(np.arange(10, 20)).tolist() == [3, 6, 7, 5, 2, 8, 9, 4, 1, 0]


def test_reading_past_the_end_is_refused():
    data = training_data(Numbered(30), total=12, local=12)
    data.next_batch()
    with pytest.raises(RuntimeError, match="12 samples"):
        data.next_batch()


def test_batch_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="not a multiple of 2 ranks x 5"):
        training_data(Numbered(30), world_size=2, local=5)


def test_loading_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    read_all(training_data(Numbered(30)), steps=2)
    assert torch.equal(torch.rand(3), expected)


# ---------------------------------------------------------------------------------------- loader processes


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_read_names_dataset_image_and_cause(num_workers):
    data = training_data(Numbered(30, broken=17), num_workers=num_workers)
    with pytest.raises(DatasetError) as caught:
        read_all(data, steps=3)
    assert str(caught.value) == "dataset numbered: image 17 cannot be read: OSError: disk fell off"
    data.close()


def test_a_dataset_that_breaks_its_contract_is_named():
    class Mislabelled(Numbered):
        def fetch(self, indices):
            images, labels = super().fetch(indices)
            return images, labels + torch.from_numpy(indices == 4)

    class Misshapen(Numbered):
        def fetch(self, indices):
            images, labels = super().fetch(indices)
            return images.double(), labels

    with pytest.raises(DatasetError, match="^dataset numbered: image 4 cannot be read: label 1 is not in 0..0$"):
        read_all(training_data(Mislabelled(30)), steps=3)
    with pytest.raises(DatasetError, match="torch.float64"):
        training_data(Misshapen(30)).next_batch()


def test_a_killed_loader_process_is_reported_in_one_line():
    known = set(multiprocessing.active_children())
    data = training_data(Numbered(30), num_workers=1, total=12_000)
    data.next_batch()
    (worker,) = set(multiprocessing.active_children()) - known
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises((DatasetError, RuntimeError), match="killed|exited|reset"):  # torch's SIGCHLD handler may be first
        for _ in range(100):
            data.next_batch()
    data.close()


def test_loader_processes_survive_the_request_to_stop_and_end_with_close():
    known = set(multiprocessing.active_children())
    data = training_data(Numbered(30), num_workers=2)
    for _ in range(2):  # one from each process
        data.next_batch()
    workers = set(multiprocessing.active_children()) - known
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    for _ in range(20):
        data.next_batch()
    assert data.data_seconds > 0
    data.close()
    assert set(multiprocessing.active_children()) <= known


# ------------------------------------------------------------------------------------------------ validation


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("num_images", "expected"), [(1, 1), (7, 7), (24, 24), (1000, 30)])
def test_validation_reads_the_first_images_once_in_equal_numbers_of_batches(world_size, num_images, expected):
    dataset = Numbered(30)
    ranks = [
        list(validation_batches(dataset, dataset.info(None), num_images, 4, rank, world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert len({len(batch["images"]) for batch in batches}) == 1 and len(batches[0]["images"]) <= 4
    for batch in batches:
        assert torch.equal(image_numbers(batch), batch["indices"])
    indices, weights = (torch.cat([batch[key] for batch in batches]) for key in ("indices", "weights"))
    assert sorted(indices[weights == 1].tolist()) == list(range(expected))
    assert weights.sum() == expected and (weights == 0).sum() < len(ranks) * len(ranks[0])


# ------------------------------------------------------------------------------------- digits, every dataset


def test_digits_are_split_into_disjoint_fixed_parts():
    train, held_out = Digits(DigitsConfig(), "train"), Digits(DigitsConfig(), "validation")
    assert (len(train), len(held_out)) == (1500, 297)
    images, labels = (torch.cat(pair) for pair in zip(*(part.fetch(np.arange(len(part))) for part in (train, held_out))))
    assert images.min() == -1 and images.max() == 1
    from sklearn.datasets import load_digits

    stored = load_digits()

    def rows(pixels, labels):
        return sorted((*(8 * (row + 1)).tolist(), label) for row, label in zip(pixels.reshape(1797, 64), labels.tolist()))

    # Together exactly the stored images with their labels, hence nothing in both parts.
    assert rows(images, labels) == rows(torch.from_numpy(stored.images) / 8 - 1, torch.from_numpy(stored.target))
    assert torch.bincount(labels[1500:], minlength=10).min() >= 15


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DatasetError, match=r"pip install .\[digits\]"):
        Digits.info(DigitsConfig())


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_dataset_keeps_the_contract(name, split, tmp_path):
    dataset_class = DATASETS[name]
    config = dataset_class.Config()
    if name == "cifar10":
        write_parquet(tmp_path / "train-0.parquet", *random_images(30))
        config.path = str(tmp_path)
    assert config.name == name
    info = dataset_class.info(config)
    dataset = dataset_class(config, split)
    indices = np.array([2, 0, 1])
    images, labels = dataset.fetch(indices)
    assert images.dtype == torch.float32 and images.shape == (3, *info.image_shape)
    assert labels.dtype == torch.int64 and labels.shape == (3,)
    assert 0 <= labels.min() and labels.max() < info.num_classes
    assert len(info.class_names) in (0, info.num_classes)
    again, _ = pickle.loads(pickle.dumps(dataset)).fetch(indices[1:])
    assert torch.equal(again, images[1:])


# --------------------------------------------------------------------------------------------------- CIFAR-10


def random_images(count, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 3, 32, 32), np.uint8), generator.integers(0, 10, count)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


def image_table(pixels, labels, column="img"):
    rows = [{"bytes": png(image), "path": None} for image in pixels]
    return pa.table({column: rows, "label": pa.array(labels, pa.int64())})


def write_parquet(path, pixels, labels, column="img"):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(image_table(pixels, labels, column), path, row_group_size=7)


def write_batches(folder, count=6, **changes):
    """Write the official layout; returns train and test arrays. `changes`: batch name -> the dict to write."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, name in enumerate([f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]):
        pixels, labels = random_images(count, seed=number)
        table = {
            b"batch_label": b"x",
            b"labels": labels.tolist(),
            b"data": pixels.reshape(count, 3072),
            b"filenames": [b"a.png"] * count,
        }
        (folder / name).write_bytes(pickle.dumps(changes.get(name, table), protocol=2))
        parts.append((pixels, labels))
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts[:5]))
    return (pixels, labels), parts[5]


def assert_holds(dataset, pixels, labels):
    assert len(dataset) == len(pixels)
    order = np.arange(len(pixels))[::-1].copy()
    images, found = dataset.fetch(order)
    np.testing.assert_allclose(images.numpy(), pixels[order] / 127.5 - 1, atol=1e-6)
    assert found.tolist() == labels[order].tolist()


def open_both(path):
    config = Cifar10Config(path=str(path))
    info = Cifar10.info(config)
    assert info.image_shape == (3, 32, 32) and info.class_names[3] == "cat" and info.num_classes == 10
    return Cifar10(config, "train"), Cifar10(config, "validation")


@pytest.mark.parametrize("held_out_name", ["test-0.parquet", "validation-0.parquet"])
@pytest.mark.parametrize("column", ["img", "image"])
def test_cifar10_from_parquet_reads_files_in_the_order_of_their_names(tmp_path, held_out_name, column):
    pixels, labels = random_images(45)
    write_parquet(tmp_path / "train-1.parquet", pixels[20:35], labels[20:35], column)
    write_parquet(tmp_path / "train-0.parquet", pixels[:20], labels[:20], column)
    write_parquet(tmp_path / held_out_name, pixels[35:], labels[35:], column)
    train, held_out = open_both(tmp_path)
    assert_holds(train, pixels[:35], labels[:35])
    assert_holds(held_out, pixels[35:], labels[35:])


def test_cifar10_without_test_files_holds_out_the_last_tenth(tmp_path):
    pixels, labels = random_images(50)
    write_parquet(tmp_path / "plain_text" / "train-0.parquet", pixels[:20], labels[:20])
    write_parquet(tmp_path / "plain_text" / "train-1.parquet", pixels[20:], labels[20:])
    train, held_out = open_both(tmp_path)
    assert_holds(train, pixels[:45], labels[:45])
    assert_holds(held_out, pixels[45:], labels[45:])


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar10_from_python_batches(tmp_path, inside):
    stored_train, stored_test = write_batches(tmp_path / inside)
    train, held_out = open_both(tmp_path)
    assert_holds(train, *stored_train)
    assert_holds(held_out, *stored_test)


def test_cifar10_reads_batches_as_python_2_wrote_them(tmp_path):
    pixels, labels = random_images(2)
    write_batches(tmp_path)
    # Opcodes of the official files: byte strings as BINSTRING, names of numpy before its version 2.
    content = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\n"
        b"(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(content).to_bytes(4, "little") + content + b"tb"
    )  # fmt: skip
    items = b"U\x04data" + array + b"U\x06labels](K" + bytes([labels[0]]) + b"K" + bytes([labels[1]]) + b"e"
    (tmp_path / "test_batch").write_bytes(b"\x80\x02}(" + items + b"u.")
    assert_holds(Cifar10(Cifar10Config(path=str(tmp_path)), "validation"), pixels, labels)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_malicious_batch_is_refused_without_running_it(tmp_path):
    write_batches(tmp_path, data_batch_2={b"data": Malicious(tmp_path / "harm"), b"labels": [1]})
    with pytest.raises(DatasetError, match="data_batch_2: not a CIFAR-10 batch: .*names posix.mkdir") as caught:
        Cifar10.info(Cifar10Config(path=str(tmp_path)))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harm").exists()
    pickle.loads((tmp_path / "data_batch_2").read_bytes())  # an ordinary reader does run it
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["builtins\neval", "__builtin__\ngetattr", "numpy\nload", "_codecs\ndecode"])
def test_no_other_name_is_admitted_from_a_pickle(tmp_path, name):
    write_batches(tmp_path)
    (tmp_path / "test_batch").write_bytes(b"\x80\x02c" + name.encode() + b"\n(U\x01atR.")
    with pytest.raises(DatasetError, match=f"names {name.replace(chr(10), '.')}, which"):
        Cifar10.info(Cifar10Config(path=str(tmp_path)))


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def bad_parquet(change):
    def write(folder):
        parquet.write_table(change(image_table(*random_images(9))), folder / "train-0.parquet")

    return write


def with_labels(labels):
    return lambda table: table.set_column(1, "label", pa.array(labels))


def truncated_parquet(folder):
    write_parquet(folder / "train-0.parquet", *random_images(9))
    truncate(folder / "train-0.parquet")


def truncated_batch(folder):
    write_batches(folder)
    truncate(folder / "data_batch_3")


def missing_batch(folder):
    write_batches(folder)
    (folder / "data_batch_4").unlink()


def two_folders(folder):
    for name in ("a", "b"):
        write_parquet(folder / name / "train-0.parquet", *random_images(9))


LABELS = [0, 1, 2, 3, 4, 5, 6, 7, 8]
BATCH = {b"labels": [0, 10, 2], b"data": np.zeros((3, 3072), np.uint8)}
BAD_FOLDERS = {
    "empty": (lambda folder: None, "neither parquet files nor CIFAR-10's python batches"),
    "only test": (
        lambda folder: write_parquet(folder / "test-0.parquet", *random_images(2)),
        "no parquet file whose name starts with 'train'",
    ),
    "two folders": (two_folders, "several folders"),
    "no parquet": (lambda folder: (folder / "train-0.parquet").write_bytes(b"hello"), "train-0.parquet: cannot be read"),
    "truncated parquet": (truncated_parquet, "train-0.parquet: cannot be read as parquet"),
    "no label column": (bad_parquet(lambda table: table.drop_columns("label")), "has img"),
    "no image column": (bad_parquet(lambda table: table.drop_columns("img")), "has label"),
    "image not struct": (
        bad_parquet(lambda table: table.set_column(0, "img", pa.array(["a"] * 9))),
        "column 'img' is string",
    ),
    "label not integer": (bad_parquet(with_labels([0.5] * 9)), "column 'label' is double"),
    "label too large": (bad_parquet(with_labels([*LABELS[:4], 10, 5, 5, 5, 11])), "row 4: label 10 is not in 0..9"),
    "label negative": (bad_parquet(with_labels([0, -1, *LABELS[2:]])), "train-0.parquet: row 1: label -1"),
    "label missing": (bad_parquet(with_labels([0, 1, None, *LABELS[3:]])), "row 2: the label is missing"),
    "paths only": (
        bad_parquet(lambda table: table.set_column(
            0, "img", pa.array([{"bytes": None, "path": "a.png"}] * 9,
                               pa.struct([("bytes", pa.binary()), ("path", pa.string())])))),
        "stores paths",
    ),
    "no rows": (bad_parquet(lambda table: table.slice(0, 0)), "no rows"),
    "missing batch": (missing_batch, "lacks data_batch_4"),
    "truncated batch": (truncated_batch, "data_batch_3: not a CIFAR-10 batch"),
    "batch is no dict": (lambda folder: write_batches(folder, test_batch=[1]), "test_batch: not a CIFAR-10 batch"),
    "batch without data": (lambda folder: write_batches(folder, data_batch_1={b"labels": [1]}), "'data' is not"),
    "batch label too large": (lambda folder: write_batches(folder, data_batch_5=BATCH), "data_batch_5: row 1: label 10"),
    "batch labels too few": (
        lambda folder: write_batches(folder, data_batch_5=BATCH | {b"labels": [1]}),
        "'labels' is not a list of 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_refused_in_one_line_before_images_are_read(tmp_path, case):
    write, message = BAD_FOLDERS[case]
    write(tmp_path)
    with pytest.raises(DatasetError) as caught:
        Cifar10.info(Cifar10Config(path=str(tmp_path)))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(DatasetError):
        Cifar10(Cifar10Config(path=str(tmp_path)), "train")
        Cifar10(Cifar10Config(path=str(tmp_path)), "validation")


def test_a_bad_path_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path, message in (("", "not given"), (tmp_path / "none", "does not exist"), (tmp_path / "file", "is a file")):
        with pytest.raises(DatasetError, match=message):
            Cifar10.info(Cifar10Config(path=str(path)))


def test_a_damaged_or_missized_image_is_named_by_file_and_row(tmp_path):
    table = image_table(*random_images(20))
    rows = table["img"].to_pylist()
    rows[3]["bytes"] = rows[3]["bytes"][:200]
    rows[5]["bytes"] = png(np.zeros((3, 16, 32), np.uint8))
    parquet.write_table(table.set_column(0, "img", pa.array(rows)), tmp_path / "train-0.parquet")
    dataset = Cifar10(Cifar10Config(path=str(tmp_path)), "train")
    with pytest.raises(DatasetError, match=r"train-0.parquet: row 3: the image cannot be decoded"):
        dataset.fetch(np.array([3]))
    with pytest.raises(DatasetError, match=r"row 5: the image is 32x16, not 32x32"):
        dataset.fetch(np.array([5]))


def test_cifar10_from_the_hub(monkeypatch):
    pixels, labels = random_images(30)

    class Sliceable:
        def __init__(self, table):
            self.table = table

        def with_format(self, name):
            assert name == "arrow"
            return self

        def __getitem__(self, everything):
            return self.table

    def load_dataset(name):
        assert name == "uoft-cs/cifar10"
        parts = {"train": slice(0, 20), "test": slice(20, 30)}
        return {name: Sliceable(image_table(pixels[part], labels[part])) for name, part in parts.items()}

    builder = SimpleNamespace(info=SimpleNamespace(features=None))
    package = SimpleNamespace(load_dataset=load_dataset, load_dataset_builder=lambda name: builder)
    monkeypatch.setitem(sys.modules, "datasets", package)
    train, held_out = open_both("uoft-cs/cifar10")
    assert_holds(train, pixels[:20], labels[:20])
    assert_holds(held_out, pixels[20:], labels[20:])


def test_the_hub_missing_or_out_of_reach_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError, match=r"pip install .\[hub\]"):
        Cifar10.info(Cifar10Config(path="uoft-cs/cifar10"))

    def fail(name):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset_builder=fail))
    with pytest.raises(DatasetError, match=r"is no folder here, .* did not give it \(ConnectionError: no route to host\)"):
        Cifar10.info(Cifar10Config(path="uoft-cs/cifar10"))


# -------------------------------------------------------------------------------------------------- synthetic


def dense_covariance(config):
    """Covariance between the pixels of a channel, summed mode by mode, [H * W, H * W] float64."""
    _, height, width = config.shape
    variances = mode_variances(config)[0].numpy()
    y, x = (grid.ravel() for grid in np.meshgrid(np.arange(height), np.arange(width), indexing="ij"))
    dy, dx = y[:, None] - y[None, :], x[:, None] - x[None, :]
    total = np.zeros(dy.shape)
    for ky in range(height):
        for kx in range(width):
            total += variances[ky, kx] * np.cos(2 * np.pi * (ky * dy / height + kx * dx / width))
    return total / (height * width)


@pytest.mark.parametrize("shape", [[2, 6, 8], [1, 5, 7]])
def test_gaussian_images_have_the_stated_covariance(shape):
    config = SyntheticConfig(shape=shape, spectrum_alpha=1.5, pixel_variance=0.6)
    images = Synthetic(config, "train").fetch(np.arange(40_000))[0].to(torch.float64)
    variances = mode_variances(config)
    assert variances.shape == tuple(shape) and variances.mean() == pytest.approx(0.6)
    assert variances[0, 0, 0] == variances[0, 0, 1] == variances[0, -1, 0]  # the constant mode counts as f = 1
    assert variances[0, 0, 2] / variances[0, 0, 1] == pytest.approx(2**-1.5)
    power = torch.fft.fft2(images, norm="ortho").abs().square().mean(dim=0)
    assert (power / variances - 1).abs().max() < 5 * (2 / 40_000) ** 0.5
    flat = images[:, 0].flatten(1)
    error = (flat.T @ flat / len(flat)).numpy() - dense_covariance(config)
    assert np.abs(error).max() < 5 * 0.6 * (2 / 40_000) ** 0.5
    assert images.mean(dim=0).abs().max() < 5 * (0.6 / 40_000) ** 0.5
    if shape[0] == 2:
        assert (images[:, 0] * images[:, 1]).mean(dim=0).abs().max() < 5 * 0.6 / 200


@pytest.mark.parametrize("kind", ["gaussian", "noise"])
def test_optimal_velocity_loss_is_that_of_the_exact_linear_estimator(kind):
    config = SyntheticConfig(shape=[1, 6, 6], kind=kind)
    x0 = Synthetic(config, "train").fetch(np.arange(20_000))[0].flatten(1).to(torch.float64)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance, identity = torch.from_numpy(dense_covariance(config)), torch.eye(36, dtype=torch.float64)
    times = torch.tensor([0.0, 0.02, 0.3, 0.5, 0.9, 1.0])
    expected = optimal_velocity_loss(config, times)
    assert expected[0] == pytest.approx(1.0) and expected[-1] == pytest.approx(1.0)
    for t, loss in zip(times.tolist(), expected.tolist()):
        x_t = (1 - t) * x0 + t * noise
        gain = torch.linalg.solve((1 - t) ** 2 * covariance + t**2 * identity, t * identity - (1 - t) * covariance)
        measured = ((x_t @ gain) - (noise - x0)).square().mean().item()
        assert measured == pytest.approx(loss, rel=0.015)


def test_synthetic_images_are_functions_of_their_index():
    for kind in ("constant", "noise", "gaussian"):
        config = SyntheticConfig(kind=kind, shape=[3, 4, 4], num_images=50, num_classes=7)
        train, held_out = Synthetic(config, "train"), Synthetic(config, "validation")
        images, labels = train.fetch(np.arange(50))
        alone, label = train.fetch(np.array([31]))
        assert torch.equal(alone[0], images[31]) and label[0] == labels[31]
        assert set(labels.tolist()) == set(range(7))
        if kind == "constant":
            assert images.std(dim=(1, 2, 3)).max() == 0 and len(images.unique()) == 7 and images.abs().max() < 1
        else:
            other = Synthetic(SyntheticConfig(kind=kind, shape=[3, 4, 4], num_images=50, seed=1), "train")
            everything = torch.cat((images, held_out.fetch(np.arange(50))[0], other.fetch(np.arange(50))[0]))
            assert len(everything.flatten(1).unique(dim=0)) == 150


def test_synthetic_images_do_not_depend_on_how_many_are_drawn_at_a_time(monkeypatch):
    config = SyntheticConfig(shape=[1, 8, 8])
    images = Synthetic(config, "train").fetch(np.arange(10))[0]
    monkeypatch.setattr("data.synthetic.WORDS_AT_A_TIME", 200)
    assert torch.equal(Synthetic(config, "train").fetch(np.arange(10))[0], images)


@pytest.mark.parametrize("shape", [[32, 32], [3, 0, 4]])
def test_a_bad_shape_is_refused(shape):
    with pytest.raises(DatasetError, match="data.shape"):
        Synthetic.info(SyntheticConfig(shape=shape))
