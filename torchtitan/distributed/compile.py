"""torch.compile, block by block."""

from dataclasses import dataclass

from torch import nn

from torchtitan.settings import setting


@dataclass(kw_only=True)
class CompileConfig:
    """`[compile]`"""

    enable: bool = setting(
        False, "compile every block with torch.compile (needs a C++ compiler on the CPU)", trajectory=False
    )


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Compile each block in place, which leaves the names of its parameters alone.

    All blocks share one code object, so the graph is compiled once. fullgraph: a graph break is an error.
    """
    for block in blocks:
        block.compile(fullgraph=True)
