"""Mesh of processes: device, process groups and the data-parallel layout."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.distributed.config import CommConfig, ParallelismConfig
from torchtitan.distributed.context_parallel import SplitContext
from torchtitan.processes.launch import LaunchError, check_rendezvous, launch_number


class Layout:
    """Layout of the processes: this process's rank, device, mesh, and the groups of gradient reductions.

    Attributes:
        data_rank, data_ranks: of processes with different images: those that share tokens count as one.
        degree: processes that share the tokens of an image.
        replicas: copies of the model, also of processes that share tokens, if it is not sharded.
        shards: processes that share one copy (1: every process holds the whole model); those that share tokens among them.
        sharded: whether parameters are sharded (FSDP2 or HSDP).
        context: exchange of tokens between the processes that have the same images; None if each has its own.
        mesh: DeviceMesh with dimensions ("replicate", "shard"), without those of size 1; None in a single process.
    """

    def __init__(self, parallelism: ParallelismConfig, device: torch.device | None = None) -> None:
        """Describe the current process group, or a single process if there is none; default device: compute_device."""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = device or compute_device()
        self.replicas, self.shards = parallelism.degrees.copies_and_shards
        self.sharded = self.shards > 1
        self.degree = parallelism.context_parallel_degree
        self.data_rank, self.data_ranks = self.rank // self.degree, self.world_size // self.degree
        if self.replicas * self.shards != self.world_size:  # each process would train alone
            raise ValueError(f"{self.replicas} replicas x {self.shards} shards is not {self.world_size} processes")
        self.mesh = self._build_mesh()
        self._context_mesh = self._build_context_mesh()
        self.context = None if self._context_mesh is None else SplitContext(self._context_mesh.get_group("context"))

    def _build_context_mesh(self) -> DeviceMesh | None:
        if self.degree == 1:
            return None
        return init_device_mesh(self.device.type, (self.data_ranks, self.degree), mesh_dim_names=("data", "context"))

    def _build_mesh(self) -> DeviceMesh | None:
        if self.world_size == 1:
            return None
        sizes = {"replicate": self.replicas, "shard": self.shards}
        used = {name: size for name, size in sizes.items() if size > 1}
        return init_device_mesh(self.device.type, tuple(used.values()), mesh_dim_names=tuple(used))

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Group of the processes that share this process's copy of the model; None where it is whole."""
        return self.mesh["shard"].get_group() if self.mesh is not None and self.sharded else None

    def groups(self) -> list[dist.ProcessGroup]:
        """List the groups of some of the processes that have collectives in a step."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        found = [] if self.mesh is None else [self.mesh.get_group(name) for name in names]
        return found if self._context_mesh is None else [*found, self._context_mesh.get_group("context")]


def crosses_nodes(layout: Layout, processes_per_node: int) -> str | None:
    """Advice on copies whose shards cross nodes without need; None if there are none.

    Neighbouring ranks share a copy, so it stays inside a node where the shard degree divides the processes of one.
    """
    shards = layout.shards
    if layout.replicas == 1 or shards == 1 or processes_per_node % shards == 0 or shards % processes_per_node == 0:
        return None
    return (
        f"parallelism.data_parallel_shard_degree: copies of {shards} shards cross nodes of "
        f"{processes_per_node} processes, and every gather uses the network "
        "(a divisor of the processes of a node keeps them inside)"
    )


def compute_device() -> torch.device:
    """Device of this process: CUDA's of its local rank, or the CPU. Raises LaunchError: there is no such device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = launch_number("LOCAL_RANK", 0), torch.cuda.device_count()
    if index >= count:
        advice = "start fewer processes on this machine, or with CUDA_VISIBLE_DEVICES= on its CPU"
        raise LaunchError(f"LOCAL_RANK: {index}, but this process sees {count} GPUs ({advice})")
    return torch.device("cuda", index)


def init_process_group(comm: CommConfig) -> None:
    """Join the processes that torchrun started; do nothing for a process started alone.

    CUDA tensors travel over NCCL; CPU tensors, and small agreements between hosts, over gloo.

    Raises:
        LaunchError: torchrun's variables are missing, their port is in use, or there is no device for this process.
    """
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        return
    check_rendezvous()
    device = compute_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # last collectives in the flight recorder
    backend, timeout = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=comm.init_timeout_seconds)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise LaunchError(f"MASTER_PORT: port {os.environ['MASTER_PORT']} is in use (give another)") from error


@contextmanager
def process_group() -> Iterator[None]:
    """Leave the process group at the end of the block, if one was joined, also after an exception."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def set_train_timeout(comm: CommConfig, layout: Layout) -> None:
    """Shorten the collective timeout once start-up (compilation, first allocations) is over."""
    if layout.mesh is None:
        return
    timeout = timedelta(seconds=comm.train_timeout_seconds)
    groups = [dist.group.WORLD, *layout.groups()]
    if layout.device.type == "cuda":
        # A rank that is late for this call must not meet the shorter timeout in the middle of its first step.
        dist.barrier(device_ids=[layout.device.index])
        torch.cuda.synchronize()
    else:
        dist.barrier()
    # torch 2.14 warns of the older name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        set_timeout(timeout, group)
