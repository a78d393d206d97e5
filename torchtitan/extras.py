"""Optional packages, and the command that installs them into the Python that runs."""

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# As the extras of pyproject.toml. The packages are named, not `.[extra]`, which works in the checkout's folder only.
EXTRAS = {
    "diffusers": ("diffusers>=0.32", "huggingface_hub"),
    "digits": ("scikit-learn",),
    "hub": ("datasets", "huggingface_hub"),
    "lowbit": ("torchao>=0.18,<0.19",),
    "ray": ("ray>=2.9",),
    "remote": ("gcsfs", "s3fs"),
    "slurm": ("submitit>=1.5",),
    "text": ("huggingface_hub", "sentencepiece", "transformers>=4.46"),
    "wandb": ("wandb",),
}
_OF_TORCHAO = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Import torchao in here without its warnings: of kernels made for another torch, of Triton, of a deprecation."""
    loggers = [logging.getLogger(name) for name in _OF_TORCHAO]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def install(*extras: str) -> str:
    """Command line that installs extras from any folder. Raises KeyError: there is no such extra."""
    return install_packages(*dict.fromkeys(package for extra in extras for package in EXTRAS[extra]))


def install_packages(*packages: str) -> str:
    """Command line that installs packages into the environment of this process, from any folder."""
    program = Path(sys.executable)
    here = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    return shlex.join([str(here), "-m", "pip", "install", *packages])
