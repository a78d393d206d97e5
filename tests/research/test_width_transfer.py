"""Transfer of rates over widths: vertex and shift in closed form; a study that resumes from its table alone."""

import json
import math
from pathlib import Path

import pytest

from research.width_transfer import best_rate, extended, verdict
from tests.research.small_runs import SMALL
from torchtitan.config.job import load_config
from torchtitan.experiments import training
from torchtitan.experiments.outcome import Outcome
from torchtitan.statistics.interval import Interval

RATES = [2.0**power for power in range(-12, -7)]


def parabola(best: float) -> dict[float, float]:
    return {rate: 1.0 + 0.3 * (math.log2(rate) - best) ** 2 for rate in RATES}


@pytest.mark.parametrize("best", [-10.0, -9.7, -10.45])
def test_the_best_rate_is_the_vertex_of_a_parabola(best):
    assert best_rate(parabola(best)) == pytest.approx(best, abs=1e-13)  # rounding of losses near 4, over 0.6


def test_a_best_rate_at_an_end_has_no_vertex_and_asks_for_another_rate():
    curves = {"AdamW": -10.0, "Muon": -12.4}
    losses = {(name, "plain", 64, 0, rate): loss for name, best in curves.items() for rate, loss in parabola(best).items()}
    assert best_rate(parabola(-12.4)) is None
    assert extended("AdamW", RATES, losses) == RATES and extended("Muon", RATES, losses) == [RATES[0] / 2, *RATES]


def test_a_rate_beside_one_that_diverged_is_taken_itself():
    assert best_rate(parabola(-9.3) | {RATES[4]: math.inf}) == -9.0


@pytest.mark.parametrize(("ends", "said"), [
    ((-0.4, 0.5), "transfers"), ((-0.6, 0.2), "undecided"), ((-2.0, -0.6), "refuted"), ((-math.inf, math.inf), "undecided"),
])  # fmt: skip
def test_a_shift_is_judged_by_its_interval(ends, said):
    assert verdict(Interval(0.0, *ends)) == said


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """Names of the runs that were trained. Each has the loss of a best rate 2^-10 at width 16, or that over the width's ratio."""
    names: list[str] = []

    def run_processes(arguments, *, processes, **options) -> Outcome:
        config = load_config(arguments, processes)
        names.append(config.job.name)
        best = -10.0 - (0.0 if config.model.mup_base_dim else math.log2(config.model.dim / 16)) + 0.01 * config.debug.seed
        (folder := Path(config.job.dump_folder) / config.job.name).mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"step": 4}))
        loss = math.exp(0.3 * (math.log2(config.optimizer.lr) - best) ** 2)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "validation_metrics/loss": loss}) + "\n")
        return Outcome("ok", "", 0.1)

    monkeypatch.setattr(training, "run_processes", run_processes)
    return names


def test_rates_are_compared_by_width_and_a_study_resumes_from_its_table(trained, study, tmp_path):
    config, first, second = tmp_path / "small.toml", tmp_path / "first", tmp_path / "second"
    config.write_text("validation.enable = true\ntraining = {local_batch_size = 4, global_batch_size = 4}\n" + SMALL)
    options = f"--rate AdamW={2**-10} --rates 3 --widths 16 32 --seeds 2 --samples 16 --checkpoints 1 --output"
    code, _, error = study("width_transfer", config, *options.split(), first)
    assert code == 0, error
    assert len(trained) == 2 * 3 * 3 + 2 * 3 * 1  # the best rate of width 32 is the lowest, so there is one more
    text = (first / "summary.md").read_text()
    assert "| AdamW | plain | 2 | -1.00 [-1.00, -1.00] | refuted |" in text
    assert "| AdamW | maximal updates | 2 | +0.00 [+0.00, +0.00] | transfers | +0.00 [+0.00, +0.00] |" in text
    assert "|plain shift| - |shift with maximal updates| +1.00 [+1.00, +1.00]" in text
    second.mkdir()
    (second / "training.csv").write_text((first / "training.csv").read_text())
    assert study("width_transfer", config, *options.split(), second)[0] == 0 and len(trained) == 24
    assert (second / "summary.md").read_text() == text
    table = second / "training.csv"  # a run that was killed says nothing of its rate, and its curve has a hole
    row = next(line for line in table.read_text().splitlines() if line.startswith("AdamW_plain_32_0.000488_s1"))
    table.write_text(table.read_text().replace(row, "AdamW_plain_32_0.000488_s1,failed,killed,16,2026,0,,"))
    assert study("width_transfer", config, *options.split(), second, "--report-only")[0] == 0
    text = (second / "summary.md").read_text()
    assert "| AdamW | plain | 1 | - | undecided |" in text and "other settings: AdamW_plain_32_0.000488_s1.\n" in text
