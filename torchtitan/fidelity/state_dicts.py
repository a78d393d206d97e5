"""State dicts of published weights: verified by hash, read without running code, compared with a network."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_extractor import file_sha256
from torchtitan.fidelity.published import PublishedWeights
from torchtitan.files.regular import user_path
from torchtitan.files.weight_files import WeightsError, mismatches, read_state_dict
from torchtitan.programs import program


def read_published(weights: PublishedWeights, path: Path | None) -> tuple[dict[str, Tensor], str]:
    """Read published weights; no code of the file is run.

    Args:
        weights: which ones.
        path: of the file, of any name; None is where scripts/download.py puts it.

    Returns:
        the state dict, and the file's SHA-256.

    Raises:
        EvaluationError: the file is missing, cannot be read, or is not the published one.
    """
    file = weights.path if path is None else user_path(path)
    advice = f"python {program('download')} {weights.name} fetches it, {weights.size / 1e6:,.0f} MB; --weights names a copy"
    if not file.exists():
        raise EvaluationError(f"{weights.name}: {file}: no such file of weights ({advice})")
    found = file_sha256(file)
    if found != weights.sha256:
        raise EvaluationError(
            f"{weights.name}: {file}: is not the published file: SHA-256 {found[:12]}..., not {weights.sha256[:12]}... "
            f"({advice})"
        )
    try:
        return read_state_dict(file)[0], found
    except WeightsError as error:
        raise EvaluationError(f"{weights.name}: {error}") from error


def check_tensors(name: str, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Compare a state dict with the shapes of a network's. Raises EvaluationError: one line with every difference."""
    problems = mismatches(dict(wanted), {key: tuple(tensor.shape) for key, tensor in tensors.items()})
    if problems:
        raise EvaluationError(f"{name}: weights of another network: {'; '.join(problems)}")
