"""Optional sinks of metrics: TensorBoard's files, Weights & Biases."""

import io
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from torchtitan.files.durable import replace_file
from torchtitan.files.optional import OptionalOutputs
from torchtitan.files.patient_file import PatientFile
from torchtitan.files.regular import read_text

# Takes a step and its metrics by tag, on the first rank.
Callback = Callable[[int, Mapping[str, float]], None]
# Callbacks of plugins by name, called with every point that metrics.jsonl gets.
CALLBACKS: dict[str, Callback] = {}


class TensorBoardFile:
    """File of TensorBoard's events, written here: a SummaryWriter's thread dies of a full disk."""

    def __init__(self, folder: Path, steps_done: int | None) -> None:
        """steps_done: where the run resumes, 0 if new: hides later events of earlier files; None: hides none."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"
        self._file = PatientFile(folder / name, "TensorBoard's file")
        self._event = Event
        self._add(Event(file_version="brain.Event:2"))
        if steps_done is not None:
            first = steps_done + 1 if steps_done else 0  # a new run may show pictures of step 0
            self._add(Event(step=first, file_version="brain.Event:2"))
            self._add(Event(step=first, session_log=SessionLog(status=SessionLog.START)))

    def add_scalars(self, step: int, values: dict[str, float]) -> None:
        """Append a point of several values."""
        event = self._event(step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=float(value))
        self._add(event)

    def add_image(self, step: int, tag: str, picture: Image.Image) -> None:
        """Append a picture, RGB."""
        event = self._event(step=step)
        image = event.summary.value.add(tag=tag).image
        image.width, image.height, image.colorspace, image.encoded_image_string = *picture.size, 3, as_png(picture)
        self._add(event)

    def sync(self) -> None:
        """Sync the events to the disk, if the disk allows."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.add(record.getvalue())


class WandbRun:
    """Run of Weights & Biases; one that cannot be started is left out of this session."""

    def __init__(self, folder: Path, name: str, config: dict) -> None:
        """folder: of the run; `wandb_id` in it makes a resumed run the same one."""
        import wandb

        self._wandb, self._folder = wandb, folder
        self._run = None
        self._outputs = OptionalOutputs()
        # A value of the environment that wandb rejects is a ValueError.
        with self._attempt("training continues, and this session is not logged there", ValueError), _nobody_at_the_terminal():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "torchtitan", name=name, id=_wandb_id(folder), resume="allow",
                dir=str(folder), config=config,
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._run:
            with self._attempt():
                self._run.log(metrics, step=step)

    def log_image(self, step: int, tag: str, picture: Image.Image) -> None:
        if self._run:
            with self._attempt():
                self._run.log({tag: self._wandb.Image(picture)}, step=step)

    def summarise(self, results: Mapping[str, float | str]) -> None:
        """Set results of the run as a whole, which its table compares."""
        if self._run:
            with self._attempt():
                self._run.summary.update(dict(results))

    def close(self) -> None:
        if self._run:
            with self._attempt("its last points may be missing"):
                self._run.finish()

    def _attempt(
        self, consequence: str = "training continues, and the next point is tried", *errors: type[Exception]
    ) -> AbstractContextManager:
        errors = (self._wandb.Error, *errors)
        return self._outputs.attempt("Weights & Biases", self._folder, *errors, consequence=consequence)


@contextmanager
def _nobody_at_the_terminal() -> Iterator[None]:
    """Give questions an empty standard input: wandb without a login would ask for it, and training would wait."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


def as_png(picture: Image.Image, texts: Mapping[str, str] | None = None) -> bytes:
    """Encode a picture as a PNG file's content, with texts in it by their keys."""
    content, info = io.BytesIO(), PngInfo()
    for key, text in (texts or {}).items():
        info.add_itxt(key, text)
    picture.save(content, format="PNG", pnginfo=info)
    return content.getvalue()


def _wandb_id(folder: Path) -> str:
    path = folder / "wandb_id"
    try:
        known = read_text(path).strip()
    except FileNotFoundError:
        known = ""
    if not known:
        known = uuid.uuid4().hex
        replace_file(path, known)
    return known
