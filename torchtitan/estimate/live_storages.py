"""Count of live tensor bytes, operation by operation, without allocating memory."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, ACTIVATIONS, COMMUNICATION = "parameters", "gradients", "activations", "communication"
ACCUMULATED = "accumulated"  # whole gradients of FSDP2's earlier microbatches, on the device also where the shards are not

_COLLECTIVES = ("fsdp", "c10d")
_HELD = (PARAMETERS, GRADIENTS, ACCUMULATED)


class LiveStorages(TorchDispatchMode):
    """Live bytes inside a FakeTensorMode after every operation, by category, and their peak in each window.

    A storage counts once, however many tensors view it, with the bytes it has at that moment: FSDP2 empties and refills
    the storage of gathered parameters. Its category is given by `hold`; without it, storages touched by a collective or
    a copy around one are COMMUNICATION, its reduced output GRADIENTS, and everything else ACTIVATIONS. Memory allocated
    and freed by a kernel within one operation is not seen.

    Attributes:
        windows: window -> category -> bytes, at the highest sum over categories in that window.
    """

    def __init__(self) -> None:
        super().__init__()
        self.windows: dict[Any, Counter] = {}
        self._live: dict[int, _Storage] = {}
        self._filled: set[_Storage] = set()  # those of COMMUNICATION that hold bytes
        self._sums: Counter = Counter()
        self._window: Any = None

    def open_window(self, key: Any) -> None:
        """Open a window: from here on peaks count for the window `key`, until the next call."""
        self._window = key
        self._sample()

    def hold(self, tensors: Iterable[Tensor], category: str) -> None:
        """Hold these tensors, plain or sharded, in a category."""
        for tensor in tensors:
            self._see(tensor.to_local() if isinstance(tensor, DTensor) else tensor, category)

    def move(self, source: str, category: str) -> None:
        """Count all that is live in one category in another."""
        for known in self._live.values():
            if known.category == source:
                self._sums[source] -= known.nbytes
                self._sums[category] += known.nbytes
                known.category = category

    def now(self) -> Counter:
        """Live bytes now, by category."""
        self._recount(list(self._filled))  # FSDP2 empties them by no operation
        return +self._sums

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on the shards
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace in _COLLECTIVES:
            for tensor in _tensors((args, kwargs, result)):
                self._see(tensor, COMMUNICATION, keep=_HELD)
            if "reduce_scatter" in func.name():
                self._see(args[0], GRADIENTS)
        else:
            for tensor in _tensors(result):
                self._see(tensor, ACTIVATIONS, keep=(*_HELD, COMMUNICATION))
        self._sample()
        return result

    def _see(self, tensor: Tensor, category: str, keep: tuple[str, ...] = ()) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._live.get(key)
        if known is None:
            known = self._live[key] = _Storage(weakref.ref(storage, lambda _: self._forget(key)), category)
        elif known.category not in keep:
            self._count(known, 0)
            known.category = category
        if known.category == COMMUNICATION and known not in self._filled:  # FSDP2 fills a block's together, by no operation
            self._recount([each for each in self._live.values() if each.category == COMMUNICATION])
        self._count(known, storage.nbytes())

    def _recount(self, storages: list["_Storage"]) -> None:
        for known in storages:
            self._count(known, storage.nbytes() if (storage := known.reference()) is not None else 0)
            (self._filled.add if known.nbytes else self._filled.discard)(known)

    def _forget(self, key: int) -> None:
        self._count(self._live.pop(key), 0)

    def _count(self, known: "_Storage", nbytes: int) -> None:
        self._sums[known.category] += nbytes - known.nbytes
        known.nbytes = nbytes

    def _sample(self) -> None:
        sums = self.now()
        if sums.total() >= self.windows.setdefault(self._window, Counter()).total():
            self.windows[self._window] = sums


@dataclass(slots=True, eq=False)
class _Storage:
    reference: weakref.ref
    category: str
    nbytes: int = 0


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and type(leaf) is not torch.Tensor]
