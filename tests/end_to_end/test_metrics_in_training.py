"""[evaluation]: samples measured during training, on any number of ranks, without a trace in the training itself."""

import shutil
import signal

import pytest

from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from torchtitan.runs.compare.tables import quality_table
from torchtitan.runs.record import group_by_seed, read_run
from torchtitan_dit.commands import evaluate
from torchtitan_dit.commands.train import main as train

STEPS = ("--training.steps", "20", "--sampling.interval", "20", "--sampling.num_steps", "2", "--checkpoint.interval", "5")


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("reference") / "digits.npz"
    words = ("reference", "digits", "--name", "digits-test", "--split", "validation", "--extractor", "digits")
    assert evaluate.main([*words, "--output", str(path)]) == 0
    return str(path)


def measured_every_eight_steps(reference: str, *more: str) -> tuple[str, ...]:
    """Of 71 samples, which two ranks do not divide into equal shares."""
    return (
        *STEPS, "--evaluation.enable", "true", "--evaluation.interval", "8", "--evaluation.metrics", '["fd", "prdc"]',
        "--evaluation.extractor", "digits", "--evaluation.reference", reference, "--evaluation.count", "71",
        "--evaluation.guidance_scale", "1.5", "--evaluation.targets", "[1e6, 1e-6]", *more,
    )  # fmt: skip


def measured(run: ForkedRun) -> dict[int, dict[str, float]]:
    points = [point for point in run.points() if "evaluation_metrics/fd" in point]
    return {point["step"]: {tag: point[tag] for tag in point if tag.startswith("evaluation")} for point in points}


def test_metrics_are_logged_alike_on_other_ranks_and_after_a_kill_and_leave_the_training_as_it_is(reference, tmp_path):
    config = write_config(tmp_path)
    plain, straight = ForkedRun(config, "plain", *STEPS), ForkedRun(config, "straight", *measured_every_eight_steps(reference))
    plain.finish()
    said = straight.finish()[0]
    assert straight.losses() == plain.losses()
    killed = ForkedRun(config, "moved", *measured_every_eight_steps(reference))
    killed.wait_for_step(12)  # a checkpoint with a measurement is there
    killed.send(signal.SIGKILL)
    killed.wait()
    columns, rows = quality_table(group_by_seed([read_run(killed.folder)]))
    assert columns == ["sample quality", "moved"]
    assert rows[0][0].startswith("fd (71 samples by euler in 2 steps") and rows[0][1] != "-"
    moved = ForkedRun(config, "moved", *measured_every_eight_steps(reference), ranks=2, shards=2)
    assert "resumed after step" in moved.finish()[0]

    found, wanted = measured(moved), measured(straight)
    assert list(found) == list(wanted) == [8, 16, 20]
    for step, values in wanted.items():
        assert values["evaluation_metrics/fd_lower"] < values["evaluation_metrics/fd"] < values["evaluation_metrics/fd_upper"]
        assert 0 <= values["evaluation_metrics/precision"] <= 1
        # The last steps were trained on another layout: equal up to rounding, not bit for bit.
        assert found[step] == pytest.approx(values, rel=1e-3, abs=1e-9)
    assert "71 samples: fd " in said and "first fd <= 1e+06" in said
    reached = {"fd <= 1e+06": {"step": 8, "epoch": round(8 * 16 / 1500, 3), "n_images_seen": 128}}
    assert straight.summary()["first_reached"] == moved.summary()["first_reached"] == reached
    how = "71 samples by euler in 2 steps, guidance 1.5 against digits.npz in features of digits"
    assert f"{how}, at step 20:\n  fd           fd " in said and straight.summary()["evaluation"]["how"] == how
    last = straight.summary()["evaluation"]
    assert last["step"] == 20 and last["fd"]["value"] == wanted[20]["evaluation_metrics/fd"]


def test_a_lost_reference_leaves_measurements_out_and_one_that_does_not_serve_is_refused(reference, tmp_path, capsys):
    config, copy = write_config(tmp_path), tmp_path / "copy.npz"
    shutil.copy(reference, copy)
    run = ForkedRun(config, "lost", *measured_every_eight_steps(str(copy)))
    run.wait_for_step(1)
    copy.unlink()
    assert "samples were not measured: evaluation.reference:" in run.finish()[0]
    assert "evaluation" not in run.summary() or run.summary()["evaluation"]["step"] < 20
    few = measured_every_eight_steps(reference, "--evaluation.count", "64", "--job.dump_folder", str(tmp_path / "few"))
    for more in ((), ("--check-only",)):
        assert train([str(config), *few, *more]) == 2
        said = capsys.readouterr().err
        assert "64 features from 64 images" in said and "evaluation.allow_small = true" in said
    assert not (tmp_path / "few").exists()
