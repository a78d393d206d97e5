"""What is printed holds no control characters, whichever way it is printed; lines and progress bars stay as they are."""

import io
import logging
import subprocess
import sys

import pytest
from tqdm import tqdm

from tests.launcher import ROOT
from torchtitan.terminal import PrintableStream, printable

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\u202egnp.exe\u2066\udcff\r\x00"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\u202egnp.exe\u2066\udcff\x0d\x00"


def test_control_characters_are_shown_and_text_of_all_languages_stays():
    assert printable(HOSTILE) == SHOWN
    plain = "a\tb\nπ 中文 עברית é — “x” 🙂"
    assert printable(plain) == plain


def test_prints_logs_tracebacks_and_bars_are_escaped_and_bars_still_move(monkeypatch):
    written = io.StringIO()
    stream = PrintableStream(written)
    monkeypatch.setattr(sys, "stderr", stream)
    print(HOSTILE, file=stream)
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler())
    logger.error("of %s", HOSTILE)
    sys.excepthook(ValueError, ValueError(HOSTILE), None)
    with tqdm(total=2, desc=HOSTILE, file=stream, position=1) as bar:
        bar.update()
    text = written.getvalue()
    assert text.count(SHOWN) >= 4 and f"ValueError: {SHOWN}" in text
    assert all(letter not in text.replace("\x1b[A", "") for letter in "\x1b\x07\x9b\x7f\u202e\udcff\x00")
    assert text.startswith(SHOWN + "\n") and "\n\r" + SHOWN in text and "\x1b[A" in text


@pytest.mark.parametrize(
    "command", sorted(path for path in (ROOT / "torchtitan_dit" / "commands").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_every_command_escapes_what_it_prints(command):
    main = command.read_text(encoding="utf-8").rpartition("\ndef run() -> NoReturn:\n")[2]
    assert "run_program(main)" in main or "exit_code(" in main  # which escape it first


def test_a_refusal_of_a_hostile_name_is_one_plain_line(tmp_path):
    name = "run\x1b[2J\u202e"
    command = [sys.executable, str(ROOT / "scripts" / "compare.py"), str(tmp_path / name)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stdout == ""
    assert r"run\x1b[2J\u202e" in ended.stderr and ended.stderr.count("\n") == 1 and "\x1b" not in ended.stderr
