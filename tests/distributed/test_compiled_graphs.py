"""Graphs that are compiled under DDP: torch's own counters call a graph that it splits one."""

from tests.launcher import run_on_ranks


def test_a_block_is_one_graph_under_ddp_and_a_whole_model_is_split_for_its_reductions():
    for operations in run_on_ranks("tests.distributed.compile_cases:graphs_under_ddp", 2):
        assert len(operations["blocks"]) == 1 and len(operations["model"]) > 1, operations
