"""Muon's matrices are divided between the ranks, and every layout updates as one process does."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.distributed.cases import whole
from tests.launcher import run_on_ranks
from torchtitan.distributed.config import ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.training import muon
from torchtitan.training.muon import Muon

HERE = "tests.distributed.test_divided_muon"
# Rows that four ranks share unevenly, and that not every rank has.
SHAPES = [(10, 6), (3, 8), (16, 16), (6, 10), (9, 4)]


def updated(replicas: int, shards: int, steps: int = 3) -> dict:
    """Weights after some steps of gradients that are the same on every layout, and this rank's orthogonalised matrices."""
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)
    gradients = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(steps)]
    layout = Layout(ParallelismConfig(data_parallel_replicate_degree=replicas, data_parallel_shard_degree=shards))
    if layout.sharded:
        fully_shard(model, mesh=layout.mesh)
    optimizer, count = Muon([{"params": list(model), "weight_decay": 0.1}], lr=0.1, momentum=0.9), 0

    def counting(matrix):
        nonlocal count
        count += 1
        return orthogonalise(matrix)

    orthogonalise = muon.orthogonalise
    with patch.object(muon, "orthogonalise", counting):
        for of_step in gradients:
            for parameter, gradient in zip(model, of_step, strict=True):
                parameter.grad = like(parameter, gradient)
            optimizer.step(skip=torch.tensor(of_step is gradients[1]))
    return {"weights": [whole(parameter).tolist() for parameter in model], "count": count}


def like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not hasattr(parameter, "placements"):
        return tensor
    shards = parameter.device_mesh.size(-1)
    rows = tensor.split(-(-len(tensor) // shards))
    place = parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
    part = rows[place] if place < len(rows) else tensor[:0]
    return parameter.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def on_layouts(layouts: list[list[int]]) -> list[dict]:
    return [updated(*layout) for layout in layouts]


@pytest.fixture(scope="module")
def on_one() -> dict:
    assert not dist.is_initialized()
    return updated(1, 1)


@pytest.mark.parametrize("ranks, layouts", [(2, [(2, 1), (1, 2)]), (4, [(4, 1), (1, 4), (2, 2)])])
def test_each_rank_has_its_share_and_the_weights_are_those_of_one_process(ranks, layouts, on_one):
    assert on_one["count"] == 3 * len(SHAPES)
    by_rank = run_on_ranks(f"{HERE}:on_layouts", ranks, {"layouts": layouts})
    for number, (_, shards) in enumerate(layouts):
        found = [results[number] for results in by_rank]
        for result in found:
            for weights, wanted in zip(result["weights"], on_one["weights"], strict=True):
                torch.testing.assert_close(torch.tensor(weights), torch.tensor(wanted), rtol=1e-6, atol=1e-6)
        members = shards if shards > 1 else ranks
        assert sum(result["count"] for result in found) == on_one["count"] * ranks // members
        assert max(result["count"] for result in found) == 3 * -(-len(SHAPES) // members)
