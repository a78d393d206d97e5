"""Previews of a run: files by step and row, the change since step 0, the page and its picture."""

import re

import numpy as np
import pytest
from PIL import Image

from torchtitan.config.job import load_config
from torchtitan.run_pictures import manner_of
from torchtitan.runs.previews import MOST_STEPS, pixel_change, preview_path, preview_rows, save_previews, write_page
from torchtitan.settings.record import effective
from torchtitan.state.resume import _drawn_otherwise

MANNER = {"num_steps": 9}
PROMPTS = ["sks on a beach", "a red house"]


def plain(value, size=(32, 24)):
    return Image.fromarray(np.full((size[1], size[0], 3), value, np.uint8))


@pytest.fixture
def samples(tmp_path):
    for step in (0, 5, 10):
        save_previews(tmp_path, step, [plain(100 + 5 * step), plain(100 + step)], PROMPTS, MANNER)
    return tmp_path


def test_change_is_the_mean_absolute_difference_in_percent_of_the_range():
    random = np.random.default_rng(0)
    a, b = (random.integers(0, 256, (9, 7, 3), np.uint8) for _ in range(2))
    brute = sum(abs(int(x) - int(y)) for x, y in zip(a.flat, b.flat, strict=True)) / a.size / 255 * 100
    assert pixel_change(Image.fromarray(a), Image.fromarray(b)) == pytest.approx(brute, rel=6 * 2.0**-53)  # three roundings each
    assert pixel_change(plain(7), plain(7)) == 0


def test_page_shows_prompts_by_steps_and_the_drift_of_those_without_the_trigger(samples):
    changes = write_page(samples, "dog", PROMPTS, "sks", MANNER)
    assert changes == {"sks on a beach": round(50 / 2.55, 4), "a red house": round(10 / 2.55, 4)}
    page = (samples / "previews.html").read_text()
    assert page.count("<img ") == 6 and "step 10" in page and "before training" in page
    drift = page[page.index('id="drift"') : page.index('id="previews"')]
    assert "a red house: 3.92 %" in drift and "beach" not in drift
    links = re.findall(r'href="([^"]+)"', page)
    assert len(links) == 6 and all((samples / link).is_file() for link in links)
    width, height = Image.open(samples / "previews.png").size
    assert width > 3 * 64 and height > 2 * 64


def test_a_missing_or_damaged_preview_leaves_a_gap(samples):
    preview_path(samples, 5, 0).unlink()
    preview_path(samples, 0, 1).write_bytes(b"cut off")
    assert write_page(samples, "dog", PROMPTS, "sks", MANNER) == {"sks on a beach": round(50 / 2.55, 4)}
    assert (samples / "previews.html").read_text().count('class="missing">missing') == 2


def test_pictures_of_other_prompts_are_left_out(samples):
    swapped = PROMPTS[::-1]
    save_previews(samples, 15, [plain(9), plain(9)], swapped, MANNER)
    assert write_page(samples, "dog", swapped, "sks", MANNER) == {}  # step 0 is of other prompts
    page = (samples / "previews.html").read_text()
    assert "step 15" in page and "step 10" not in page and page.count("<img ") == 2
    assert "Left out: pictures of 3 other\nsteps, of other prompts" in page
    assert write_page(samples, "dog", ["another", "too"], "sks", MANNER) == {}


def test_pictures_that_were_drawn_otherwise_are_not_compared(tmp_path):
    given = ([], ["--sampling.interval", "9"], ["--sampling.num_steps", "2"])
    manners = [manner_of(load_config(["--data.name", "digits", *words], 1)) for words in given]
    manners.append(manners[0] | {"decoder": ["taef2", "folder"]})
    assert manners[0] == manners[1] != manners[2]
    for step, manner in enumerate(manners):
        save_previews(tmp_path, step, [plain(100 + 5 * step)], ["a"], manner)
    assert write_page(tmp_path, "dog", ["a"], "", manners[0]) == {"a": round(5 / 2.55, 4)}
    assert "Left out: pictures of 2 other\nsteps, of" in (tmp_path / "previews.html").read_text()
    for manner in manners[2:]:
        assert write_page(tmp_path, "dog", ["a"], "", manner) == {}
        assert (tmp_path / "previews.html").read_text().count("<img ") == 1
    later = manners[0] | {"new": 1, "solver": manners[0]["solver"] | {"new": 2}}  # of a version with more keys
    for step, manner in ((4, later), (5, {})):  # and of one that wrote no manners
        save_previews(tmp_path, step, [plain(100 + 5 * step)], ["a"], manner)
    assert write_page(tmp_path, "dog", ["a"], "", manners[0]) == {"a": round(25 / 2.55, 4)}
    assert write_page(tmp_path, "dog", ["a"], "", manners[2]) == {}


@pytest.mark.parametrize("words, said", [
    (["--sampling.num_steps", "2", "--sampling.interval", "9"], ["sampling.num_steps: 20 -> 2"]),
    (["--sampling.enable", "false"], []), (["--sampling.solver.name", "heun"], ["sampling.solver.name: euler -> heun"]), ([], []),
])  # fmt: skip
def test_what_a_resume_draws_otherwise_is_said(words, said):
    given = ["--data.name", "digits", "--sampling.num_steps", "20"]
    before, config = effective(load_config(given, 1)), load_config([*given, *words], 1)
    assert _drawn_otherwise(before, config) == said
    before["sampling"]["enable"] = False
    assert _drawn_otherwise(before, config) == []


def test_many_steps_are_shown_evenly_with_the_first_and_the_last(tmp_path):
    for step in range(0, 300, 10):
        save_previews(tmp_path, step, [plain(step % 256)], ["a"], MANNER)
    steps, (row,), _ = preview_rows(tmp_path, ["a"], "", MANNER)
    assert len(steps) == MOST_STEPS and (steps[0], steps[-1]) == (0, 290) and steps == sorted(set(steps))
    assert len(row.previews) == MOST_STEPS
    for step in (300, 310, 320):
        save_previews(tmp_path, step, [plain(9)], ["b"], MANNER)
    assert preview_rows(tmp_path, ["b"], "", MANNER)[0] == [300, 310, 320]
