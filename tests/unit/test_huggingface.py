"""Hugging Face datasets: columns, captions, map-style and streamed tables, exact resume, and what is refused."""

import json
import pickle
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from tests.encoded_images import SIDE, assert_resumes_in_mid_epoch, decoded, everything, image_bytes
from tests.hub_tables import (
    FEATURES,
    NAMES,
    ROWS,
    config_of,
    forget_tables,
    table_of,
    write_files,
    write_parquet,
    write_table,
)
from tests.refusals import one_line
from torchtitan.conditions import Unconditional
from torchtitan.data import DatasetError
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.parquet_files import table_url
from torchtitan.data.row_groups import RowGroupImages
from torchtitan.training.sample_order import sample_order


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch):
    forget_tables(monkeypatch)


@pytest.fixture
def package(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")
    return datasets


@pytest.fixture(params=["map-style", "streaming"])
def streaming(request):
    """Streaming needs no package beside the trainer's own."""
    if request.param == "map-style":
        request.getfixturevalue("package")
    return request.param == "streaming"


def refused(config) -> str:
    return one_line(DatasetError, HuggingFace.info, config)


# --- what is read


def test_images_labels_and_names_are_those_of_the_rows(tmp_path, streaming):
    write_files(tmp_path / "a")
    config = config_of(tmp_path / "a", streaming=streaming)
    info = HuggingFace.info(config)
    assert info.class_names == tuple(NAMES) and info.image_shape == (3, SIDE, SIDE) and not info.has_validation
    images, labels = everything(HuggingFace(config, "train"))
    assert torch.equal(images, torch.stack([decoded(image_bytes(number)) for number in range(2 * ROWS)]))
    assert labels == [number % 5 for number in range(2 * ROWS)]


def test_streaming_reads_the_same_images_in_an_epoch_and_holds_out_the_same(tmp_path, package):
    write_files(tmp_path / "a")
    configs = [config_of(tmp_path / "a", streaming=streaming, validation_fraction=0.1) for streaming in (False, True)]
    held_out = [everything(HuggingFace(config, "validation")) for config in configs]
    assert torch.equal(held_out[0][0], held_out[1][0]) and len(held_out[0][1]) == 18
    epochs = []
    for config in configs:
        dataset = HuggingFace(config, "train")
        indices = sample_order(dataset, 0, 0, 1).indices(np.arange(len(dataset)))
        images, labels = dataset.fetch(indices).values()
        epochs.append((indices.tolist(), sorted(zip(images.flatten(1).tolist(), labels.tolist(), strict=True))))
    assert epochs[0][1] == epochs[1][1] and epochs[0][0] != epochs[1][0]


def test_both_resume_in_mid_epoch_on_other_ranks_and_loader_processes(tmp_path, streaming):
    write_files(tmp_path / "a")
    assert_resumes_in_mid_epoch(HuggingFace, config_of(tmp_path / "a", streaming=streaming))


def test_a_saved_dataset_and_a_slice_of_a_split_are_read(tmp_path, package):
    rows = package.Dataset(table_of(0, 20)).cast(
        package.Features(
            {"picture": package.Image(), "kind": package.ClassLabel(names=NAMES), "id": package.Value("int64")}
        )
    )
    package.DatasetDict({"train": rows, "test": rows.select(range(5, 8))}).save_to_disk(tmp_path / "both")
    rows.save_to_disk(tmp_path / "one")
    both = config_of(tmp_path / "both", validation_split="test")
    assert HuggingFace.info(both).has_validation
    assert len(HuggingFace(both, "train")) == 20
    images, labels = everything(HuggingFace(both, "validation"))
    assert labels == [0, 1, 2] and torch.equal(images[1], decoded(image_bytes(6)))
    assert len(HuggingFace(config_of(tmp_path / "one"), "train")) == 20
    with pytest.raises(DatasetError, match="has no split 'dev'; it has train, test"):
        HuggingFace.info(config_of(tmp_path / "both", split="dev"))
    write_files(tmp_path / "a")
    sliced = config_of(tmp_path / "a", split="train[10:30]")
    assert everything(HuggingFace(sliced, "train"))[1] == [number % 5 for number in range(10, 30)]


@pytest.mark.parametrize("labels", [None, ["cat"] * 40])
def test_labels_that_are_left_aside_need_not_be_there(tmp_path, streaming, labels):
    rows = pa.array([{"bytes": image_bytes(number), "path": None} for number in range(40)])
    table = pa.table({"picture": rows} | ({"kind": labels} if labels else {}))
    kind = {} if labels is None else {"kind": {"_type": "Value", "dtype": "string" if "cat" in labels else "int64"}}
    write_table(tmp_path, table, json.dumps({"info": {"features": {"picture": {"_type": "Image"}} | kind}}))
    config = config_of(tmp_path, streaming=streaming, labels=False)
    assert HuggingFace.info(config).condition_kind == Unconditional()
    batch = HuggingFace(config, "train").fetch(np.arange(40))
    assert set(batch) == {"images"} and torch.equal(batch["images"][7], decoded(image_bytes(7)))


def test_a_store_is_streamed_from_folders_that_name_the_split_and_the_subset(tmp_path):
    write_files("memory://hf/small/train", "0000")
    write_files("memory://hf/large/train", "0000")
    with pytest.raises(DatasetError, match="data.config: .* in several folders, large/train, small/train; say which"):
        HuggingFace.info(config_of("memory://hf", streaming=True))
    config = config_of("memory://hf", config="small", streaming=True)
    assert HuggingFace.info(config).num_classes == 5
    copy = pickle.loads(pickle.dumps(HuggingFace(config, "train")))
    assert torch.equal(copy.fetch(np.array([100]))["images"][0], decoded(image_bytes(100)))


def test_a_hub_name_is_a_url_of_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert table_url("owner/name", "") == "hf://datasets/owner/name"
    assert table_url("owner/name", "refs/convert/parquet") == "hf://datasets/owner/name@refs%2Fconvert%2Fparquet"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert table_url("owner/name", "") == str(tmp_path / "owner" / "name")


# --- columns


def test_files_that_do_not_describe_themselves_are_read_by_the_columns_types(tmp_path):
    write_files(tmp_path / "a", features=None)
    config = config_of(tmp_path / "a", streaming=True, label_column="kind")
    info = HuggingFace.info(config)
    assert (info.num_classes, info.class_names) == (5, ())  # the largest label in the footers
    assert everything(HuggingFace(config, "train"))[1][:6] == [0, 1, 2, 3, 4, 0]


TWO = FEATURES | {"id": {"_type": "ClassLabel", "names": [str(number) for number in range(90)]}}
COLUMNS = {
    "several": (
        TWO, {}, "data.label_column: {}/train-00000-of-00002.parquet has several columns of class labels, id, kind;"
    ),
    "none": (
        {"picture": {"_type": "Image"}, "kind": {"_type": "Value", "dtype": "int64"}}, {},
        "has no column of class labels; say which of its columns: id (int64), picture (Image), kind (int64), or set data.labels"
        " = false",
    ),
    "missing": (
        FEATURES, {"label_column": "x"}, "has no column 'x'; it has id (int64), picture (Image), kind (ClassLa"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_that_are_not_clear_are_named(tmp_path, case):
    features, keys, message = COLUMNS[case]
    write_files(tmp_path, features=features)
    assert message.format(tmp_path) in refused(config_of(tmp_path, streaming=True, **keys))


FOOTERS = {
    "labels of texts": (["a", "b"], "column 'kind' is string, not integers"),
    "no label": ([0, None], "train-0.parquet: row group 0: 1 rows have no 'kind'"),
    "a label too large": ([0, 5], "train-0.parquet: row group 0: its largest 'kind', 5, is not in 0..4"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOOTERS)
def test_what_the_footer_contradicts_is_refused_before_rows_are_read(tmp_path, case, monkeypatch):
    labels, message = FOOTERS[case]
    table = pa.table({"picture": [{"bytes": image_bytes(0)}] * 2, "kind": labels})
    write_table(tmp_path, table, json.dumps({"info": {"features": FEATURES}}))
    monkeypatch.setattr(RowGroupImages, "_read", None)
    assert message in refused(config_of(tmp_path, streaming=True))


# --- refused


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError, match=r"needs the package datasets: .*-m pip install datasets huggingface_hub"):
        HuggingFace.info(config_of(tmp_path))


def test_a_hub_out_of_reach_is_said_in_one_line(monkeypatch, package):
    def fail(*_, **__):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(package, "load_dataset", fail)
    monkeypatch.setattr("torchtitan.data.parquet_files.open_storage", fail)
    for streaming, what in ((False, "'owner/name'"), (True, "hf://datasets/owner/name")):
        with pytest.raises(DatasetError, match=rf"^data.path: {what} cannot be read .*\(ConnectionError: no network\)"):
            HuggingFace.info(config_of("owner/name", streaming=streaming))


BAD = {
    "no path": ({"path": ""}, "data.path: not given; huggingface needs a name on the hub, a folder or a URL"),
    "revision here": ({"revision": "main"}, "data.revision: '{}' is no name on the Hugging Face hub; leave the key"),
    "no such split": ({"split": "dev"}, "data.path: {}: no parquet file of split 'dev': none begins so or lies in a"),
    "no parquet": ({"path": "{}/empty"}, "data.path: {}/empty: no parquet files there (data.streaming = false reads"),
    "url unstreamed": ({"path": "memory://x", "streaming": False}, "is a URL, which only data.streaming = true reads"),
    "damaged footer": ({"path": "{}/broken"}, "train-0.parquet cannot be read (ArrowInvalid: "),
    "held out is trained on": (
        {"validation_split": "train"}, "data.validation_split: 'train' is the training split; name another, or leave"
    ),
    "other classes": ({"validation_split": "test"}, "data.validation_split: classes of 'test' are not those of 'tr"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, case):
    keys, message = BAD[case]
    write_files(tmp_path)
    others = FEATURES | {"kind": {"_type": "ClassLabel", "names": ["x", "y", "z", "v", "w"]}}
    write_parquet(tmp_path / "test-0.parquet", features=others)
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "train-0.parquet").write_bytes(b"PAR1 no footer PAR1")
    keys = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in keys.items()}
    if case != "damaged footer":
        (tmp_path / "broken" / "train-0.parquet").unlink()
    config = config_of(**{"path": tmp_path, "streaming": True} | keys)
    assert message.format(tmp_path) in refused(config)


# --- captions

CAPTIONED = {"picture": {"_type": "Image"}, "text": {"_type": "Value", "dtype": "string"}}


def write_captions(folder, texts, features=CAPTIONED, **keys):
    """A file of as many noise images; row groups of 3 rows."""
    folder.mkdir(exist_ok=True)
    images = [{"bytes": image_bytes(number), "path": None} for number in range(len(texts))]
    table = pa.table({"picture": images, "text": texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    parquet.write_table(table.replace_schema_metadata(metadata), folder / "train-0.parquet", row_group_size=3, **keys)
    return folder


@pytest.mark.parametrize("features", [CAPTIONED, None])
def test_captions_are_read_instead_of_labels(tmp_path, streaming, features):
    write_captions(tmp_path / "a", [f"picture\nof {number}" for number in range(10)], features)
    config = config_of(tmp_path / "a", streaming=streaming, caption_column="text", validation_fraction=0.2)
    info = HuggingFace.info(config)
    assert info.condition_kind == Unconditional() and info.has_validation
    train, held_out = (HuggingFace(config, split) for split in ("train", "validation"))
    assert held_out.captions(np.arange(2)) == ["picture of 4", "picture of 9"]
    assert train.captions(np.array([7, 0, 4])) == ["picture of 8", "picture of 0", "picture of 5"]
    batch = pickle.loads(pickle.dumps(train)).fetch(np.array([4, 0]))
    assert batch.keys() == {"images"}
    assert torch.equal(batch["images"], torch.stack([decoded(image_bytes(number)) for number in (5, 0)]))
    assert pickle.loads(pickle.dumps(train)).captions(np.array([4])) == ["picture of 5"]


def test_a_trigger_word_is_put_into_captions(tmp_path, streaming):
    write_captions(tmp_path / "a", ["a [trigger]", "a cat"])
    config = config_of(tmp_path / "a", streaming=streaming, caption_column="text", trigger_word="zork")
    HuggingFace.info(config)
    assert HuggingFace(config, "train").captions(np.arange(2)) == ["a zork", "zork a cat"]


NO_TEXTS = {
    "missing": (["a"], {"caption_column": "x"}, "has no column 'x'; it has picture ("),
    "not texts": (["a"], {"caption_column": "picture"}, ", not texts"),
    "null": (["a", None], {}, {False: ": row 1: the caption is missing", True: "row group 0: 1 rows have no 'text'"}),
}


@pytest.mark.parametrize("case", NO_TEXTS)
def test_captions_that_cannot_be_used_are_refused_before_training(tmp_path, streaming, case):
    texts, keys, message = NO_TEXTS[case]
    write_captions(tmp_path / "a", texts)
    found = refused(config_of(tmp_path / "a", **{"streaming": streaming, "caption_column": "text"} | keys))
    assert (message if isinstance(message, str) else message[streaming]) in found


LATE = {
    "blank": (["a", " \t"], "row group 0, row 1: the caption is empty"),
    "trigger": (["a", "a [trigger]"], "row group 0, row 1: [trigger] stands for a trigger word, and there is none"),
    "long": (["a", "b" * 70_000], "row group 0, row 1: a caption of 70,000 characters, more than 65,536"),
}


@pytest.mark.parametrize("case", LATE)
def test_streamed_captions_that_footers_do_not_show_are_named_when_they_are_read(tmp_path, case):
    texts, message = LATE[case]
    write_captions(tmp_path / "a", texts, write_statistics=False)
    config = config_of(tmp_path / "a", streaming=True, caption_column="text")
    HuggingFace.info(config)
    assert message in one_line(DatasetError, HuggingFace(config, "train").captions, np.array([0, 1]))
