"""Initial weights of diffusion transformers, for every flavor: also TorchDiTan's, which were published with another scheme."""

from torch import nn

from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.layers import FourierFeatures, RMSNorm, TokenBias, TokenGain

SCALARS = ("time", "duration", "guidance")  # that are embedded


def initialise(model: nn.Module, config: DiTConfig) -> None:
    """Draw the weights as in Peebles and Xie, arXiv 2212.09748; a packed linear, as queries, keys and values, as one matrix."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            # Zero too, and without a draw: the other weights are those of a network without this head.
            if name.startswith("intermediate."):
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | RMSNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
        elif isinstance(module, TokenBias):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, TokenGain):  # of values
            nn.init.constant_(module.weight, 0.5)
        elif isinstance(module, FourierFeatures):
            nn.init.normal_(module.frequencies)

    embeddings = (*(f"{each}_embed.{part}" for each in SCALARS for part in ("hidden", "out")), "label_embed")
    for name, module in model.named_modules():
        if name.endswith(embeddings) and isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    # adaLN-Zero: every block starts as the identity, because its gates are zero. The first prediction is zero too.
    for name, module in model.named_modules():
        if name.endswith("modulation") or name == "output.linear":
            nn.init.zeros_(module.weight)
    if config.mup_base_dim:
        from torchtitan.models.dit.width import scale_initial_weights

        scale_initial_weights(model, config)
