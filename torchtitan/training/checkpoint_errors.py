"""What can be wrong with a checkpoint or with the place it is in."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message is one line."""


class StoreError(CheckpointError, OSError):
    """A remote store that does not answer or that refuses: it says nothing about the checkpoints in it."""


class DamagedFile(Exception):
    """A file that is not what it should be; the message says in a few words what is wrong with it."""
