"""Programs of the trainer, its studies, and what other Python code calls."""
