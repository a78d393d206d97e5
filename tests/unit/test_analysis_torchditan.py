import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from torchtitan.runs.analysis.cells import join_repeats
from torchtitan.runs.analysis.findings import cautions
from torchtitan.runs.analysis.report import analyse, write_report
from torchtitan.runs.analysis.torchditan_runs import flops_excess, read_torchditan_run

NAME = "dit-l_bs16_ps2_actselective_ctrue_dbfloat16_p1,8_20250102-0304"
CONFIG = {
    "model": {"flavor": "DiT-L", "patch_size": 2, "input_channels": 16},
    "dataset": {"batch_size": -1, "image_size": [64, 64], "num_classes": 1000},
    "training": {"steps": 40, "batch_size": 16, "compile": True, "data_parallel_replicate_degree": 1,
                 "data_parallel_shard_degree": 8, "mixed_precision_param": "bfloat16"},
    "activation_checkpoint": {"mode": "selective"},
    "float8": {"enable_float8_linear": False},
}


def write_run(folder, images=800.0, config=CONFIG, steps=40):
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    with SummaryWriter(str(folder)) as writer:
        for step in (1, *range(10, steps + 1, 10)):
            for tag, value in {
                "im/s": images + step / 8, "mfu(%)": 28.0, "it/s": 6.25, "wps": 102400.0,
                "memory/max_reserved(GiB)": 30.5, "memory/max_active(GiB)": 29.0,
            }.items():
                writer.add_scalar(tag, value if step > 1 else value / 4, step)


@pytest.mark.parametrize(
    "flavor, patch, side, excess",
    [  # its count over the right one, from counting both by hand
        ("TorchDiTan-L", 2, 64, 3.147e12 / 2.205e12), ("TorchDiTan-L", 4, 64, 7.295e11 / 4.946e11),
        ("TorchDiTan-L", 8, 64, 1.793e11 / 1.213e11), ("TorchDiTan-7B", 2, 64, 4.573e13 / 3.118e13),
        ("TorchDiTan-7B", 8, 64, 2.747e12 / 1.851e12), ("TorchDiTan-L", 2, 32, 7.289e11 / 4.940e11),
    ],
)
def test_excess_of_its_flop_count(flavor, patch, side, excess):
    assert flops_excess(flavor, patch, (16, side, side), 1000) == pytest.approx(excess, rel=6e-4)


def test_a_run_is_read_from_events_and_configuration(tmp_path):
    write_run(tmp_path / "ablations_1" / NAME)
    (run,) = analyse([tmp_path]).runs
    assert run.axes == {
        "model": "TorchDiTan-L", "patch": 2, "local_batch": 16, "global_batch": 128, "layout": "fsdp", "mesh": "1x8",
        "world_size": 8, "ac": "selective", "compile": "true", "dtype": "bfloat16", "device": None,
    }
    assert (run.status, run.points, run.warmup_steps) == ("ok", 3, 4)  # the window of step 10 begins in the warm-up
    values = {name: estimate.value for name, estimate in run.measures.items()}
    assert values["images_per_second"] == pytest.approx(803.75)
    assert values["tokens_per_second"] == pytest.approx(819200.0)
    assert values["step_seconds"] == pytest.approx(0.16)
    assert values["mfu_reported_percent"] == pytest.approx(28.0)
    assert values["mfu_percent"] == pytest.approx(28.0 / (3.147e12 / 2.205e12), rel=6e-4)


@pytest.mark.parametrize(
    "size, shape", [([64, 32], (16, 64, 32)), (64, (16, 64, 64)), ([64], None), ([64, 0], None), ("64", None), (None, None)]
)
def test_image_size_is_height_and_width(size, shape, tmp_path):
    write_run(tmp_path / NAME, config=CONFIG | {"dataset": CONFIG["dataset"] | {"image_size": size}})
    assert read_torchditan_run(tmp_path / NAME).image_shape == shape


def test_axes_come_from_the_name_where_there_is_no_configuration(tmp_path):
    write_run(tmp_path / "dit-7b_bs4_ps8_actnone_cfalse_dbfloat16_f8_p2,4", config=None)
    (run,) = analyse([tmp_path]).runs
    assert (run.axes["model"], run.axes["patch"], run.axes["dtype"]) == ("TorchDiTan-7B", 8, "float8")
    assert (run.axes["layout"], run.axes["global_batch"], run.axes["compile"]) == ("hsdp", 32, "false")
    assert run.status == "ok"
    assert "mfu_percent" not in run.measures  # the image is not known, so neither are the FLOPs
    assert run.measures["mfu_reported_percent"].value == pytest.approx(28.0)


def test_a_run_that_stopped_early_is_unfinished(tmp_path):
    write_run(tmp_path / NAME, steps=20)
    (run,) = analyse([tmp_path]).runs
    assert (run.status, run.reason, run.measures) == ("unfinished", "logged up to step 20 of 40", {})


def test_a_batch_that_was_counted_but_not_loaded_is_said(tmp_path):
    write_run(tmp_path / NAME, config=CONFIG | {"dataset": CONFIG["dataset"] | {"batch_size": 1}})
    assert "dataset.batch_size = 1 is what was loaded" in read_torchditan_run(tmp_path / NAME).problems[0]


def test_its_grid_is_compared_like_any_other(tmp_path):
    for compiled, images in (("false", 500.0), ("true", 800.0)):
        write_run(tmp_path / NAME.replace("ctrue", f"c{compiled}"), images, CONFIG | {"training": CONFIG["training"] | {
            "compile": compiled == "true"}})
    results = analyse([tmp_path])
    assert len(join_repeats(results.runs)) == 2
    effect = next(one for one in results.effects if one.at == "equal batch")
    assert (effect.switch, effect.ratios["images_per_second"].value) == ("compile", pytest.approx(1.6, abs=0.01))
    assert any("every parameter once per token" in line for line in cautions(results))
    write_report(results, tmp_path / "out", "TorchDiTan")
    assert "MFU as reported, %" in (tmp_path / "out" / "analysis.md").read_text()


def test_a_stray_configuration_hides_no_runs_below_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_run(tmp_path / "ablations" / NAME)
    assert [run.name for run in analyse([tmp_path]).runs] == [f"ablations/{NAME}"]


def test_events_of_a_run_of_this_program_are_never_those_of_torchditan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_run(tmp_path / "own", config=None)
    (tmp_path / "own" / "metrics.jsonl").write_text("")
    assert [(run.name, run.source) for run in analyse([tmp_path]).runs] == [("own", "")]
    write_run(tmp_path / "tb", config=None)  # of TorchDiTan
    assert [(run.source, run.status) for run in analyse([tmp_path]).runs] == [("torchditan", "ok"), ("", "unfinished")]


def test_events_of_another_program_are_no_run(tmp_path):
    write_run(tmp_path / "bert", config={"model_type": "bert"})
    write_run(tmp_path / NAME)
    assert [run.name for run in analyse([tmp_path]).runs] == [NAME]


def test_runs_of_unknown_models_are_no_repeats(tmp_path):
    unknown = CONFIG | {"model": {"patch_size": 2}}
    write_run(tmp_path / "one", config=unknown)
    write_run(tmp_path / "two", config=unknown)
    write_run(tmp_path / "three")
    write_run(tmp_path / "four")
    cells = join_repeats(analyse([tmp_path]).runs)
    assert sorted([run.name for run in cell.runs] for cell in cells) == [["four", "three"], ["one"], ["two"]]
