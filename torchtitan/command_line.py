"""What the commands of this project share."""

import argparse


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, without the usage before it; exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")
