"""Non-finite values: in a state, and the first one of a step, with every module watched."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchtitan.distributed.activation_checkpoint import WRAPPER_PREFIX
from torchtitan.distributed.collectives import of_all_ranks
from torchtitan.distributed.parallelize import local


class Watch:
    """Watch for the first non-finite value since its creation; found: it in words, or ""."""

    def __init__(self) -> None:
        self.found = ""

    def see(self, tensor: Tensor | None, words: str) -> None:
        """Check a tensor, plain or sharded; waits for the device."""
        if not self.found and tensor is not None and not local(tensor).isfinite().all():
            self.found = words

    def see_all(self, tensors: Iterable[tuple[str, Tensor | None]], words: str) -> None:
        """Check tensors by name; `words` has a place for it."""
        for name, tensor in tensors:
            self.see(tensor, words.format(name))


@contextmanager
def watched(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Watch the output of every module in forward, and its gradient in backward; compiled blocks run eagerly inside."""
    handles = []
    for name, module in model.named_modules():
        if name and not name.endswith(WRAPPER_PREFIX.rstrip(".")):
            handles.append(module.register_forward_hook(_hook(name.replace(WRAPPER_PREFIX, ""), watch)))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(name: str, watch: Watch):
    def look(module: nn.Module, inputs: tuple, output: object) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if not isinstance(tensor, Tensor):
                continue
            watch.see(tensor, f"the output of {name}")
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: watch.see(gradient, f"the gradient of the output of {name}"))

    return look


@torch.no_grad()
def not_finite(tensors: dict[str, Tensor]) -> str:
    """Name the first tensor of each rank, plain or sharded, that holds a non-finite value; "": none does.

    Collective. Reads every value once, takes no memory, and waits for the device once.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}  # some optimizers count their steps on the host
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (values := local(tensor)).numel():
            by_device.setdefault(values.device, {})[name] = values
    bad = set()
    for floating in by_device.values():
        largest = torch._foreach_norm(list(floating.values()), math.inf)  # NaN counts as the largest
        finite = torch.stack([value.isfinite() for value in largest]).tolist()
        bad |= {name for name, good in zip(floating, finite, strict=True) if not good}
    return over_ranks(next((f"{name} is not finite" for name in tensors if name in bad), ""))


def over_ranks(found: str) -> str:
    """Gather the findings of all ranks in one line, like findings once; collective."""
    everyone = of_all_ranks(found)
    ranks_by_words: dict[str, list[int]] = {}
    for rank, words in enumerate(everyone):
        ranks_by_words.setdefault(words, []).append(rank)
    ranks_by_words.pop("", None)
    if len(everyone) == 1 or list(map(len, ranks_by_words.values())) == [len(everyone)]:
        return next(iter(ranks_by_words), "")
    return "; ".join(
        f"{words} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for words, ranks in ranks_by_words.items()
    )
