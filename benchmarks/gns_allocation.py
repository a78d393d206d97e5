"""Predicted and realised savings of timesteps chosen by measured noise: python benchmarks/gns_allocation.py

A small DiT is trained on digits; then its weights are frozen, and for each loss and spread of the timesteps

    predicted   noise and signal of 10 bins are measured by the taps of ordinary training steps; the Neyman shares and
                the gradient variance that they promise, over that of the present sampler, follow from these alone
    realised    on other samples, batches are drawn with either sampler, importance weights on, and the variance of the
                batches' mean gradients is measured directly, without bins, taps or sketches

in the plain geometry and in Adam's (row and column factors of the second moment), in which variance is |update|^2. The
losses are the rectified flow's velocity error, and the same error times (1 - t)^2, which is the error of the noise.

Also realised are stratified timesteps against independent ones, and shares in proportion to the multiplier. "shift" is
|mean gradient less the present sampler's|^2 / |mean gradient|^2, without bias: 0 where the objective is the same.
Images are drawn with replacement, so that samples are independent. All intervals are of 95 %, by the jackknife over
groups of batches where realised; 16 such comparisons with the prediction miss 0.8 times on average if all is right.

Stratified timesteps also remove the mean gradient's variation with t within a bin. Ten bins do not measure that: they
predict too small a gain of stratification, and too large a gain of other shares for stratified timesteps, where the
mean gradient changes fast with t.

Writes benchmarks/results/gns_allocation.json.
"""

import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import shared
from benchmarks.gns_samplers import LOSSES
from torchtitan.data import DATASETS
from torchtitan.diffusion.objective import Microbatch
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepSampler
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps, bin_masses, bin_means
from torchtitan.gns.allocate import FROM_WEIGHT, NEYMAN, STRATIFIED, neyman_shares, predicted_ratios, weight_shares
from torchtitan.gns.capture import GradientTaps
from torchtitan.gns.config import inner_edges
from torchtitan.gns.decayed import BinEstimates, DecayedSums
from torchtitan.gns.monitor import GNSMonitor
from torchtitan.gns.step_sums import GEOMETRIES
from torchtitan.statistics.student import student_quantile
from torchtitan.trainer import Trainer

FLOOR = 0.1
PRESENT = "present"
BIN_EDGES = torch.linspace(0.0, 1.0, 11).tolist()
# Samples that training never sees.
FIRST_MEASURED, FIRST_REALISED = 10_000_000, 20_000_000


class Ratio(NamedTuple):
    """Ratio with its 95 % interval."""

    value: float
    lower: float
    upper: float

    def holds(self, value: float) -> bool:
        """Check whether the interval holds a value."""
        return self.lower <= value <= self.upper


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--age", type=int, default=500, help="steps trained before weights are frozen")
    parser.add_argument("--batch", type=int, default=64, help="samples of a batch")
    parser.add_argument("--steps", type=int, default=160, help="measured steps")
    parser.add_argument("--groups", type=int, default=24, help="groups of --group-size batches, per sampler")
    parser.add_argument("--group-size", type=int, default=8)
    arguments = parser.parse_args()
    started, rows = time.process_time(), []
    for loss in LOSSES:
        sizes = {"dim": arguments.dim, "num_layers": arguments.layers, "batch": arguments.batch}
        trainer = build(loss, **sizes, bin_edges=BIN_EDGES)
        shared.train_to(trainer, arguments.age)
        found = look(trainer, arguments.steps, arguments.groups, arguments.group_size)
        rows += [{"loss": loss, **row} for row in found]
        trainer.close()
    print_table(rows)
    print(f"of {len(rows)} realised intervals {sum(row['inside'] for row in rows)} hold the prediction")
    result = {
        "data": "digits", "settings": vars(arguments), "floor": FLOOR, "losses": LOSSES, "rows": rows,
        "cpu_seconds": round(time.process_time() - started), **shared.conditions(),
    }  # fmt: skip
    shared.write_results("gns_allocation", result)


def build(loss: str, *, dim: int, num_layers: int, batch: int, bin_edges: Sequence[float]) -> Trainer:
    """Build a trainer with taps on every layer."""
    return shared.build_trainer(LOSSES[loss] | {
        "model.flavor": "debug", "model.dim": dim, "model.num_layers": num_layers, "model.mlp_hidden_dim": 8 * round(dim / 3),
        "data.name": "digits", "optimizer.lr": 1e-3, "lr_scheduler.warmup_steps": 50, "objective.timesteps.name": "uniform",
        "training.local_batch_size": batch, "gns.enable": True, "gns.interval": 100_000, "gns.bin_edges": list(bin_edges),
    })  # fmt: skip


def look(trainer: Trainer, steps: int, groups: int, group_size: int) -> list[dict]:
    """Compare prediction and realisation with frozen weights: a row per spread, geometry and change of the sampler."""
    ordinary = trainer.state.objective.timestep_sampler
    edges = inner_edges(trainer.config.gns, ordinary.density)
    mass = bin_masses(ordinary.density, edges)
    multiplier = bin_means(ordinary.density, edges, lambda t: trainer.state.objective.learned_weighting(t / (1.0 - t)))
    others = {FROM_WEIGHT: weight_shares(mass, multiplier)} if multiplier.max() > 1.01 * multiplier.min() else {}
    draws, samplers, predictions = FrozenDraws(trainer), {}, {}
    for spread in ("none", "stratified"):
        samplers[spread, PRESENT] = present = TimestepSampler(ordinary.density, trainer.config.debug.seed, spread)
        samplers |= {(spread, name): allocated(present, edges, shares) for name, shares in others.items()}
        stratified = spread != "none"
        for geometry, found in measure(trainer, draws, present, steps).items():
            shares = neyman_shares(mass, found.noise, None if stratified else found.signal, FLOOR)
            samplers[spread, f"{NEYMAN} {geometry}"] = allocated(present, edges, shares)
            for ratio in predicted_ratios(mass, found, others, stratified=stratified, floor=FLOOR):
                predictions[spread, geometry, ratio.name] = Ratio(*ratio[1:])
    realised = realise(trainer, draws, samplers, groups, group_size)
    rows = []
    for (spread, geometry, change), predicted in predictions.items():
        old, new = (spread, PRESENT), (spread, f"{NEYMAN} {geometry}" if change == NEYMAN else change)
        if change == STRATIFIED:
            new = (STRATIFIED, PRESENT)
        measured, (shift, shift_stderr) = realised.ratio(new, old, geometry), realised.shift(new, old)
        rows.append({
            "spread": spread, "geometry": geometry, "change": change, "predicted": predicted, "realised": measured,
            "inside": measured.holds(predicted.value), "excludes_1": not measured.holds(1.0), "shift": shift,
            "shift_stderr": shift_stderr, "shares": getattr(samplers[new], "shares", mass).tolist(),
        })  # fmt: skip
    return rows


def allocated(present: TimestepSampler, edges: Tensor, shares: Tensor) -> AllocatedTimesteps:
    """Sampler with other shares of the bins."""
    sampler = AllocatedTimesteps(present.density, present.seed, present.spread, edges=edges)
    sampler.set_shares(shares)
    return sampler


# ---------------------------------------------------------------------- predicted


def taps_of(trainer: Trainer) -> GradientTaps:
    """Taps of a trainer that measures with them."""
    return cast(GradientTaps, cast(GNSMonitor, trainer.state.gns)._taps)


def measure(trainer: Trainer, draws: "FrozenDraws", sampler: TimestepSampler, steps: int) -> dict[str, BinEstimates]:
    """Measure by the taps' sketches in every geometry."""
    taps, batch = taps_of(trainer), trainer.config.training.local_batch_size
    pools = {geometry: DecayedSums(taps.num_bins, math.inf) for geometry in GEOMETRIES}
    for number in tqdm(range(steps), desc="measured steps", leave=False):
        taps.begin_step(number, True, trainer.state.optimizer.state, trainer.config.optimizer.beta2, trainer.state.layout)
        loss = draws.loss(sampler, FIRST_MEASURED + number * batch, before_forward=taps.begin_microbatch)
        loss.mean().backward()
        taps.end_microbatch(batch, loss)
        trainer.state.optimizer.zero_grad()
        found = taps.end_step().to_host()
        for index, geometry in enumerate(GEOMETRIES):
            pools[geometry].add(found.whole(index))
    return {geometry: pool.estimate() for geometry, pool in pools.items()}


class FrozenDraws:
    """Batches of a trainer's data, drawn with replacement: a function of the sampler and the first sample's number."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._dataset = DATASETS[trainer.config.data.name](trainer.config.data, "train")

    def loss(self, sampler: TimestepSampler, first: int, before_forward: Callable[[Tensor], None] | None = None) -> Tensor:
        """Losses [B] of samples first .. first + B - 1; `before_forward` is told their times."""
        trainer = self._trainer
        numbers = first + torch.arange(trainer.config.training.local_batch_size)
        chosen = torch.randint(len(self._dataset), numbers.shape, generator=torch.Generator().manual_seed(first))
        batch = self._dataset.fetch(chosen.numpy()) | {"samples": numbers}
        images, state = batch["images"], trainer.state
        state.objective.timestep_sampler = sampler
        draw = state.objective.draw(tuple(images.shape[1:]), GlobalBatch(first, len(numbers)), numbers)
        if before_forward:
            before_forward(draw.t)
        return state.objective.loss(state.model, Microbatch(images, state.condition(batch, draw)), draw).loss


# ---------------------------------------------------------------------- realised


class Realised:
    """Gradient variances of samplers, by groups of batches that differ in their timesteps only."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._variances: dict[tuple, list[float]] = {}
        self._means: dict[Hashable, Tensor] = {}  # [groups, P] each

    def add(self, sampler: Hashable, group: int, gradients: Tensor, factors: dict[str, Tensor]) -> None:
        """Add one group's mean gradients [M, P]; `factors` [P] of every geometry."""
        for geometry, factor in factors.items():
            centred = (gradients - gradients.mean(0)) * factor
            variance = centred.square().sum(1).double().sum().item() / (len(gradients) - 1)
            self._variances.setdefault((sampler, geometry), []).append(variance)
        if sampler not in self._means:
            self._means[sampler] = gradients.new_empty(self._groups, gradients.shape[1])
        self._means[sampler][group] = gradients.mean(0)

    def ratio(self, new: Hashable, old: Hashable, geometry: str) -> Ratio:
        """Ratio of the variance of one sampler's batches to that of another's."""
        variances = torch.tensor([self._variances[sampler, geometry] for sampler in (new, old)], dtype=torch.float64)
        sums = variances.sum(1, keepdim=True)
        without = (sums - variances).log()  # each group left out
        value = math.log(sums[0] / sums[1])
        reach = _quantile(variances.shape[1]) * _jackknife_stderr(without[0] - without[1])
        return Ratio(*(math.exp(value + sign * reach) for sign in (0, -1, 1)))

    def shift(self, new: Hashable, old: Hashable) -> tuple[float, float]:
        """Shift |G_new - G_old|^2 / |G_old|^2 without bias, of the mean gradients, and its standard error."""
        between, signal = _pairs(self._means[new] - self._means[old]), _pairs(self._means[old])
        return (between[0] / signal[0]).item(), _jackknife_stderr(between[1:] / signal[1:])


def realise(
    trainer: Trainer, draws: FrozenDraws, samplers: Mapping[Any, TimestepSampler], groups: int, group_size: int
) -> Realised:
    """Realise mean gradients of groups x group_size batches of every sampler."""
    parameters = list(trainer.state.model.parameters())
    factors = geometry_factors(trainer)
    found, batch = Realised(groups), trainer.config.training.local_batch_size
    for group in tqdm(range(groups), desc="groups of batches", leave=False):
        for name, sampler in samplers.items():
            gradients = []
            for number in range(group * group_size, (group + 1) * group_size):
                loss = draws.loss(sampler, FIRST_REALISED + number * batch)
                gradient = torch.autograd.grad(loss.mean(), parameters)
                gradients.append(torch.cat([part.flatten() for part in gradient]))
            found.add(name, group, torch.stack(gradients), factors)
    return found


def geometry_factors(trainer: Trainer) -> dict[str, Tensor]:
    """Factors of every geometry on the flat gradient, [P]: those of the last measured step."""
    found = {}
    for index, geometry in enumerate(GEOMETRIES):
        parts = [parameter_factors(trainer, name, index) for name, _ in trainer.state.model.named_parameters()]
        found[geometry] = torch.cat([part.flatten() for part in parts])
    return found


def parameter_factors(trainer: Trainer, name: str, geometry: int) -> Tensor:
    """Factors of a geometry, by its number, on the gradient of a parameter: those of the last measured step."""
    layer, _, kind = name.rpartition(".")
    scales = taps_of(trainer)._layers[layer]
    rows, columns = scales.rows[geometry], scales.columns[geometry]
    if kind == "bias":
        return rows * columns[-1]
    return rows[:, None] * columns[None, :-1] if trainer.state.model.get_parameter(name).ndim == 2 else rows * columns


def _pairs(vectors: Tensor) -> Tensor:
    """Pairwise mean inner product of different vectors [N, P]: of all, then with each left out; float64 [N + 1]."""
    gram = (vectors @ vectors.T).double().fill_diagonal_(0.0)
    count = len(gram)
    all_pairs, own = gram.sum(), gram.sum(1)
    return torch.cat(((all_pairs / (count * (count - 1)))[None], (all_pairs - 2 * own) / ((count - 1) * (count - 2))))


def _jackknife_stderr(without: Tensor) -> float:
    count = len(without)
    return ((count - 1) / count * (without - without.mean()).square().sum()).sqrt().item()


def _quantile(groups: int) -> float:
    return student_quantile(0.975, torch.tensor(groups - 1.0, dtype=torch.float64)).item()


def print_table(rows: Sequence[dict]) -> None:
    print(f"{'loss':<9}{'spread':<11}{'geometry':<9}{'change':<12}{'predicted':>21}{'realised':>22}{'holds it':>9}"
          f"{'not 1':>7}{'shift':>17}")
    for row in rows:
        predicted, realised = (
            f"{row[key].value:.3f} [{row[key].lower:.3f}, {row[key].upper:.3f}]" for key in ("predicted", "realised")
        )
        print(f"{row['loss']:<9}{row['spread']:<11}{row['geometry']:<9}{row['change']:<12}{predicted:>21}{realised:>22}"
              f"{'yes' if row['inside'] else 'NO':>9}{'yes' if row['excludes_1'] else 'no':>7}"
              f"{100 * row['shift']:>8.2f} +- {100 * row['shift_stderr']:.2f}%")


if __name__ == "__main__":
    main()
