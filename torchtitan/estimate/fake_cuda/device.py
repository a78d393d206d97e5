"""CUDA device without a GPU: tensors with shapes and no memory, under CUDA's dispatch and autocast.

FakeTensorMode makes such tensors on any machine, but the backward asks torch for a guard of the device, which a build
without CUDA lacks, and one without a GPU leaves empty. `device_guard.cpp` is that guard, compiled once into a cache folder.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan.errors import unwrapped
from torchtitan.estimate.cuda_kernels import cuda_kernels

_SOURCE = Path(__file__).with_name("device_guard.cpp")
_HEAD_MULTIPLE = 8  # features of a head that flash attention takes; others are padded
DEVICE_NAME = "NVIDIA H200"
_attention_of_host = F.scaled_dot_product_attention


class NoFakeCuda(Exception):
    """CUDA cannot be imitated here; the message is one line."""


class _Installed:
    """Guard in this process, once; torch counts its devices at the first backward."""

    done = False


def require_guard() -> None:
    """Install the device guard in this process; before its first backward.

    Raises:
        NoFakeCuda: there is a GPU, no C++ compiler, or no place for what it builds.
    """
    if _Installed.done:
        return
    if torch.cuda.is_available():
        raise NoFakeCuda("this machine has a GPU (hide it: CUDA_VISIBLE_DEVICES= )")
    try:
        ctypes.CDLL(str(_library())).install()
    except OSError as error:
        raise NoFakeCuda(f"the guard of the imitated device cannot be built: {unwrapped(error)}") from None
    _Installed.done = True


def _library() -> Path:
    root = Path(torch.__file__).parent
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan-dit"
    built = cache / f"fake_cuda_{digest}.so"
    if built.exists():
        return built
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise NoFakeCuda("no C++ compiler (c++ or g++), which builds the guard of the imitated device")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        part = Path(folder) / "guard.so"
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        command = [
            compiler, "-O1", "-std=c++20", "-shared", "-fPIC", abi, f"-I{root / 'include'}", str(_SOURCE), "-o", str(part),
            f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NoFakeCuda(f"{_SOURCE.name} does not compile: {unwrapped(done.stderr)[:300]}")
        part.rename(built)
    return built


class _FakeCudaMode(FakeTensorMode):
    @property
    def avoid_device_init(self) -> bool:
        return True


@contextmanager
def fake_cuda(counter: Any) -> Iterator[None]:
    """Compute on an imitated CUDA device inside the context: `torch.cuda.is_available()`, and tensors on it have no values.

    Args:
        counter: a StepCounter, which sees every operation, and keeps those of the host real.

    Raises:
        NoFakeCuda: as `require_guard`.
    """
    require_guard()
    with ExitStack() as stack:
        for target, name, value in _replacements(counter):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(_FakeCudaMode(allow_non_fake_inputs=True))
        stack.enter_context(counter)
        stack.enter_context(cuda_kernels("CUDA"))
        yield


def _replacements(counter: Any) -> list[tuple[Any, str, Any]]:
    """Replace calls of torch.cuda that ask a driver, by what a GPU would answer, and the choice of an attention kernel;
    synchronisations are counted.
    """
    import torch.cuda.amp.common as amp

    class Event:
        epoch = -1

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait(self, *_: Any) -> None: ...

        def record(self, *_: Any) -> None:
            self.epoch = counter.epoch

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            if self.epoch == counter.epoch:  # an event of the step before has long passed
                counter.waited("Event.synchronize")

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_stream(self, *_: Any) -> None: ...
        def wait_event(self, *_: Any) -> None: ...
        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *_: object) -> None: ...

        def record_event(self, *_: Any) -> Event:
            return Event()

        def synchronize(self) -> None:
            counter.waited("Stream.synchronize")

    one = Stream()
    properties = SimpleNamespace(
        name=DEVICE_NAME, total_memory=150_000_000_000, major=9, minor=0, multi_processor_count=132, uuid="0",
        L2_cache_size=50 * 2**20, warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448, gcnArchName="",
    )  # fmt: skip
    answers = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "set_device": lambda *_: None, "_lazy_init": lambda: None,
        "init": lambda: None, "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda *_: DEVICE_NAME, "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties, "memory_stats": lambda *_: defaultdict(int),
        "reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda: None,
        "synchronize": lambda *_: counter.waited("synchronize"), "Event": Event, "Stream": Stream,
        "current_stream": lambda *_: one, "default_stream": lambda *_: one, "stream": lambda stream: stream,
        "manual_seed_all": lambda *_: None, "manual_seed": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
        "mem_get_info": lambda *_: (properties.total_memory, properties.total_memory),
    }  # fmt: skip
    others: list[tuple[Any, str, Any]] = [
        (amp, "amp_definitely_not_available", lambda: False), (fake_tensor, "init_gpu_context", lambda *_: None),
    ]  # fmt: skip
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)  # as FSDP frees and refills gathered parameters, without an operation
        counter.resized(storage)
        return storage

    others += [(torch.UntypedStorage, "resize_", resized), (F, "scaled_dot_product_attention", _attention)]
    return [*((torch.cuda, name, value) for name, value in answers.items()), *others]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by the kernel that CUDA chooses: flash in half precision, the memory-efficient one otherwise."""
    if query.device.type != "cuda":
        return _attention_of_host(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if attn_mask is not None or query.dtype == torch.float32:
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    if rest := -width % _HEAD_MULTIPLE:
        query, key, value = (F.pad(x, (0, rest)) for x in (query, key, value))
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return found[..., :width] if rest else found
