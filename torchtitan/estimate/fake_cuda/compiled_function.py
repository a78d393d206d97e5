"""Count of a compiled function: the compiler's own partition into forward and backward, and fusion as far as data flow allows.

torch's partitioner decides which results the forward keeps. Products, attention and what inductor leaves to torch's own kernels
are separate kernels; all other operations between two of them are taken as one kernel that reads and writes each tensor once, the
least that a compiler can move.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.utils
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import fallbacks, lowerings
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from torchtitan.estimate.fake_cuda.counter import NO_KERNEL, Call, call_flops

FUSED = "fused"


@dataclass
class CompiledFunction:
    """Counts of a function's compiled forward and backward.

    Attributes:
        kept: bytes from forward to backward: results and inputs, without weights.
        forward, backward: kernels, those of fused operations by the name FUSED.
    """

    kept: int = 0
    forward: Counter[Call] = field(default_factory=Counter)
    backward: Counter[Call] = field(default_factory=Counter)


def count_compiled(
    function: Callable[..., Any], inputs: tuple[Any, ...], weights: Sequence[Tensor] = (),
    param_dtype: torch.dtype | None = None,
) -> CompiledFunction:  # fmt: skip
    """Count a function on the imitated device; inside `fake_cuda`.

    Args:
        function: of the weights as a list, where there are any, and of the inputs; it runs once.
        inputs: tensors and mappings, tuples or lists of them; those that require a gradient get one.
        weights: get a gradient too, and are not counted as kept.
        param_dtype: of autocast; None: none.
    """
    graphs: dict[str, fx.GraphModule] = {}
    leaves, spec = tree_flatten(inputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def of_tensors(weights: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        given = dict(zip(places, tensors, strict=True))
        inputs = tree_unflatten([given.get(place, leaf) for place, leaf in enumerate(leaves)], spec)
        found = function(weights, *inputs) if weights else function(*inputs)
        return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]

    def keep(which: str) -> Any:
        def compiler(graph: fx.GraphModule, _: Any) -> Any:
            graphs[which] = graph
            return make_boxed_func(graph)

        return compiler

    compiled = aot_function(
        of_tensors, keep("forward"), keep("backward"), partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    tensors = [leaves[place] for place in places]
    mode = detect_fake_mode(tensors)
    # Without the counter's mode, which takes the tensors of a trace for the host's.
    with _disable_current_modes(), mode or nullcontext(), warnings.catch_warnings():
        # A copy of a graph copies the constants in it.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with (
            torch.autocast("cuda", dtype=param_dtype, enabled=param_dtype is not None),
            patch.object(torch.compiler, "is_compiling", lambda: True),
            # Constant tables that a function reads are of the imitated device too.
            patch.object(torch._dynamo.utils, "assert_no_fake_params_or_buffers", lambda graph: None),
        ):
            outputs = compiled([weight.detach().requires_grad_() for weight in weights], tensors)
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        if trained:
            sum(tensor.float().sum() for tensor in trained).backward()
    found = CompiledFunction(_kept(graphs["forward"].graph, len(weights), len(outputs)))
    found.forward = _kernels(graphs["forward"].graph)
    found.backward = _kernels(graphs["backward"].graph) if trained else Counter()
    return found


def count_compiled_module(
    module: nn.Module, inputs: tuple[Any, ...], param_dtype: torch.dtype | None
) -> CompiledFunction:
    """Count a module as a function of its parameters and `trained_attributes`; see `count_compiled`."""
    names = [name for name, _ in module.named_parameters()]
    places = trained_attributes(module)

    def forward(weights: list[Tensor], *inputs: Any) -> Any:
        given = dict(zip(places, weights[len(names) :], strict=True))
        with ExitStack() as stack:
            for attribute, owners in places.items():
                for owner, name in owners:
                    stack.enter_context(patch.object(owner, name, given[attribute]))
            return functional_call(module, dict(zip(names, weights, strict=False)), inputs)

    return count_compiled(forward, inputs, [*module.parameters(), *places], param_dtype)


def trained_attributes(module: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """Tensors that get a gradient and are no parameters, as the probes of taps -> modules that have it, and its name there."""
    found: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, value in vars(owner).items():
            if isinstance(value, Tensor) and value.requires_grad:
                found.setdefault(value, []).append((owner, name))
    return found


def _kept(graph: fx.Graph, parameters: int, outputs: int) -> int:
    of_weights = set(graph.find_nodes(op="placeholder")[:parameters])
    results: Any = graph.output_node().args[0]
    saved = {_base(node) for node in results[outputs:] if isinstance(node, fx.Node)}
    return sum(_bytes(node) for node in saved if _origin(node) not in of_weights)


def _origin(node: fx.Node) -> fx.Node:
    """Origin of a node that is made of one other, as a weight cast for a product is."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _kernels(graph: fx.Graph) -> Counter[Call]:
    """Kernels of a graph: those that stand alone (see `_is_alone`), and a fused one for each connected region between them.

    The level of an operation is the number of those alone on the longest way to it. Fused are operations of a level that hand
    on or share a tensor: none that is alone lies between any two of them.
    """
    calls: Counter[Call] = Counter()
    nodes = [node for node in graph.nodes if node.op == "call_function" and _base(node) is node]
    level: dict[fx.Node, int] = {}
    group: dict[fx.Node, fx.Node] = {}
    readers: dict[tuple[fx.Node, int], fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    for node in nodes:
        sources = {_base(source) for source in node.all_input_nodes}
        level[node] = max((level.get(source, 0) + _is_alone(source) for source in sources), default=0) - (
            _is_item(node) and _is_alone(node)  # a result of the operation, not a step after it
        )
        if _is_alone(node):
            if not _is_item(node):
                calls[_call_alone(node)] += 1
            continue
        group[node] = node
        for source in sources:
            reader = readers.setdefault((source, level[node]), node)
            group[root(node)] = root(reader)
            if source in group and level[source] == level[node]:
                group[root(node)] = root(source)
    regions: dict[fx.Node, list[fx.Node]] = {}
    for node in group:
        regions.setdefault(root(node), []).append(node)
    output = {_base(node) for node in graph.output_node().all_input_nodes}
    for region in regions.values():
        members = set(region)
        read = {_base(source) for node in region for source in node.all_input_nodes} - members
        written = {node for node in region if node in output or _users(node) - members}
        moved = sum(map(_bytes, read | written))
        calls[Call(FUSED, "", moved, 0)] += 1
    return calls


def _users(node: fx.Node) -> set[fx.Node]:
    """Operations that read a node, or a view of it."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= {user} if user.op == "output" or _base(user) is user else _users(user)
    return found


def _call_alone(node: fx.Node) -> Call:
    values = [source.meta["val"] for source in node.all_input_nodes]
    moved = sum(_bytes(source) for source in node.all_input_nodes) + sum(map(_size, _tensors(node.meta["val"])))
    target: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    dtype = next((str(value.dtype) for value in values if value.is_floating_point()), str(values[0].dtype))
    return Call(target._schema.name.partition("::")[2], dtype.removeprefix("torch."), moved, call_flops(
        target, args, kwargs, node.meta["val"]
    ))  # fmt: skip


def _is_alone(node: fx.Node) -> bool:
    """Whether an operation is a kernel of its own, or a node a result of one."""
    if _is_item(node):
        return _is_alone(node.all_input_nodes[0])
    packet = getattr(node.target, "_overloadpacket", None)
    by_torch = node.target in fallbacks or node.target not in lowerings
    return packet in flop_registry or (node.op == "call_function" and by_torch)


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _base(node: fx.Node) -> fx.Node:
    """Node that owns the memory of this one: itself, unless it is a view."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name.partition("::")[2] in NO_KERNEL and node.all_input_nodes:
            node = node.all_input_nodes[0]
        elif _is_item(node) and _base(node.all_input_nodes[0]) is not node.all_input_nodes[0]:
            node = _base(node.all_input_nodes[0])
        else:
            return node
    return node


def _bytes(node: fx.Node) -> int:
    return sum(map(_size, _tensors(node.meta.get("val"))))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, Tensor) else []


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
