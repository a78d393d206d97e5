"""File names hold no control characters once they are shown; text of all languages stays."""

from torchtitan.data.image_files import shown_path
from torchtitan.terminal import printable

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\u202egnp.exe\u2066\udcff\r\x00"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\u202egnp.exe\u2066\udcff\x0d\x00"


def test_control_characters_are_shown_and_text_of_all_languages_stays():
    assert printable(HOSTILE) == SHOWN
    plain = "a\tb\nπ 中文 עברית é — “x” 🙂"
    assert printable(plain) == plain


def test_a_path_is_one_line_whatever_bytes_it_has():
    assert shown_path(b"a\n\x1b[2J\xff.png") == r"a\n\x1b[2J\xff.png"
