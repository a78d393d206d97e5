"""The sweep over guidance, weights and steps: every setting on the same noise, a heat map, resumed, refusals in one line."""

import shutil

import numpy as np
import pytest
import torch

from research.sampling_sweep import VALUES
from tests.end_to_end.runs import write_config
from tests.end_to_end.tools import load_tool
from tests.evaluations import frechet_distance
from tests.faults.forked import ForkedRun
from tests.research.tables import rows_of
from torchtitan.data import DATASETS
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices
from torchtitan.fidelity.extractors import open_extractor
from torchtitan.fidelity.moments import moments_of_rows
from torchtitan.pictures.grids import to_rgb
from torchtitan.weights.trained_model import load_run

SHORT = (
    "--training.steps", "8", "--lr_scheduler.warmup_steps", "0", "--checkpoint.interval", "8", "--sampling.enable", "false",
    "--ema.snapshot_interval", "32", "--ema.tracks", '[{"name": "short", "kind": "power", "sigma_rel": 0.05}, {"name": "long", '
    '"kind": "power", "sigma_rel": 0.1}]',
)  # fmt: skip
QUICK = ["--images", "40", "--sets", "2", "--batch-size", "15", "--extractor", "digits", "--allow-small"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trained = ForkedRun(write_config(tmp_path_factory.mktemp("sweep")), "tiny", *SHORT)
    trained.finish()
    return trained.folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("references") / "digits.npz"
    words = ["reference", "digits", "--name", "digits", "--output", str(path), "--extractor", "digits"]
    assert load_tool("evaluate").main(words) == 0
    return path


def test_every_setting_is_judged_on_the_same_noise_and_drawn_as_a_heat_map(run, reference, study):
    words = [
        "sampling_sweep", run, *QUICK, "--weights", "short", "--lengths", "0.07", "--scales", 1, 2, "--num-steps", 1, 2,
        "--metrics", "fd,prdc,accuracy", "--reference", reference,
    ]  # fmt: skip
    code, _, error = study(*words)
    assert code == 0, error
    folder = run / "studies" / "sampling_sweep"
    rows = rows_of(folder)
    assert len(rows) == 2 * 2 * 2 * 2 and {row["status"] for row in rows} == {"ok"}, [row["reason"] for row in rows]
    assert {row["weights"] for row in rows} == {"short", "std=0.07"}
    assert all(0 <= float(row[name]) <= 1 for row in rows for name in ("precision", "recall", "coverage", "accuracy"))
    assert len({row["fd"] for row in rows}) == 16 and not any(row["kid"] for row in rows)

    chosen = ("short", 2.0, "2", "40")
    (row,) = (r for r in rows if (r["weights"], float(r["scale"]), r["num_steps"], r["first_image"]) == chosen)
    assert float(row["fd"]) == pytest.approx(distance(run, *chosen[:2]), rel=1e-4)

    summary = (folder / "summary.md").read_text()
    best = min({(r["weights"], r["scale"], r["num_steps"]) for r in rows}, key=lambda each: mean_fd(rows, each))
    assert f"Best mean: {best[0]}, guidance {float(best[1]):g}, {best[2]} steps" in summary
    for name in ("fd", "precision", "recall", "density", "coverage"):
        assert f"]({rows[0]['model']}-{name}.png)" in summary
        assert (folder / f"{rows[0]['model']}-{name}.png").stat().st_size > 10_000
    before = (folder / "results.csv").read_bytes()
    assert study(*words)[0] == 0
    assert (folder / "results.csv").read_bytes() == before


def test_rows_of_another_method_are_not_compared_and_a_guide_is_not_guided_by_itself(run, study, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    config = copy / "config.toml"
    words = ["sampling_sweep", copy, *QUICK, "--metrics", "is", "--scales", 1, 2, "--weights", "both"]
    folder, drawn = tmp_path / "sweep", []
    for changes in (("", ""), ('guide_track = ""', 'guide_track = "long"'), ('name = "euler"', 'name = "heun"')):
        config.write_text(config.read_text().replace(*changes))
        code, _, error = study(*words, "--output", folder)
        assert code == 0, error
        drawn.append([(row["method"], row["weights"], float(row["scale"])) for row in rows_of(folder)])
    summary = (folder / "summary.md").read_text()
    methods = list(dict.fromkeys(method for method, _, _ in drawn[-1]))
    assert [method.split()[0] for method in methods] == ["euler", "euler", "heun"]
    assert len(drawn[0]) == 12 and len(drawn[1]) == 12 + 10 == len(drawn[2]) - 10
    assert (methods[1], "long", 1.0) in drawn[1] and (methods[1], "long", 2.0) not in drawn[1]
    assert "solver heun. Guided by long. That guide's own samples are drawn without guidance alone." in summary


def mean_fd(rows, setting):
    return np.mean([float(r["fd"]) for r in rows if (r["weights"], r["scale"], r["num_steps"]) == setting])


def distance(run, track, scale):
    """Fréchet distance of the second set, drawn in one batch and compared with all training digits."""
    trained = load_run(run, track, None, torch.device("cpu"))
    sampling, extractor = trained.config.sampling, open_extractor("digits")
    sampler = ImageSampler(trained.model, trained.objective, "float32", torch.device("cpu"))
    method = sampling.method() | {"guidance": type(sampling.guidance)(scale), "num_steps": 2}
    images = sampler.draw(balanced_choices(40, 10), 0, batch_size=40, first_number=40, **method)
    train = DATASETS["digits"](trained.config.data, "train")
    real = train.fetch(np.arange(len(train)))["images"]
    features = [
        extractor.extract(torch.from_numpy(to_rgb(each.numpy()).transpose(0, 3, 1, 2).copy()))["pooled"].numpy()
        for each in (images, real)
    ]
    return frechet_distance(*map(moments_of_rows, features))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metrics", "fd"], "--reference: not given"),
        (["--metrics", "fdd"], "no metric is called 'fdd'"),
        (["--metrics", "memorisation"], "memorisation is not of a sweep"),
        (["--metrics", "fid"], "fid is of inception features"),
        (["--metrics", "is", "--scales", "nan"], "--scales"),
        (["--metrics", "is", "--scales", "1", "--guide", ":none"], "--guide: has no effect at a guidance scale of 1"),
        (["--metrics", "is", "--num-steps", "0"], "--num-steps"),
        (["--metrics", "is", "--images", "3"], "3 samples are too few for any metric"),
        (["--metrics", "is", "--extractor", "nothing"], "'nothing' is no feature extractor (there are"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, study, tmp_path, words, message):
    code, _, error = study("sampling_sweep", run, *QUICK, *words, "--output", tmp_path / "out")
    assert code == 2 and message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_every_value_of_a_sweep_has_a_direction():
    assert {"fd", "kid", "precision", "is"} <= VALUES.keys() and "memorised" not in VALUES
    assert set(VALUES.values()) == {"lower", "higher"}
