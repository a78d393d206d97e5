"""Initial weights checked by all ranks: each tensor is read by one, and a bad one is known to all."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.launcher import run_on_ranks
from torchtitan.config.job import JobConfig, load_config
from torchtitan.data import dataset_info
from torchtitan.errors import CheckpointError
from torchtitan.files.weight_files import WeightsError
from torchtitan.files.weight_hash import file_sha256
from torchtitan.weights import initial_weights
from torchtitan.weights.initial_weights import check_together
from torchtitan.weights.network import BASE_SHA256, check_base

RANKS = 3


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, width) for width in (6, 2, 9, 3)))


def checked_by_a_rank(paths: list[str]) -> list:
    """Names of the tensors that this rank has read of all files; hash or error of each file."""
    read, answers, each = [], [], initial_weights.each_tensor

    def noted(path, names):
        read.extend(names)
        return each(path, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_weights, "each_tensor", noted)
        for path in paths:
            try:
                answers.append(check_together(Path(path), network(), hashed=True))
            except WeightsError as error:
                answers.append(str(error))
    return [sorted(read), answers]


def test_each_tensor_is_read_by_one_rank_and_all_know_what_is_wrong(tmp_path):
    good = {name: tensor.detach().clone() for name, tensor in network().state_dict().items()}
    files = {"good": good, "other": {name: tensor.clone() for name, tensor in good.items()}, "bad": dict(good)}
    files["other"]["3.bias"][0] += 1
    for name in ("0.bias", "2.weight"):
        files["bad"][name] = torch.full_like(good[name], math.nan)
    paths = [str(tmp_path / f"{name}.safetensors") for name in files]
    for path, tensors in zip(paths, files.values(), strict=True):
        save_file(tensors, path)
    found = run_on_ranks("tests.distributed.test_initial_weights:checked_by_a_rank", RANKS, {"paths": paths})
    assert sorted(name for read, _ in found for name in read) == sorted(3 * list(good)) and all(read for read, _ in found)
    hashes = [file_sha256(Path(path)) for path in paths[:2]]
    said = f"{paths[2]}: 2 tensors hold values that are not finite: 0.bias, 2.weight"
    assert [answers for _, answers in found] == RANKS * [[*hashes, said]] and hashes[0] != hashes[1]


def test_a_checkpoint_of_another_base_is_refused():
    config = JobConfig()
    check_base({BASE_SHA256: "ab"}, "ab", "step 1", config)
    with pytest.raises(CheckpointError, match="step 1: its adapters were trained on other frozen weights"):
        check_base({BASE_SHA256: "ab"}, "cd", "step 1", config)


def test_every_problem_of_initial_weights_names_their_key(tmp_path):
    config = load_config(["--checkpoint.initial_weights", str(tmp_path / "missing.safetensors")], 1)
    info = dataset_info(config.data)
    with pytest.raises(WeightsError, match="^checkpoint.initial_weights: .*missing.safetensors: no such file"):
        initial_weights.check_initial_weights(config, info, tmp_path / "checkpoint")
    save_file({"output.linear.weight": torch.zeros(1), "stranger": torch.zeros(1)}, tmp_path / "missing.safetensors")
    with pytest.raises(WeightsError) as refused:
        initial_weights.check_initial_weights(config, info, tmp_path / "checkpoint")
    lines = str(refused.value).splitlines()
    assert len(lines) == 3 and all(line.startswith("checkpoint.initial_weights: ") for line in lines)
