"""Read parquet rows a few at a time: repeats of a stored image could otherwise fill the memory."""

from collections.abc import Sequence
from typing import Any

from torchtitan.data.base import DatasetError

ROWS_AT_A_TIME = 8
MAX_REPEATED_BYTES = 256 << 20  # that images may take beyond what the file says of their column


def check_types(place: str, schema: Any, image_column: str, column_beside: str, captioned: bool = False) -> None:
    """Check that a table's columns can hold images, and labels or captions, whatever its metadata say.

    Args:
        place: name of the table in messages.
        schema: of the table, a pyarrow.Schema.
        image_column, column_beside: their names; the latter is "" where none is read.
        captioned: whether the latter holds captions.

    Raises:
        DatasetError: one is missing, there twice, or of another type.
    """
    import pyarrow

    beside = [(column_beside, "texts" if captioned else "integers")] if column_beside else []
    for name, wanted in [(image_column, "images"), *beside]:
        places = schema.get_all_field_indices(name)
        if len(places) != 1:
            count = f"has {len(places)} columns {name!r}; name another" if places else f"column {name!r} is missing"
            raise DatasetError(f"{place}: {count}")
        kind = schema.field(places[0]).type
        stored = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        fits = {"images": _holds_bytes, "integers": pyarrow.types.is_integer, "texts": _is_text}[wanted]
        if not fits(stored):
            raise DatasetError(f"{place}: column {name!r} is {kind!s:.80}, not {wanted}")


def read_rows(
    place: str, reader: Any, groups: Sequence[int], image_column: str, column_beside: str, most_bytes: int,
    captioned: bool = False,
) -> Any:  # fmt: skip
    """Read images, and labels or captions.

    Args:
        place: name of the rows in messages.
        reader: pyarrow.parquet.ParquetFile whose columns `check_types` has passed.
        groups: row groups.
        image_column, column_beside: their names.
        most_bytes: limit of the memory of images and captions.
        captioned: whether the column beside the images holds captions.

    Returns:
        pyarrow.Table of "image", large_binary in one array, and "label", int64, or "caption", large_string, if that is read.

    Raises:
        DatasetError: the images take more.
        (and pyarrow's own exceptions for damaged files)
    """
    import pyarrow
    from pyarrow import compute

    # 64-bit offsets: one array, however large
    beside = ("caption", pyarrow.large_string()) if captioned else ("label", pyarrow.int64())
    schema = pyarrow.schema([("image", pyarrow.large_binary()), beside][: 1 + bool(column_beside)])
    is_struct = pyarrow.types.is_struct(reader.schema_arrow.field(image_column).type)
    columns = [f"{image_column}.bytes" if is_struct else image_column, column_beside][: len(schema)]
    batches, taken = [], 0
    for batch in reader.iter_batches(ROWS_AT_A_TIME, row_groups=list(groups), columns=columns):
        images = batch.column(image_column)
        images = (compute.struct_field(images, "bytes") if is_struct else images).cast(schema.types[0])
        others = [batch.column(column_beside).cast(schema.types[1])] if column_beside else []
        for column in (images, *others) if captioned else (images,):
            taken += compute.sum(compute.binary_length(column)).as_py() or 0
        if taken > most_bytes:
            held = "images and captions" if captioned else "images"
            raise DatasetError(
                f"{place}: {held} of more than {most_bytes >> 20} MiB, which the file stores once and repeats; write "
                "it without a dictionary of that column"
            )
        batches.append(pyarrow.record_batch([images, *others], schema))
    return pyarrow.Table.from_batches(batches, schema).combine_chunks()


def _holds_bytes(kind: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_binary(kind.field(place).type)
    return _is_binary(kind)


def _is_text(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)


def _is_binary(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)
