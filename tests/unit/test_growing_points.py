"""Points of a growing metrics.jsonl, read once each."""

import json

import pytest

from torchtitan.gns.logged_bins import is_drawn
from torchtitan.training import metric_points
from torchtitan.training.metric_points import GrowingPoints


def line(step: int, value: float = 0.0) -> str:
    return json.dumps({"step": step, "gns/x": value + step, "other": 1}) + "\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    return path


def reader(path, most=1000) -> GrowingPoints:
    return GrowingPoints(path, '"gns/', lambda tag: tag == "gns/x", most)


def append(path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def steps(points: list[dict]) -> list[int]:
    return [point["step"] for point in points]


def test_each_line_is_parsed_once_and_half_a_line_when_it_is_whole(file, monkeypatch):
    points, parsed = reader(file), []
    monkeypatch.setattr(metric_points, "parse_point", lambda line: parsed.append(line) or json.loads(line))
    assert points.read() == []
    for step in range(1, 6):
        half = line(step)
        append(file, half[:9])
        assert steps(points.read()) == list(range(1, step))
        append(file, half[9:] + '{"step": 3}\n')
        assert points.read() == [{"step": number, "gns/x": float(number)} for number in range(1, step + 1)]
    assert len(parsed) == 5


@pytest.mark.parametrize("longer", [False, True])
def test_a_file_that_was_cut_back_is_read_anew(file, longer):
    points = reader(file)
    append(file, "".join(map(line, range(1, 7))))
    points.read()
    file.write_text("".join(map(line, range(1, 4))))
    append(file, "".join(line(step, 0.5) for step in range(4, 9 if longer else 5)))
    found = points.read()
    assert steps(found) == list(range(1, 9 if longer else 5)) and found[3]["gns/x"] == 4.5


def test_points_are_thinned_evenly_and_the_last_one_stays(file):
    points, most = reader(file, most=8), 0
    for step in range(101):
        append(file, line(step))
        found = steps(points.read())
        most = max(most, len(found))
        assert found[0] == 0 and found[-1] == step
    assert most <= 9 and found == [0, 16, 32, 48, 64, 80, 96, 100]


def test_what_a_picture_draws_is_kept_of_a_point():
    assert is_drawn("gns/adam/composite/3/b_simple") and is_drawn("gns/plain/composite/0/upper")
    assert is_drawn("gns/bins") and is_drawn("gns/edges/3")
    for tag in ("gns/adam/sketch/3/b_simple", "gns/adam/composite/3/signal", "loss/composite/3/lower", "gns/all/x"):
        assert not is_drawn(tag)
