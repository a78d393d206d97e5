"""Configurations with endless mistakes: the first are told with advice, the others are counted, in little time."""

import time
from pathlib import Path

import pytest

from torchtitan.config import job as config
from torchtitan.config.job import ConfigError, load_config
from torchtitan.settings.schema import MOST_SHOWN

MANY = 20_000


def refused(tmp_path: Path, text: str, *flags: str) -> list[str]:
    (tmp_path / "x.toml").write_text(text)
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(["--job.config_file", str(tmp_path / "x.toml"), *flags], world_size=1)
    assert time.process_time() - start < 10  # a search for the nearest key of each takes a minute
    return [line.removeprefix(f"{tmp_path / 'x.toml'}: ") for line in caught.value.problems]


@pytest.mark.parametrize(("text", "first"), [
    ("".join(f"stepz{n} = 1\n" for n in range(MANY)), "stepz0: is in no section (did you mean training.steps?)"),
    ("[training]\n" + "".join(f"stepz{n} = 1\n" for n in range(MANY)),
     "training.stepz0: unknown key (did you mean training.steps?)"),
    ("".join(f"[trainin{n}]\n" for n in range(MANY)), "trainin0: unknown section (did you mean training?)"),
    ("[ema]\ntracks = [{" + ", ".join(f"nam{n} = 1" for n in range(MANY)) + "}]",
     "ema.tracks[0].nam0: unknown key (did you mean name?)"),
])  # fmt: skip
def test_unknown_keys_without_end(tmp_path, monkeypatch, text, first):
    asked = []
    suggestion = config.suggestion
    monkeypatch.setattr(config, "suggestion", lambda *words: asked.append(words) or suggestion(*words))
    lines = refused(tmp_path, text)
    assert lines[0] == first and len(lines) == MOST_SHOWN + 1 and lines[-1] == f"... and {MANY - MOST_SHOWN:,} more"
    assert len(asked) <= MOST_SHOWN


def test_unknown_flags_without_end(tmp_path):
    lines = refused(tmp_path, "", *(f"--training.stepz{n}=1" for n in range(2_000)))
    assert lines[0] == "command line: --training.stepz0: unknown key (did you mean --training.steps?)"
    assert len(lines) == MOST_SHOWN + 1 and lines[-1] == "... and 1,980 more"


def test_tracks_of_one_name_and_of_many(tmp_path):
    lines = refused(tmp_path, "[[ema.tracks]]\nname = 'a'\n" * 5_000)
    assert lines[0] == "ema.tracks[1].name: 'a' is the name of an earlier track"
    assert lines[-1] == f"... and {5_000 - MOST_SHOWN:,} more" and len(lines) == MOST_SHOWN + 1
    names = "".join(f"[[ema.tracks]]\nname = 'm{n}'\n" for n in range(1_000))
    (line,) = refused(tmp_path, names + "[sampling]\nenable = true\nema_track = 'zzz'\n")
    assert line.startswith("sampling.ema_track: 'zzz' is not a name in ema.tracks (set it to one of m0, m1, ")
    assert line.endswith("m19, ... (1,001 in all))") and len(line) < 300


def test_as_many_problems_as_are_shown_are_all_shown():
    assert ConfigError(["x"] * MOST_SHOWN).problems == ["x"] * MOST_SHOWN
    assert str(ConfigError(["x"] * (MOST_SHOWN + 1))) == "x\n" * MOST_SHOWN + "... and 1 more"
