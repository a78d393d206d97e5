"""What cannot run is refused in one line per problem, with exit code 2 and nothing written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.end_to_end.runs import checkpoint_tensors, write_config
from tests.faults.forked import ForkedRun
from tests.forked import run_script
from torchtitan.runs.compare.tables import notes
from torchtitan.runs.record import read_run
from torchtitan.weights.trained_model import WeightsError, load_weights

QUICK = ["--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--sampling.enable", "false"]


def call(arguments: list[str]) -> tuple[int, str, str]:
    result = run_script("train.py", *arguments)
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
    assert code == 2 and "does not fit this model: a tensor is missing" in error and "--checkpoint.initial_weights" in error
    (trained.folder / "summary.json").write_bytes(before[trained.folder / "summary.json"])
    del before[trained.folder / "status.json"]  # a run that starts removes it
    assert {path: path.read_bytes() for path in before} == before

    allowed = ("--training.steps", "3", "--optimizer.lr", "0.004", "--job.allow_config_change", "true")
    code, _, error = call(training_arguments(config, "trained", *allowed))
    assert code == 0 and "resumed after step 2 of 3" in error and "optimizer.lr: 0.003 -> 0.004" in error
    run = read_run(trained.folder)
    changes = ["after step 2: optimizer.lr: 0.003 -> 0.004", "after step 2: training.steps: 2 -> 3"]
    assert sorted(run.summary["config_changes"]) == changes
    code, _, error = call(training_arguments(config, "trained", "--optimizer.lr", "0.004"))  # as before the extension
    assert code == 2 and "give --training.steps 3 as it had" in error
    assert any("keys were changed while it trained: after step 2: " in note for note in notes([run]))


def test_weights_with_missing_extra_or_misshapen_tensors_are_refused(trained, tmp_path):
    found = checkpoint_tensors(sorted((trained.folder / "checkpoint").iterdir())[0])
    tensors = {name.removeprefix("ema.ema."): tensor for name, tensor in found.items() if name.startswith("ema.ema.")}
    changed = tensors | {"stranger": torch.zeros(1), "output.linear.bias": torch.zeros(7)}
    del changed["patch_embed.weight"]
    save_file(changed, tmp_path / "changed.safetensors")
    save_file(tensors, tmp_path / "good.safetensors")
    (tmp_path / "garbage.safetensors").write_bytes(b"not tensors")

    def load(name: str) -> dict[str, torch.Tensor]:
        path, config = tmp_path / f"{name}.safetensors", trained.folder / "config.toml"
        return dict(load_weights(path, config, torch.device("cpu")).model.named_parameters())

    with pytest.raises(WeightsError) as refused:
        load("changed")
    assert "1 tensors are missing: patch_embed.weight" in str(refused.value)
    assert "1 tensors are not of this model: stranger" in str(refused.value)
    assert "output.linear.bias is [7] instead of [4]" in str(refused.value)
    with pytest.raises(WeightsError, match="not a readable safetensors file"):
        load("garbage")
    assert all(torch.equal(value, tensors[name]) for name, value in load("good").items())
