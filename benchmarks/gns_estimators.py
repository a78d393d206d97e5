"""Error of the online estimates of the gradient noise scale against exact ones: python benchmarks/gns_estimators.py

Small DiTs are trained on real images, and at three ages, with weights frozen, the same samples are measured twice: by
the taps of a training step with fresh projections every time, and exactly, by one gradient per sample. Reported are
errors of ln B_simple over the timestep bins, as root mean squares, of

    sketch      the whole model, N measured steps one after another, against the exact value of these steps
    composite   4 N steps, every fourth one measured, free parts on all: against the exact value of all of them
    adaLN       the modulation part alone on the first N steps: its error, and its bias, the geometric mean of the ratio
    other       the exact value of the first N steps against that of all later ones: the error of sampling alone; and
                the number of bins in which the sketch agrees with the later ones within the 95 % intervals of both

in the plain geometry and in Adam's (row and column factors of the second moment, on both sides). Adds to
benchmarks/results/gns_estimators.json.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from benchmarks import shared
from benchmarks.gns_allocation import parameter_factors, taps_of
from torchtitan.diffusion.objective import Draw, Microbatch
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.gns.composite import Composite, ControlledSums, FreeSums
from torchtitan.gns.config import GNSConfig
from torchtitan.gns.decayed import BinEstimates, DecayedSums
from torchtitan.gns.statistics import PairSums
from torchtitan.gns.step_sums import GEOMETRIES, PARTS, StepSums
from torchtitan.state.resume import materialise_state
from torchtitan.trainer import Trainer
from torchtitan.training.optimizer import optimizer_tensors

SETTINGS: shared.Settings = {
    "model.flavor": "debug", "model.dim": 128, "model.num_layers": 4, "model.mlp_hidden_dim": 344, "optimizer.lr": 5e-4,
    "lr_scheduler.warmup_steps": 50, "objective.timesteps.name": "uniform", "gns.enable": True,
    "gns.interval": 1_000_000,  # the measured steps follow the training
}  # fmt: skip
DATA: dict[str, shared.Settings] = {
    "digits": {"data.name": "digits"}, "cifar10": {"data.name": "cifar10", "model.patch_size": 8},
}  # fmt: skip
MEASURED_EVERY = 4
TRAINED_BATCH = 256
CHUNK = 32  # single gradients held at once

Samples = tuple[Tensor, Any, Draw]  # images, conditions, draws
Step = tuple[StepSums, dict[str, PairSums]]  # by the taps, and by single gradients in each geometry


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--data", nargs="+", choices=DATA, default=["digits"], help="results of others are kept")
    parser.add_argument("--cifar10", help="folder of CIFAR-10")
    parser.add_argument("--ages", type=int, nargs="+", default=[150, 500, 1500],
        help="steps trained before each measurement; results of others are kept")
    parser.add_argument("--measured", type=int, default=32,
        help="N: measured steps of a measurement, at frozen weights")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step of a measurement")
    parser.add_argument("--sketch-size", type=int, default=GNSConfig().sketch_size)
    arguments = parser.parse_args()
    if "cifar10" in arguments.data and not arguments.cifar10:
        parser.error("--data cifar10 needs --cifar10 FOLDER")
    for data in arguments.data:
        rows = measure(data, arguments)
        print_table(rows)
        write(data, rows, arguments)


def measure(data: str, arguments: argparse.Namespace) -> list[dict]:
    """Train on a data set, and measure at each age: a row per age and geometry."""
    settings = SETTINGS | DATA[data] | {"gns.sketch_size": arguments.sketch_size}
    settings |= {"data.path": arguments.cifar10} if data == "cifar10" else {}
    trainer = shared.build_trainer(settings | {"training.local_batch_size": TRAINED_BATCH})
    looking = shared.build_trainer(settings | {"training.local_batch_size": arguments.batch})
    rows = []
    for age in arguments.ages:
        shared.train_to(trainer, age)
        copy_state(trainer, looking)
        found = judge_look(steps_of_look(looking, age, arguments.measured), arguments.measured)
        rows += [{"data": data, "age": age, "batch": arguments.batch, **row} for row in found]
    trainer.close()
    looking.close()
    return rows


def write(data: str, rows: list[dict], arguments: argparse.Namespace) -> None:
    """Write the results together with those of other data sets and ages."""
    results = shared.read_results("gns_estimators")
    done = [row for row in results.get(data, {}).get("rows", ()) if row["age"] not in arguments.ages]
    results[data] = {
        "model": "DiT of 128 channels, 4 blocks", "measured_steps": arguments.measured,
        "sketch_size": arguments.sketch_size, "rows": sorted(done + rows, key=lambda row: row["age"]),
        **shared.conditions(),
    }  # fmt: skip
    shared.write_results("gns_estimators", results)


def copy_state(trainer: Trainer, to: Trainer) -> None:
    """Copy weights and moments; the other trainer's batch may differ."""
    to.state.model.load_state_dict(trainer.state.model.state_dict())
    materialise_state(to.state.optimizer, to.config.optimizer.lr)
    copies = optimizer_tensors(to.state.optimizer, to.state.parameters)
    for name, tensor in optimizer_tensors(trainer.state.optimizer, trainer.state.parameters).items():
        copies[name].copy_(tensor)


def steps_of_look(trainer: Trainer, age: int, measured: int) -> Iterator[Step]:
    """Steps of a measurement with frozen weights."""
    first = 10_000_000 * age  # samples that training never sees
    for number in tqdm(range(MEASURED_EVERY * measured), desc=f"age {age}", leave=False):
        sketched = number < measured or _measured_for_composite(number)
        sums = _measure(trainer, first, number, sketched)  # first, since it sets the factors of Adam's geometry
        yield sums, exact_sums(trainer, _samples(trainer, first, number))


def judge_look(steps: Iterator[Step], measured: int) -> list[dict]:
    """Judge a measurement: a row per geometry."""
    keys = ("sketch", "modulation", "exact", "all exact", "other")
    num_bins, geometries = GNSConfig().num_bins, GEOMETRIES
    pools = {(g, key): DecayedSums(num_bins, math.inf) for g in geometries for key in (*keys, "composite's")}
    composites = [Composite(num_bins, index, math.inf) for index in range(len(geometries))]
    controlled = [ControlledSums(num_bins) for _ in geometries]
    entries = [FreeSums.zeros(num_bins) for _ in geometries]
    for number, (sums, exact) in enumerate(steps):
        for index, geometry in enumerate(geometries):
            entries[index] += FreeSums.of(sums, index)
            if _measured_for_composite(number):
                entry, entries[index] = entries[index], FreeSums.zeros(num_bins)
                if (found := composites[index].add(entry, sums)) is not None:
                    controlled[index].add(*found, cast(Tensor, pools[geometry, "composite's"].add(found[0])))
            pools[geometry, "all exact"].add(exact[geometry])
            pools[geometry, "other" if number >= measured else "exact"].add(exact[geometry])
            if number < measured:
                pools[geometry, "sketch"].add(_whole(sums, index, range(len(PARTS))))
                pools[geometry, "modulation"].add(_whole(sums, index, [PARTS.index("modulation")]))
    return [
        _row(
            geometry,
            {key: pools[geometry, key].estimate() for key in keys}
            | {"composite": sums.estimate(pools[geometry, "composite's"])},
        )
        for geometry, sums in zip(geometries, controlled, strict=True)
    ]


def _measured_for_composite(number: int) -> bool:
    return number % MEASURED_EVERY == MEASURED_EVERY - 1


def _measure(trainer: Trainer, first: int, number: int, sketched: bool) -> StepSums:
    x0, condition, draw = _samples(trainer, first, number)
    taps = taps_of(trainer)
    taps.begin_step(first + number, sketched, trainer.state.optimizer.state, trainer.config.optimizer.beta2, trainer.state.layout)
    taps.begin_microbatch(draw.t)
    trainer.state.objective.loss(trainer.state.model, Microbatch(x0, condition), draw).loss.mean().backward()
    taps.end_microbatch(len(x0), torch.zeros(len(x0)))
    trainer.state.optimizer.zero_grad()
    return taps.end_step().to_host()


def _samples(trainer: Trainer, first: int, number: int) -> Samples:
    """Samples of a step as a training step would see them: images, conditions, and draws of t and noise."""
    batch = trainer.config.training.local_batch_size
    where = GlobalBatch(first + number * batch, batch)
    samples = torch.arange(where.size) + where.first_sample
    dataset = trainer.state.data.dataset
    data = dataset.fetch((samples % len(dataset)).numpy()) | {"samples": samples}
    draw = trainer.state.objective.draw(tuple(data["images"].shape[1:]), where, samples)
    return data["images"], trainer.state.condition(data, draw), draw


def exact_sums(trainer: Trainer, samples: Samples) -> dict[str, PairSums]:
    """Exact sums of samples from one gradient each, in every geometry."""
    x0, condition, draw = samples
    parameters = {name: parameter.detach() for name, parameter in trainer.state.model.named_parameters()}
    objective, model = trainer.state.objective, trainer.state.model

    def loss(weights, x, label, t, noise, importance):
        def network(x_t, time, classes):
            return functional_call(model, weights, (x_t, time, classes))

        one = Draw(t[None], noise[None], importance[None])
        return objective.loss(network, Microbatch(x[None], label[None]), one).loss.sum()

    bins = torch.bucketize(draw.t, taps_of(trainer)._edges)
    one_hot = torch.nn.functional.one_hot(bins, taps_of(trainer).num_bins).double()
    factors = {
        geometry: {name: parameter_factors(trainer, name, index) for name in parameters}
        for index, geometry in enumerate(GEOMETRIES)
    }
    # [weights, kinds] per parameter: one pass over the squared elements serves all geometries.
    weights = {name: torch.stack([of[name].flatten().square() for of in factors.values()], dim=1) for name in parameters}
    squares = torch.zeros(one_hot.shape[1], len(factors), dtype=torch.float64)
    sums = {name: torch.zeros(one_hot.shape[1], weight.numel()) for name, weight in parameters.items()}
    drawn = (x0, condition, draw.t, draw.noise, draw.importance, one_hot)
    for *chunk, in_bin in zip(*(values.split(CHUNK) for values in drawn), strict=True):
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule
            per_sample = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0, 0))(parameters, *chunk)
        for name, gradient in per_sample.items():
            flat = gradient.flatten(1)
            sums[name].addmm_(in_bin.float().T, flat)
            squares += in_bin.T @ (flat.square() @ weights[name]).double()
    products = dict.fromkeys(factors, torch.zeros(()))
    for name, sum_of_bin in sums.items():
        for kind, of in factors.items():
            scaled = sum_of_bin.double() * of[name].flatten()
            products[kind] = products[kind] + scaled @ scaled.T
    return {
        kind: PairSums.of_group(one_hot.sum(0).cpu(), squares[:, place].cpu(), products[kind].cpu())
        for place, kind in enumerate(factors)
    }


def _whole(sums: StepSums, index: int, parts) -> PairSums:
    parts = list(parts)
    squares, products = sums.squares[parts, index].sum(0), sums.all_products[parts, index].sum(0)
    return PairSums(sums.count, squares, products, cast(Tensor, sums.all_pairs))


def _row(geometry: str, found: dict[str, BinEstimates]) -> dict:
    row: dict[str, Any] = {"geometry": geometry} | {key: estimates.b_simple.tolist() for key, estimates in found.items()}
    pairs = {"sketch": "exact", "modulation": "exact", "composite": "all exact", "other": "exact"}
    for key, truth in pairs.items():
        value, wanted = found[key].b_simple, found[truth].b_simple
        known = (wanted > 0) & (value > 0)
        row[f"{key}_rms"] = _rms(value[known] / wanted[known])
        row[f"{key}_spearman"] = spearman(value, wanted)
        row[f"{key}_bins"] = int(known.sum())
    ratio = found["modulation"].b_simple / found["exact"].b_simple
    row["modulation_ratio"] = ratio[ratio > 0].log().mean().exp().item()
    other = found["other"]
    row["other_lower"], row["other_upper"] = other.lower.tolist(), other.upper.tolist()
    row["sketch_agrees_with_other"] = int(_agree(found["sketch"], other).sum())
    return row


def _agree(one: BinEstimates, other: BinEstimates) -> Tensor:
    """Check whether two estimates from different samples agree within the 95 % intervals of both, per bin."""
    first_below = one.b_simple < other.b_simple
    below, above = ([one, other], [other, one])
    low, high = (
        [torch.where(first_below, getattr(a, name), getattr(b, name)).log() for name in ("b_simple", end)]
        for (a, b), end in ((below, "upper"), (above, "lower"))
    )
    return high[0] - low[0] <= ((low[1] - low[0]).square() + (high[0] - high[1]).square()).sqrt()


def _rms(ratio: Tensor) -> float:
    return ratio.log().square().mean().sqrt().item()


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of values without ties."""
    ranks = torch.stack((a.argsort().argsort(), b.argsort().argsort())).double()
    return torch.corrcoef(ranks)[0, 1].item()


def print_table(rows: list[dict]) -> None:
    print(
        f"{'data':<8}{'age':>6}{'batch':>6} {'geometry':<9}{'exact B':>17}{'sketch':>8}"
        f"{'composite':>11}{'rank':>6}{'adaLN':>8}{'ratio':>7}{'other':>8}{'agree':>8}"
    )
    for row in rows:
        span = f"{min(row['exact']):.1f} .. {max(row['exact']):.1f}"
        print(f"{row['data']:<8}{row['age']:>6}{row['batch']:>6} {row['geometry']:<9}{span:>17}{row['sketch_rms']:>8.1%}"
              f"{row['composite_rms']:>11.1%}{row['composite_spearman']:>6.2f}{row['modulation_rms']:>8.1%}"
              f"{row['modulation_ratio']:>7.2f}{row['other_rms']:>8.1%}{row['sketch_agrees_with_other']:>8}")


if __name__ == "__main__":
    main()
