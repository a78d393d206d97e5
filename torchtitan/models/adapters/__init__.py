"""Low-rank adapters (LoRA): updates W + s B A of frozen weights, of which only the small A and B train."""
