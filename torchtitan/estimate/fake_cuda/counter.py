"""Count of what a program does on an imitated CUDA device: operations, bytes, FLOPs, copies, waits and live memory."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# Operations that only describe memory, or allocate it, and start nothing on the device.
NO_KERNEL = frozenset(
    "alias as_strided chunk detach diagonal empty empty_like empty_strided expand is_pinned is_same_size lift lift_fresh"
    " narrow new_empty new_empty_strided permute record_stream _reshape_alias reshape resize_ select set_ slice split"
    " split_with_sizes squeeze t transpose unbind unfold unsafe_split unsafe_chunk unsqueeze _unsafe_view view view_as_real"
    " view_as_complex wait_tensor prim_device device".split()
)
# Operations that return a value to the host: it waits for all earlier work.
_HOST_READS = frozenset("_local_scalar_dense equal nonzero masked_select unique_dim _unique2".split())

# Operations that change their first argument without reading it.
_OVERWRITES = frozenset("copy_ fill_ zero_ normal_ uniform_".split())


@dataclass(frozen=True)
class Copy:
    """Copy between host and device.

    Attributes:
        to_device: direction.
        shape, dtype: of the values.
        pinned: whether the host's side is pinned memory.
        non_blocking: as asked for.
    """

    to_device: bool
    shape: tuple[int, ...]
    dtype: str
    pinned: bool
    non_blocking: bool

    @property
    def waits(self) -> bool:
        """True if the host waits for the copy, and so for the device's work before it.

        A non-blocking copy to the host uses pinned memory, which torch allocates itself.
        """
        return not (self.non_blocking and (self.pinned or not self.to_device))


@dataclass(frozen=True)
class Call:
    """Call of an operation on the device: in eager mode about one kernel.

    Attributes:
        name: of the operation.
        dtype: of its first floating-point input, or of its first output.
        moved: bytes of its inputs and outputs on the device.
        flops: floating-point operations of matrix products and attention, 2 per multiply-accumulate; else 0.
    """

    name: str
    dtype: str
    moved: int
    flops: int


@dataclass
class PhaseCounts:
    """Counts of one phase of a step.

    Attributes:
        calls: operations that compute or move values on the device, with their number.
        collectives: name -> bytes of their larger side on this rank; no operations of the device's own.
        copies: between host and device.
        waits: what the host waited in -> times.
        peak: most bytes live on the device.
        end: bytes live at the end.
        kept: bytes from the forward to the backward, where compiled blocks were counted.
    """

    calls: Counter[Call] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    copies: list[Copy] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    end: int = 0
    kept: int = 0

    @property
    def operations(self) -> int:
        """Number of operations."""
        return self.calls.total()

    @property
    def moved(self) -> int:
        """Bytes of the inputs and outputs of all operations."""
        return sum(call.moved * times for call, times in self.calls.items())

    @property
    def flops(self) -> Counter[str]:
        """Floating-point operations by dtype."""
        sums: Counter[str] = Counter()
        for call, times in self.calls.items():
            if call.flops:
                sums[call.dtype] += call.flops * times
        return sums

    @property
    def synchronising(self) -> int:
        """Times that the host waits for the device."""
        return sum(copy.waits for copy in self.copies) + self.waits.total()

    def add(self, other: "PhaseCounts") -> None:
        """Add the counts of another phase, which ends later."""
        self.calls += other.calls
        self.collectives += other.collectives
        self.copies += other.copies
        self.waits += other.waits
        self.peak, self.end = max(self.peak, other.peak), other.end


class StepCounter(TorchDispatchMode):
    """Counter inside `fake_cuda`: operations on the device are counted and have no values, those on the host are real.

    A value that the host reads from the device is 0.

    Attributes:
        phases: name -> counts, in the order of their first operation.
        live: bytes on the device.
        epoch: number of resets, which a step begins with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, PhaseCounts] = {}
        self.live = 0
        self._sizes: dict[int, int] = {}
        self._pinned: dict[int, Any] = {}
        self.epoch = 0
        self._phase = "start"

    @property
    def now(self) -> PhaseCounts:
        """Counts of the present phase."""
        return self.phases.setdefault(self._phase, PhaseCounts(peak=self.live))

    def enter(self, phase: str) -> str:
        """Enter a phase; return the one before."""
        before, self._phase = self._phase, phase
        self.now.peak = max(self.now.peak, self.live)
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is inside for a phase."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.phases[name].end = self.live
            self.enter(before)

    def reset(self) -> None:
        """Forget all counts; what lives, lives on."""
        self.phases = {}
        self.epoch += 1

    def waited(self, reason: str) -> None:
        """Count that the host waits for the device."""
        self.now.waits[reason] += 1

    # ------------------------------------------------------------------ dispatch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on the shards
        kwargs = dict(kwargs or {})
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        of_device = any(isinstance(tensor, FakeTensor) for tensor in inputs) or _is_cuda(kwargs.get("device"))
        if not of_device:
            return self._on_host(func, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if name in _HOST_READS:
            self.waited(name)
            if name in ("_local_scalar_dense", "equal"):  # the shape of the others' result depends on values: they raise
                return _zero(inputs[0].dtype) if name == "_local_scalar_dense" else False
        if (read := self._read_by_host(name, args, kwargs, inputs)) is not None:
            return read
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            if tensor.device.type == "cuda":
                self._hold(tensor.untyped_storage())
        if not self._written_by_host(name, args, kwargs, inputs, outputs):
            self._count(func, name, args, kwargs, result, inputs, outputs)
        return result

    def _on_host(self, func, args, kwargs):
        if func is aten.is_pinned.default:
            return args[0].untyped_storage().data_ptr() in self._pinned
        pin = func is aten._pin_memory.default or kwargs.pop("pin_memory", False)
        with unset_fake_temporarily():
            result = args[0].clone() if func is aten._pin_memory.default else func(*args, **kwargs)
            if pin:
                storage = result.untyped_storage()
                self._pinned[storage.data_ptr()] = storage
        return result

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _read_by_host(self, name: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> Tensor | None:
        """Copy to the host, which has zeros then; None for any other operation."""
        if name == "_to_copy" and _is_host(kwargs.get("device")) and inputs[0].device.type == "cuda":
            source, non_blocking = inputs[0], kwargs.get("non_blocking", False)
            with unset_fake_temporarily():
                target = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        elif name == "copy_" and inputs[0].device.type == "cpu" and inputs[1].device.type == "cuda":
            target, source = inputs[:2]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            return None
        self._copied(False, source, name == "_to_copy" or self._is_pinned(target), non_blocking)
        return target

    def _written_by_host(self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        if name == "_to_copy":
            non_blocking = kwargs.get("non_blocking", False)
        elif name == "copy_":
            inputs, non_blocking = inputs[1:], args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            for tensor in inputs:  # such as an index, which torch copies
                if tensor.device.type == "cpu" and tensor.ndim and outputs and outputs[0].device.type == "cuda":
                    self._copied(True, tensor, False, False)
            return False
        if inputs[0].device.type != "cpu" or outputs[0].device.type != "cuda":
            return False
        self._copied(True, outputs[0], self._is_pinned(inputs[0]), non_blocking)
        return True

    def _copied(self, to_device: bool, tensor: Tensor, pinned: bool, non_blocking: bool) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.now.copies.append(Copy(to_device, tuple(tensor.shape), dtype, pinned, non_blocking))

    def _count(self, func, name, args, kwargs, result, inputs, outputs) -> None:
        on_device = [tensor for tensor in (*inputs, *outputs) if tensor.device.type == "cuda"]
        if not on_device or name in NO_KERNEL:
            return
        if func.namespace == "c10d":
            self.now.collectives[name] += max(map(_bytes, on_device))
            return
        moved = _read_bytes(name, _without_results(func, kwargs, inputs)) + _written_bytes(func, args, outputs)
        flops = call_flops(func, args, kwargs, result)
        dtypes = [t.dtype for t in inputs if t.is_floating_point()] or [on_device[-1].dtype]
        self.now.calls[Call(name, str(dtypes[0]).removeprefix("torch."), moved, flops)] += 1

    # ------------------------------------------------------------------ memory

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take the present size of a storage, if it is on the device."""
        if id(storage) in self._sizes:
            self._hold(storage)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._freed, key)
        self._sizes[key] = size
        self.live += size - (known or 0)
        self.now.peak = max(self.now.peak, self.live)

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def call_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of a call of a matrix product or attention; 0 of any other operation."""
    counted = flop_registry.get(func._overloadpacket)
    if counted is None:
        return 0
    if any(argument.name == "out_dtype" for argument in func._schema.arguments):  # an overload that the registry does not know
        args, kwargs = [leaf for leaf in args if isinstance(leaf, Tensor)], {}
    return counted(*args, **kwargs, out_val=result)


def _without_results(func: Any, kwargs: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Inputs without those that the call only writes, `out=`."""
    results = {id(leaf) for each in func._schema.arguments if each.is_out for leaf in tree_leaves(kwargs.get(each.name))}
    return [tensor for tensor in inputs if id(tensor) not in results]


def _read_bytes(name: str, inputs: list[Tensor]) -> int:
    overwritten = name in _OVERWRITES
    return sum(map(_bytes, inputs[1:] if overwritten else inputs))


def _written_bytes(func: Any, args: Any, outputs: list[Tensor]) -> int:
    """Bytes written: outputs, or arguments changed in place, which a foreach operation does not return."""
    changed = [
        leaf
        for declared, value in zip(func._schema.arguments, args, strict=False)
        if declared.alias_info is not None and declared.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
    known = {id(tensor) for tensor in changed}
    return sum(map(_bytes, changed)) + sum(_bytes(tensor) for tensor in outputs if id(tensor) not in known)


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on the device; of one that repeats its values, those that exist."""
    if tensor.device.type != "cuda":
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _zero(dtype: torch.dtype) -> bool | int | float:
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
