"""Converters: the one way to replace modules of a model, for gradient taps, low precision and adapters.

A converter is a function of a module's name and of the module; the returned module replaces it. It adopts the replaced
module's parameters, under their names, so that checkpoints, optimizer and sharding see the same model.
"""

from collections.abc import Callable

from torch import nn

Converter = Callable[[str, nn.Module], nn.Module | None]


def convert(model: nn.Module, converter: Converter) -> dict[str, nn.Module]:
    """Replace modules of a model in place, before the model is wrapped; name -> new module, for all replaced.

    Args:
        converter: called with the name and the module of every leaf, in the model's order; None keeps it.
    """
    leaves = {name: module for name, module in model.named_modules() if name and not any(module.children())}
    replaced = {name: new for name, module in leaves.items() if (new := converter(name, module)) is not None}
    for name, new in replaced.items():
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent).register_module(child, new)
    return replaced
