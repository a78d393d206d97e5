"""Candidate batch sizes of a configuration: multiples, or divisors of a given global batch size."""

from collections.abc import Callable, Sequence

from torchtitan.config.job import ConfigError, JobConfig

_GLOBAL = "training.global_batch_size"


class AutotuneRefused(Exception):
    """Search that cannot begin with the given options; the message is one line."""


def candidates_of(
    config_with: Callable[[int], JobConfig], whole: int | None, ranks: int, multiple_of: int, largest: int
) -> Sequence[int]:
    """List the local batch sizes to choose from, one or more, rising.

    Args:
        config_with: local batch size -> configuration; raises ConfigError where it cannot run.

    Raises:
        ConfigError: the configuration cannot run with any of them.
        AutotuneRefused: none is left by multiple_of and largest.
    """
    if whole is None:
        return _multiples(config_with, multiple_of, largest)
    share = whole // ranks
    divisors = [size for size in range(multiple_of, min(share, largest) + 1, multiple_of) if share % size == 0]
    if whole % ranks or not divisors:
        config_with(1)  # what is wrong with the configuration comes first
        raise AutotuneRefused(
            f"multiple-of: no multiple of {multiple_of} up to {min(share, largest)} divides the {share} images that"
            f" each rank has of {_GLOBAL} = {whole} (change one of them, or set the latter to -1 to let it follow)"
        )
    accepted = [size for size in divisors if _is_accepted(config_with, size)]
    if not accepted:
        config_with(divisors[0])
    return accepted


def _multiples(config_with: Callable[[int], JobConfig], multiple_of: int, largest: int) -> Sequence[int]:
    multiples = range(multiple_of, largest + 1, multiple_of)
    if _is_accepted(config_with, multiples[0]):
        return multiples
    # As where the noise scale needs more images a step. What is refused at any size is told here.
    config_with(multiples[-1])
    first = next(place for place, size in enumerate(multiples) if _is_accepted(config_with, size))
    return multiples[first:]


def _is_accepted(config_with: Callable[[int], JobConfig], batch_size: int) -> bool:
    try:
        config_with(batch_size)
    except ConfigError:
        return False
    return True
