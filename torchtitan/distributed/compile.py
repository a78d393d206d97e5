"""Compile blocks or the whole model, and the objective, with torch.compile, and count compilations during a run."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import CompilationMetrics, counters, get_compilation_metrics

from torchtitan.distributed.config import CUDA_GRAPH_MODES
from torchtitan.errors import unwrapped

logger = logging.getLogger(__name__)


# Most graphs of one function for each shape of the training images, if torch cannot find one for all: of an ordinary step,
# and two of steps that measure the gradients of single samples, in part or wholly.
_GRAPHS_PER_SHAPE = 3
# Most graphs of a kind of block: these, one of evaluations of any batch size, and one of evaluations of one image.
_GRAPHS_PER_KIND = _GRAPHS_PER_SHAPE + 2


def compile_blocks(
    blocks: list[nn.Module], memory_budget: float = 1.0, backend: str = "inductor", num_shapes: int = 1,
    mode: str = "default",
) -> None:  # fmt: skip
    """Compile each block in place; parameters keep their names.

    Blocks share one code object: where all are alike, the graph is compiled once, otherwise once for each kind of block.
    Sizes are fixed. For images of several shapes a kind has a graph for the first, and one for any number of tokens.
    fullgraph: a graph break is an error.

    Args:
        memory_budget: bytes that may be kept from forward to backward, as a share of what is kept without
            recomputation, in [0, 1]; the cheapest results to recompute are not kept.
        backend: name of torch's compiler backend.
        num_shapes: shapes of the images, batches being of one.
        mode: of inductor, as torch.compile's. With CUDA graphs, `begin_graphs` must mark every optimizer step.
    """
    alike = len({_shapes(block) for block in blocks}) <= 1
    if not alike:
        _allow_graphs(_GRAPHS_PER_KIND * len(blocks))
    _allow_graphs_of_shapes(num_shapes, kinds=1 if alike else len(blocks))
    # By use torch finds the sizes that change; data have up to a hundred shapes. Else batches of evaluations, which have
    # other sizes, would make the graphs of training that are compiled after them ones of any size.
    by_use = num_shapes > 1
    for block in blocks:
        cast(Any, block).any_batch_size = mode not in CUDA_GRAPH_MODES
        block.compile(fullgraph=True, dynamic=None if by_use else False, backend=_compiler(backend, memory_budget, mode))


def compile_model(
    model: nn.Module, memory_budget: float = 1.0, backend: str = "inductor", num_shapes: int = 1, mode: str = "default"
) -> None:
    """Compile a model's forward in place as one graph, as `compile_blocks`; hooks run outside of the graph."""
    _allow_graphs_of_shapes(num_shapes, kinds=1)
    model.forward = torch.compile(model.forward, fullgraph=True, backend=_compiler(backend, memory_budget, mode))


def compile_objective(objective: Any, backend: str = "inductor") -> None:
    """Compile the methods of an objective's `graphs` in place, those before and after its network.

    They run eagerly where no gradient is recorded, as in evaluations, whose batches have other sizes. By use torch finds the
    sizes and numbers that change, such as the attempt after a rollback. The mode of the blocks is none of theirs: results of
    CUDA graphs would be overwritten by the next microbatch of a step.
    """
    for name in objective.graphs:
        method = getattr(objective, name)
        setattr(objective, name, _where_trained(method, torch.compile(method, backend=backend)))


def _where_trained(eager: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(eager)
    def either(*arguments: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else eager)(*arguments)

    return either


def compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules of a model that were compiled one by one and take batches of any size.

    Those that are replayed as CUDA graphs do not: they have one for each size, and overwrite their last results.
    """
    return [module for module in model.modules() if getattr(module, "any_batch_size", False)]


@contextmanager
def any_batch_size(model: nn.Module) -> Iterator[None]:
    """Call compiled blocks with batches of any size in the context: a graph for all sizes, and one for a single image.

    They are compiled once, at their first use, beside the graphs of training, which stay as they are.
    """
    calls = {block: cast(Callable[..., Any], block._compiled_call_impl) for block in compiled_blocks(model)}
    tables = {id(buffer) for buffer in model.buffers()}  # their first dimension is not the batch
    try:
        for block, call in calls.items():
            block._compiled_call_impl = _of_any_batch(call, tables)
        yield
    finally:
        for block, call in calls.items():
            block._compiled_call_impl = call


def _of_any_batch(call: Callable[..., Any], tables: set[int]) -> Callable[..., Any]:
    def of_any_batch(x: torch.Tensor, *others: Any) -> Any:
        for tensor in (x, *others):
            if isinstance(tensor, torch.Tensor) and tensor.shape[:1] == x.shape[:1] and id(tensor) not in tables:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return call(x, *others)

    return of_any_batch


def _allow_graphs_of_shapes(num_shapes: int, kinds: int) -> None:
    if num_shapes > 1:
        _allow_graphs(_GRAPHS_PER_SHAPE * num_shapes * kinds)


def _allow_graphs(count: int) -> None:
    """Allow that many graphs of one function: torch's limit is meant for one that is compiled again and again."""
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, count)
    dynamo_config.accumulated_recompile_limit = max(dynamo_config.accumulated_recompile_limit, count)


def _shapes(block: nn.Module) -> tuple:
    return tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def begin_graphs() -> None:
    """Begin an optimizer step of blocks that are replayed as CUDA graphs: results of the last step are not read any more.

    Once a step, not once a microbatch: the gradients that accumulate are results of graphs.
    """
    torch.compiler.cudagraph_mark_step_begin()


def _compiler(backend: str, memory_budget: float, mode: str) -> "str | _Compiler":
    plain = memory_budget == 1.0 and mode == "default"
    return backend if plain else _Compiler(backend, memory_budget, mode)


@dataclass(frozen=True)
class _Compiler:
    """Backend that sets torch's memory budget around each of its own compilations only, and inductor's mode for them.

    Kept results are decided as the forward is compiled. To torch's cache of graphs equal instances are one backend.
    """

    backend: str
    memory_budget: float
    mode: str

    def __call__(self, graph, inputs, **options):
        if self.mode != "default":
            options["config_patches"] = torch._inductor.list_mode_options(self.mode)
        with functorch_config.patch(activation_memory_budget=self.memory_budget):
            return lookup_backend(self.backend)(graph, inputs, **options)


class CompileCounter:
    """Counter of torch.compile's work in this process from here on; reading it costs microseconds."""

    def __init__(self, expected_steps: int) -> None:
        """expected_steps: first steps, in which functions may be compiled again without a word."""
        self._expected_steps = expected_steps
        self._steps = self._recompiles = 0
        self._untold: list[str] = []
        self._latest = _last(get_compilation_metrics())
        self._before = _totals()

    def counts(self) -> dict[str, int]:
        """Total counts up to now.

        Returns:
            graphs: compiled; recompiles: functions compiled again, for arguments or attributes that none of their
                graphs fits; graph_breaks: places where a function was split into several graphs (in a block, an error).
        """
        self._read()
        graphs, breaks = (now - before for now, before in zip(_totals(), self._before, strict=True))
        return {"graphs": graphs, "recompiles": self._recompiles, "graph_breaks": breaks}

    def expect(self) -> None:
        """Expect what was compiled up to here: graphs of evaluations are no news."""
        self._read()
        self._untold.clear()

    def end_step(self, step: int) -> None:
        """Warn of every recompilation in this step, with its number."""
        self._read()
        self._steps += 1
        if self._steps > self._expected_steps:
            for described in self._untold:
                logger.warning(f"step {step}: recompiled, which takes time: {described}")
        self._untold.clear()

    def _read(self) -> None:
        compilations = get_compilation_metrics()
        found = [_describe(each) for each in self._unseen(compilations) if each.recompile_reason]
        self._latest = _last(compilations)
        self._recompiles += len(found)
        self._untold += found

    def _unseen(self, compilations: list[CompilationMetrics]) -> Iterator[CompilationMetrics]:
        """Recompilations not seen yet: torch keeps the last 64, and a step has fewer."""
        places = [place for place, each in enumerate(compilations) if each is self._latest]
        yield from compilations[places[0] + 1 if places else 0 :]


def _last(compilations: list[CompilationMetrics]) -> CompilationMetrics | None:
    return compilations[-1] if compilations else None


def _totals() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _describe(compilation: CompilationMetrics) -> str:
    reason = unwrapped(compilation.recompile_reason or "")
    place = f"{Path(str(compilation.co_filename)).name}:{compilation.co_firstlineno}"
    return f"{compilation.co_name} ({place}): {reason if len(reason) <= 300 else reason[:297] + '...'}"
