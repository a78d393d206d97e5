"""Weights & Biases, offline: its file has the run's points, pictures and results; without a login a run trains."""

import os
import socket
import struct
import sys

import pytest
from PIL import Image

from torchtitan.training.metric_sinks import WandbRun


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    package = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"  # where nobody listens
    settings = {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "BASE_URL": url, "CONFIG_DIR": str(tmp_path)}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path))  # the user's .netrc may have a key
    yield package
    package.teardown()


def records(wandb, folder):
    """Records of the file that `wandb sync` sends, in LevelDB's log format: 7 bytes, then checksum, length, type, content."""
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # the package's process has written all then
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    content, place, found = path.read_bytes(), 7, []
    while place < len(content):
        length, kind = struct.unpack_from("<HB", content, place + 4)
        assert kind == 1 and len(content) < 1 << 15  # whole, as in the first block of 32 KiB
        found.append(Record.FromString(content[place + 7 : place + 7 + length]))
        place += 7 + length
    return found


def values(items):
    return {item.key or ".".join(item.nested_key): item.value_json for item in items}


def test_the_run_of_a_folder_has_its_points_pictures_and_results(wandb, tmp_path):
    run = WandbRun(tmp_path, "x", {"training": {"steps": 7}})
    run.log(3, {"loss": 2.5})
    run.log_image(4, "samples", Image.new("RGB", (6, 5)))
    run.log(5, {"loss": 1.25, "lr": 1e-3})
    run.summarise({"sample_accuracy": 0.9, "status": "completed"})
    run.close()
    found = records(wandb, tmp_path)
    (of_run,) = (record.run for record in found if record.HasField("run"))
    assert (of_run.run_id, of_run.display_name) == ((tmp_path / "wandb_id").read_text(), "x")
    assert values(of_run.config.update)["training"] == '{"steps":7}'
    points = [values(record.history.item) for record in found if record.HasField("history")]
    assert [(point["_step"], point.get("loss"), point.get("lr")) for point in points] == [
        ("3", "2.5", None), ("4", None, None), ("5", "1.25", "0.001"),
    ]  # fmt: skip
    assert (points[1]["samples.width"], points[1]["samples.height"]) == ("6", "5")
    assert len(list(tmp_path.rglob("samples_*.png"))) == 1
    summary = {}
    for record in found:
        summary |= values(record.summary.update)
    assert (summary["sample_accuracy"], summary["status"]) == ("0.9", '"completed"')


@pytest.mark.parametrize(("project", "shown"), [(None, "torchtitan"), ("mine", "mine")])
def test_the_project_is_that_of_the_environment(wandb, tmp_path, monkeypatch, project, shown):
    if project is not None:
        monkeypatch.setenv("WANDB_PROJECT", project)
    WandbRun(tmp_path, "x", {}).close()
    assert [record.run.project for record in records(wandb, tmp_path) if record.HasField("run")] == [shown]


class Terminal:
    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        raise AssertionError("somebody was asked")


@pytest.mark.parametrize(("mode", "said"), [("online", "API key")])
def test_without_a_login_nobody_is_asked_and_one_line_says_so(wandb, tmp_path, monkeypatch, caplog, mode, said):
    """wandb asks at a terminal for a key, and raises an error where there is none; bad values of its variables are errors too."""
    terminal = Terminal()
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(sys, "stdin", terminal)
    run = WandbRun(tmp_path, "x", {})
    assert sys.stdin is terminal
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("torchtitan")]
    assert said in line and "training continues, and this session is not logged there" in line
    assert "\n" not in line
    run.log(1, {"loss": 1.0})
    run.summarise({"status": "completed"})
    run.close()
    assert len([record for record in caplog.records if record.name.startswith("torchtitan")]) == 1
