"""Error of features that a metric cannot be computed from."""


class FidelityError(ValueError):
    """Features that a metric cannot be computed from; the message is one line: the cause and the remedy."""
