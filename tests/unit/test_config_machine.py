"""Configurations that this machine or layout cannot run: a package, a compiler or whole parameters are missing."""

import importlib.util

import pytest

from tests.configurations import load, problems
from torchtitan.config import checks as config_checks
from torchtitan.extras import install_packages

pytestmark = pytest.mark.usefixtures("in_empty_folder")

@pytest.mark.parametrize("package, key", [("tensorboard", "enable_tensorboard"), ("wandb", "enable_wandb")])
def test_logger_without_its_package_is_refused(package, key, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(config_checks.importlib.util, "find_spec", lambda name: None if name == package else found(name))
    advice = f"the package {package} is not installed ({install_packages(package)}, or set it to false)"
    assert problems(f"[metrics]\n{key} = true") == [f"run.toml: metrics.{key}: {advice}"]


def test_a_sharded_model_is_not_compiled_as_a_whole():
    whole = ["--compile.enable", "true", "--compile.scope", "model"]
    refused = "command line: --compile.scope: model needs parameters that are not sharded: FSDP gathers them block by block"
    for shards, replicas in ((2, 1), (2, 2), (-1, 1)):
        degrees = f"[parallelism]\ndata_parallel_replicate_degree = {replicas}\ndata_parallel_shard_degree = {shards}"
        (line,) = problems(degrees, whole, world_size=2 * replicas)
        assert line == f"{refused} (set blocks)"
    copies = "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1"
    assert load(copies, whole, world_size=2).compile.scope == load(None, whole).compile.scope == "model"
    assert problems("[compile]\nscope = 'model'") == [
        "run.toml: compile.scope: has no effect when compile.enable = false; remove it or set compile.enable = true"
    ]


def test_compile_without_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(config_checks.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(config_checks.shutil, "which", lambda name: None)
    assert problems("[compile]\nenable = true") == [
        "run.toml: compile.enable: the CPU needs a C++ compiler: none of g++, clang++, $CXX is there"
        " (install g++, or set it to false)"
    ]
    monkeypatch.setenv("CXX", "mycc -O2")
    monkeypatch.setattr(config_checks.shutil, "which", lambda name: name if name == "mycc" else None)
    assert load("[compile]\nenable = true").compile.enable
