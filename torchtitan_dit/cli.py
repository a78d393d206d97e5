"""The command `torchtitan-dit NAME ...`: every program of the project under one name, each in torchtitan_dit/commands/."""

import importlib
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from types import ModuleType
from typing import NoReturn

PROGRAM = "torchtitan-dit"
_REFUSED = 2  # as in torchtitan.processes.exit_codes, which another torchtitan would not have
_INTERRUPTED = 130
_TAKE_KEYS = ("train", "estimate", "autotune_batch_size", "sweep")  # modules that read a whole configuration


@dataclass(frozen=True)
class Command:
    """A word after `torchtitan-dit`.

    Attributes:
        module: file of torchtitan_dit/commands/.
        words: arguments that come before those given.
        on_ranks: whether several processes of a launcher, as torchrun, run it together.
        interruptible: whether SIGTERM and the like interrupt it as Ctrl-C does, unless a launcher ends its processes itself.
    """

    module: str
    help: str
    words: tuple[str, ...] = ()
    on_ranks: bool = False
    interruptible: bool = False


COMMANDS = {
    "train": Command("train", "train a model, or resume its run", on_ranks=True),
    "sample": Command("sample", "draw images from a run or a file of weights", on_ranks=True),
    "evaluate": Command("evaluate", "judge images by FID, KID, inception score, precision and recall", (), True, True),
    "extract": Command("extract_latents", "encode images into a latent store; convert, show and verify stores", (), True, True),
    "decode": Command("cosmos_latent_decoder", "latents to images with an autoencoder; encode images, check the autoencoder"),
    "checkpoint": Command("checkpoint", "list, verify and compare checkpoints; export and import weights"),
    "export": Command("checkpoint", "write a run's weights in a published layout", ("export",)),
    "import": Command("checkpoint", "make a checkpoint of published weights", ("import",)),
    "download": Command("download", "fetch public autoencoders, latents and feature extractors"),
    "ema": Command("ema", "choose the length of a weight average after training", (), True, True),
    "estimate": Command("estimate", "memory, speed and hours of a run before its launch"),
    "autotune": Command("autotune_batch_size", "find the largest batch size that fits", interruptible=True),
    "sweep": Command("sweep", "run a grid of configurations", interruptible=True),
    "compare": Command("compare", "show a run, or compare several and their hardware, on one page", interruptible=True),
    "analyse": Command("optimization_analysis", "speed and memory of a folder of runs"),
}


def run_command(module: str) -> NoReturn:
    """Run a program of torchtitan_dit/commands/ on the words of `sys.argv`, and end the process with its exit code."""
    from torchtitan.processes.launch import bound_openmp_spin, prefer_expandable_segments
    from torchtitan.processes.parent_death import end_with_launcher

    end_with_launcher()  # before the seconds that importing torch takes
    bound_openmp_spin()
    command = next(each for each in COMMANDS.values() if each.module == module)
    if not command.on_ranks:
        _refuse_ranks()
    if module == "train":
        prefer_expandable_segments()
    if module not in _TAKE_KEYS:
        load_named_plugins()
    program = _imported(module)
    if sys.argv[0].startswith(PROGRAM):  # its help speaks of itself under the name that it was called by
        program.__doc__ = re.sub(rf"(python )?(scripts/)?{module}\.py", sys.argv[0], program.__doc__ or "")
    from torchtitan.processes.command_line import interrupt_by_signals, run_program, run_rank

    if command.interruptible and "WORLD_SIZE" not in os.environ:
        interrupt_by_signals()
    (run_rank if command.on_ranks else run_program)(program.main)


def _refuse_ranks() -> None:
    """End the process if a launcher started several; the first one says so."""
    from torchtitan.processes.exit_codes import before_exit

    ranks = os.environ.get("WORLD_SIZE", "")
    if not ranks.isdecimal() or int(ranks) < 2:
        return
    if os.environ.get("RANK", "0") == "0":
        advice = "start it without torchrun, or unset WORLD_SIZE"
        print(f"{sys.argv[0]}: runs in one process, and WORLD_SIZE says {ranks} ({advice})", file=sys.stderr, flush=True)
    before_exit(_REFUSED)
    sys.exit(_REFUSED)


def load_named_plugins() -> None:
    """Load the plugins of `--job.plugins FILE`, a word of every command. Ends the process where one cannot be loaded."""
    from torchtitan.settings.plugins import PluginError, load_plugins, plugin_names
    from torchtitan.settings.sources import read_command_line, split_keys

    own, of_job = split_keys(sys.argv[1:], "job")
    flags, _ = read_command_line(of_job)
    if flags.keys() != {"job.plugins"}:
        return
    try:
        load_plugins(plugin_names(flags["job.plugins"]))
    except (PluginError, ValueError) as error:
        print(f"--job.plugins: {error}", file=sys.stderr)
        sys.exit(_REFUSED)
    sys.argv[1:] = own


def _imported(module: str) -> ModuleType:
    """Import a command. Ends the process in one line where a package is missing, or by Ctrl-C."""
    from torchtitan.processes.importing import uncollected

    try:
        with uncollected():
            return importlib.import_module(f"torchtitan_dit.commands.{module}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "torchtitan", "torchtitan_dit"):
            raise
        advice = "use scripts/train.sh, which sets up .venv, or .venv/bin/python"
        print(f"{sys.argv[0]}: {sys.executable} has no package {package} ({advice})", file=sys.stderr)
        sys.exit(_REFUSED)
    except KeyboardInterrupt:
        print("interrupted before the start", file=sys.stderr)
        sys.exit(_INTERRUPTED)


def main() -> NoReturn:
    """Run `torchtitan-dit NAME ...`, or `python -m torchtitan_dit NAME ...`, which torchrun can start too."""
    try:
        importlib.metadata.distribution("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        text = "the package torchtitan is installed here too, and its modules have the same name"
        print(f"{PROGRAM}: {text} (use an environment without it: {sys.executable} -m pip uninstall torchtitan)", file=sys.stderr)
        sys.exit(_REFUSED)
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0 if words else _REFUSED)
    name, *rest = words
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        print(f"{PROGRAM}: {name}: no such command ({advice})", file=sys.stderr)
        sys.exit(_REFUSED)
    command = COMMANDS[name]
    # What argparse calls the program in its messages, up to the command's own first words.
    sys.argv = [f"{PROGRAM} {name}" if not command.words else PROGRAM, *command.words, *rest]
    run_command(command.module)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([f"{PROGRAM} COMMAND ...   (`{PROGRAM} COMMAND --help` describes one)", "", *lines])
