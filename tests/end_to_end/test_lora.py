"""Runs that train adapters: content of checkpoints, frozen weights at a resume, exports, drawing, refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.end_to_end.runs import checkpoint_tensors, write_config
from tests.end_to_end.tools import caller
from tests.faults.forked import ForkedRun
from tests.forked import run_script
from torchtitan.config.job import load_config
from torchtitan.data import dataset_info
from torchtitan.errors import CheckpointError
from torchtitan.fidelity.images import open_images
from torchtitan.files.weight_files import named_weights
from torchtitan.weights.network import new_network
from torchtitan.weights.trained_model import WeightsError, load_run
from torchtitan_dit.commands import train
from torchtitan_dit.commands.checkpoint import main as checkpoint

QUICK = (
    "--training.steps", "4", "--lr_scheduler.warmup_steps", "0", "--sampling.enable", "false", "--checkpoint.interval", "2",
    "--lora.enable", "true", "--lora.rank", "3", "--metrics.log_freq", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def bases(config) -> list[Path]:
    found = []
    for seed in (1, 2):
        job = load_config(["--job.config_file", str(config), "--lora.enable", "true", "--debug.seed", str(seed)], 1)
        info = dataset_info(job.data)
        path = config.parent / f"base-{seed}.safetensors"
        save_file(named_weights(new_network(job, info, torch.device("cpu"))), path)
        found.append(path)
    return found


@pytest.fixture(scope="module")
def trained(config, bases) -> ForkedRun:
    run = ForkedRun(config, "trained", *QUICK, "--checkpoint.initial_weights", str(bases[0]))
    run.finish()
    return run


def test_checkpoints_hold_adapters_alone(trained):
    tensors = checkpoint_tensors(trained.folder / "checkpoint" / "step-00000004")
    of_parts = {part: [name for name in tensors if name.startswith(part)] for part in ("model.", "optimizer.", "ema.ema.")}
    assert all(names for names in of_parts.values())
    assert all(".adapters.lora." in name for names in of_parts.values() for name in names)
    downs = [tensor for name, tensor in tensors.items() if name.startswith("model.") and name.endswith(".down")]
    assert {tensor.shape[0] for tensor in downs} == {3}
    assert all(tensor.any() for name, tensor in tensors.items() if name.startswith("model.") and name.endswith(".up"))
    assert trained.summary()["num_parameters"] == sum(t.numel() for name, t in tensors.items() if name.startswith("model."))


def test_a_run_goes_on_with_its_own_frozen_weights_only(trained, config, bases):
    losses = trained.losses()
    shutil.rmtree(trained.folder / "checkpoint" / "step-00000004")
    (trained.folder / "summary.json").unlink()
    allow = ("--job.allow_config_change", "true")
    other = ForkedRun(config, "trained", *QUICK, "--checkpoint.initial_weights", str(bases[1]), *allow)
    (code,), (output,) = other.wait()
    assert code == 2 and "its adapters were trained on other frozen weights" in output and bases[1].name in output
    same = ForkedRun(config, "trained", *QUICK, "--checkpoint.initial_weights", str(bases[0]))
    same.finish()
    assert same.losses() == losses


def test_samples_need_the_frozen_weights(trained, config, bases, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained.folder, copy)
    saved = copy / "config.toml"
    saved.write_text(saved.read_text().replace(bases[0].name, bases[1].name))
    result = run_script("scripts/sample.py", str(copy), "--num-steps", "2", "--out", str(tmp_path / "grid"))
    assert result.returncode == 2 and "other frozen weights" in result.stderr
    saved.write_text(saved.read_text().replace(bases[1].name, "moved.safetensors"))
    with pytest.raises(WeightsError, match=r"moved\.safetensors: no such file of weights, the base of the adapters \(name it in"):
        load_run(copy, None, None, torch.device("cpu"))
    checkpoint = shutil.move(sorted((copy / "checkpoint").iterdir())[-1], tmp_path)
    with pytest.raises(CheckpointError, match="is of adapters alone, and their base is not known here"):
        load_run(Path(checkpoint), None, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["--lora.patterns", '["no_such_layer"]'], ["lora.patterns[0]", "no_such_layer"]),
        (["--gns.enable", "true"], ["gns.single_pass", "lora"]),
    ],
)
def test_what_cannot_be_adapted_is_refused(config, capsys, overrides, fragments):
    words = (config, "--job.dump_folder", config.parent / "bad", *QUICK, *overrides)
    code, output, error = caller(train, capsys)(*words)
    assert (code, output) == (2, "") and all(fragment in error for fragment in fragments), error
    assert not (config.parent / "bad").exists()


EDM2 = [
    "--model.name=edm2", "--model.flavor=cifar", "--model.channels=32", "--model.channel_mults=[1]", "--model.num_blocks=1",
    "--model.attention_resolutions=[8]",
]  # fmt: skip


@pytest.mark.parametrize(
    "family", [["--model.flavor=debug", "--model.magnitude_preserving=true"], [*EDM2, "--model.config=G"]]
)
def test_adapters_of_every_family_train(config, family, request):
    name = f"family-{request.node.callspec.indices['family']}"
    run = ForkedRun(config, name, *QUICK, *family)
    run.finish()
    assert all(norm > 0 for _, _, norm in run.losses())


def test_adapter_and_merged_network_are_exported(trained, bases, config, tmp_path, capsys):
    """Merged weights are the base's plus s B A of the exported adapter, layer by layer."""
    adapter, merged = tmp_path / "adapter.safetensors", tmp_path / "merged.safetensors"
    for words in (("--adapter", "native", "--output", str(adapter)), ("--format", "safetensors", "--output", str(merged))):
        assert checkpoint(["export", str(trained.folder), "--ema", "none", *words]) == 0
    with safe_open(adapter, framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["step"], metadata["rank"], metadata["alpha"], metadata["base"]) == ("4", "3", "3", bases[0].name)
    assert len(metadata["base_sha256"]) == 64
    base, tensors, found = (load_file(path) for path in (bases[0], adapter, merged))
    assert found.keys() == base.keys()
    changed = set()
    for name in tensors:
        if name.endswith(".up"):
            layer = name.removeprefix("adapter.").partition("[")[0]
            update = tensors[name] @ tensors[name.replace(".up", ".down")].flatten(1)
            wanted = base[f"{layer}.weight"] + update.reshape(base[f"{layer}.weight"].shape)
            torch.testing.assert_close(found[f"{layer}.weight"], wanted, rtol=1e-6, atol=1e-7)
            assert update.any()
            changed.add(f"{layer}.weight")
    assert changed and all(torch.equal(found[name], base[name]) for name in base.keys() - changed)
    shutil.copytree(trained.folder, tmp_path / "friend")  # without the base
    saved = tmp_path / "friend" / "config.toml"
    saved.write_text(saved.read_text().replace(bases[0].name, "moved.safetensors"))
    alone = tmp_path / "alone.safetensors"
    assert checkpoint(["export", str(saved.parent), "--ema", "none", "--adapter", "native", "--output", str(alone)]) == 0
    there = load_file(alone)
    assert there.keys() == tensors.keys() and all(torch.equal(there[name], tensors[name]) for name in there)
    assert checkpoint(["export", str(trained.folder), "--adapter", "kohya", "--output", str(tmp_path / "x.safetensors")]) == 2
    assert "--adapter kohya: is not of model.name = dit (there are native)" in capsys.readouterr().err


def test_the_frozen_file_with_the_exported_adapter_draws_the_pictures_of_the_run(trained, bases, config, tmp_path):
    adapter = tmp_path / "adapter.safetensors"
    assert checkpoint(["export", str(trained.folder), "--adapter", "native", "--output", str(adapter)]) == 0
    from_file = (str(bases[0]), "--config", str(config))
    pictures = {}
    for name, words in {
        "run": (str(trained.folder),), "file": (*from_file, "--lora", str(adapter)), "base": from_file,
        "none": (*from_file, "--lora", f"{adapter}:0"),
    }.items():  # fmt: skip
        out = tmp_path / name
        result = run_script("scripts/sample.py", *words, "--count", "4", "--num-steps", "2", "--out", str(out))
        assert result.returncode == 0, result.stderr
        pictures[name] = open_images(out).pixels(range(4))
    assert np.array_equal(pictures["run"], pictures["file"]) and np.array_equal(pictures["base"], pictures["none"])
    assert not np.array_equal(pictures["run"], pictures["base"])
    assert "was trained on other weights" not in result.stderr
    words = (str(trained.folder), "--lora", f"{adapter}:-1", "--count", "4", "--num-steps", "2", "--out", str(tmp_path / "off"))
    result = run_script("scripts/sample.py", *words)
    assert "--lora: drawn beside the run's own adapters, which count once" in result.stderr, result.stderr
    assert np.abs(open_images(tmp_path / "off").pixels(range(4)).astype(int) - pictures["base"]).max() <= 1  # less what it has
    merged = tmp_path / "merged.safetensors"
    assert checkpoint(["export", str(trained.folder), "--format", "safetensors", "--output", str(merged)]) == 0
    words = ("--lora", str(adapter), "--num-steps", "1", "--out", str(tmp_path / "x"))
    result = run_script("scripts/sample.py", str(merged), *words)
    assert result.returncode == 0 and "was trained on other weights than merged" in result.stderr, result.stderr
    result = run_script("scripts/sample.py", str(adapter), "--config", str(config), "--out", str(tmp_path / "x"))
    assert result.returncode == 2 and "is an adapter (give it with --lora" in result.stderr, result.stderr


def test_adapters_that_cannot_be_drawn_with_are_refused(bases, config, tmp_path):
    words = (str(bases[0]), "--config", str(config), "--lora", f"{bases[0]}:0.5", "--out", str(tmp_path / "x"))
    result = run_script("scripts/sample.py", *words)
    assert result.returncode == 2 and bases[0].name in result.stderr and "Traceback" not in result.stderr, result.stderr


def test_further_adapters_are_frozen_weights_too(trained, config, tmp_path, capsys):
    adapter = tmp_path / "adapter.safetensors"
    assert checkpoint(["export", str(trained.folder), "--adapter", "native", "--output", str(adapter)]) == 0

    def run(weight: float, *more: str) -> ForkedRun:
        extra = json.dumps([{"path": str(adapter), "weight": weight, "sampling_weight": 0.5}])
        return ForkedRun(config, "assisted", *QUICK, "--lora.extra", extra, *more)

    assert f", beside {adapter} (1, in samples 0.5), on " in run(1.0).finish()[0]
    folder = config.parent / "outputs" / "assisted"
    shutil.rmtree(folder / "checkpoint" / "step-00000004")
    (folder / "summary.json").unlink()
    (code,), (output,) = run(0.5, "--job.allow_config_change", "true").wait()
    assert code == 2 and "its adapters were trained on other frozen weights" in output
    assert "with the adapters of [[lora.extra]] (name the files of those)" in output
    alone = str(tmp_path / "alone.safetensors")
    assert checkpoint(["export", str(folder), "--adapter", "native", "--output", alone]) == 0
    assert f"note: the run also draws with {adapter} at 0.5 (lora.extra), which is not in this file" in capsys.readouterr().err
    adapter.unlink()
    result = run_script("scripts/sample.py", str(folder), "--num-steps", "2", "--out", str(tmp_path / "x"))
    assert result.returncode == 2 and f"{adapter}: no such file of weights" in result.stderr
