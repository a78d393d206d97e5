"""Tables of images as Hugging Face datasets writes them, for the tests of their readers."""

import json

import fsspec
import pyarrow as pa
from pyarrow import parquet

from tests.encoded_images import SIDE, image_bytes
from torchtitan.data import huggingface, row_groups
from torchtitan.data.huggingface import HuggingFaceConfig

NAMES = ["ant", "bee", "cow", "dog", "elk"]
FEATURES = {"picture": {"_type": "Image"}, "kind": {"_type": "ClassLabel", "names": NAMES}}
ROWS, GROUP = 90, 7  # rows of each of two files, rows of a row group


def forget_tables(monkeypatch):
    """Open tables anew, and try a failed read again at once."""
    huggingface._open_groups.cache_clear()
    huggingface._open_table.cache_clear()
    monkeypatch.setattr(row_groups, "PAUSES", (0.0, 0.0, 0.0))


def table_of(first, count, features=FEATURES, change=None):
    rows = [{"bytes": image_bytes(number), "path": None} for number in range(first, first + count)]
    labels = [number % 5 for number in range(first, first + count)]
    if change:
        change(rows, labels)
    columns = {"picture": pa.array(rows, pa.struct({"bytes": pa.binary(), "path": pa.string()}))}
    table = pa.table(columns | {"kind": pa.array(labels, pa.int64()), "id": list(range(count))})
    features = features and {"id": {"_type": "Value", "dtype": "int64"}} | features
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    return table.replace_schema_metadata(metadata)


def write_parquet(path, first=0, count=ROWS, statistics=True, **keys):
    with fsspec.open(str(path), "wb") as file:
        parquet.write_table(table_of(first, count, **keys), file, row_group_size=GROUP, write_statistics=statistics)


def write_files(folder, split="train", **keys):
    storage, path = fsspec.url_to_fs(str(folder))
    storage.makedirs(path, exist_ok=True)
    for number in range(2):
        write_parquet(f"{folder}/{split}-{number:05}-of-00002.parquet", ROWS * number, **keys)
    return folder


def config_of(path, **keys):
    defaults = {"image_size": SIDE, "horizontal_flip": False, "validation_fraction": 0.0}
    if keys.get("streaming"):
        defaults["shuffle_row_groups"] = 4
    return HuggingFaceConfig(path=str(path), **defaults | keys)


def write_table(folder, table, description, **keys):
    table = table.replace_schema_metadata({"huggingface": description})
    parquet.write_table(table, folder / "train-0.parquet", **keys)
