"""Compiled blocks in evaluations: graphs of their own, few, and none of them in training."""

import pytest
import torch

from tests.unit.test_activation_checkpoint import debug_model
from torchtitan.distributed.compile import CompileCounter, compile_blocks, compile_model
from torchtitan.evaluation.eval_mode import evaluating


class Graphs:
    """Backend that runs what it is given, and counts it."""

    count = 0

    def __call__(self, graph, inputs, **options):
        self.count += 1
        return graph.forward


def network():
    torch.compiler.reset()
    return debug_model(num_layers=2)


def output(model, images):
    generator = torch.Generator().manual_seed(images)
    x = torch.randn(images, 1, 8, 8, generator=generator)
    return model(x, torch.linspace(0, 900, images), torch.arange(images) % 10)


@torch.no_grad()
def evaluated(model, images, **options):
    with evaluating(model, **options):
        return output(model, images)


def test_evaluations_of_all_batch_sizes_share_a_graph_which_training_does_not_use():
    model, graphs = network(), Graphs()
    wanted = {images: evaluated(model, images) for images in (7, 5, 2, 1)}
    compile_blocks(model.blocks(), backend=graphs)
    counter = CompileCounter(expected_steps=0)
    found = {7: evaluated(model, 7)}  # a preview, before any training
    output(model, 4).sum().backward()
    assert graphs.count == 2
    for images in (5, 2, 7):
        found[images] = evaluated(model, images)
    output(model, 4).sum().backward()
    assert graphs.count == 2
    found[1] = evaluated(model, 1)
    output(model, 4).sum().backward()
    assert graphs.count == 3
    for images, image in found.items():
        assert torch.equal(image, wanted[images]), images
    # A batch of another size in training has its own graph, of this size alone.
    output(model, 3).sum().backward()
    output(model, 6).sum().backward()
    assert graphs.count == 5
    counter.expect()
    assert counter.counts()["recompiles"] == 4 and not counter._untold


@pytest.mark.parametrize("case", ["compiled whole", "looked into", "replayed as CUDA graphs"])
def test_these_are_evaluated_without_compilation(case):
    model, graphs = network(), Graphs()
    if case == "compiled whole":
        compile_model(model, backend=graphs)
    else:
        compile_blocks(model.blocks(), backend=graphs, mode="reduce-overhead" if "CUDA" in case else "default")
    evaluated(model, 3, compiled=case != "looked into")
    assert graphs.count == 0 and model.training
    output(model, 3)
    assert graphs.count == 1
