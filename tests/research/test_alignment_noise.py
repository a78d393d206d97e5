"""Gradients of flow and alignment by brute force, their estimates in closed form, and a study that branches and resumes."""

import json
from pathlib import Path

import torch
from torch.func import functional_call

from research.aligned_gradients import ESTIMATES, AlignedGradients, estimates
from research.alignment_noise import stop_by_rule
from research.block_products import block_products
from research.offline_gradients import timestep_bin
from tests.end_to_end.tools import table
from tests.research.small_runs import SMALL, trained_folder
from tests.research.test_grid_studies import Trainings
from torchtitan import philox
from torchtitan.checkpoint.checkpointer import checkpoint_path
from torchtitan.checkpoint.comparison import open_checkpoint
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.experiments import training

CONFIG = SMALL.replace("num_layers = 1", "num_layers = 3") + """
[alignment]
teacher = "self"
block = 1
teacher_block = 2
projector = "convolution"
weight = 0.7
[training]
steps = 3
local_batch_size = 8
global_batch_size = 8
[[ema.tracks]]
name = "ema"
decay = 0.5
"""
CPU = torch.device("cpu")


def test_gradients_are_those_of_both_mean_losses_at_the_checkpoint(tmp_path):
    """By hand: the average's forward at a lower time, the convolution, the cosine, and one differentiation of the mean."""
    run = trained_folder(tmp_path, "aligned", CONFIG)
    found = AlignedGradients(run, 3, seed=5, device=CPU)
    where = timestep_bin(found.gradients.objective, 0.2, 0.6)
    blocks = found.blocks(where, 4, 3, 2)  # [2, 3, P]

    source, model = open_checkpoint(checkpoint_path(run_checkpoints(run), 3)), found.model
    saved = source.read(list(source.shapes))
    numbers = torch.arange(6)
    batch, draw = found.gradients.samples(where, 4, numbers)
    t, tokens = draw.t[:, None, None, None], []
    hooks = [model.layers[place].register_forward_hook(lambda *of: tokens.append(of[2])) for place in (0, 1)]
    lower = (t.flatten() - 0.2 * philox.uniform(found.gradients.objective.seed, "alignment", numbers, 4).float()).clamp_min(0)
    at = (1 - lower[:, None, None, None]) * batch.images + lower[:, None, None, None] * draw.noise
    average = {name: saved[f"ema.ema.{name}"] for name, _ in model.named_parameters()}
    with torch.no_grad():
        functional_call(model.eval(), average, (at, 1000 * lower, batch.condition))
    features = tokens[1]
    tokens.clear()
    predicted = model.train()((1 - t) * batch.images + t * draw.noise, 1000 * draw.t, batch.condition)
    for hook in hooks:
        hook.remove()
    flow = (predicted - (draw.noise - batch.images)).square().mean()
    weight, bias = (saved[f"objective.alignment.convolution.{name}"] for name in ("weight", "bias"))
    maps = tokens[0].transpose(1, 2).unflatten(2, (4, 4))
    projected = torch.conv2d(maps, weight, bias, padding=1).flatten(2).transpose(1, 2)
    align = -0.7 * torch.cosine_similarity(projected, features, dim=-1).mean()
    reached = [model.get_parameter(name) for name in found.names]
    assert {name.split(".")[1] for name in found.names if name.startswith("layers.")} == {"0"}
    for mine, loss in zip(blocks.mean(1), (flow, align), strict=True):
        parts = torch.autograd.grad(loss, reached, retain_graph=True)
        torch.testing.assert_close(mine, torch.cat([part.flatten() for part in parts]), rtol=1e-4, atol=1e-7)


def test_estimates_are_those_of_the_drawn_gradients():
    """Two bins, known mean gradients and covariances: within four standard errors, which repetitions confirm."""
    generator, size, sigma = torch.Generator().manual_seed(0), 4, 0.5
    means = torch.tensor([[[1.0, 0, 0], [0, 2.0, 0]], [[0.5, 0.5, 0], [0, -1.0, 0]]])  # [loss, bin, P]
    drawn = sigma * torch.randn(400, 2, 2, 12, 3, generator=generator) / size**0.5
    found = torch.stack([
        estimates(block_products((means[:, :, None] + one).flatten(0, 1)), size) for one in drawn
    ])  # [400, estimates, 3]
    spread = (found.std(0) / 400**0.5).clamp_min(1e-9)
    g, a, trace = means[0], means[1], 3 * sigma**2
    g, a = (torch.cat((each, each.mean(0, keepdim=True))).double() for each in (g, a))
    between = [each[:2].square().sum(1).mean() - each[2].square().sum() for each in (g, a)]
    true = {
        "flow": g.square().sum(1), "align": a.square().sum(1), "product": (g * a).sum(1),
        "flow_noise": torch.tensor([trace, trace, trace + between[0]]),
        "align_noise": torch.tensor([trace, trace, trace + between[1]]),
        "cross_noise": torch.tensor([0, 0, (g[:2] * a[:2]).sum(1).mean() - (g[2] * a[2]).sum()]),
    }  # fmt: skip
    for name, expected in true.items():
        place = ESTIMATES.index(name)
        assert ((found[:, place].mean(0) - expected).abs() < 4 * spread[place]).all(), name
    exact = estimates(block_products(means[:, :, None].expand(2, 2, 12, 3).flatten(0, 1)), size)
    cosine = torch.nn.functional.cosine_similarity(g, a, dim=1)
    torch.testing.assert_close(exact[ESTIMATES.index("cosine")], cosine, rtol=1e-6, atol=1e-9)


def test_the_rule_stops_where_the_bound_is_first_not_above_0():
    rows = [{"step": str(step), "product": product, "product_se": "1"} for step, product in ((10, "1.8"), (20, "1.7"), (30, "9"))]
    assert stop_by_rule(rows, 16) == 20  # Student's t with 15 degrees of freedom: 1.753
    assert stop_by_rule(rows[::2], 16) == 0


def test_branches_begin_at_their_stop_and_a_study_resumes(study, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "run_processes", Trainings())
    methods, config = tmp_path / "methods.toml", tmp_path / "tiny.toml"
    methods.write_text("[plain]\n[aligned]\nalignment = {teacher = 'digits', block = 1, projector = 'convolution'}\n")
    config.write_text("""validation.enable = true
evaluation = {enable = true, metrics = ["accuracy", "fd"], extractor = "digits", count = 66, reference = "train"}
sampling.num_steps = 1
optimizer.lr = 0.05
training = {local_batch_size = 4, global_batch_size = 4}
""" + SMALL)
    words = ["alignment_noise", config, "--methods", methods, "--seeds", "2", "--samples", "12", "--checkpoints", "3"]
    words += ["--bins", "2", "--blocks", "3", "--block-size", "2", "--output", tmp_path / "out"]
    code, _, error = study(*words)
    assert code == 0, error
    rows = {row["run"]: row for row in table(tmp_path / "out" / "training.csv")}
    assert {"plain_s1", "aligned_s1", "aligned_s1_stop1"} <= set(rows) and all(row["status"] == "ok" for row in rows.values())
    assert len(table(tmp_path / "out" / "results.csv")) == 2 * 3 * 3
    losses, branched = (json.loads(rows[name]["losses"]) for name in ("aligned_s0", "aligned_s0_stop1"))
    assert list(losses) == ["1", "2", "3"] and list(branched) == ["2", "3"] and branched["3"] != losses["3"]
    assert not list(Path(tmp_path / "out" / "runs").glob("*/checkpoint/step-*"))
    before = (tmp_path / "out" / "training.csv").read_bytes()
    assert study(*words)[0] == 0 and (tmp_path / "out" / "training.csv").read_bytes() == before
    assert "8 of 8 runs have ended" in (tmp_path / "out" / "summary.md").read_text()
