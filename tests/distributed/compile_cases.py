"""What the ranks of test_compiled_graphs.py run; see tests.launcher."""

from unittest.mock import patch

import torch
import torch._dynamo.config as dynamo_config
import torch.distributed as dist

from torchtitan.conditions import Classes
from torchtitan.distributed import parallelize
from torchtitan.distributed.compile import compile_blocks, compile_model
from torchtitan.distributed.config import CompileConfig, ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.models import MODELS
from torchtitan.models.dit.config import DiTConfig


def graphs_under_ddp() -> dict[str, list[int]]:
    """Operations of every graph that is compiled under DDP for a model of one block of 3 MB, by scope."""
    found = {scope: _graphs(scope) for scope in ("blocks", "model")}
    assert dynamo_config.optimize_ddp is True  # as before, for others in the process
    return found


def _graphs(scope: str) -> list[int]:
    graphs = []

    def counting(graph, inputs, **options):
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    torch.manual_seed(0)
    config = DiTConfig(dim=208, num_layers=1, num_heads=4, mlp_hidden_dim=832)
    model = MODELS["dit"].build(config, (1, 8, 8), Classes(10))
    model.init_weights()
    layout = Layout(ParallelismConfig(data_parallel_replicate_degree=dist.get_world_size(), data_parallel_shard_degree=1))
    with (
        patch.object(parallelize, "compile_blocks", lambda *args, **keys: compile_blocks(*args, backend=counting, **keys)),
        patch.object(parallelize, "compile_model", lambda *args, **keys: compile_model(*args, backend=counting, **keys)),
    ):
        train_module = parallelize.parallelize(model, layout, compiling=CompileConfig(enable=True, scope=scope))
    train_module(torch.randn(2, 1, 8, 8), torch.rand(2), torch.arange(2))
    return graphs
