"""The study of linear probes on real runs: classes and none, killed and resumed, refused in one line."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from research.probe_passes import chosen_images
from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from tests.research.tables import rows_of, rows_of_killed
from torchtitan.data.digits import Digits, DigitsConfig

SHORT = (
    "--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--checkpoint.interval", "2", "--sampling.enable", "false",
)  # fmt: skip
UNET = (
    "--model.name=edm2", "--model.flavor=XXS", "--model.channels=16", "--model.channel_mults=[1,2]",
    "--model.num_blocks=1", "--model.attention_resolutions=[4]", "--model.channels_per_head=8", "--data.labels=false",
    "--gns.enable=false", "--objective.path=edm", "--objective.prediction=edm", "--objective.preconditioning=edm",
    "--objective.timesteps.name=lognormal_sigma",
)  # fmt: skip
FEW = ("--train-images", 100, "--levels", 4, 7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folder of the runs `dit` (with classes), `unet` (without) and `no_null` (classes, but no null class)."""
    config = write_config(tmp_path_factory.mktemp("probe"))
    for name, overrides in (("dit", ()), ("unet", UNET)):
        trained = ForkedRun(config, name, *SHORT, *overrides)
        trained.finish()
    folder = trained.folder.parent
    shutil.copytree(folder / "dit", folder / "no_null")
    path = folder / "no_null" / "config.toml"
    changed = re.sub(r"^label_dropout = .*$", "label_dropout = 0.0", path.read_text(), flags=re.MULTILINE)
    path.write_text(changed)
    return folder


def test_all_blocks_and_levels_are_probed_and_the_baseline_once(runs, study):
    words = ["linear_probe", runs / "dit", "--weights", "ema", *FEW]
    code, _, error = study(*words)
    assert code == 0, error
    folder = runs / "dit" / "studies" / "linear_probe"
    rows = rows_of(folder)
    assert [(row["block"], row["sigma"]) for row in rows] == [
        ("pixels", "0"), *((f"block_{k}", sigma) for sigma in ("0.0599473", "0.585348") for k in (1, 2))
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {"ok"} and {row["tested"] for row in rows} == {"297"}
    assert [row["features"] for row in rows] == ["64"] + 4 * ["64"]
    for row in rows:
        assert 0 <= float(row["lower"]) <= int(row["correct"]) / 297 <= float(row["upper"]) <= 1
    wanted = _accuracy_by_scikit_learn(100, float(rows[0]["penalty"]))
    assert float(rows[0]["accuracy"]) == pytest.approx(wanted, abs=1.5 / 297) and wanted > 0.7
    summary = (folder / "summary.md").read_text()
    assert "sigma 0.0599, ln SNR 5.63" in summary and "never the class of an image" in summary
    assert (folder / "step-00000002.png").stat().st_size > 10_000 and not (folder / "features").exists()
    before = (folder / "results.csv").read_bytes()
    assert study(*words)[0] == 0 and (folder / "results.csv").read_bytes() == before


def test_a_run_without_classes_is_probed_with_the_datasets(runs, study, tmp_path):
    words = ["linear_probe", runs / "unet", "--blocks", "in_1", "out_2", "--sigmas", 0.1, "--probe", "port", "--passes", 2]
    code, _, error = study(*words, "--output", tmp_path)
    assert code == 0, error
    rows = rows_of(tmp_path)
    assert [row["block"] for row in rows] == ["pixels", "in_1", "out_2"] and {row["tested"] for row in rows} == {"297"}
    assert {row["features"] for row in rows[1:]} == {"16", "32"} and {row["penalty"] for row in rows} == {""}
    assert "the port's protocol" in (tmp_path / "summary.md").read_text()


def test_a_killed_probe_resumes_with_the_features_it_has(runs, study, tmp_path):
    words = ["linear_probe", runs / "dit", *FEW, "--blocks", "block_1", "block_2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert study(*words, "--output", whole)[0] == 0
    assert 2 <= len(rows_of_killed([*words, "--output", killed], killed)) < 5
    parts = sorted((killed / "features").rglob("*.safetensors"))
    written = {part: part.stat().st_mtime_ns for part in parts}
    assert {part.name for part in parts} == {
        "train-0-00000.safetensors", "test-0-00000.safetensors", "test-0-00001.safetensors"
    }  # fmt: skip
    (parts[0].parent / "notes.txt").write_text("mine")
    assert study(*words, "--output", killed)[0] == 0
    assert _values(killed) == _values(whole) and not any(part.exists() for part in written)
    assert [path.name for path in (killed / "features").rglob("*.*")] == ["notes.txt"]


def test_a_damaged_part_is_named(runs, study, tmp_path):
    words = ["linear_probe", runs / "dit", *FEW, "--blocks", "block_1", "--output", tmp_path]
    rows_of_killed(words, tmp_path)
    part = next(path for path in (tmp_path / "features").rglob("train-*") if "step" in path.parent.name)
    part.write_bytes(b"no tensors")
    code, _, error = study(*words)
    assert code == 2 and error.splitlines()[-1].startswith(f"{part}: is missing or damaged (remove ")


@pytest.mark.parametrize(("run", "words", "message"), [
    ("dit", ["--blocks", "out_6"], "--blocks: 'out_6' is no block of the model (there are: block_1, block_2)"),
    ("dit", ["--levels", "30"], "--levels: 30 is not in 0..18"),
    ("dit", ["--train-images", "2000"], "--train-images: 2000, the train split has 1500"),
    ("dit", ["--test-images", "298"], "--test-images: 298, the validation split has 297"),
    ("dit", ["--train-images", "9"], "--train-images: must be at least 10, is 9"),
    ("dit", ["--passes", "0"], "--passes: must be at least 1, is 0"),
    ("unet", ["--conditioning", "uniform"], "--conditioning uniform: the model takes no classes"),
    ("no_null", [], "--conditioning null: the model was trained without a null class, model.label_dropout is 0"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(runs, study, tmp_path, run, words, message):
    code, _, error = study("linear_probe", runs / run, *words, "--output", tmp_path / "out")
    assert code == 2 and message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_data_without_classes_are_refused(runs, study, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "unet", run)
    config = (run / "config.toml").read_text()
    start = config.index("[data]")
    end = config.index("\n[", start)
    synthetic = '[data]\nname = "synthetic"\nkind = "gaussian"\nshape = [1, 8, 8]\nnum_classes = 0\nlabels = false\n'
    (run / "config.toml").write_text(config[:start] + synthetic + config[end:])
    code, _, error = study("linear_probe", run)
    assert code == 2 and error == "data.name = synthetic: no classes, a probe needs 2 at least\n"


def test_a_drawn_class_stands_in_where_there_is_no_null_class(runs, study, tmp_path):
    words = ["linear_probe", runs / "no_null", *FEW, "--blocks", "block_2", "--conditioning", "uniform"]
    assert study(*words, "--output", tmp_path)[0] == 0
    assert "a class drawn for each image" in (tmp_path / "summary.md").read_text()


def _accuracy_by_scikit_learn(num_train: int, penalty: float) -> float:
    """Of logistic regression on standardised pixels."""
    from sklearn.linear_model import LogisticRegression

    train, test = (Digits(DigitsConfig(), split) for split in ("train", "validation"))
    chosen = chosen_images(train, num_train, 0).positions
    seen, unseen = train.fetch(chosen), test.fetch(np.arange(len(test)))
    x, test_x = (batch["images"].flatten(1).numpy() for batch in (seen, unseen))
    mean, deviation = x.mean(0), x.std(0, ddof=1)
    x, test_x = ((each - mean) / np.where(deviation > 0, deviation, np.inf) for each in (x, test_x))
    model = LogisticRegression(C=1 / (num_train * penalty), tol=1e-6, max_iter=5000).fit(x, seen["class"].numpy())
    return model.score(test_x, unseen["class"].numpy())


def _values(folder: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name not in ("date", "runtime")} for row in rows_of(folder)]
