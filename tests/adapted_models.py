"""Small networks with random weights, and random adapters of them."""

import zlib

import torch

from torchtitan.conditions import POOLED, TEXT, Classes, Embeddings
from torchtitan.models.adapters.adapters import add_frozen_adapter
from torchtitan.models.adapters.target import LowRankWeights
from torchtitan.models.adapters.targets import weight_of
from torchtitan.models.flux.config import FLAVORS
from torchtitan.models.flux.model import Flux

DEBUG = FLAVORS["debug"]
IMAGE, TOKENS = (3, 8, 12), 5
PIXELS, CLASSES = (3, 16, 16), Classes(5)


def flux(config=DEBUG, seed=3):
    """Flux in float32 of which no parameter is at a special value."""
    kind = Embeddings({TEXT: torch.zeros(TOKENS, config.text_dim), POOLED: torch.zeros(config.pooled_dim)})
    return randomised(Flux(config, IMAGE, kind), seed)


def randomised(model, seed=3):
    torch.manual_seed(seed)
    model.init_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(values + 1 if "norm" in name else values)
    return model.eval().requires_grad_(False)


def flux_inputs(config=DEBUG, batch=2):
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    text, pooled = normal(batch, TOKENS, config.text_dim), normal(batch, config.pooled_dim)
    return normal(batch, *IMAGE), torch.linspace(250.0, 900.0, batch), {TEXT: text, POOLED: pooled}


def drawn(model, targets, rank=2, alpha=None):
    """Adapter with values that depend on the target alone; ranks and alphas by number, or by a function of the target."""
    def one(target):
        generator = torch.Generator().manual_seed(zlib.crc32(str(target).encode()))
        inputs = weight_of(model, target.module)[1:]
        of_target = rank(target) if callable(rank) else rank
        scale = alpha(target) if callable(alpha) else alpha
        return LowRankWeights(
            torch.randn(of_target, *inputs, generator=generator) * 0.3,
            torch.randn(target.stop - target.start, of_target, generator=generator) * 0.3,
            float(of_target if scale is None else scale),
        )

    return {target: one(target) for target in targets}


def with_adapter(model, weights):
    add_frozen_adapter(model, "tested", weights, 1.0, 1.0)
    return model
