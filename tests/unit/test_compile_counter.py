"""Recompilations and graph breaks are counted, and told when nobody expects them."""

import json
import logging
from functools import partial

import pytest
import torch

from tests.distributed.cases import make_trainer
from torchtitan.distributed import compile as compile_module
from torchtitan.distributed import parallelize as parallelize_module
from torchtitan.distributed.compile import CompileCounter, compile_blocks, compile_objective


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


class Doubling(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.linear(x)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x + 1


def test_recompilations_and_graph_breaks_are_counted_from_the_counters_making_on():
    function = torch.compile(doubled, backend="eager", dynamic=False)
    function(torch.ones(2))
    counter = CompileCounter(expected_steps=0)
    function(torch.ones(2))
    assert counter.counts() == {"graphs": 0, "recompiles": 0, "graph_breaks": 0}
    for size in (3, 4, 3):
        function(torch.ones(size))
    assert counter.counts() == {"graphs": 2, "recompiles": 2, "graph_breaks": 0}
    torch.compile(broken, backend="eager")(torch.ones(2))
    assert counter.counts() == {"graphs": 4, "recompiles": 2, "graph_breaks": 1}


def test_the_function_is_named_when_it_is_compiled_again_after_the_first_steps(caplog):
    function = torch.compile(doubled, backend="eager", dynamic=False)
    counter = CompileCounter(expected_steps=2)
    for step, size in enumerate((2, 3, 4, 4), 11):
        function(torch.ones(size))
        counter.counts()  # as at a logged point: reading does not take the warning away
        counter.end_step(step)
    (message,) = [record.getMessage() for record in caplog.records if record.name == compile_module.__name__]
    assert message.startswith("step 13: recompiled") and "doubled (test_compile_counter.py:" in message
    assert "size mismatch at index 0" in message and "\n" not in message


@torch._dynamo.config.patch(recompile_limit=4)
def test_blocks_that_differ_have_a_graph_each_beyond_torchs_limit_and_alike_ones_share_one():
    for widths, graphs in (([6] * 6, 1), ([4, 5, 6, 7, 8, 9], 6)):
        torch.compiler.reset()
        counter = CompileCounter(expected_steps=0)
        blocks = [Doubling(width) for width in widths]
        compile_blocks(blocks, backend="eager")
        for _ in range(2):
            for block in blocks:
                block(torch.ones(2, block.linear.in_features))
        assert counter.counts()["graphs"] == graphs


def test_a_run_reports_what_was_compiled(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(parallelize_module, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
    monkeypatch.setattr(parallelize_module, "compile_objective", partial(compile_objective, backend="eager"))
    gns = ("--gns.enable", "true", "--gns.num_bins", "4", "--gns.interval", "4", "--gns.sketch_size", "4")
    trainer = make_trainer(
        str(tmp_path), "counted", steps=10, replicas=1, shards=1, accumulation=1,
        overrides=("--compile.enable", "true", *gns),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        assert trainer.train() == 0
    trainer.close()
    points = [json.loads(line) for line in (trainer.state.folder.path / "metrics.jsonl").read_text().splitlines()]
    recompiles = [point["compile/recompiles"] for point in points if "compile/recompiles" in point]
    # The fourth step is the first that measures: its graph is expected.
    assert recompiles == [0, 0, 0] + [1] * 7
    assert {point["compile/graph_breaks"] for point in points if "compile/graph_breaks" in point} == {0}
    summary = json.loads(trainer.state.folder.summary.read_text())
    # Two of the blocks, and three of the objective.
    assert summary["compile"] == {"graphs": 5, "recompiles": 1, "graph_breaks": 0}
    assert not [record for record in caplog.records if record.name == compile_module.__name__]


@pytest.mark.parametrize(("growth", "recompiles"), [("[]", 0), ("[32]", 1)])
def test_what_a_step_of_several_microbatches_draws_is_compiled_before_the_first(tmp_path, monkeypatch, growth, recompiles):
    monkeypatch.setattr(parallelize_module, "compile_blocks", lambda *_, **__: None)
    monkeypatch.setattr(parallelize_module, "compile_objective", partial(compile_objective, backend="eager"))
    trainer = make_trainer(
        str(tmp_path), "stratified", steps=4, replicas=1, shards=1, accumulation=2,
        overrides=("--compile.enable", "true", "--objective.spread", "stratified", "--gns.enable", "false",
                   "--training.double_batch_after", growth),
    )  # fmt: skip
    assert trainer.train() == 0
    trainer.close()
    counts = json.loads(trainer.state.folder.summary.read_text())["compile"]
    assert counts["graphs"] > 0 and counts["recompiles"] == recompiles
    points = [json.loads(line) for line in (trainer.state.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert {point["compile/recompiles"] for point in points if "compile/recompiles" in point} == {recompiles}
