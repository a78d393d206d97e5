"""Count of a compiled block: the compiler's own partition into forward and backward, and fusion as far as data flow allows.

torch's partitioner decides which results the forward keeps. Products and attention are separate kernels; all other
operations between two of them are taken as one kernel that reads and writes each tensor once, the least that a compiler can move.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.utils.flop_counter import flop_registry

from torchtitan.estimate.fake_cuda.counter import NO_KERNEL, Call, call_flops

FUSED = "fused"


@dataclass
class CompiledBlock:
    """Counts of a block's compiled forward and backward.

    Attributes:
        kept: bytes from forward to backward: results and the block's inputs, without parameters.
        forward, backward: kernels, those of fused operations by the name FUSED.
    """

    kept: int = 0
    forward: Counter[Call] = field(default_factory=Counter)
    backward: Counter[Call] = field(default_factory=Counter)


def count_compiled(block: nn.Module, inputs: tuple[Any, ...], param_dtype: torch.dtype | None) -> CompiledBlock:
    """Count a block on the imitated device; inside `fake_cuda`.

    Args:
        block: with parameters on the device; it runs once.
        inputs: of its forward.
        param_dtype: of autocast; None: the weights are in the dtype of compute.
    """
    graphs: dict[str, fx.GraphModule] = {}
    names = [name for name, _ in block.named_parameters()]

    def forward(parameters: list[Tensor], *inputs: Any) -> Any:
        return functional_call(block, dict(zip(names, parameters, strict=True)), inputs)

    def keep(which: str) -> Any:
        def compiler(graph: fx.GraphModule, _: Any) -> Any:
            graphs[which] = graph
            return make_boxed_func(graph)

        return compiler

    compiled = aot_function(
        forward, keep("forward"), keep("backward"), partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    with torch.autocast("cuda", dtype=param_dtype, enabled=param_dtype is not None):
        output = compiled([parameter.detach().requires_grad_() for parameter in block.parameters()], *inputs)
    outputs = output if isinstance(output, tuple) else (output,)
    sum(tensor.float().sum() for tensor in outputs).backward()
    found = CompiledBlock(_kept(graphs["forward"].graph, len(names), len(outputs)))
    found.forward, found.backward = (_kernels(graphs[which].graph) for which in ("forward", "backward"))
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
    """Kernels of a graph: a product or an attention each, and a fused one for each connected region between them.

    The level of an operation is the number of products on the longest way to it. Fused are operations of a level that hand
    on or share a tensor: no product lies between any two of them.
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
        level[node] = max((level.get(source, 0) + _is_product(source) for source in sources), default=0) - (
            _is_item(node) and _is_product(node)  # a result of the product, not a step after it
        )
        if _is_product(node):
            if not _is_item(node):
                calls[_call_of_product(node)] += 1
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


def _call_of_product(node: fx.Node) -> Call:
    values = [source.meta["val"] for source in node.all_input_nodes]
    moved = sum(_bytes(source) for source in node.all_input_nodes) + sum(map(_size, _tensors(node.meta["val"])))
    target: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    dtype = next(str(value.dtype) for value in values if value.is_floating_point())
    return Call(target._schema.name.partition("::")[2], dtype.removeprefix("torch."), moved, call_flops(
        target, args, kwargs, node.meta["val"]
    ))  # fmt: skip


def _is_product(node: fx.Node) -> bool:
    packet = getattr(node.target, "_overloadpacket", None)
    return packet in flop_registry or (_is_item(node) and _is_product(node.all_input_nodes[0]))


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
