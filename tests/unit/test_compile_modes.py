"""What each mode of the compiler passes to inductor, and the layouts that a CUDA graph does not fit."""

import pytest
import torch

from tests.distributed.cases import make_trainer
from tests.unit.test_compile_counter import Doubling
from torchtitan.distributed import compile as compile_module
from torchtitan.distributed.compile import compile_blocks
from torchtitan.distributed.config import CompileConfig, compile_problems

GRAPHS, TUNED = {"triton.cudagraphs": True}, {"max_autotune": True, "coordinate_descent_tuning": True}


@pytest.mark.parametrize(
    "mode, patches",
    [
        ("default", None), ("reduce-overhead", GRAPHS), ("max-autotune", TUNED | GRAPHS),
        ("max-autotune-no-cudagraphs", TUNED),
    ],
)
def test_a_mode_is_inductors_own_with_a_memory_budget_or_without(mode, patches, monkeypatch):
    passed = []

    def recording(graph, inputs, **options):
        passed.append(options)
        return graph

    monkeypatch.setattr(compile_module, "lookup_backend", lambda name: recording)
    x, budgets = torch.randn(2, 3), (0.5,) if mode == "default" else (1.0, 0.5)
    for budget in budgets:
        torch.compiler.reset()
        block = Doubling(3)
        wanted = block(x)
        compile_blocks([block], memory_budget=budget, mode=mode)
        assert torch.equal(block(x), wanted)
    assert passed == [{} if patches is None else {"config_patches": patches}] * len(budgets)


def test_cuda_graphs_are_refused_where_addresses_or_results_change(monkeypatch):
    def wrong(mode, shards=1, scope="blocks"):
        return [text for _, text in compile_problems(CompileConfig(enable=True, mode=mode, scope=scope), shards)]

    assert "CUDA is not there (set default)" in wrong("reduce-overhead")[0]
    assert "CUDA is not there (set max-autotune-no-cudagraphs)" in wrong("max-autotune")[0]
    assert wrong("max-autotune-no-cudagraphs", shards=2) == wrong("default") == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert wrong("reduce-overhead") == wrong("max-autotune") == []
    assert "FSDP gathers weights anew" in wrong("reduce-overhead", shards=2)[0]
    assert "of the whole model" in wrong("max-autotune", scope="model")[0]


def test_graphs_begin_with_each_optimizer_step_and_not_with_its_microbatches(tmp_path):
    from torch._inductor.cudagraph_trees import MarkStepBox  # seconds, which no other test file's process waits for

    trainer = make_trainer(str(tmp_path), "run", steps=10, replicas=1, shards=1, accumulation=2)
    counted = []
    for mode in ("default", "reduce-overhead"):
        trainer._replays_graphs = CompileConfig(enable=True, mode=mode).cuda_graphs
        before = MarkStepBox.mark_step_counter
        for _ in range(2):
            trainer.state.step += 1
            trainer.train_step()
        counted.append(abs(MarkStepBox.mark_step_counter - before))
    trainer.close()
    assert counted == [0, 2]
