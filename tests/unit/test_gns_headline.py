"""Advice, picture, allocation and growth use the estimator of the narrowest valid intervals, and name it."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchtitan.config.job import load_config
from torchtitan.diffusion.objectives import build_objective
from torchtitan.distributed.config import ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.estimate.memory import estimate_memory
from torchtitan.gns import monitor as monitor_module
from torchtitan.gns.batch_size import RATIO, RATIO_LOWER, RATIO_UPPER, half_progress
from torchtitan.gns.conclusion import conclusions
from torchtitan.gns.config import GNSConfig, bin_tags
from torchtitan.gns.decayed import BinEstimates, narrowest
from torchtitan.gns.monitor import GNSMonitor
from torchtitan.gns.pool import WHOLE_MODEL, Agreement
from torchtitan.gns.step_sums import GEOMETRIES
from torchtitan.trainer import Trainer
from torchtitan.training.config import UPDATE_RULES, UpdateRule
from torchtitan.training.optimizer import _RULES, optimizer_tensors

BINS = 3
SCALES = {"sketch": 100.0, "composite": 200.0}
OF_ADAM = 7.0  # times as large in Adam's geometry


def estimates(scale: float, factor: float, bins: int = BINS) -> BinEstimates:
    """Noise scales of all bins, each with an interval of a factor to either side."""
    one = torch.ones(bins, dtype=torch.float64)
    return BinEstimates(
        signal=one, noise=scale * one, b_simple=scale * one, lower=scale / factor * one, upper=scale * factor * one,
        unbounded=one < 0, samples=1e4 * one, steps=50.0 * one, signal_stderr=0.01 * one, noise_stderr=0.01 * one,
        matrix=torch.eye(bins, dtype=torch.float64), matrix_stderr=0.01 * torch.ones(bins, bins, dtype=torch.float64),
        lag=640.0 * one,
    )


class PoolOf:
    """Pool in which one estimator has the narrower intervals, in all bins and as a whole."""

    geometries, outliers, num_bins = GEOMETRIES, 0, BINS

    def __init__(self, narrow: str) -> None:
        self.agreement = Agreement(BINS, len(GEOMETRIES), half_life=1e9)
        self._factors = {name: 1.2 if name == narrow else 1.5 for name in WHOLE_MODEL}

    def by_bin(self, geometry: str, name: str) -> BinEstimates:
        return estimates(SCALES.get(name, 1.0) * (OF_ADAM if geometry == "adam" else 1.0), self._factors.get(name, 1.5))

    def whole(self, geometry: str, name: str, mass: torch.Tensor | None, stratified: bool) -> BinEstimates:
        return estimates(SCALES.get(name, 1.0) * (OF_ADAM if geometry == "adam" else 1.0), self._factors.get(name, 1.5), 1)

    def narrowest(self, geometry: str) -> str:
        return narrowest({name: self.by_bin(geometry, name) for name in WHOLE_MODEL})

    def window(self, geometry: str) -> int:
        return 0

    def mean_square_loss(self) -> torch.Tensor:
        return torch.ones(BINS, dtype=torch.float64)


def monitor_of(narrow: str, edges: tuple[float, float] = (0.4, 0.6), **keys: bool) -> GNSMonitor:
    """Monitor of three bins with such a pool."""
    layout = Layout(ParallelismConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=1))
    found = GNSMonitor(
        GNSConfig(enable=True, num_bins=BINS, **keys), objective=build_objective(load_config([], 1).objective, seed=0),
        edges=torch.tensor(edges, dtype=torch.float64),
        taps=SimpleNamespace(num_bins=BINS, geometries=GEOMETRIES), ranks=None,
        layout=layout, folder=Path("unused"), adam=True,
    )  # fmt: skip
    found.pool = PoolOf(narrow)
    return found


@pytest.mark.parametrize("narrow", WHOLE_MODEL)
def test_conclusion_on_the_batch_is_of_the_narrowest(narrow, monkeypatch):
    monkeypatch.setattr(PoolOf, "parts_of_whole", lambda *of: {}, raising=False)
    logged = {"step": 1} | monitor_of(narrow).metrics()
    line, _ = conclusions([logged], 16, 16, 1, lambda step: "at the peak learning rate")
    scale = SCALES[narrow]
    waste = 16 / (scale / 1.2)
    wastes = f"wastes at most {100 * waste / (1 + waste):.0f} % of its images"
    assert line.startswith(f"at the peak learning rate, batch 16 {wastes}; 64 would need at most ")
    assert f"(gradient noise scale {scale:.0f} [{float(f'{scale / 1.2:.2g}'):.0f}, " in line
    assert line.endswith(" images)")


def test_new_shares_are_told_by_the_bin_that_is_drawn_more():
    line = monitor_of("sketch")._drawn_now([0.6, 0.1, 0.3])
    part = "60% of them in t from 0 to 0.4, where the objective has 34%"
    assert line == f"step 0: timesteps are drawn by measured noise now, {part}"


@pytest.mark.parametrize("narrow", WHOLE_MODEL)
def test_the_picture_is_of_the_narrowest(narrow, monkeypatch):
    drawn = {}

    def keep(points, edges, levels, global_batch_size, names, masses, half):
        drawn.update(names=names, half=half, scales={geometry: of[0].b_simple.tolist() for geometry, of in levels.items()})

    monkeypatch.setattr(monitor_module, "draw_noise_scale", keep)
    monitor_of(narrow).draw([], 16)
    assert drawn["names"] == dict.fromkeys(GEOMETRIES, narrow)
    assert list(drawn["names"]) == ["plain", "adam"]  # the headline geometry first
    assert drawn["scales"] == {"plain": [SCALES[narrow]] * BINS, "adam": [OF_ADAM * SCALES[narrow]] * BINS}
    assert drawn["half"].batch.tolist() == pytest.approx([RATIO * SCALES[narrow]] * BINS)


@pytest.mark.parametrize("narrow", WHOLE_MODEL)
def test_allocation_follows_the_narrowest_in_the_geometry_of_updates(narrow):
    monitor = monitor_of(narrow)
    monitor._schedule = SimpleNamespace(update=lambda *given, **_: seen.append(given[2].b_simple.tolist()))
    seen = []
    monitor._step = monitor._config.interval
    monitor.keep_step(torch.tensor(False))
    assert seen == [[OF_ADAM * SCALES[narrow]] * BINS]


@pytest.mark.parametrize("narrow", WHOLE_MODEL)
def test_half_progress_is_logged_of_the_narrowest(narrow):
    monitor = monitor_of(narrow)
    monitor._pooled.parts_of_whole = lambda *_: {}
    batch = RATIO * SCALES[narrow]
    found = {tag: value for tag, value in monitor.metrics().items() if tag.startswith("gns/half_progress/")}
    assert len(found) == 3 * BINS and found["gns/half_progress/2/batch"] == pytest.approx(batch)
    assert found["gns/half_progress/0/lower"] < RATIO_LOWER / RATIO * batch < batch
    assert found["gns/half_progress/0/upper"] > RATIO_UPPER / RATIO * batch


def test_half_progress_joins_both_errors_and_keeps_an_open_end_open():
    exact = half_progress(estimates(100.0, 1.0 + 1e-12))
    assert exact.lower.tolist() == pytest.approx([100.0 * RATIO_LOWER] * BINS)
    assert exact.upper.tolist() == pytest.approx([100.0 * RATIO_UPPER] * BINS)
    wide = half_progress(estimates(100.0, math.e**3))
    below, above = (math.hypot(3.0, math.log(ratio)) for ratio in (RATIO / RATIO_LOWER, RATIO_UPPER / RATIO))
    assert wide.lower.tolist() == pytest.approx([100.0 * RATIO * math.exp(-below)] * BINS)
    assert wide.upper.tolist() == pytest.approx([100.0 * RATIO * math.exp(above)] * BINS)
    known = estimates(100.0, 1.2)
    opened = replace(known, unbounded=torch.tensor([True, False, False]), upper=known.upper.clone().fill_(math.inf))
    found = half_progress(opened)
    assert math.isnan(found.batch[0]) and math.isinf(found.upper[0])
    assert found.lower[0].item() == pytest.approx(RATIO_LOWER * 100.0 / 1.2)


def test_of_equally_narrow_estimators_rounding_does_not_choose():
    first = estimates(100.0, 1.2)
    rounded = replace(first, upper=first.upper * (1 - 1e-12))
    assert narrowest({"sketch": first, "composite": rounded}) == "sketch"
    assert narrowest({"sketch": first, "composite": replace(first, upper=first.upper * 0.98)}) == "composite"


@pytest.mark.parametrize(("optimizer", "words", "geometries", "half"), [
    ("AdamW", (), GEOMETRIES, True), ("AdamW", ("--gns.adam_geometry", "false"), GEOMETRIES[:1], True),
    ("SGD", (), GEOMETRIES[:1], False),
])  # fmt: skip
def test_adams_geometry_can_be_left_out_and_half_progress_stays(tmp_path, monkeypatch, optimizer, words, geometries, half):
    monkeypatch.setitem(UPDATE_RULES, "SGD", UpdateRule(averages=1))  # as a user adds one
    monkeypatch.setitem(_RULES, "SGD", lambda groups, config: torch.optim.SGD(groups, config.lr, momentum=0.9))
    config = load_config([
        "--job.dump_folder", str(tmp_path), "--model.flavor", "debug", "--model.num_layers", "1", "--training.steps", "6",
        "--training.local_batch_size", "32", "--gns.enable", "true", "--gns.num_bins", "2", "--gns.interval", "1",
        "--gns.log_interval", "6", "--sampling.enable", "false", "--metrics.enable_tensorboard", "false",
        "--checkpoint.enable", "false", "--validation.enable", "false", *words,
    ], 1)  # fmt: skip
    config.optimizer.name = optimizer
    trainer = Trainer(config)
    trainer.train()
    found = trainer.state.gns.metrics()
    held = sum(tensor.nbytes for tensor in optimizer_tensors(trainer.state.optimizer, trainer.state.parameters).values())
    assert estimate_memory(trainer.config, 1).optimizer == held
    kinds = {tag.split("/")[1] for tag in found} - {"more_steps"}  # known by chance after six steps
    assert kinds == {"bins", "edges", "samplers", *geometries, *(["half_progress"] if half else [])}
    assert trainer.state.gns.pool.geometries == geometries
    trainer.close()


def test_a_state_of_other_bins_is_measured_anew_and_said(caplog):
    before, after = monitor_of("sketch"), monitor_of("sketch", edges=(0.3, 0.6))
    before.pool = after.pool = before._taps = None
    state = before.state_dict()
    after._ranks = SimpleNamespace(load_state_dict=lambda state: loaded.append("ranks"))
    state |= {"ranks": {}}
    loaded: list[str] = []
    after.load_state_dict(state, 7)
    assert not loaded and "other edges of timestep bins than at step 7" in caplog.text
    after.load_state_dict(state | {"edges of timestep bins": [0.3, 0.6]}, 7)
    assert loaded == ["ranks"]


def test_points_of_other_bins_are_not_drawn(monkeypatch):
    drawn = []
    monkeypatch.setattr(monitor_module, "draw_noise_scale", lambda points, *_: drawn.extend(points))
    edges = {1: [0.5], 2: [0.4, 0.6], 4: [0.3, 0.6]}
    points: list[dict] = [{"step": step} | (bin_tags(edges[step]) if step in edges else {}) for step in (1, 2, 3, 4)]
    monitor_of("sketch").draw(points, 16)
    assert [point["step"] for point in drawn] == [2, 3]
