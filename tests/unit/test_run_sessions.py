"""Sessions of a run: what was trained on an earlier layout does not count for the present one."""

import json

import pytest

from torchtitan.runs.analysis.collect import collect
from torchtitan.runs.analysis.measures import IMAGES
from torchtitan.runs.sessions import steps_of_earlier_layouts
from torchtitan.supervision.events import EventLog


def resume(folder, step, world_size, layout=""):
    EventLog(folder, rank=0, world_size=world_size, keep_every=1, step=step, layout=layout)


@pytest.mark.parametrize(("sessions", "before"), [
    ([], 0),
    ([(0, 2, "FSDP x 2")], 0),
    ([(0, 2, "FSDP x 2"), (40, 2, "FSDP x 2")], 0),
    ([(0, 2, "FSDP x 2"), (40, 2, "DDP x 2")], 40),
    ([(0, 2, "DDP x 2"), (20, 1, "one process"), (40, 2, "DDP x 2"), (60, 2, "DDP x 2")], 40),
    ([(0, 2, ""), (40, 2, "DDP x 2")], 0),  # recorded before sessions had a layout
    ([(0, 4, ""), (40, 2, "")], 40),
    ([(0, 2, "DDP x 2"), (40, 4, "DDP x 4"), (0, 4, "DDP x 4")], 0),  # back to the start
])  # fmt: skip
def test_steps_of_earlier_layouts(tmp_path, sessions, before):
    for session in sessions:
        resume(tmp_path, *session)
    assert steps_of_earlier_layouts(tmp_path) == before


def test_damaged_lines_of_events_are_left_out(tmp_path):
    resume(tmp_path, 0, 2, "DDP x 2")
    with open(tmp_path / "events" / "rank-0000.jsonl", "a") as file:
        file.write('{"event": "session", "step": "x"}\n{"event": "session"\n["session"]\n\0\xff"session"\n')
    resume(tmp_path, 30, 1, "one process")
    assert steps_of_earlier_layouts(tmp_path) == 30


def test_a_run_resumed_on_another_layout_has_the_speed_of_the_last_one(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('[job]\nname = "run"\n[model]\nname = "dit"\nflavor = "debug"\n[training]\nsteps = 100\n')
    speeds = [(step, 40.0 if step <= 60 else 20.0) for step in range(10, 101, 10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "throughput(img/s)": v}) + "\n" for s, v in speeds))
    (run / "summary.json").write_text(json.dumps({"status": "completed", "step": 100}))
    resume(run, 0, 1, "one process")
    resume(run, 60, 2, "DDP x 2")
    (found,), _ = collect([tmp_path])
    assert found.measures[IMAGES.name].value == 20.0
    assert found.notes == ["resumed on another layout after step 60: points before do not count"]
