"""Text encoders: what turns captions into the embeddings that condition a network."""

from torchtitan.texts.base import TextEncoder, TextEncoderError
from torchtitan.texts.opening import TextEncoders, open_encoder, open_encoders, reopen_encoders

__all__ = ["TextEncoder", "TextEncoderError", "TextEncoders", "open_encoder", "open_encoders", "reopen_encoders"]
