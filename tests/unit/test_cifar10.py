"""CIFAR-10 and CIFAR-100 from each of their sources, and what is said about bad ones."""

import io
import os
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from torchtitan.data import DatasetError
from torchtitan.data.cifar import Cifar10, Cifar10Config, Cifar100, Cifar100Config


def random_images(count, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 3, 32, 32), np.uint8), generator.integers(0, 10, count)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


def image_table(pixels, labels, column="img", label_column="label"):
    rows = [{"bytes": png(image), "path": None} for image in pixels]
    return pa.table({column: rows, label_column: pa.array(labels, pa.int64())})


def write_parquet(path, pixels, labels, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(image_table(pixels, labels, **columns), path, row_group_size=7)


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
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts[:5], strict=True))
    return (pixels, labels), parts[5]


def assert_holds(dataset, pixels, labels):
    assert len(dataset) == len(pixels)
    order = np.arange(len(pixels))[::-1].copy()
    images, found = dataset.fetch(order).values()
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
    write_parquet(tmp_path / "train-1.parquet", pixels[20:35], labels[20:35], column=column)
    write_parquet(tmp_path / "train-0.parquet", pixels[:20], labels[:20], column=column)
    write_parquet(tmp_path / held_out_name, pixels[35:], labels[35:], column=column)
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


def fine_labels(count):
    return np.arange(count) * 7 % 100


def test_cifar100_from_parquet_has_the_fine_labels(tmp_path):
    pixels, coarse = random_images(30)
    table = image_table(pixels, coarse).rename_columns(["img", "coarse_label"])
    parquet.write_table(table.append_column("fine_label", pa.array(fine_labels(30))), tmp_path / "train-0.parquet")
    config = Cifar100Config(path=str(tmp_path))
    info = Cifar100.info(config)
    assert info.num_classes == len(set(info.class_names)) == 100
    assert (info.class_names[0], info.class_names[53], info.class_names[99]) == ("apple", "orange", "worm")
    assert_holds(Cifar100(config, "train"), pixels[:27], fine_labels(30)[:27])
    assert_holds(Cifar100(config, "validation"), pixels[27:], fine_labels(30)[27:])


@pytest.mark.parametrize("inside", ["", "cifar-100-python"])
def test_cifar100_from_python_batches(tmp_path, inside):
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    for name, count in (("train", 20), ("test", 9)):
        pixels, coarse = random_images(count, seed=count)
        table = {b"data": pixels.reshape(count, 3072), b"coarse_labels": coarse.tolist()}
        table[b"fine_labels"] = fine_labels(count).tolist()
        (folder / name).write_bytes(pickle.dumps(table, protocol=2))
    config = Cifar100Config(path=str(tmp_path))
    assert Cifar100.info(config).image_shape == (3, 32, 32)
    assert_holds(Cifar100(config, "train"), random_images(20, seed=20)[0], fine_labels(20))
    assert_holds(Cifar100(config, "validation"), random_images(9, seed=9)[0], fine_labels(9))


def test_the_two_editions_refuse_each_other_in_one_line(tmp_path):
    write_parquet(tmp_path / "ten" / "train-0.parquet", *random_images(9))
    write_batches(tmp_path / "batches")
    for name, message in (("ten", "has no column 'fine_label'; it has img"), ("batches", "nor CIFAR-100's python batches")):
        with pytest.raises(DatasetError, match=message):
            Cifar100.info(Cifar100Config(path=str(tmp_path / name)))
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").touch()
    with pytest.raises(DatasetError, match="lacks test: unpack the whole cifar-100-python.tar.gz"):
        Cifar100.info(Cifar100Config(path=str(tmp_path)))


def test_cifar10_reads_batches_as_python_2_wrote_them(tmp_path):
    pixels, labels = random_images(2)
    write_batches(tmp_path)
    # Opcodes of the official files: byte strings as BINSTRING, names of numpy before its version 2.
    content = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\n"
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


@pytest.mark.parametrize("name", ["builtins\neval", "numpy\nload"])
def test_no_other_name_is_admitted_from_a_pickle(tmp_path, name):
    write_batches(tmp_path)
    (tmp_path / "test_batch").write_bytes(b"\x80\x02c" + name.encode() + b"\n(U\x01atR.")
    with pytest.raises(DatasetError, match=f"names {name.replace(chr(10), '.')}, which"):
        Cifar10.info(Cifar10Config(path=str(tmp_path)))


def bad_parquet(change):
    def write(folder):
        parquet.write_table(change(image_table(*random_images(9))), folder / "train-0.parquet")

    return write


def with_labels(labels):
    return lambda table: table.set_column(1, "label", pa.array(labels))


def first_image(content):
    def change(table):
        rows = table["img"].to_pylist()
        rows[0]["bytes"] = content
        return table.set_column(0, "img", pa.array(rows))

    return bad_parquet(change)


def truncated_batch(folder):
    write_batches(folder)
    path = folder / "data_batch_3"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def missing_batch(folder):
    write_batches(folder)
    (folder / "data_batch_4").unlink()


def two_folders(folder):
    for name in ("a", "b"):
        write_parquet(folder / name / "train-0.parquet", *random_images(9))


BATCH = {b"labels": [0, 10, 2], b"data": np.zeros((3, 3072), np.uint8)}
BAD_FOLDERS = {
    "empty": (lambda folder: None, "neither parquet files nor CIFAR-10's python batches"),
    "only test": (lambda folder: write_parquet(folder / "test-0.parquet", *random_images(2)), "no parquet file of split 'train'"),
    "two folders": (two_folders, "has split 'train' in several folders"),
    "no parquet": (lambda folder: (folder / "train-0.parquet").write_bytes(b"hello"), "train-0.parquet cannot be read"),
    "no label column": (bad_parquet(lambda table: table.drop_columns("label")), "has no column 'label'"),
    "label too large": (bad_parquet(with_labels([0, 1, 2, 3, 10, 5, 5, 5, 11])), "has 12 classes, CIFAR-10 10"),
    "another size": (first_image(png(np.zeros((3, 64, 64), np.uint8))), "row 0: the image is 64x64, not 32x32"),
    "missing batch": (missing_batch, "lacks data_batch_4"),
    "truncated batch": (truncated_batch, "data_batch_3: not a CIFAR-10 batch"),
    "batch label too large": (lambda folder: write_batches(folder, data_batch_5=BATCH), "data_batch_5: row 1: label 10"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_refused_in_one_line_before_images_are_read(tmp_path, case):
    write, message = BAD_FOLDERS[case]
    write(tmp_path)
    with pytest.raises(DatasetError) as caught:
        Cifar10.info(Cifar10Config(path=str(tmp_path)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


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
    with pytest.raises(DatasetError, match=r"train-0.parquet: row group 0, row 3: the image cannot be decoded"):
        dataset.fetch(np.array([3]))
    with pytest.raises(DatasetError, match=r"row 5: the image is 32x16, not 32x32"):
        dataset.fetch(np.array([5]))


def test_cifar10_from_the_hub(monkeypatch):
    pixels, labels = random_images(30)

    class Table:
        def __init__(self, table, split):
            self.table = table.slice(0, 20) if split == "train" else table.slice(20)

        features = SimpleNamespace(to_dict=lambda: {"img": {"_type": "Image"}, "label": {"_type": "Value", "dtype": "int64"}})
        cast_column = lambda self, name, kind: self  # noqa: E731
        with_format = lambda self, name: self  # noqa: E731

        def select_columns(self, names):
            return self

        def __len__(self):
            return len(self.table)

        def __getitem__(self, place):
            return self.table if isinstance(place, slice) else self.table.slice(place, 1).to_pylist()[0]

    def load_dataset(name, config, split, revision):
        assert name == "uoft-cs/cifar10"
        return Table(image_table(pixels, labels), split)

    package = SimpleNamespace(load_dataset=load_dataset, Image=lambda decode: None)
    monkeypatch.setitem(sys.modules, "datasets", package)
    train, held_out = open_both("uoft-cs/cifar10")
    assert_holds(train, pixels[:20], labels[:20])
    assert_holds(held_out, pixels[20:], labels[20:])
