"""What a GPU's verdict and norm become where the weights are in host memory, and the runs that cannot have them there."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.configurations import load, problems
from torchtitan.distributed.parallelize import clip_gradients
from torchtitan.training.config import OptimizerConfig
from torchtitan.training.optimizer import build_optimizer

OFFLOAD = "[training]\nenable_cpu_offload = true\n"
SHARDED = "[parallelism]\ndata_parallel_shard_degree = 2\n[gns]\nenable = false\n"


def test_norm_and_verdict_of_the_gpu_reach_gradients_and_optimizer_on_the_host(monkeypatch):
    scales, verdicts = [], []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda tensors, scale: scales.append(scale.device.type))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: verdicts.append(self.found_inf.device.type))
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.zeros(3)
        optimizer = build_optimizer({"weight": parameter}, OptimizerConfig())
        clip_gradients([parameter], torch.zeros((), dtype=torch.float64, device="cuda"), 1.0)
        optimizer.step(torch.zeros((), dtype=torch.bool, device="cuda"))
    assert scales == verdicts == ["cpu"]


def test_offload_is_refused_without_a_gpu_or_shards_and_with_what_would_compute_on_the_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = problems(OFFLOAD + SHARDED, world_size=2)
    assert "weights are in host memory anyway, as CUDA is not there" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load(OFFLOAD + SHARDED, world_size=2).training.enable_cpu_offload
    (line,) = problems(OFFLOAD + "[parallelism]\ndata_parallel_shard_degree = 1\n[gns]\nenable = false", world_size=1)
    assert "is FSDP2's, which needs shards" in line
    for arguments, part in (
        (["--optimizer.name", "Muon"], "Muon does not update weights in host memory"),
        (["--gns.enable", "true"], "gns.single_pass needs the optimizer's state"),
    ):
        assert sum(part in line for line in problems(OFFLOAD + SHARDED, arguments, world_size=2)) == 1
