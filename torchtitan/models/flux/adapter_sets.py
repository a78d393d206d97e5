"""Published sets of Flux's layers with low-rank adapters, each under the name of the program that trains it.

With rank r the adapter of a linear from i to o has r (i + o) parameters. Of FLUX.1, rank 16:

    ai-toolkit  494  85,917,696   every linear of the blocks, as diffusers has them
    diffusers   342  44,826,624   attention and feed-forward of double blocks; queries, keys and values of single blocks
    kohya       304  76,578,816   every linear of the blocks, as black-forest-labs has them

The first two have an adapter each for queries, keys, values and the hidden layer of a single block, kohya has one for all.
"""

from collections.abc import Callable

from torchtitan.models.adapters.target import Target
from torchtitan.models.flux.conversion import published_linears
from torchtitan.models.flux.model import Flux

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_FEED_FORWARD = ("net.0.proj", "net.2")


def ai_toolkit(model: Flux) -> list[Target]:
    """Every linear of the blocks, as diffusers has them."""
    return [target for name, target in published_linears(model, "diffusers").items() if "transformer_blocks." in name]


def diffusers(model: Flux) -> list[Target]:
    """Linears of the default of diffusers' training scripts."""
    endings = tuple(f".attn.{name}" for name in _ATTENTION)
    endings += tuple(f".{layers}.{name}" for layers in ("ff", "ff_context") for name in _FEED_FORWARD)
    return [target for name, target in published_linears(model, "diffusers").items() if name.endswith(endings)]


def kohya(model: Flux) -> list[Target]:
    """Every linear of the blocks, as black-forest-labs has them."""
    return [target for name, target in published_linears(model, "bfl").items() if "_blocks." in name]


SETS: dict[str, Callable[[Flux], list[Target]]] = {"ai-toolkit": ai_toolkit, "diffusers": diffusers, "kohya": kohya}
