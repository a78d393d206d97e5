"""Every command line of the README and of docs/ is parsed by its program; the README's run in small."""

import argparse
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from research import STUDIES
from research import command_line as study
from tests.end_to_end.test_presets import SMALL_NETWORKS, small
from tests.forked import run_script
from tests.launcher import ROOT, run_on_ranks
from torchtitan.config.job import ConfigError, JobConfig, help_text, load_config
from torchtitan.runs.compare.page import compare_page
from torchtitan.runs.compare.tables import next_steps
from torchtitan.runs.record import read_run
from torchtitan.settings.sections import all_sections, keys
from torchtitan_dit.cli import COMMANDS
from torchtitan_dit.commands import sample

PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
README, INDEX = PAGES["README.md"], PAGES["index.md"]
for path in (ROOT / "train_configs").rglob("*.toml"):
    lines = re.findall(r"^#(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    PAGES[str(path.relative_to(ROOT))] = "\n".join(f"    {line.strip().lstrip('-')}" for line in lines)
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:(?:\S*/)?(?:python|torchrun)|sbatch|train\.py|optimization_analysis\.py|cosmos_latent_decoder\.py"
    r"|(?:scripts|benchmarks)/\w+\.(?:py|sh|slurm)|torchtitan-dit)(?: |$)|--(?!section)\w+\.[a-z_]"
)
TRAINED = ("README.md", "data.md")
MISSING = re.compile(r"does not exist|no such (?:file|folder)|not given|needs one of|is no ")  # files that a reader has


class Parsed(Exception):
    """A program's parser accepted its words."""


def commands(page: str) -> list[str]:
    """Command lines of a page: of its indented and fenced blocks, and of its inline code; of a preset, of its comments."""
    text = re.sub(r"\\\n\s*", " ", PAGES[page])
    fenced = re.findall(r"^```(?:sh|bash)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()] + re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)
    inline = re.sub(r"^ {4,}\S.*$", "", text, flags=re.MULTILINE)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", inline)]
    parts = (part.split(" # ")[0].strip() for line in lines for part in line.split("&&"))
    return list(dict.fromkeys(part for part in parts if COMMAND.match(part) and "  " not in part))


def split(command: str) -> tuple[int, str, list[str]]:
    """Number of processes, program or `-m module`, and its words, of a command line."""
    words = shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", re.sub(r"(\S+)(?: \| \S+)+", r"\1", command)))
    processes = 1
    while re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        name, value = words.pop(0).split("=")
        processes = int(value) if name == "NGPU" else processes
    if words[0] == "sbatch":
        words = words[next((place for place, word in enumerate(words) if word.startswith("scripts/")), 0) :]
    launcher = words[0].endswith("torchrun") or words[1:3] == ["-m", "torch.distributed.run"]
    if launcher:
        launched = get_args_parser().parse_args(words[1:] if words[0].endswith("torchrun") else words[3:])
        processes = int(launched.nproc_per_node) * int(launched.nnodes.split(":")[-1])
        words = ["-m " * launched.module + launched.training_script, *launched.training_script_args]
    elif words[0].endswith("python"):
        words = [f"-m {words[2]}", *words[3:]] if words[1] == "-m" else words[1:]
    return processes, words[0], words[1:]


def training_words(program: str, words: list[str]) -> list[str] | None:
    """Words of train.py that a command trains with; None for a program that does not train."""
    if program.startswith("--"):
        return ["--job.config_file", "train_configs/digits.toml", program, *words]
    if program in ("torchtitan-dit", "-m torchtitan_dit") and words[:1] == ["train"]:
        program, words = "train.py", words[1:]
    if re.fullmatch(r"scripts/(train\.sh|\w+\.slurm)", program):
        config = [] if words and words[0].startswith("--") else words[:1]
        return ["--job.config_file", *(config or ["train_configs/digits.toml"]), *words[len(config) :]]
    if program != "train.py":
        return None
    alone = next((word for word in words[:1] if not word.startswith("--")), None)
    return words if alone is None else ["--job.config_file", *words]


def parse(program: str, words: list[str], monkeypatch, partial: bool) -> None:
    """Have a program's parser accept words. Raises SystemExit: it refused them."""
    if program in ("torchtitan-dit", "-m torchtitan_dit"):
        if not words or words[0] == "NAME":
            return
        program, words = f"scripts/{COMMANDS[words[0]].module}.py", [*COMMANDS[words[0]].words, *words[1:]]
    if program == "-m research" and words[:1] != ["--help"]:
        assert words[0] in STUDIES
        if len(words) > 1 and not partial:
            study.parse_arguments(words)
        return
    if program.startswith("-m "):
        assert importlib.util.find_spec(program[3:])
        return
    if not program.endswith(".py"):
        text = (ROOT / program).read_text() if "/" in program else ""
        assert not [word for word in words if word.startswith("--") and text and word not in text]
        return
    if not words or "--help" in words:
        assert (ROOT / program).is_file()
        return
    place, name = Path(program).parent.name, Path(program).stem
    module = importlib.import_module(f"benchmarks.{name}" if place == "benchmarks" else f"torchtitan_dit.commands.{name}")
    whole = argparse.ArgumentParser.parse_args

    def parse_args(parser, args=None, namespace=None):
        whole(parser, args, namespace)
        raise Parsed

    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", [program, *words])
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        if name == "estimate":
            module.parse_arguments(words)
        else:
            with pytest.raises((Parsed, SystemExit) if partial else Parsed):
                module.main()


def configuration(words: list[str]) -> tuple[list[str], set[str]]:
    """Words of the configuration in those of another program, of a shipped file and what all its runs share; and all keys."""
    shipped = [word for word in words if word.startswith("train_configs/") and word.endswith(".toml") and "sweeps" not in word]
    found, named, shared = ["--job.config_file", *shipped], set(), True
    for word, after in zip(words, [*words[1:], ""], strict=False):
        shared &= word != "--arm"
        if key := re.match(r"--((?!section)\w+\.[a-z_][\w.]*)|([a-z]\w*\.[\w.]+)=", word):
            named.add(key[1] or key[2])
            found += [] if not shared else [f"--{word}"] if key[2] else [word] if "=" in word else [word, after]
    return found if shipped else [], named


def accept_training(words: list[str], processes: int) -> None:
    """Check a training's words: keys, values, shipped files; a reader's data and weights need not be here."""
    words = [word for word in words if word not in ("--check-only", "--setup-only", "--smoke")]
    if "--help" in words:
        help_text(words[words.index("--help") + 1 :])
        return
    if "--job.plugins" in words:  # which would add to the registries of this process
        assert run_script("train.py", *words, "--check-only").returncode == 0
        return
    try:
        load_config(words, processes, elsewhere=True)
    except ConfigError as error:
        assert not [line for line in error.problems if not MISSING.search(line)], error


def accept(page: str, command: str, monkeypatch) -> None:
    processes, program, words = split(command.split(" ...")[0])
    assert not [key for key in configuration([program, *words])[1] if not exists(key)]
    partial = " ..." in command or len(words) <= 1 and program.startswith("scripts")  # it names a command, or some of its words
    if program.startswith("--") and page not in ("README.md", "index.md"):  # of any configuration
        return
    training = training_words(program, words)
    if training is None:
        parse(program, words, monkeypatch, partial)
        if found := configuration(words)[0]:
            accept_training(found, processes)
    elif "--autotune" in training:
        parse("scripts/autotune_batch_size.py", [word for word in words if word != "--autotune"], monkeypatch, False)
    elif training:
        accept_training(training, processes)


def exists(key: str) -> bool:
    section, _, name = key.rpartition(".")
    if any(section == each and name in {field.name for field in keys(values)} for each, values in all_sections(JobConfig())):
        return True
    return f"--{key}" in help_text([section.split(".")[0]]) or name in help_text([key])


ALL = [pytest.param(page, command, id=f"{page}: {command[:60]}") for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), ALL)
def test_command_is_accepted_by_its_program(page, command, monkeypatch):
    accept(page, command, monkeypatch)


def test_steps_of_the_first_run_are_those_whose_checkpoints_it_keeps():
    config = load_config(["digits"], 1)
    saved = range(config.checkpoint.interval, config.training.steps + 1, config.checkpoint.interval)
    first = re.compile(r"outputs/digits(?![\w-])|train\.sh digits --checkpoint")
    of_first = [command for page in PAGES for command in commands(page) if first.search(command)]
    steps = {int(step) for command in of_first for step in re.findall(r"(?:@|step-|--steps? |load_step )0*(\d+)", command)}
    assert steps and steps <= set(saved[-config.checkpoint.keep_latest_k :])


def test_commands_of_the_pages_that_share_a_run_folder_share_its_training():
    """Pasted after one another, none is refused for another training in its folder; a reader's own paths are not compared."""
    found: dict[str, dict[frozenset, str]] = {}
    for page, command in [(name, each) for name in PAGES if name.endswith(".md") for each in commands(name)]:
        _, program, words = split(command.split(" ...")[0])
        words = (training_words(program, words) or []) if not program.startswith("--") else []
        if words[:1] != ["--job.config_file"] or {"--smoke", "--help", "--autotune"} & set(words) or words[1].isupper():
            continue
        preset = f"{words[1].removeprefix('train_configs/').removesuffix('.toml')}.toml"
        text = shlex.join(word for word in words[2:] if word != "--check-only").replace("=", " ")
        keys_given = dict(re.findall(r"--(\S+) ([^-\s]\S*|'[^']*')", text))
        shipped = tomllib.loads((ROOT / "train_configs" / preset).read_text()).get("job", {})
        name = keys_given.pop("job.name", shipped.get("name", Path(preset).stem))
        same = re.compile(r"checkpoint\.load|data\.path|parallelism\.")
        training = {(key, value) for key, value in keys_given.items() if not same.match(key)}
        found.setdefault(name, {})[frozenset({("", preset), *training})] = f"{page}: {command}"
    assert len(found) > 20
    extended = found.pop("lower-lr")
    assert len(extended) == 2 and not {name: trainings for name, trainings in found.items() if len(trainings) > 1}


@pytest.fixture(scope="module")
def trained(folders, latents, tmp_path_factory) -> dict[str, Path]:
    """Folder of a run of two steps for each training of two pages, by its command."""
    outputs = tmp_path_factory.mktemp("outputs")
    runs: dict[int, dict[str, list[str]]] = {1: {}, 4: {}}
    for page, command in [(name, each) for name in TRAINED for each in commands(name)]:
        processes, program, words = split(command)
        training = training_words(program, words) or []
        if training[:1] != ["--job.config_file"] or program.startswith("--") and page != "README.md":
            continue
        preset = f"{training[1].removeprefix('train_configs/').removesuffix('.toml')}.toml"
        data = training[training.index("--data.name") + 1] if "--data.name" in training else None
        shrunk = small(preset, folders, latents, outputs, data)
        pairs = zip(shrunk[::2], shrunk[1::2], strict=True)
        pairs = [pair for pair in pairs if pair[0].startswith(("--data.", "--autoencoder.", "--validation."))]
        last = [*itertools.chain(*pairs), "--checkpoint.enable", "true"]
        ranks = 1 if processes == 1 else 4
        runs[ranks][command] = [*shrunk, *training, *last, "--job.name", f"run-{ranks}-{len(runs[ranks])}"]
    for ranks, arguments in runs.items():
        run_on_ranks("tests.end_to_end.test_presets:train_all", ranks, {"arguments": list(arguments.values())})
    return {command: outputs / f"{words[-1]}-smoke" for arguments in runs.values() for command, words in arguments.items()}


def test_trainings_of_two_pages_make_two_steps(trained):
    assert {folder.name.split("-")[1] for folder in trained.values()} == {"1", "4"}
    for command, folder in trained.items():
        points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [point["step"] for point in points if "grad_norm" in point] == [1, 2], command


def test_other_commands_of_the_readme_run_in_small(trained, folders, latents, tmp_path):
    """On what its trainings left; a word that is given again counts the last time."""
    runs = {Path(training_words(*split(command)[1:])[1]).stem: folder for command, folder in trained.items()}
    smaller = {
        "scripts/extract_latents.py": [
            "--output", str(tmp_path / "store"), "--autoencoder", "cosmos", "--path", latents[-1], "--normalization", "measured",
            "--data.path", str(folders["imagenet"]), "--data.image_size", "32",
        ],
        "scripts/estimate.py": SMALL_NETWORKS["dit"],
        "scripts/sample.py": ["--num-steps", "2"],
        "scripts/checkpoint.py": ["--output", str(tmp_path / "adapter.safetensors")],
    }  # fmt: skip
    ran = set()
    for _, program, words in map(split, commands("README.md")):
        if program in smaller:
            words = [str(runs[Path(word).name]) if word.startswith("outputs/") else word for word in words]
            words = ["2" if before == "--count" else word for before, word in zip(["", *words], words, strict=False)]
            done = run_script(program, *words, *smaller[program])
            assert done.returncode == 0, (program, words, done.stderr)
            ran.add(program)
    assert ran == smaller.keys() and (tmp_path / "store" / "index.json").exists() and (tmp_path / "adapter.safetensors").exists()


def test_commands_of_a_runs_page_run_as_they_are_pasted(trained, tmp_path):
    folder = trained["scripts/train.sh train_configs/my_images.toml --data.path PICTURES"]
    smaller = {
        "draw samples": ["--num-steps", "2"], "make a reference of the data": ["--extractor", "cifar10"],
        "evaluate against it": ["--extractor", "cifar10", "--num-steps", "2", "--count", "20", "--allow-small"],
        "train longer": ["--check-only"],
    }  # fmt: skip
    steps = dict(next_steps(read_run(folder)))
    assert len(steps) == 6
    for what, line in steps.items():
        words = shlex.split(line.removeprefix(".venv/bin/python ").replace("scripts/train.sh", "train.py"))
        words = [str(folder) if word == "OTHER_RUN" else word for word in words]
        done = run_script(str(ROOT / words[0]), *words[1:], *smaller.get(what, []), folder=tmp_path)
        assert done.returncode == 0, (line, done.stderr)
    page = compare_page([read_run(folder)])
    measured = f"fd (cifar10, 20 samples by euler in 2 steps, guidance 2 against {folder.name}, written "
    assert f"<h1>{folder.name}</h1>" in page and measured in page
    stored = next(path for command, path in trained.items() if "--data.name latents" in command)
    assert not [line for _, line in next_steps(read_run(stored)) if "evaluate" in line]


def test_a_reference_is_made_before_it_is_compared_with():
    assert INDEX.index("evaluate.py reference digits --name digits") < INDEX.index("--reference digits")


# --- keys, options and files


def test_keys_that_pages_name_exist():
    sections, named = {name for name, _ in all_sections(JobConfig())}, set()
    for page, text in PAGES.items():
        if page == "coming_from.md":  # left cells of its tables from there on are keys of other programs
            text, _, other = text.partition("## Keys of TorchTitan")
            text += "\n".join(line if " | the same" in line else line.split(" | ", 1)[-1] for line in other.splitlines())
        for key in re.findall(r"`(?:--)?((?:[a-z_0-9]+\.)+[a-z_0-9]+)(?=[` =])", text):
            if sections & {key.partition(".")[0], key.rpartition(".")[0]} and not key.endswith((".py", ".json", ".jsonl")):
                named.add((page, key))
    assert len(named) > 150  # the pages are searched at all
    assert not [(page, key) for page, key in named if key != "objective.uncertainty.weight" and not exists(key)]


def test_options_of_sampling_that_the_page_for_dit_names_exist(monkeypatch):
    samples = PAGES["coming_from.md"].partition("### Samples")[2].partition("\n## ")[0]
    here = " ".join(line.split(" | ")[1] for line in samples.splitlines() if line.count(" | ") == 1)
    options = {word for word in re.findall(r"--[a-z][\w-]*", here) if word != "--tf32"}
    monkeypatch.setattr("sys.argv", ["sample.py", "run"])
    parsed = {f"--{name.replace('_', '-')}" for name in vars(sample.parse_arguments())}
    assert len(options) > 12 and not options - parsed


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:scripts|docs|benchmarks|train_configs)/[\w./]+\w", README + INDEX))))
def test_named_file_exists(path):
    assert (ROOT / path).exists()


def test_the_readme_is_read_in_a_minute():
    assert len(README.split()) <= 700


def test_index_names_every_page_script_and_benchmark():
    pages = {path.name for kind in ("md", "ipynb") for path in (ROOT / "docs").glob(f"*.{kind}")} - {"index.md"}
    assert pages == set(re.findall(r"^\| \[([\w.]+)\]\(\1\)", INDEX, re.MULTILINE))
    assert pages == set(re.findall(r" ([\w]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) - {"index.md"}
    programs = {f"{path.parent.name}/{path.name}" for folder in ("scripts", "benchmarks") for path in (ROOT / folder).glob("*.*")}
    assert programs == set(re.findall(r"`((?:scripts|benchmarks)/[\w.]+)`", INDEX))
