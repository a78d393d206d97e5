"""Files of a set of samples: an image per seed as PNG, or all in one npz or Parquet file that is put together from parts."""

import csv
import io
import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from torchtitan.evaluation.sample_plans import SampleSetError, SetPlan
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file, replace_files, replacing
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.removal import remove_folder

LABELS = "labels.csv"
PARTS = "parts"
_LABELS_HEADER = ("file", "class")


class SetFiles(ABC):
    """Files of a set, of which several processes write different batches; each file is whole or missing."""

    def __init__(self, folder: Path, plan: SetPlan) -> None:
        self.folder, self.plan = folder, plan

    @abstractmethod
    def begin(self) -> None:
        """Begin or resume, in one process. Raises OSError, SampleSetError."""

    @abstractmethod
    def written(self) -> list[bool]:
        """Whether each batch is written."""

    @abstractmethod
    def is_written(self, batch: int) -> bool:
        """Check whether one batch is written."""

    @abstractmethod
    def write(self, batch: int, pixels: np.ndarray) -> None:
        """Write a batch, uint8 [B, H, W, 3]. Raises OSError."""

    @abstractmethod
    def finish(self) -> Path:
        """Finish, in one process, when all batches are written: what there is to use. Raises OSError, SampleSetError."""

    @abstractmethod
    def read(self) -> Iterator[np.ndarray]:
        """Read the pixels of the finished set, uint8 [B, H, W, 3], in the order of its seeds."""


class PNGFiles(SetFiles):
    """A PNG file per image, named by its seed, and the choices in labels.csv."""

    def begin(self) -> None:
        own = {self._name(seed) for seed in self.plan.seeds.tolist()}
        if others := sorted(path.name for path in self.folder.glob("*.png") if path.name not in own):
            raise SampleSetError(f"{self.folder}: holds {others[0]}, which is not of this set (move it away)")
        if self.plan.choices is not None:
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(_LABELS_HEADER)
            pairs = zip(self.plan.seeds.tolist(), self.plan.choices.tolist(), strict=True)
            writer.writerows((self._name(seed), choice) for seed, choice in pairs)
            refuse_foreign_file(self.folder / LABELS, ",".join(_LABELS_HEADER).encode())
            replace_file(self.folder / LABELS, text.getvalue())

    def written(self) -> list[bool]:
        there = {path.name for path in self.folder.iterdir()}
        return [there.issuperset(self._names(batch)) for batch in range(self.plan.num_batches)]

    def is_written(self, batch: int) -> bool:
        return all((self.folder / name).exists() for name in reversed(self._names(batch)))

    def write(self, batch: int, pixels: np.ndarray) -> None:
        replace_files(self.folder, dict(zip(self._names(batch), map(_png, pixels), strict=True)))

    def finish(self) -> Path:
        if not all(self.written()):
            raise SampleSetError(f"{self.folder}: images are missing (the same command draws them)")
        return self.folder

    def read(self) -> Iterator[np.ndarray]:
        for batch in range(self.plan.num_batches):
            yield np.stack([_pixels(self.folder / name) for name in self._names(batch)])

    def _names(self, batch: int) -> list[str]:
        return [self._name(seed) for seed in self.plan.batch(batch)[0].tolist()]

    @staticmethod
    def _name(seed: int) -> str:
        return f"{seed:06d}.png"


class OneFile(SetFiles):
    """One file, put together from a part for each batch when all are there; then the parts are removed."""

    suffix: ClassVar[str]
    part_suffix: ClassVar[str]

    def begin(self) -> None:
        if not self.path.exists():
            make_folder(self._parts)
            remove_unfinished(self._parts)

    def written(self) -> list[bool]:
        if self.path.exists():
            return [True] * self.plan.num_batches
        there = {path.name for path in self._parts.iterdir()}
        return [self._part(batch).name in there for batch in range(self.plan.num_batches)]

    def is_written(self, batch: int) -> bool:
        return self._part(batch).exists() or self.path.exists()

    def write(self, batch: int, pixels: np.ndarray) -> None:
        replace_file(self._part(batch), self._part_content(batch, pixels))

    def finish(self) -> Path:
        if not self.path.exists():
            missing = [batch for batch, there in enumerate(self.written()) if not there]
            if missing:
                raise SampleSetError(f"{self._part(missing[0])}: is missing (the same command draws it)")
            with replacing(self.path) as unfinished:
                self._join(unfinished)
        remove_folder(self._parts, {self._part(batch).name for batch in range(self.plan.num_batches)}.__contains__)
        return self.path

    @property
    def path(self) -> Path:
        """The one file."""
        return self.folder / f"samples{self.suffix}"

    @property
    def _parts(self) -> Path:
        return self.folder / PARTS

    def _part(self, batch: int) -> Path:
        return self._parts / f"{batch:06d}{self.part_suffix}"

    def _damaged(self, batch: int) -> SampleSetError:
        return SampleSetError(f"{self._part(batch)}: is damaged (remove it, and the same command draws it again)")

    @abstractmethod
    def _part_content(self, batch: int, pixels: np.ndarray) -> bytes: ...

    @abstractmethod
    def _join(self, path: Path) -> None:
        """Write the parts, one in memory at a time, to a file. Raises SampleSetError: one is damaged."""


class NPZFile(OneFile):
    """An npz file as ADM's evaluation reads it: arr_0 uint8 [N, H, W, 3]; arr_1 the choices; and `seeds`.

    Source: Dhariwal and Nichol, "Diffusion models beat GANs on image synthesis", arXiv 2105.05233, published code.
    """

    suffix, part_suffix = ".npz", ".npy"

    def _part_content(self, batch: int, pixels: np.ndarray) -> bytes:
        content = io.BytesIO()
        np.save(content, pixels)
        return content.getvalue()

    def _join(self, path: Path) -> None:
        shape = self._load(0).shape[1:]
        with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
            with archive.open(zipfile.ZipInfo("arr_0.npy"), "w", force_zip64=True) as member:
                header = {"descr": "|u1", "fortran_order": False, "shape": (len(self.plan.seeds), *shape)}
                np.lib.format.write_array_header_1_0(member, header)
                for batch in range(self.plan.num_batches):
                    pixels = self._load(batch)
                    if pixels.dtype != np.uint8 or pixels.shape != (len(self.plan.batch(batch)[0]), *shape):
                        raise self._damaged(batch)
                    member.write(np.ascontiguousarray(pixels).data)
            for name, values in (("arr_1", self.plan.choices), ("seeds", self.plan.seeds)):
                if values is not None:
                    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
                        np.lib.format.write_array(member, values.numpy(), allow_pickle=False)

    def read(self) -> Iterator[np.ndarray]:
        with np.load(self.path, allow_pickle=False) as content:
            yield content["arr_0"]

    def _load(self, batch: int) -> np.ndarray:
        try:
            return np.load(self._part(batch), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(batch) from error


class ParquetFile(OneFile):
    """A Parquet file with the columns image (PNG), label (where there are choices) and seed, as `datasets` reads it."""

    suffix = part_suffix = ".parquet"

    def _part_content(self, batch: int, pixels: np.ndarray) -> bytes:
        import pyarrow
        from pyarrow import parquet

        seeds, choices = self.plan.batch(batch)
        images = [
            {"bytes": _png(image), "path": f"{seed:06d}.png"} for image, seed in zip(pixels, seeds.tolist(), strict=True)
        ]
        columns = {"image": images, "label": choices.tolist(), "seed": seeds.tolist()}
        schema = self._schema(pyarrow)
        content = io.BytesIO()
        table = pyarrow.table({name: columns[name] for name in schema.names}, schema)
        parquet.write_table(table, content, compression="none")
        return content.getvalue()

    def _join(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        schema = self._schema(pyarrow)
        with parquet.ParquetWriter(path, schema, compression="none") as writer:
            for batch in range(self.plan.num_batches):
                try:
                    table = parquet.read_table(self._part(batch))
                except (OSError, pyarrow.ArrowException) as error:
                    raise self._damaged(batch) from error
                writer.write_table(table)

    def read(self) -> Iterator[np.ndarray]:
        from pyarrow import parquet

        with parquet.ParquetFile(self.path) as file:
            for rows in file.iter_batches(columns=["image"]):
                yield np.stack([_pixels(io.BytesIO(image["bytes"])) for image in rows.column("image").to_pylist()])

    def _schema(self, pyarrow: Any) -> Any:
        image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        features = {"image": {"_type": "Image"}, "seed": {"dtype": "int64", "_type": "Value"}}
        fields = [("image", image), ("seed", pyarrow.int64())]
        if self.plan.choices is not None:
            features["label"] = {"dtype": "int64", "_type": "Value"}
            fields.insert(1, ("label", pyarrow.int64()))
        return pyarrow.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})


# --format -> files of a set
SET_FORMATS: dict[str, type[SetFiles]] = {"png": PNGFiles, "npz": NPZFile, "parquet": ParquetFile}


def _png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG", compress_level=1)
    return content.getvalue()


def _pixels(source: Path | io.BytesIO) -> np.ndarray:
    with Image.open(source, formats=("PNG",)) as image:
        return np.asarray(image.convert("RGB"))
