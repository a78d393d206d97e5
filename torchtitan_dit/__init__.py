"""Train diffusion transformers, and sample from them, in Python: `load`, `sample`, `train`; `Trainer` in this process.

The commands are in `torchtitan_dit.commands`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_dit.api import Model, Run, Trainer, configure, load, load_plugins, sample, train

__all__ = ["Model", "Run", "Trainer", "configure", "load", "load_plugins", "sample", "train"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import torch only when one of the names is used: the commands' help is to be quick."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchtitan_dit import api

    return getattr(api, name)
