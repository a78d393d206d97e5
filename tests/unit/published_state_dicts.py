"""State dicts with the names and shapes of published ones; the values are bits of Philox, the same with every version."""

import math
import zlib

import numpy as np
import torch

from torchtitan.fidelity.dinov2 import VisionTransformer
from torchtitan.fidelity.inception import Convolution, InceptionNetwork


def uniform(name, shape):
    """Uniform in [-1, 1), a function of the name; the stream of a numpy bit generator never changes."""
    count = math.prod(shape)
    bits = np.random.Philox(key=zlib.crc32(name.encode())).random_raw((count + 1) // 2).view(np.uint32)[:count]
    return torch.from_numpy((bits >> 8).astype(np.float32) * 2.0**-23 - 1).reshape(shape)


def noise_images(count, channels, height, width):
    return ((uniform("images", (count, channels, height, width)) + 1) * 128).to(torch.uint8)


def convolution_weights(name, shape):
    """Weights of a unit of Inception: of variance 2 / inputs, so that activations keep their size."""
    values = uniform(name, shape)
    if name.endswith((".bn.weight", ".bn.running_var")):
        return 1 + values / 2
    return values * math.sqrt(6 / math.prod(shape[1:])) if len(shape) > 1 else values / 4


def inception_state_dict():
    with torch.device("meta"):
        network = InceptionNetwork()
    shapes = {"fc.weight": (1008, 2048), "fc.bias": (1008,)}
    for name, module in network.named_modules():
        if isinstance(module, Convolution):
            shapes[f"{name}.conv.weight"] = tuple(module.weight.shape)
            shapes |= {f"{name}.bn.{part}": (module.out_channels,) for part in ("weight", "bias", "running_mean", "running_var")}
    return {name: convolution_weights(name, shape) for name, shape in shapes.items()}


def transformer_state_dict(network: VisionTransformer):
    return {name: transformer_weights(name, tuple(tensor.shape)) for name, tensor in network.state_dict().items()}


def transformer_weights(name, shape):
    """Weights of a vision transformer, larger than trained ones are at the start: each part shows in the result."""
    values = uniform(name, shape)
    if name.endswith((".weight", ".gamma")) and len(shape) == 1:
        return 1 + values / 2
    return values * math.sqrt(3 / math.prod(shape[1:])) if name.endswith(".weight") else values / 2
