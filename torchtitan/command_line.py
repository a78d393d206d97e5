"""What the commands of this project share."""

import argparse


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, without the usage before it; exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def readable_size(size: float) -> str:
    """A number of bytes in its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
