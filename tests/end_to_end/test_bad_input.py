"""What cannot run is refused in one line per problem, with exit code 2 and nothing written."""

import random
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


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["--training.local_batchsize", "4"], ["--training.local_batchsize", "training.local_batch_size"]),
        (["--training.steps", "many"], ["--training.steps", "many"]),
        (["--parallelism.data_parallel_shard_degree", "3"], ["1 replicas x 3 shards", "1 process"]),
        (["--model.patch_size", "3"], ["model.patch_size", "8"]),
        (["--sampling.enable", "true", "--sampling.classes", "[10]"], ["sampling.classes", "10"]),
        (["--data.name", "cifar10", "--data.path", "nowhere/at/all"], ["nowhere/at/all"]),
        (["--model.flavor", "DiT-S/3", "--optimizer.lr", "-1"], ["DiT-S/2", "optimizer.lr"]),
    ],
)
def test_bad_configuration_is_refused(config, overrides, fragments):
    code, output, error = call(training_arguments(config, "bad", *overrides))
    assert code == 2 and output == ""
    assert "Traceback" not in error and all(fragment in error for fragment in fragments), error
    assert not (config.parent / "outputs" / "bad").exists()


def test_only_the_first_rank_reports(config):
    arguments = training_arguments(config, "bad", "--optimizer.lr", "-1")
    errors = []
    for rank in "01":
        code, _, error = call(arguments, RANK=rank, WORLD_SIZE="2")
        assert code == 2
        errors.append(error)
    assert "optimizer.lr" in errors[0] and errors[1] == ""


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
    code, _, error = call(training_arguments(config, "trained", "--optimizer.lr", "0.5", "--training.steps", "3"))
    assert code == 2 and "Traceback" not in error
    assert "optimizer.lr: 0.003 -> 0.5" in error and "training.steps: 2 -> 3" in error
    assert "job.allow_config_change" in error
    (trained.folder / "summary.json").write_bytes(before[trained.folder / "summary.json"])
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


def test_fuzzed_command_lines_run_or_are_refused(tmp_path):
    """Twenty seeded command lines of good and bad values, each a process of its own."""
    config = write_config(tmp_path)
    good = {
        "--model.num_heads": ["4", "2"],
        "--model.patch_size": ["2", "4"],
        "--model.position": ["sincos", "rotary"],
        "--data.name": ["digits", "synthetic"],
        "--objective.timesteps.name": ["uniform", "logit_normal"],
        "--objective.spread": ["none", "stratified", "low_discrepancy"],
        "--training.local_batch_size": ["16", "8", "-1"],
        "--training.mixed_precision_param": ["float32", "bfloat16"],
        "--ema.tracks": ['[{"name": "ema"}]', '[{"name": "ema", "decay": 0.5}, {"name": "slow"}]'],
        "--activation_checkpoint.mode": ["none", "full", "selective"],
        "--job.name": ["fine"],
    }
    bad = {
        "--model.num_heads": ["3", "0", "two"],
        "--model.patch_size": ["5", "[2]"],
        "--data.name": ["cifar10", "../x"],
        "--objective.spread": ["maybe"],
        "--training.local_batch_size": ["5", "1e99", "nan"],
        "--ema.tracks": ["3", '[{"nam": "x"}]', "{"],
        "--checkpoint.keep_latest_k": ["-5"],
        "--sampling.solver.name": ["rk45", "heun"],  # no effect: QUICK turns sampling off
        "--job.name": ["../escape", "a/b", ""],
        "--lr_scheduler.min_lr_factor": ["2", "inf"],
        "--unheard.of": ["1"],
    }
    draw = random.Random(2026)
    lines = []
    for number in range(20):
        chosen = {key: draw.choice(good[key]) for key in draw.sample(list(good), 3)}
        if number % 2:
            key = draw.choice(list(bad))
            chosen[key] = draw.choice(bad[key])
        lines.append([part for item in chosen.items() for part in item])

    def attempt(number: int) -> tuple[list[str], int, str, str]:
        base = ["--job.config_file", str(config), "--job.dump_folder", str(tmp_path / f"outputs{number}"), *QUICK]
        return lines[number], *call([*base, *lines[number]])

    results = [attempt(number) for number in range(len(lines))]
    codes = [code for _, code, _, _ in results]
    for number, (line, code, output, error) in enumerate(results):
        assert code in (0, 2), (line, output, error)
        assert "Traceback" not in output + error, (line, error)
        assert code == 0 or error.strip(), line
        assert (tmp_path / f"outputs{number}").exists() == (code == 0), line
    assert codes == [0, 2] * 10
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("outputs")) == ["small.toml"]
