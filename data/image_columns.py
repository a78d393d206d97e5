"""Columns of images, labels and captions of a table, found from its schema."""

from dataclasses import dataclass
from typing import Any

from torchtitan.data.base import DatasetError


@dataclass(frozen=True)
class Columns:
    """Columns that training reads.

    Attributes:
        beside: name of the column read with it, of labels or captions; "" where labels are left aside.
        class_names: of the labels, empty where the table does not name them.
    """

    image: str
    beside: str
    class_names: tuple[str, ...]
    captioned: bool = False

    @property
    def labelled(self) -> bool:
        return bool(self.beside) and not self.captioned


def find_columns(
    place: str, features: dict[str, Any], image_column: str, label_column: str, caption_column: str = "",
    labels: bool = True,
) -> Columns:  # fmt: skip
    """Find the given columns, or the only ones of their kind.

    Args:
        features: column -> description, as Hugging Face `datasets` writes them: {"_type": "Image"},
            {"_type": "ClassLabel", "names": [...]}, {"_type": "Value", "dtype": "int64"}.
        caption_column: name of a column of texts, to be read instead of labels, or "".

    Raises:
        DatasetError: a column given is missing or of another kind, or there is not exactly one of the kind.
    """
    image = _choose(place, features, "image", image_column, _is_image)
    if caption_column:
        return Columns(image, _choose(place, features, "caption", caption_column, _is_text), (), captioned=True)
    if not labels:
        return Columns(image, "", ())
    label = _choose(place, features, "label", label_column, _is_label if label_column else _is_class_label)
    return Columns(image, label, tuple(features[label].get("names") or []))


def arrow_features(schema: Any) -> dict[str, Any]:
    """Describe the columns of a parquet file without such metadata, from their types alone."""
    import pyarrow

    features: dict[str, Any] = {}
    for field in schema:
        struct = pyarrow.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
        if struct or pyarrow.types.is_binary(field.type) or pyarrow.types.is_large_binary(field.type):
            features[field.name] = {"_type": "Image"}
        else:
            features[field.name] = {"_type": "Value", "dtype": str(field.type)}
    return features


def _choose(place: str, features: dict[str, Any], kind: str, given: str, fits: Any) -> str:
    key = f"data.{kind}_column"
    listed = ", ".join(f"{name} ({_describe(feature)})" for name, feature in features.items()) or "none"
    if given:
        if given not in features:
            raise DatasetError(f"{key}: {place} has no column {given!r}; it has {listed}")
        if not fits(features[given]):
            wanted = {"image": "images", "label": "class labels or integers", "caption": "texts"}[kind]
            advice = " (data.labels = false trains without labels)" if kind == "label" else ""
            raise DatasetError(f"{key}: column {given!r} of {place} is {_describe(features[given])}, not {wanted}{advice}")
        return given
    found = [name for name, feature in features.items() if fits(feature)]
    if len(found) == 1:
        return found[0]
    wanted = "images" if kind == "image" else "class labels"
    if found:
        raise DatasetError(f"{key}: {place} has several columns of {wanted}, {', '.join(found)}; say which")
    advice = ", or set data.labels = false" if kind == "label" else ""
    raise DatasetError(f"{key}: {place} has no column of {wanted}; say which of its columns: {listed}{advice}")


def _describe(feature: Any) -> str:
    if not isinstance(feature, dict):
        return "list"
    return f"{feature.get('dtype') or feature.get('_type') or 'struct'!s:.80}"


def _is_image(feature: Any) -> bool:
    """Check for an image column; also the struct of an image that was saved without metadata."""
    return isinstance(feature, dict) and (feature.get("_type") == "Image" or set(feature) == {"bytes", "path"})


def _is_class_label(feature: Any) -> bool:
    return isinstance(feature, dict) and feature.get("_type") == "ClassLabel"


def _is_label(feature: Any) -> bool:
    integer = isinstance(feature, dict) and "int" in str(feature.get("dtype", ""))
    return integer or _is_class_label(feature)


def _is_text(feature: Any) -> bool:
    return isinstance(feature, dict) and feature.get("dtype") in ("string", "large_string")
