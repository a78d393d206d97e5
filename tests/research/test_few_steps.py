"""Samples in few steps: lengths of equal FLOPs, and changes in closed form."""

import math

from research import few_steps
from tests.research.small_runs import SMALL

MEAN_FLOW = """[plain]
["one step"]
objective = {name = "mean_flow", preconditioning = "data_time", tangent = "sampled"}
model.duration_embedding = true
sampling.solver.name = "mean_flow"
"""


def test_a_method_has_the_steps_that_its_calls_leave_of_the_flops(study, tmp_path, monkeypatch):
    planned: dict[str, int] = {}
    monkeypatch.setattr(
        few_steps, "train_grid", lambda grid, *rest: planned.update({n: c.training.steps for n, c in grid.configs.items()})
    )
    config, methods = tmp_path / "tiny.toml", tmp_path / "methods.toml"
    config.write_text(SMALL + "[training]\nsteps = 500\n[sampling]\nguidance_scale = 1.0\n")
    methods.write_text(MEAN_FLOW)
    code, _, error = study("few_steps", config, "--methods", methods, "--seeds", "2", "--output", tmp_path / "out")
    assert code == 0 and "0 of 4 runs" in (tmp_path / "out" / "summary.md").read_text(), error
    assert planned == {"plain_s0": 500, "one_step_s0": 300, "plain_s1": 500, "one_step_s1": 300}


def test_changes_are_against_the_plain_run_at_the_last_number_of_steps_and_at_as_many():
    found = {
        (name, seed): {
            count: {"accuracy": 0.5 + 0.01 * seed + gain, "fd": math.exp(0.1 * seed - gain)}
            for count, gain in (("1", gains[0]), ("20", gains[1]))
        }
        for name, gains in (("plain", (0.0, 0.25)), ("one", (0.125, 0.125))) for seed in (0, 1)
    }  # fmt: skip
    text = few_steps._tables(found, ["plain", "one"], {"accuracy": "higher", "fd": "lower"}, [1, 20])
    plain, last, one = (line.split(" | ") for line in text.splitlines() if line.startswith(("| plain", "| one | 2 | 1 ")))
    assert plain[3] == "50.5 [44.1, 56.9] %" and last[5] == "-" == last[7]
    assert one[5].startswith("**-12.5 points [-12.5, -12.5]**") and one[7].startswith("**+12.5 points")
    assert one[6].startswith(f"**{100 * math.expm1(0.125):+.1f} %") and one[8].startswith(f"**{100 * math.expm1(-0.125):+.1f} %")
    half = 12.7062 * 0.05  # t(1, 97.5 %)
    low, high = (math.exp(0.05 + sign * half) for sign in (-1, 1))
    assert plain[4] == f"{math.exp(0.05):.3g} [{low:.3g}, {high:.3g}]"
