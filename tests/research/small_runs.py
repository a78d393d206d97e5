"""Small runs on digits for tests of studies."""

from pathlib import Path

from tests.faults.forked import ForkedRun

SMALL = """
[model]
flavor = "DiT-S/2"
dim = 16
num_layers = 1
num_heads = 2
mlp_hidden_dim = 32
[data]
name = "digits"
"""


def trained_folder(folder: Path, name: str, config: str) -> Path:
    """Train a configuration to its end; the run's folder."""
    path = folder / "small.toml"
    path.write_text(config)
    trained = ForkedRun(path, name)
    trained.finish()
    return trained.folder
