"""scripts/checkpoint.py on a run that was trained sharded: right weights out and in, damage and strangers refused."""

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.runs import Run, checkpoint_tensors
from tests.end_to_end.test_bad_input import call
from tests.end_to_end.tools import caller, load_tool
from tests.faults.forked import ForkedRun
from torchtitan.weights.trained_model import checkpoints_of_source

CONFIG = """
[model]
flavor = "DiT-S/2"
dim = 32
num_layers = 2
num_heads = 4
mlp_hidden_dim = 128
[data]
name = "digits"
[training]
steps = 4
local_batch_size = 4
global_batch_size = 8
[lr_scheduler]
warmup_steps = 0
[[ema.tracks]]
name = "ema"
[[ema.tracks]]
name = "slow"
decay = 0.999
warmup_power = 0
[metrics]
enable_tensorboard = false
[checkpoint]
interval = 2
[sampling]
enable = false
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tmp_path_factory.mktemp("tool") / "small.toml"
    config.write_text(CONFIG)
    trained = ForkedRun(config, "trained", ranks=2, shards=2)
    trained.finish()
    return trained


@pytest.fixture(scope="module")
def config_file(run) -> Path:
    return run.folder.parents[1] / "small.toml"


@pytest.fixture
def command(capsys):
    """scripts/checkpoint.py in this process: words of a command line -> (exit code, output, errors)."""
    return caller(load_tool("checkpoint"), capsys)


def weights_of(run: Run, prefix: str, step: int = 4) -> dict[str, torch.Tensor]:
    """Shards put together without the program's own reader."""
    tensors = checkpoint_tensors(run.folder / "checkpoint" / f"step-{step:08d}")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- export and import


@pytest.mark.parametrize(("track", "prefix"), [("none", "model."), ("ema", "ema.ema."), ("slow", "ema.slow.")])
def test_any_track_of_a_sharded_run_is_exported_exactly(run, command, tmp_path, track, prefix):
    file = tmp_path / "weights.safetensors"
    words = ["export", run.folder, "--ema", track, "--step", 2, "--format", "safetensors", "--output", file]
    code, output, _ = command(*words)
    assert code == 0 and output.startswith(f"{file}: step 2, ")
    wanted = weights_of(run, prefix, step=2)
    assert len(wanted) == 31 and same(load_file(file), wanted)
    others = [weights_of(run, other, step=2) for other in ("model.", "ema.ema.", "ema.slow.") if other != prefix]
    assert not any(same(wanted, other) for other in others)


def test_torch_checkpoints_are_read_at_the_usual_nesting(run, command, tmp_path):
    file = tmp_path / "published.safetensors"
    command("export", run.folder, "--format", "sit", "--output", file)
    best = load_file(file)
    worse = {name: torch.zeros_like(tensor) for name, tensor in best.items()}
    torch.save(best, tmp_path / "plain.pt")
    record = {"model": worse, "ema": best, "opt": {"state": {0: {"step": 3}}}, "args": argparse.Namespace(lr=1e-4)}
    torch.save(record, tmp_path / "nested.pt")
    # A torch file does not say that its network was trained on another time than SiT's.
    config_file = tmp_path / "sit.toml"
    config_file.write_text(CONFIG + '[objective]\npreconditioning = "sit"\n')
    for name, note in (("plain", ""), ("nested", "taken from 'ema'")):
        back = tmp_path / f"{name}.safetensors"
        source = tmp_path / f"{name}.pt"
        code, _, error = command("import", source, "--format", "sit", "--config", config_file, "--output", back)
        assert code == 0 and note in error
        assert same(load_file(back), weights_of(run, "ema.ema."))


def test_bfloat16_weights_are_the_rounded_ones(run, command, tmp_path):
    file = tmp_path / "half.safetensors"
    assert command("export", run.folder, "--format", "dit", "--dtype", "bfloat16", "--output", file)[0] == 0
    found, wanted = load_file(file), weights_of(run, "ema.ema.")
    assert found.pop("pos_embed").dtype == torch.float32
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert torch.equal(found["blocks.1.mlp.fc2.weight"], wanted["layers.1.mlp.out.weight"].bfloat16())


# --- list, verify, diff


@pytest.fixture
def damaged(run, tmp_path) -> Path:
    """A copy of the run whose newer checkpoint has one flipped bit in its middle."""
    copy = tmp_path / "damaged"
    shutil.copytree(run.folder, copy)
    shard = sorted((copy / "checkpoint" / "step-00000004").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    return copy


def test_list_shows_good_and_damaged_checkpoints(run, damaged, command, tmp_path):
    code, output, _ = command("list", run.folder)
    rows = [line.split(maxsplit=6) for line in output.splitlines()[1:]]
    assert code == 0
    assert [(row[0], *row[5:]) for row in rows] == [("2", "good", "ema, slow"), ("4", "good", "ema, slow")]
    folder = run.folder / "checkpoint"
    assert command("list", folder)[1] == output and command("list", folder / "step-00000004")[1].splitlines()[1:] == [
        output.splitlines()[2]
    ]
    (run.folder / "best").symlink_to(folder / "step-00000004")
    assert command("list", run.folder / "best")[1].splitlines()[1:] == [output.splitlines()[2]]
    (run.folder / "best").unlink()
    (tmp_path / "checkpoint").symlink_to(folder)  # of a run with its checkpoints elsewhere
    (tmp_path / "config.toml").write_text("[job]\n")
    assert checkpoints_of_source(tmp_path / "checkpoint" / "step-00000004", None) == (tmp_path, tmp_path / "checkpoint", 4)
    code, output, _ = command("list", damaged)
    rows = [line.split(maxsplit=6) for line in output.splitlines()[1:]]
    assert code == 0 and rows[0][5] == "good"
    assert rows[1][5] == "damaged" and rows[1][6].endswith(".safetensors is damaged")


def test_verify_names_the_damaged_checkpoint(run, damaged, command):
    code, output, _ = command("verify", damaged / "checkpoint")
    assert code == 1 and len(output.splitlines()) == 2
    code, output, _ = command("verify", run.folder)
    whole = ["config.toml", "metrics.jsonl", "summary.json", "step-00000002", "step-00000004"]
    assert code == 0 and [Path(line.removesuffix(": good")).name for line in output.splitlines()] == whole
    code, output, _ = command("verify", damaged, run.folder / "checkpoint" / "step-00000002")
    assert code == 1 and output.count(": good\n") == 5
    line = output.splitlines()[4]
    assert line.startswith(str(damaged / "checkpoint" / "step-00000004: shard"))
    assert "(nothing needs to be done: a resume skips it and uses step 2 (a finished run, with --checkpoint.load_step 2)" in line
    (damaged / "checkpoint" / "step-00000004" / "manifest.json").unlink()
    code, output, _ = command("verify", damaged / "checkpoint" / "step-00000004")
    assert code == 1 and "manifest.json is missing" in output


def test_damaged_checkpoints_are_not_exported(damaged, command, tmp_path):
    words = ["export", damaged, "--format", "safetensors", "--output", tmp_path / "x.safetensors"]
    code, _, error = command(*words, "--step", 4)
    assert code == 2 and "is damaged" in error and not (tmp_path / "x.safetensors").exists()
    code, output, error = command(*words)
    assert code == 0 and "step 2" in output and "is damaged; skipped" in error


def test_diff_of_equal_and_of_different_weights(run, damaged, command, tmp_path):
    newest = run.folder / "checkpoint" / "step-00000004"
    count = len(checkpoint_tensors(newest))
    assert command("diff", run.folder, newest)[:2] == (0, f"equal bit for bit: {count} tensors\n")
    code, output, _ = command("diff", run.folder / "checkpoint" / "step-00000002", newest)
    assert code == 1 and "state.json: step" in output and "not equal" in output.splitlines()[0]
    code, _, error = command("diff", damaged / "checkpoint" / "step-00000004", newest)
    assert code == 2 and "is damaged" in error
    code, _, error = command("diff", damaged, newest.with_name("step-00000002"))
    assert code == 2 and error.endswith("is damaged (name the folder of another checkpoint to compare that)\n")
    code, _, error = command("diff", run.folder / "checkpoint" / "step-00000003", newest)
    assert code == 2 and error.endswith("step-00000003: no such checkpoint (there are: 2, 4)\n")

    a = {"same": torch.tensor([1.0, float("nan")]), "moved": torch.tensor([3.0, 4.0]), "gone": torch.ones(1)}
    b = {"same": a["same"], "moved": torch.tensor([3.0, 4.5]), "new": torch.ones(1), "zero": torch.tensor([-0.0])}
    save_file(a | {"zero": torch.tensor([0.0]), "cast": torch.ones(2)}, tmp_path / "a.safetensors")
    torch.save(b | {"cast": torch.ones(2).bfloat16()}, tmp_path / "b.pt")
    code, output, _ = command("diff", tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert code == 1 and output.splitlines() == [
        "not equal: 1 tensors equal bit for bit, 2 different (max 0.5), 1 of another shape or dtype, 1 only in A, "
        "1 only in B",
        "moved: max 0.5, relative 0.1",
        "zero: max 0, relative 0",
        "only in A: gone",
        "only in B: new",
        "another shape or dtype: cast: float32 [2] and bfloat16 [2]",
    ]


# --- what is refused


def test_what_is_no_checkpoint_is_refused(run, config_file, command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("not tensors")
    (tmp_path / "noise.pt").write_bytes(b"\x80\x02noise" * 9)
    torch.save({"x": 3}, tmp_path / "numbers.pt")
    before, written = contents(tmp_path), ["--format", "dit", "--output", tmp_path / "x"]
    for words in (["list", tmp_path / "empty"], ["verify", tmp_path / "text.safetensors"],
                  ["diff", run.folder, tmp_path / "missing"],
                  ["export", run.folder, "--ema", "fast", *written], ["export", run.folder, "--step", 3, *written],
                  *(["import", tmp_path / name, "--config", config_file, *written] for name in ("noise.pt", "numbers.pt"))):
        code, output, error = command(*words)
        assert code == 2 and output == "" and error.strip(), words
    assert contents(tmp_path) == before


def test_foreign_weights_are_refused(run, config_file, command, tmp_path):
    file = tmp_path / "good.safetensors"
    command("export", run.folder, "--format", "dit", "--output", file)
    good = load_file(file)
    wide = CONFIG.replace("dim = 32", "dim = 384").replace("num_layers = 2", "num_layers = 12")
    (tmp_path / "wide.toml").write_text(wide)
    torch.save({name: t for name, t in good.items() if name != "blocks.0.attn.qkv.bias"}, tmp_path / "missing.pt")
    before = contents(tmp_path)
    for source, layout, config, fragment in (
        (file, "diffusers", config_file, "is in the dit layout (give --format dit)"),
        (file, "dit", tmp_path / "wide.toml", "the configuration is DiT-S/2"),
        (tmp_path / "missing.pt", "dit", config_file, "1 tensors are missing: blocks.0.attn.qkv.bias"),
        (tmp_path, "diffusers", config_file, "holds no diffusion_pytorch_model.safetensors"),
    ):
        code, _, error = command(
            "import", source, "--format", layout, "--config", config, "--output", tmp_path / "x.safetensors"
        )
        assert code == 2 and fragment in error, error
    assert contents(tmp_path) == before


def test_output_is_replaced_only_when_asked_for(run, command, tmp_path):
    file, folder = tmp_path / "x.safetensors", tmp_path / "folder"
    file.write_text("mine")
    words = ["export", run.folder, "--format", "safetensors", "--output", file]
    code, _, error = command(*words)
    assert code == 2 and "--overwrite" in error and file.read_text() == "mine"
    assert command(*words, "--overwrite")[0] == 0 and same(load_file(file), weights_of(run, "ema.ema."))

    words = ["export", run.folder, "--format", "diffusers", "--approximate", "--output", folder]
    assert command(*words)[0] == 0 and command(*words)[0] == 2 and command(*words, "--overwrite")[0] == 0
    (folder / "notes.txt").write_text("mine")
    code, _, error = command(*words, "--overwrite")
    assert code == 2 and "notes.txt" in error and (folder / "notes.txt").read_text() == "mine"
    inside = {"config.json", "diffusion_pytorch_model.safetensors", "notes.txt"}
    assert contents(tmp_path) == {"x.safetensors", "folder"} | {f"folder/{name}" for name in inside}


# --- initial weights


def test_a_new_run_starts_from_a_file_of_weights_and_a_resumed_one_does_not(run, config_file, command, tmp_path):
    """A file that lacks a tensor or has another one needs a key."""
    file = tmp_path / "start.safetensors"
    command("export", run.folder, "--ema", "none", "--format", "safetensors", "--output", file)
    weights = load_file(file)
    lacking = weights.pop("patch_embed.weight")
    save_file(weights | {"stranger": torch.zeros(2)}, file)
    start = ["--checkpoint.initial_weights", str(file), "--checkpoint.interval", "1", "--optimizer.lr", "1e-30"]
    words = [*start, "--training.steps", "1"]
    codes, outputs = ForkedRun(config_file, "started", *words, ranks=2, shards=2).wait()
    assert codes[0] == 2 and outputs[0].count("(--checkpoint.initial_weights_strict false accepts that)") == 2
    begun = ForkedRun(config_file, "started", *words, "--checkpoint.initial_weights_strict", "false", ranks=2, shards=2)
    output = begun.finish()[0]
    assert "1 tensors are missing: patch_embed.weight" in output and "1 tensors are not of this model: stranger" in output
    trained = weights_of(begun, "model.", step=1)
    assert all(torch.equal(trained[name], weights[name]) for name in weights) and f"reading {file}" in output
    for prefix in ("model.", "ema.ema.", "ema.slow."):
        found = weights_of(begun, prefix, step=1)
        drawn = found.pop("patch_embed.weight")
        assert drawn.shape == lacking.shape and drawn.std() > 0 and not torch.equal(drawn, lacking)
        assert found.keys() == weights.keys()
        assert max((found[name] - weights[name]).abs().max() for name in weights) < 1e-20

    file.unlink()
    resumed = ForkedRun(config_file, "started", *start, "--training.steps", "2", "--job.allow_config_change", "true")
    assert "resumed after step 1 of 2" in resumed.finish()[0]


def test_initial_weights_that_do_not_fit_are_refused_before_anything_is_written(run, config_file, command, tmp_path):
    file = tmp_path / "published.safetensors"
    command("export", run.folder, "--format", "dit", "--output", file)
    code, _, error = call([
        "--job.config_file", str(config_file), "--job.dump_folder", str(tmp_path / "outputs"),
        "--checkpoint.initial_weights", str(file),
    ])
    assert code == 2 and "Traceback" not in error
    assert f"{file}: is in the dit layout, not in this program's (import it: .venv/bin/python " in error
    assert error.count("\n") == 1 and not (tmp_path / "outputs").exists()
    words = ["--job.dump_folder", str(tmp_path / "outputs"), "--checkpoint.initial_weights", str(run.folder)]
    code, _, error = call(["--job.config_file", str(config_file), *words])
    advice = f".venv/bin/python scripts/checkpoint.py export {run.folder} --format safetensors --output FILE.safetensors"
    assert (code, error) == (
        2, f"checkpoint.initial_weights: {run.folder}: is the folder of a run (export its weights: {advice})\n"
    )
