"""Pictures and other files that a reader leaves out: counted, and said in one line."""

import functools
import logging
import os
from collections import Counter
from collections.abc import Mapping

import numpy as np

from torchtitan.pictures.number_text import counted
from torchtitan.processes.launch import CHECKED, launch_number
from torchtitan.programs import program

PICTURES_NOT_READ = (
    b"heic", b"heif", b"avif", b"jxl", b"jp2", b"dng", b"nef", b"cr2", b"cr3", b"psd", b"svg", b"arw", b"orf", b"rw2",
    b"raf", b"tga", b"exr",
)  # fmt: skip

logger = logging.getLogger(__name__)


def ending_of(name: bytes) -> bytes:
    """Ending of a file's name, in lower case."""
    return name.rpartition(b".")[2].lower()


@functools.cache  # a run opens its data several times
def say_once(line: str, always: bool = False) -> None:
    """Log a line on data, from one process of a run; always: also where a check of the configuration would have said it."""
    if launch_number("RANK", 0) == 0 and (always or CHECKED not in os.environ):
        logger.warning(line)


def say_left_out(place: str, counts: Mapping[str, int]) -> None:
    """Say how many pictures of each ending are left out of a place, if any are."""
    if total := sum(counts.values()):
        listed = ", ".join(f"{count:,} .{ending}" for ending, count in Counter(counts).most_common())
        text = f"leaving out {counted(total, 'picture')} of endings that are not read: {listed} (convert to jpg or png)"
        say_once(f"{place}: {text}")


def say_untrained(place: str, classes: np.ndarray, held_out: np.ndarray, known: int) -> None:
    """Say how many classes have no image, or none to train on, if any; classes and held_out: of each image, [N]."""
    say_lacking(place, known - len(np.unique(classes)), known)
    if untrained := len(np.setdiff1d(classes, classes[~held_out])):
        advice = "data.validation_fraction = 0 trains on them"
        say_once(f"{place}: all images of {counted(untrained, 'class', 'es')} are among the held-out ones ({advice})")


def say_lacking(place: str, lacking: int, known: int) -> None:
    """Say how many of the known classes have no image, if any."""
    if lacking > 0:
        text = f"without images (--classes of {program('evaluate')} leaves them out of samples)"
        say_once(f"{place}: {lacking:,} of {known:,} classes are {text}")
