"""Maximal update parametrisation: initial weights and learning rates by role, so that a rate serves networks of all widths.

With m the width over that of the base, at which nothing differs:

    role                                        initial standard deviation    Adam's rate    Muon's rate (rms; fan)
    inputs: patches, times' first maps, labels  the base's                    1
    others: fan-in proportional to the width    the base's / sqrt(m)          1 / m          1 / sqrt(m); 1

Biases, gains and tables count as inputs. Decay is 1 over the rate's factor, so that the product stays. The output layer, zero at
the start, has its usual multiplier 1 / m in its rate, which is the same network under Adam: weights are exported as they are.
Where attention heads grow, from d0 to d channels, scores are multiplied by sqrt(d0) / d.

Sources: Yang et al., "Tensor programs V", arXiv 2203.03466, table 3; for DiT, arXiv 2505.15270.
"""

import math

import torch
from torch import nn

from torchtitan.models.dit.config import DiTConfig

_HIDDEN, _OUT = "_embed.hidden", "_embed.out"  # of times, drawn with a standard deviation that knows no width


def fan_in_ratios(model: nn.Module, config: DiTConfig) -> dict[str, float]:
    """Fan-in over the base's of every linear's weight, by the parameter's name; 1 for inputs."""
    ratio = config.width_ratio
    return {
        f"{name}.weight": 1.0 if name.startswith("patch_embed") or name.endswith(_HIDDEN) else ratio
        for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }  # fmt: skip


@torch.no_grad()
def scale_initial_weights(model: nn.Module, config: DiTConfig) -> None:
    """Bring weights just drawn for their own width to the deviations of the table above."""
    modules = dict(model.named_modules())
    for name, ratio in fan_in_ratios(model, config).items():
        layer = modules[name.removesuffix(".weight")]
        factor = 1.0 / math.sqrt(ratio)
        if not name.removesuffix(".weight").endswith((_HIDDEN, _OUT)):  # Xavier's: variance 2 / (fan-in + fan-out)
            inputs, outputs = layer.in_features, layer.out_features
            grows = name.startswith("patch_embed") and outputs == config.dim
            base_outputs = outputs / config.width_ratio if grows or ratio != 1.0 else outputs
            factor *= math.sqrt((inputs + outputs) / (inputs / ratio + base_outputs))
        if factor != 1.0:
            layer.weight.mul_(factor)
