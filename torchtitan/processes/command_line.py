"""Command-line parts shared by the commands of this project."""

import argparse
import errno
import functools
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn, TextIO

from torchtitan.files.run_lock import Busy
from torchtitan.processes.exit_codes import BUSY, FAILED, REFUSED, before_exit
from torchtitan.processes.launch import LaunchError, check_launch
from torchtitan.settings.synonyms import SYNONYMS

_READER_GONE = 128 + signal.SIGPIPE


class OneLineParser(argparse.ArgumentParser):
    """Parser with one-line errors, without the usage text; exit code 2.

    An option may be written with _ for -; the configuration, CONFIG, is taken from --config CONFIG too.
    """

    def __init__(self, of_command: bool = False, **options: Any) -> None:
        """of_command: it is one command's of a parser of several, and refuses unknown options itself, which knows its own."""
        defaults: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**defaults | options)
        self._of_command = of_command

    def add_subparsers(self, **options: Any):
        return super().add_subparsers(**{"parser_class": functools.partial(type(self), of_command=True)} | options)

    def parse_known_args(self, args=None, namespace=None):
        found, rest = self._parse_known(args, namespace)
        if rest and self._of_command:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _parse_known(self, args=None, namespace=None):
        words = [_with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        config = next((action for action in self._actions if action.dest == "config"), None)
        place = next((place for place, word in enumerate(words) if word.partition("=")[0] == "--config"), None)
        if config is None or place is None:
            return super().parse_known_args(words, namespace)
        _, equals, given = words.pop(place).partition("=")
        if not (equals or words[place:]):
            self.error("argument --config: expected one argument")
        given = given if equals else words.pop(place)
        self._remove_action(config)
        namespace, rest = super().parse_known_args(words, namespace)
        namespace.config = self._get_value(config, given)
        return namespace, rest

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}{self._advice(message)}\n")

    def _advice(self, message: str) -> str:
        """Options that were meant by unknown ones, of another program's name for it or the nearest; or what does that."""
        unknown = message.partition("unrecognized arguments: ")[2]
        meant = [self._nearest(word.partition("=")[0]) for word in unknown.split() if word.startswith("--")]
        options, remarks = [each for each in meant if each[:2] == "--"], [each for each in meant if each and each[:2] != "--"]
        advice = "; ".join([f"did you mean {', '.join(options)}?"] * bool(options) + remarks)
        return f" ({advice})" if advice else ""

    def _nearest(self, word: str) -> str:
        key, remark = SYNONYMS.get(word[2:].replace("-", "_").lower(), ("", ""))
        if remark and not key:
            return remark
        own = f"--{key.rpartition('.')[2].replace('_', '-')}"
        options = self._option_string_actions
        near = [own] if own in options else [each for each in options if each.endswith(word[1:])]  # --steps: --num-steps
        near = near or get_close_matches(word, [each for each in options if each != "--help"], n=1, cutoff=0.7)
        if near or "--slurm" not in options:
            return near[0] if near else ""
        return "keys of runs belong in [fixed] of the grid's file" if "." in word else f"--slurm {word[2:]}=VALUE"


def _with_dashes(word: str) -> str:
    """Word with the dashes of an option's name; a key of a configuration, with a dot, keeps its own."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") and "." not in name else word


class FirstRankParser(OneLineParser):
    """Parser that reports an error once on each machine, however many processes were started there."""

    def error(self, message: str):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().error(message)
        self.exit(REFUSED)


def at_least(least: int) -> Callable[[str], int]:
    """Type of options: whole numbers from `least` on."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, is {value}")
        return value

    return integer


def sides(text: str) -> tuple[int, int]:
    """Type of options: height and width, as 512x768."""
    if (found := re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)) is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no height and width (give HEIGHTxWIDTH, as 512x768)")
    return int(found[1]), int(found[2])


def positive(text: str) -> float:
    """Type of options: numbers above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, is {text}")
    return value


def assignment(text: str) -> tuple[str, str]:
    """Type of options: NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, is {text!r}")
    return name, value


def refusing(*errors: type[Exception], stopped: str = "stopped") -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a command's main: one of these errors is a line of the first process and exit code 2, Ctrl-C one and 130."""

    def decorate(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def wrapped(words: list[str] | None = None) -> int:
            try:
                return main(words)
            except errors as error:
                line, code = str(error), REFUSED
            except KeyboardInterrupt:
                line, code = stopped, 128 + signal.SIGINT
            if os.environ.get("RANK", "0") == "0":
                print(line, file=sys.stderr)
            return code

        return wrapped

    return decorate


def interrupt_by_signals() -> None:
    """Have SIGTERM, SIGUSR1 (Slurm) and SIGINT, in a shell's background job too, raise KeyboardInterrupt."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, interrupt)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a command as `exit_code` does, and end the process with its code."""
    sys.exit(exit_code(main))


def run_rank(main: Callable[[], int]) -> NoReturn:
    """Run a command that may be one of several processes as `exit_code` does, and end the process at once with its code."""
    code = exit_code(main)
    logging.shutdown()
    before_exit(code)
    os._exit(code)  # a gloo thread may abort the interpreter while it shuts down


def exit_code(main: Callable[[], int]) -> int:
    """Run a command and turn its outcome into an exit code.

    Returns:
        the command's own code; 2 if RANK, WORLD_SIZE or the like are no valid numbers; 75 if another process works in
        its folder, 141 if the reader of its output has gone (as in `--help | head -1`; without a message), 1 if the
        output cannot be written.
    """
    _open_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Output(sys.stdout)
    try:
        try:
            check_launch()
            code = main()
        except SystemExit as ended:  # of the parser
            code = ended.code if isinstance(ended.code, int) else FAILED * bool(ended.code)
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
        except Busy as error:
            print(error, file=sys.stderr)
            code = BUSY
        except LaunchError as error:
            print(error, file=sys.stderr)
            code = REFUSED
        if sys.stdout is not None:  # it was closed when Python started
            sys.stdout.flush()
        return code
    except _OutputError as error:
        if error.errno == errno.EPIPE:
            return _READER_GONE
        with suppress(OSError):
            print(f"standard output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        _let_python_end_quietly()


def _open_standard_files() -> None:
    """Open closed standard files: otherwise the next opened file would take their number, and receive printed text.

    A name of a file that is no UTF-8 is printed escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


class _OutputError(OSError):
    """Output that cannot be written: its reader has gone, or the disk behind it is full."""


class _Output:
    """Standard output that fails with an error which no file has."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _OutputError(error.errno, error.strerror) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _OutputError(error.errno, error.strerror) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _let_python_end_quietly() -> None:
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # Python would write what is left once more, and complain
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


def readable_size(size: float) -> str:
    """Format a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
