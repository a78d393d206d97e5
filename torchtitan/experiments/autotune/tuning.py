"""Tuning of a configuration's batch size on this device by trying: the largest that fits."""

import math
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.config.job import JobConfig, load_config, unchecked_config
from torchtitan.distributed.mesh import compute_device
from torchtitan.estimate.memory import estimate_memory
from torchtitan.experiments.autotune.candidates import AutotuneRefused, candidates_of
from torchtitan.experiments.autotune.probe import Probe, probe_config, run_probe
from torchtitan.experiments.autotune.record import SearchRecord
from torchtitan.experiments.autotune.search import largest_fitting
from torchtitan.settings import has_key
from torchtitan.settings.plugins import loaded_plugins
from torchtitan.settings.record import effective
from torchtitan.training.hardware import device_name, peak_resident_gib

MAX_BATCH_SIZE = 65536

_GIB = 2**30
# Keys without influence on memory and speed, and the batch sizes, which are separate in a record.
_WITHOUT_EFFECT = {
    "debug.seed", "optimizer.lr", "training.local_batch_size", "training.global_batch_size", "training.max_local_batch_size",
}
_SECTIONS_WITHOUT_EFFECT = {"job", "comm", "metrics", "lr_scheduler"}


class NothingFits(Exception):
    """Not even the smallest batch size fits; the message is one line with suggestions."""


@dataclass(frozen=True)
class AutotuneResult:
    """Result of a search; tried: number of probes made now; 0: the answer was on record."""

    batch_size: int
    probes: list[Probe]
    tried: int
    record: Path


def autotune(
    arguments: list[str], processes: int = 1, *, memory_gib: float | None = None, cache: Path | None = None,
    multiple_of: int = 1, max_batch_size: int = MAX_BATCH_SIZE, headroom: float = 0.1, fresh: bool = False,
    timeout_s: float = 1800.0, devices: list[int] | None = None, stop: threading.Event | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> AutotuneResult:  # fmt: skip
    """Find the largest training.local_batch_size of a configuration on this device, by doubling and bisection from an estimate.

    Every batch size is tried in fresh processes, by a few steps of train.py. It fits if every rank ends well, its peak
    of memory is at most (1 - headroom) of the available memory, and no CUDA allocator had to free its cache. Where
    training.global_batch_size is given, only batch sizes that accumulate to it are tried.

    Args:
        arguments: of train.py, `--section.key value`; a local batch size among them is overridden.
        memory_gib: memory of each process, > 0; on CUDA at most, and by default, the device's; needed on the CPU.
        cache: folder of the records, by default <job.dump_folder>/autotune; answers and begun searches are in it.
        multiple_of: only multiples of it are tried, 1 or more.
        headroom: share of the memory to leave free, 0 <= headroom < 1.

    Raises:
        ConfigError: the configuration cannot run.
        AutotuneRefused: the options make no sense.
        NothingFits: not even the smallest batch size fits.
        ProbeFailed: a try failed for another reason than memory.
        RecordError: the record cannot be read or written.
        KeyboardInterrupt, Stopped: after the processes of the present try were ended; its record stays.
    """
    if multiple_of > max_batch_size:
        raise AutotuneRefused(f"multiple-of: {multiple_of} is more than max = {max_batch_size} (raise max)")
    given = unchecked_config(arguments)
    whole = given.training.global_batch_size if given.training.global_batch_size > 0 else None
    ranks = max(processes // given.parallelism.context_parallel_degree, 1)
    device = compute_device() if devices is None else torch.device(compute_device().type, devices[0])
    memory_gib = memory_of(device, memory_gib)

    def config_with(batch_size: int) -> JobConfig:
        return load_config([*arguments, f"--training.local_batch_size={batch_size}"], processes)

    candidates = candidates_of(config_with, whole, ranks, multiple_of, max_batch_size)
    smallest = config_with(candidates[0])
    record = SearchRecord(cache or Path(smallest.job.dump_folder) / "autotune", {
        "headroom": headroom, "multiple_of": multiple_of, "max_batch_size": max_batch_size, "global_batch_size": whole,
        "processes": processes, "device": device_name(device), "memory_gib": round(memory_gib, 3), "torch": torch.__version__,
        "configuration": _what_decides(smallest, processes), **({"plugins": plugins} if (plugins := loaded_plugins()) else {}),
    })  # fmt: skip
    # Of a process's data in a hopeless try on the CPU; address space that is not touched counts too.
    limit = 2 * memory_gib + 2 if device.type == "cpu" else None
    probe = partial(
        run_probe, processes=processes, timeout_s=timeout_s, log=record.log, memory_limit_gib=limit, devices=devices, stop=stop
    )
    search = _Search(record, lambda size: probe(config_with(size)), memory_gib, (1 - headroom) * memory_gib, report)
    if not fresh:
        record.read()
    if record.batch_size is None:
        record.make_folder()
        guess = _guess(config_with, candidates, processes, search.limit_gib, device)
        record.batch_size = largest_fitting(candidates, guess, search.fits)
        record.write()
    if record.batch_size is None:
        raise NothingFits(_nothing_fits(smallest, record.probes, memory_gib, search.limit_gib, multiple_of))
    if record.batch_size == candidates[-1]:
        of_key = f"training.global_batch_size = {whole} allows: more may fit (give --training.global_batch_size -1)"
        bound = of_key if whole == ranks * record.batch_size else f"max = {max_batch_size} allows: more may fit"
        report(f"{record.batch_size} is the largest that {bound}")
    return AutotuneResult(record.batch_size, record.probes, search.tried, record.path)


class _Search:
    """Search that tries batch sizes, or takes them from the record."""

    def __init__(
        self, record: SearchRecord, probe: Callable[[int], Probe], memory_gib: float, limit_gib: float,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.limit_gib = limit_gib
        self.memory_gib = memory_gib
        self.tried = 0
        self._record, self._probe, self._report = record, probe, report

    def fits(self, batch_size: int) -> bool:
        known = self._record.find(batch_size)
        probe = known or self._probe(batch_size)
        if not known:
            self.tried += 1
            self._record.probes.append(probe)
            self._record.write()
        self._report(self._line(probe, known is not None))
        return probe.fits(self.limit_gib)

    def _line(self, probe: Probe, known: bool) -> str:
        words = f"batch size {probe.batch_size:>5}: {'fits' if probe.fits(self.limit_gib) else 'does not fit'}"
        if probe.status == "oom":
            words += ", out of memory"
        else:
            words += f", {probe.memory_gib:.3g} of {self.limit_gib:.3g} GiB, {probe.images_per_second:.4g} images/s"
            if probe.num_alloc_retries:
                words += f", {probe.num_alloc_retries} allocator retries"
        return words + (" (on record)" if known else f" ({probe.seconds:.0f} s)")


def memory_of(device: torch.device, given_gib: float | None) -> float:
    """GiB of each process: those given, at most the device's. Raises AutotuneRefused: none are given, and a CPU's is shared."""
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory / _GIB
        return min(there, given_gib or there)
    if given_gib is None:
        raise AutotuneRefused("memory: the CPU's is shared, so give the limit of each process (--memory GiB)")
    return given_gib


def _what_decides(config: JobConfig, processes: int) -> dict[str, Any]:
    """Keys of the short runs that memory and speed may depend on."""
    with tempfile.TemporaryDirectory() as folder:
        probed, _ = probe_config(config, processes, Path(folder))
    tables = {name: table for name, table in effective(probed).items() if name not in _SECTIONS_WITHOUT_EFFECT}
    return {
        section: {key: value for key, value in table.items() if f"{section}.{key}" not in _WITHOUT_EFFECT}
        for section, table in tables.items()
    }


def _guess(
    config_with: Callable[[int], JobConfig], candidates: Sequence[int], processes: int, limit_gib: float,
    device: torch.device,
) -> int:  # fmt: skip
    """Guess the largest batch size that fits, by an estimate at two of them: memory is linear in the batch size."""
    if device.type == "cpu":
        limit_gib -= peak_resident_gib()  # a process that has imported all this, and has no model yet
    low, high = candidates[0], candidates[min(7, len(candidates) - 1)]
    if low == high:
        return low
    on_gpu = device.type == "cuda"
    needs = [estimate_memory(config_with(size), processes, on_gpu).needed / _GIB for size in (low, high)]
    per_image = (needs[1] - needs[0]) / (high - low)
    if per_image <= 0:
        return low
    return max(low, math.floor(low + (limit_gib - needs[0]) / per_image))


def _nothing_fits(config: JobConfig, probes: list[Probe], memory_gib: float, limit_gib: float, multiple_of: int) -> str:
    batch_size = config.training.local_batch_size
    smallest = next(probe for probe in probes if probe.batch_size == batch_size)
    need = "memory runs out" if smallest.status == "oom" else f"{smallest.memory_gib:.3g} GiB are needed"
    help_ = []
    if config.activation_checkpoint.mode != "full":
        help_.append('activation_checkpoint.mode = "full"')
    help_.append("more shards (parallelism.data_parallel_shard_degree, FSDP)")
    if has_key(config.model, "patch_size"):
        help_.append("fewer tokens (a larger model.patch_size)")
    if batch_size > 1 and multiple_of > 1:
        help_.append("a smaller multiple-of")
    return (
        f"nothing fits: {need} at batch size {batch_size}, the smallest, where {limit_gib:.3g} of {memory_gib:.3g} GiB"
        f" may be used; possible remedies: {', '.join(help_)}"
    )
