"""What cannot run is refused in one line per problem, with exit code 2 and nothing written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from tests.forked import run_script

QUICK = ["--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--sampling.enable", "false"]


def call(arguments: list[str], script: str = "train.py", **environment: str) -> tuple[int, str, str]:
    result = run_script(script, *arguments, **environment)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("refused"))


def training_arguments(config: Path, name: str, *overrides: str) -> list[str]:
    dump_folder = str(config.parent / "outputs")
    return ["--job.config_file", str(config), "--job.dump_folder", dump_folder, "--job.name", name, *QUICK, *overrides]


def test_bad_configuration_is_refused(config):
    code, output, error = call(training_arguments(config, "bad", "--model.flavor", "DiT-S/3", "--optimizer.lr", "-1"))
    assert code == 2 and output == ""
    assert "Traceback" not in error and "DiT-S/2" in error and "optimizer.lr" in error, error
    assert not (config.parent / "outputs" / "bad").exists()


@pytest.fixture(scope="module")
def trained(config):
    run = ForkedRun(config, "trained", *QUICK)
    run.finish()
    return run


def test_folder_of_another_configuration_is_not_continued(config, trained):
    # All but the lock, which says who was there last.
    files = [path for path in trained.folder.rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: path.read_bytes() for path in files}
    (trained.folder / "summary.json").unlink()
    other = training_arguments(config, "trained", "--optimizer.lr", "0.5", "--training.steps", "3")
    code, _, error = call([*other, "--check-only"])
    assert code == 2 and "Traceback" not in error
    assert "optimizer.lr: 0.003 -> 0.5" in error and "training.steps: 2 -> 3" in error
    assert "job.allow_config_change" in error
    deeper = ("--job.allow_config_change", "true", "--model.num_layers", "7", "--training.steps", "3")
    code, _, error = call(training_arguments(config, "trained", *deeper))
    assert code == 2 and "does not fit this model: a tensor is missing" in error
    (trained.folder / "summary.json").write_bytes(before[trained.folder / "summary.json"])
    del before[trained.folder / "status.json"]  # a run that starts removes it
    assert {path: path.read_bytes() for path in before} == before

    code, _, error = call(
        training_arguments(config, "trained", "--training.steps", "3", "--job.allow_config_change", "true")
    )
    assert code == 0 and "resumed after step 2 of 3" in error


def test_weights_with_missing_extra_or_misshapen_tensors_are_refused(trained, tmp_path):
    checkpoint = sorted((trained.folder / "checkpoint").iterdir())[0]
    tensors = {
        name.removeprefix("ema.ema."): tensor
        for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()
        if name.startswith("ema.ema.")
    }
    changed = dict(tensors)
    del changed["patch_embed.weight"]
    changed["stranger"] = torch.zeros(1)
    changed["output.linear.bias"] = torch.zeros(7)
    save_file(changed, tmp_path / "changed.safetensors")
    save_file(tensors, tmp_path / "good.safetensors")
    (tmp_path / "garbage.safetensors").write_bytes(b"not tensors")
    outputs = {}
    for name in ("changed", "good", "garbage"):
        source = [str(tmp_path / f"{name}.safetensors"), "--config", str(trained.folder / "config.toml")]
        outputs[name] = call([*source, "--images-per-class", "1", "--num-steps", "2"], "scripts/sample.py")
    code, _, error = outputs["changed"]
    assert code == 2 and "Traceback" not in error
    assert "1 tensors are missing: patch_embed.weight" in error
    assert "1 tensors are not of this model: stranger" in error
    assert "output.linear.bias is [7] instead of [4]" in error
    assert outputs["garbage"][0] == 2 and "not a readable safetensors file" in outputs["garbage"][2]
    assert outputs["good"][0] == 0 and Path(outputs["good"][1].strip()).exists(), outputs["good"]
