"""Index of a latent store: one JSON file, written last, with its own checksum.

    STORE/index.json  shard-00000.safetensors  shard-00001.safetensors  ...  skipped.jsonl (where images were left out)
                      captions-00000.safetensors  ... (where it has captions: texts with their embeddings)

A folder without the index is not a store yet: see `torchtitan.latents.writer`.
"""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from torchtitan.errors import LatentStoreError, unwrapped
from torchtitan.files.durable import replace_file
from torchtitan.files.regular import read_regular
from torchtitan.programs import program

INDEX_FILE = "index.json"
SKIPPED_FILE = "skipped.jsonl"
PARTIAL_FOLDER = "partial"
MAX_INDEX_BYTES = 24 << 20
MAX_SHARDS = 1000  # as many files as `images_per_shard` makes at most
_IMAGES_PER_SHARD, _LEAST_IMAGES_PER_SHARD, _FEW_SHARDS = 1024, 64, 16

MOST_SHARDS = 100_000  # with explicit sizes; their records still fit the largest index
MOST_CLASSES = 1_000_000
CAPTION_SHARD_BYTES = 256 << 20
_OF_A_CACHE = re.compile(r"-[0-9a-f]{16}$")  # as torchtitan.config.latent_cache names folders
HOW_TO_MAKE = f"{program('extract_latents')} makes one of images, or of their --features, and with convert of published latents"

StoredDtype = Literal["float16", "bfloat16", "int8"]
CaptionDtype = Literal["float32", "float16", "bfloat16"]


Count = Annotated[int, Field(ge=1, lt=1 << 40)]
CountOrNone = Annotated[int, Field(ge=0, lt=1 << 40)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


_OF_CAPTIONS = ("captions", "caption_shards")


class StoreRecord(BaseModel):
    """Part of a store's index: no other keys, no other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Normalization(StoreRecord):
    """Normalised = (raw - shift) * scale, by channel or by element [C, h, w].

    source: "measured", "given" by the user, or the "autoencoder"'s own.
    """

    shift: list[Finite]
    scale: list[Finite]
    source: Literal["measured", "autoencoder", "given"]


class FileRecord(StoreRecord):
    """File of the store: bytes, and SHA-256."""

    size: Count
    sha256: Sha256


class ShardRecord(FileRecord):
    """File of encoded images: also their number."""

    num_images: CountOrNone


class CaptionPlan(StoreRecord):
    """Plan of a store's captions: texts by number, each with its embeddings, and of each image the number of its text.

    Text 0 is the null caption, which stands for no condition.

    Attributes:
        source: "image": every image has a caption of its own; "class": it is made from the name of the class.
        num_texts: different ones, with the null caption.
        texts_per_shard: text i belongs to file i // texts_per_shard.
        prompts: numbers of the texts that grids of samples show.
        text_shape: (tokens, width) of the embeddings of a text's tokens.
        pooled_shape: (width,) of the embedding of the whole text.
        encoders: of "text" and of "pooled": "name", and everything that identifies the encoder.
    """

    source: Literal["image", "class"]
    num_texts: Count
    texts_per_shard: Count
    digest: Sha256
    prompts: list[CountOrNone]
    text_shape: tuple[Count, Count]
    pooled_shape: tuple[Count]
    dtype: CaptionDtype
    encoders: dict[str, dict[str, Any]]

    @property
    def num_shards(self) -> int:
        return -(-self.num_texts // self.texts_per_shard)

    def texts_of(self, shard: int) -> range:
        """Numbers of the texts that belong to a file."""
        first = shard * self.texts_per_shard
        return range(first, min(first + self.texts_per_shard, self.num_texts))

    @pydantic.model_validator(mode="after")
    def _agrees(self) -> "CaptionPlan":
        if self.num_shards > MOST_SHARDS:
            raise ValueError(f"texts_per_shard: {self.num_shards} files are too many")
        return self


class SkippedImage(StoreRecord):
    """Image not in the store, undecodable; path: its file, or its place in one, relative to the source."""

    image: CountOrNone
    path: str
    reason: str


class StorePlan(StoreRecord):
    """Plan of a store: fixed before the first image is written, and equal for every writer.

    Attributes:
        num_source_images: images of the source; the store holds those of them that can be decoded.
        images_per_shard: of the source, image i of which belongs to shard i // images_per_shard.
        posterior: whether mean and standard deviation are kept, or only the latent.
        mirrored: whether each image's mirror image is kept too, encoded as such.
        int8_step: with dtype int8, the difference of neighbouring values; None gives each image and channel its own.
        num_classes: labels are 0 .. num_classes - 1; 0: no labels.
        image_size: pixels of each side of the images that were encoded, None where it is not known.
        autoencoder: maker of the latents: "name", and everything that identifies it; "unknown" if it is not known.
        normalization: None: measured after the last shard.
        origin: of the images, in words and numbers that distinguish it from other sources.
        captions: None: the store has none, and its record is that of stores before there were captions.
    """

    num_source_images: Count
    images_per_shard: Count
    shape: tuple[Count, Count, Count]
    posterior: bool
    mirrored: bool
    dtype: StoredDtype
    int8_step: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    num_classes: Annotated[int, Field(ge=0, le=MOST_CLASSES)]
    class_names: list[str] = []
    image_size: Count | None = None
    autoencoder: dict[str, Any]
    normalization: Normalization | None = None
    origin: dict[str, Any] = {}
    captions: CaptionPlan | None = None

    @property
    def num_shards(self) -> int:
        return -(-self.num_source_images // self.images_per_shard)

    @property
    def of_features(self) -> bool:
        """True if a teacher's features are kept instead of latents."""
        return self.autoencoder.get("name") == "features"

    @property
    def views(self) -> int:
        """Number of views per image: 2 where the mirror image is kept."""
        return 1 + self.mirrored

    @property
    def parts(self) -> int:
        """Number of arrays per view: 2 where mean and standard deviation are kept."""
        return 1 + self.posterior

    def source_images_of(self, shard: int) -> range:
        """Numbers, in the source, of the images that belong to a shard."""
        first = shard * self.images_per_shard
        return range(first, min(first + self.images_per_shard, self.num_source_images))

    @pydantic.model_validator(mode="after")
    def _agrees(self) -> "StorePlan":
        if self.num_shards > MOST_SHARDS:
            least = -(-self.num_source_images // MOST_SHARDS)
            raise ValueError(f"images_per_shard: {self.num_shards} files are too many; at least {least} each")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ValueError(f"{len(self.class_names)} class names for {self.num_classes} classes")
        return self

    @pydantic.model_serializer(mode="wrap")
    def _without_captions(self, standard: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        content = standard(self)
        return content if self.captions else {key: content[key] for key in content if key not in _OF_CAPTIONS}


class StoreIndex(StorePlan):
    """Index of a complete store: plan, normalisation, shards in order; num_images: through all shards."""

    format: Literal["latent store"] = "latent store"
    version: Literal[1] = 1
    num_images: Count
    normalization: Normalization
    shards: list[ShardRecord]
    caption_shards: list[FileRecord] = []

    def metadata(self) -> dict[str, str]:
        """Describe latents drawn by a model of these: their normalisation, and the autoencoder that decodes them."""
        normalization = self.normalization.model_dump(include={"shift", "scale"})
        return {"normalization": json.dumps(normalization), "autoencoder": json.dumps(self.autoencoder)}

    def files(self) -> dict[str, FileRecord]:
        """Files of the store by name, but for the index: images, then captions."""
        images = {shard_name(number): shard for number, shard in enumerate(self.shards)}
        return images | {caption_shard_name(number): shard for number, shard in enumerate(self.caption_shards)}

    def first_images(self) -> np.ndarray:
        """First image number of each shard, int64 [num_shards]; an empty one has that of the next."""
        counts = np.array([shard.num_images for shard in self.shards], np.int64)
        return np.cumsum(counts) - counts

    def plan(self) -> StorePlan:
        """Plan that the store was begun with."""
        content = {name: getattr(self, name) for name in StorePlan.model_fields}
        if self.normalization.source == "measured":
            content["normalization"] = None
        return StorePlan(**content)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def caption_shard_name(number: int) -> str:
    return f"captions-{number:05d}.safetensors"


def images_per_shard(num_source_images: int) -> int:
    """Choose the images per file so that a store has at most MAX_SHARDS files, and a small one some: what is resumed is files."""
    of_small = min(_IMAGES_PER_SHARD, -(-num_source_images // _FEW_SHARDS))
    return max(_LEAST_IMAGES_PER_SHARD, of_small, -(-num_source_images // MAX_SHARDS))


def read_index(folder: Path) -> StoreIndex:
    """Read the index of a complete store. Raises LatentStoreError."""
    if not folder.is_dir():
        advice = f"give a latent store ({HOW_TO_MAKE})"
        if _OF_A_CACHE.search(folder.parent.name):
            advice = "the first command of the run that had this cache, with data.path its pictures, makes it anew"
        looked = "" if folder.is_absolute() else f" (looked for {folder.absolute()})"
        raise LatentStoreError(f"{folder}: no such folder{looked}; {advice}")
    if not (folder / INDEX_FILE).is_file():
        if (folder / PARTIAL_FOLDER).is_dir():
            raise LatentStoreError(f"{folder}: not finished; run the command that writes it again, and it resumes")
        raise LatentStoreError(f"{folder}: no latent store, it has no {INDEX_FILE}")
    return parse_record(StoreIndex, read_sealed(folder / INDEX_FILE), folder / INDEX_FILE)


def parse_record(kind: type[StoreRecord], content: dict, path: Path) -> Any:
    """Read a record from JSON's dicts and lists. Raises LatentStoreError."""
    try:
        return kind.model_validate_json(json.dumps(content))
    except pydantic.ValidationError as failure:
        raise LatentStoreError(f"{path}: {first_problem(failure)}") from failure


def first_problem(failure: pydantic.ValidationError) -> str:
    """First reason for the refusal of a record, in one line."""
    error = failure.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, error["loc"]))
    text = unwrapped(error["msg"].removeprefix("Value error, "))
    return f"{place}: {text}" if place else text


def write_sealed(path: Path, content: dict) -> None:
    """Write JSON with its checksum; see `place_durably`. Raises OSError."""
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=1, ensure_ascii=False)
    place_durably(path, text.encode() + b"\n")


def read_sealed(path: Path) -> dict:
    """Read a file of `write_sealed`. Raises LatentStoreError."""
    try:
        content = json.loads(read_regular(path, MAX_INDEX_BYTES))
    except OSError as error:
        raise LatentStoreError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise LatentStoreError(f"{path}: not JSON; take a good copy of it, or write the store anew") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise LatentStoreError(f"{path}: damaged or edited, its checksum does not agree; take a good copy of it")
    return content


def place_durably(path: Path, content: bytes) -> dict:
    """Place a file whole and on the disk; return its {"size", "sha256"}. Raises OSError."""
    replace_file(path, content)
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _checksum(content: dict) -> str:
    try:
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    except (ValueError, RecursionError):
        return ""


def rounded(value: float) -> float:
    """Round to ten significant digits: more than any use needs, fewer than sums in another order would change."""
    return value if value == 0 or not math.isfinite(value) else float(f"{value:.10g}")
