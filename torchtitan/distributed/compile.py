"""torch.compile."""

from dataclasses import dataclass

from torchtitan.settings import setting


@dataclass(kw_only=True)
class CompileConfig:
    """`[compile]`"""

    enable: bool = setting(False, "compile every block with torch.compile (needs a C++ compiler on the CPU)",
                           trajectory=False)
