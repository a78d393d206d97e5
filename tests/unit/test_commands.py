"""Every program under one name, and under the names that it has in the checkout."""

import ast

import pytest

from tests.forked import ROOT, run_script
from torchtitan import programs
from torchtitan_dit import cli
from torchtitan_dit.cli import COMMANDS

DRAWS_ONLY = ROOT / "scripts" / "draw_architecture.py"  # a tool of the project itself, not a program of its users
PROGRAMS = sorted({*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")} - {DRAWS_ONLY})


def test_every_command_has_a_name_and_a_program_in_the_checkout():
    modules = {command.module for command in COMMANDS.values()}
    assert modules == {path.stem for path in (ROOT / "torchtitan_dit" / "commands").glob("[!_]*.py")}
    assert modules == {path.stem for path in PROGRAMS}
    assert all(command.help and not command.help.endswith(".") for command in COMMANDS.values())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_programs_of_the_checkout_only_call_the_command(program):
    calls = [node for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    called = [ast.unparse(call) for call in calls if "run_command" in ast.unparse(call)]
    assert called == [f"run_command('{program.stem}')"]
    assert len(program.read_text(encoding="utf-8").splitlines()) <= 11


def test_messages_name_programs_as_they_are_called(monkeypatch, tmp_path):
    words = {command.module: f"torchtitan-dit {word}" for word, command in COMMANDS.items() if not command.words}
    scripts = [path.stem for path in PROGRAMS if path.parent.name == "scripts"]
    assert [programs.program(name) for name in scripts] == [f"scripts/{name}.py" for name in scripts]
    assert (programs.pasted("sample"), programs.pasted("train")) == (".venv/bin/python scripts/sample.py", "scripts/train.sh")
    monkeypatch.setattr(programs, "_CHECKOUT", tmp_path)
    assert programs.pasted("sample") == words["sample"]
    assert {name: programs.program(name) for name in scripts} == {name: words[name] for name in scripts}


def test_a_command_says_whether_it_runs_on_ranks():
    files = (ROOT / "torchtitan_dit" / "commands").glob("*.py")
    joining = {path.stem for path in files if "init_process_group(" in path.read_text()}
    assert {command.module for command in COMMANDS.values() if command.on_ranks} == joining | {"train"}


def test_several_processes_of_a_command_of_one_are_refused_by_the_first_in_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = "scripts/checkpoint.py"
    first, second = (run_script(script, "list", "x", RANK=rank, LOCAL_RANK=rank) for rank in "01")
    said = f"{script}: runs in one process, and WORLD_SIZE says 2 (start it without torchrun, or unset WORLD_SIZE)\n"
    assert (first.returncode, first.stdout, first.stderr) == (2, "", said)
    assert (second.returncode, second.stdout, second.stderr) == (2, "", "")


@pytest.mark.parametrize(("failure", "code", "said"), [
    (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "has no package torch (use scripts/train.sh, which"),
    (KeyboardInterrupt(), 130, "interrupted before the start"),
])  # fmt: skip
def test_an_import_that_fails_ends_in_one_line(monkeypatch, capsys, failure, code, said):
    def fail(name):
        raise failure

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    with pytest.raises(SystemExit) as ended:
        cli._imported("train")
    error = capsys.readouterr().err
    assert ended.value.code == code and said in error and error.count("\n") == 1
