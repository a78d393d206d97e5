"""What becomes of the sums of many steps: pooled, estimated from, kept in checkpoints and on disk."""

import json
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.objectives import timesteps
from tests.refusals import one_line
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.gns import raw_sums
from torchtitan.gns.composite import Composite, FreeSums
from torchtitan.gns.config import GNSConfig, inner_edges
from torchtitan.gns.pool import ESTIMATORS, Pool
from torchtitan.gns.raw_sums import RawSums, RawSumsError, raw_files, read_sums
from torchtitan.gns.statistics import PairSums, noise, signal
from torchtitan.gns.step_sums import PARTS, StepSums

BINS, GEOMETRIES = 3, 2
MODULATION, TOKEN = PARTS.index("modulation"), PARTS.index("token")


def b_simple(sums: PairSums) -> torch.Tensor:
    return noise(sums) / signal(sums)


def made_up(
    step: int, *, measured: bool, ratio: float | None = None, adam: bool = True, scale: Tensor | None = None
) -> StepSums:
    """Sums of 24 made-up samples with a common mean in one microbatch, so that sketches and products are the same.

    Args:
        step: seed.
        measured: with the token part.
        ratio: the token part's gradients are the modulation part's times this; None: they are their own.
        adam: with factors in the second geometry.
        scale: gradients and losses of each bin are multiplied by it, [K].
    """
    generator = torch.Generator().manual_seed(step)
    bins = torch.arange(24) % BINS
    factor = torch.ones(BINS) if scale is None else scale
    gradients = torch.randn(len(PARTS), GEOMETRIES, 24, 5, generator=generator, dtype=torch.float64)
    gradients += torch.arange(1, 6).double()[:, None].expand(5, 5).diagonal() / 3
    if ratio is not None:
        gradients[TOKEN] = ratio * gradients[MODULATION]
    if not adam:
        gradients[:, 1] = 0.0
    gradients *= factor[bins][:, None]
    one_hot = torch.nn.functional.one_hot(bins, BINS).double()
    sums = one_hot.T @ gradients  # [P, G, K, 5]
    count, squares, products = one_hot.sum(0), gradients.square().sum(-1) @ one_hot, sums @ sums.mT
    pairs = torch.outer(count, count) - count.diag()
    losses = torch.rand(24, generator=generator, dtype=torch.float64) * factor[bins]
    found = StepSums(count, losses.square() @ one_hot, pairs, squares, products)
    if measured:
        return replace(found, all_pairs=pairs, sketched=0.75 * products, corrections=0.25 * products)
    found.squares[TOKEN] = found.products[TOKEN] = torch.nan
    return found


def of_geometry(sums: StepSums, geometry: int) -> PairSums:
    return PairSums(sums.count, sums.squares[:, geometry].sum(0), sums.products[:, geometry].sum(0), sums.pairs)


def add_entry(composite: Composite, geometry: int, steps: Sequence[StepSums]) -> tuple[PairSums, Tensor]:
    """Add an entry, of which the last step is measured, to the composite of a geometry."""
    found = composite.add(reduce(add, (FreeSums.of(sums, geometry) for sums in steps)), steps[-1])
    assert found is not None
    return found


def filled(steps: int = 11, *, every: int = 3, adam_from: int = 1) -> Pool:
    pool = Pool(BINS, GEOMETRIES, half_life=100.0)
    for step in range(1, steps + 1):
        pool.add(made_up(step, measured=step % every == 0, adam=step >= adam_from))
    return pool


def same(found: object, wanted: object) -> bool:
    """Bit for bit, what is no number being equal to itself."""
    return all(
        torch.equal(getattr(found, field.name).nan_to_num(7.7), getattr(wanted, field.name).nan_to_num(7.7))
        for field in fields(wanted)
    )


# ---------------------------------------------------------------------- composite


@pytest.mark.parametrize("geometry", [0, 1])
def test_composite_recovers_the_ratio_of_token_to_modulation(geometry):
    composite = Composite(BINS, geometry, half_life=100.0)
    for last in (3, 6):
        add_entry(composite, geometry, [made_up(step, measured=step == last, ratio=1.5) for step in range(last - 2, last + 1)])
    of_squares, of_signal = composite.token_to_modulation()
    assert torch.allclose(of_squares, torch.full((BINS,), 2.25, dtype=torch.float64), rtol=1e-12)
    assert of_signal.tolist() == pytest.approx([2.25] * BINS, rel=1e-9)


@pytest.mark.parametrize("geometry", [0, 1])
def test_composite_takes_each_bins_slope_over_steps_drawn_to_the_common_one(geometry):
    """The token part's signal is a multiple of the modulation part's and an offset, others in every bin."""
    composite, steps = Composite(BINS, geometry, half_life=math.inf, share=None), 6
    slopes = torch.tensor([2.0, 3.0, 5.0]).double()
    seen = []
    for step in range(1, steps + 1):
        sums = made_up(step, measured=True)
        own = sums.products[MODULATION] - sums.squares[MODULATION].diag_embed()
        sums.products[TOKEN] = slopes.diag() * own + 2.0 * sums.pairs * torch.tensor([0.5, 1.0, -0.2]).diag()
        sums.products[TOKEN] += sums.squares[TOKEN].diag_embed()
        add_entry(composite, geometry, [replace(sums, sketched=sums.products, corrections=torch.zeros_like(sums.products))])
        seen.append(own[geometry].diagonal() / sums.pairs.diagonal())
        if step < 5:
            assert torch.equal(*composite.token_to_modulation())  # that of the squares, for want of a slope
    variances = torch.stack(seen).var(0)
    second = composite._parts.ratios[:, 0] + composite._parts.ratios[:, 1]
    weight = variances / second**2  # bins have as many pairs
    common = (weight * slopes).sum() / weight.sum()
    wanted = ((steps - 1) * slopes + 4 * common) / (steps - 1 + 4)
    assert torch.allclose(composite.token_to_modulation()[1], wanted, rtol=1e-9)


def test_composite_equals_sketch_where_every_step_is_measured_whatever_the_ratio():
    pool = Pool(BINS, GEOMETRIES, half_life=100.0)
    for step in range(1, 9):
        pool.add(made_up(step, measured=True))
    for geometry in pool.geometries:
        sketch, composite = (pool.by_bin(geometry, estimator) for estimator in ("sketch", "composite"))
        for name in ("signal", "noise", "b_simple", "lower", "upper"):
            assert torch.allclose(getattr(composite, name), getattr(sketch, name), rtol=1e-9), name


def test_composite_counts_the_steps_between_exactly_where_the_token_part_is_a_multiple_of_the_modulation():
    """The proxy is then the whole model, and with a coefficient of 1 an entry's estimate that of all its steps."""
    composite, everything, corrected = Composite(BINS, 0, half_life=math.inf), [], []
    for last in (3, 6, 9):
        steps = range(last - 2, last + 1)
        whole, controls = add_entry(composite, 0, [made_up(step, measured=step == last, ratio=1.5) for step in steps])
        if last > 3:  # before, no ratio is known
            everything += [of_geometry(made_up(step, measured=True, ratio=1.5), 0) for step in steps]
            products = whole.products - controls.sum(-1).diag()
            corrected.append(PairSums(whole.count, whole.squares - controls[:, 0], products, whole.pairs))
    found, total = reduce(add, corrected), reduce(add, everything)
    assert torch.allclose(signal(found), signal(total), rtol=1e-9)
    assert torch.allclose(noise(found), noise(total), rtol=1e-9)
    assert torch.allclose(b_simple(found), b_simple(total), rtol=1e-9)


# ---------------------------------------------------------------------- pool


def test_an_entry_is_the_plain_sum_of_its_steps():
    pool, steps = Pool(BINS, GEOMETRIES, half_life=100.0), [made_up(step, measured=step == 3) for step in (1, 2, 3)]
    for sums in steps:
        pool.add(sums)
    for index, geometry in enumerate(pool.geometries):
        sketch = of_geometry(steps[2], index)
        assert torch.allclose(pool.by_bin(geometry, "sketch").b_simple, b_simple(sketch), rtol=1e-12)
        entries = [
            PairSums(sums.count, sums.squares[MODULATION, index], sums.products[MODULATION, index], sums.pairs)
            for sums in steps
        ]
        modulation = reduce(add, entries)
        assert torch.allclose(pool.by_bin(geometry, "modulation").b_simple, b_simple(modulation), rtol=1e-12)
        whole = sketch.combined(torch.zeros(BINS, dtype=torch.int64), 1)
        assert torch.allclose(pool.whole(geometry, "sketch").b_simple, b_simple(whole), rtol=1e-12)


@pytest.mark.parametrize("cut", [6, 7, 8])  # step 6 and 9 are measured, so 7 and 8 end in the middle of an entry
def test_state_through_json_goes_on_bit_for_bit_also_in_the_middle_of_an_entry(cut):
    straight = filled(14)
    first = filled(cut)
    resumed = Pool(BINS, GEOMETRIES, half_life=100.0)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.state_dict() == first.state_dict()
    for step in range(cut + 1, 15):
        resumed.add(made_up(step, measured=step % 3 == 0))
    assert resumed.state_dict() == straight.state_dict()
    for geometry in straight.geometries:
        for estimator in ESTIMATORS:
            assert same(resumed.by_bin(geometry, estimator), straight.by_bin(geometry, estimator))
            assert same(resumed.whole(geometry, estimator), straight.whole(geometry, estimator))
    assert torch.equal(resumed.mean_square_loss(), straight.mean_square_loss())


def test_adam_is_absent_before_its_first_factors():
    pool = filled(8, adam_from=9)
    plain, adam = (pool.by_bin(geometry, "modulation") for geometry in ("plain", "adam"))
    assert plain.b_simple.isfinite().all() and (plain.samples > 0).all()
    for estimator in ESTIMATORS:
        assert not pool.by_bin("adam", estimator).b_simple.isfinite().any()
    assert (adam.samples == 0).all()
    # Those of step 6 come too late for the entry of steps 4 to 6, but not its own samples.
    later = filled(6, adam_from=6)
    assert later.by_bin("adam", "sketch").b_simple.isfinite().all()
    assert later.by_bin("adam", "modulation").samples.tolist() == [8.0] * BINS


def test_step_that_is_not_finite_leaves_the_pool_as_it_was():
    pool = filled(5)
    before = pool.state_dict()
    broken = made_up(6, measured=False)
    for tensor in (broken.squares, broken.products, broken.square_losses):
        tensor[:] = torch.nan
    pool.add(broken)
    assert pool.state_dict() == before


# ---------------------------------------------------------------------- sums of a step


@pytest.mark.parametrize("measured", [True, False])
def test_rescaled_sums_are_those_of_rescaled_losses(measured):
    factor = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    found = made_up(1, measured=measured).rescaled(factor)
    wanted = made_up(1, measured=measured, scale=factor)
    for field in fields(StepSums):
        value, right = getattr(found, field.name), getattr(wanted, field.name)
        assert (value is None) == (right is None)
        if right is not None:
            assert torch.allclose(value, right, rtol=1e-12, atol=0.0, equal_nan=True), field.name


EDGES = torch.tensor([0.1, 1 / 3], dtype=torch.float64)


def written(folder, last: int, flush_at: tuple[int, ...]) -> RawSums:
    raw = RawSums(folder, EDGES, GEOMETRIES)
    for step in range(1, last + 1):
        raw.add(step, made_up(step, measured=step % 3 == 0))
        if step in flush_at:
            raw.flush()
    return raw


def assert_rows(folder, steps: list[int]) -> None:
    rows = list(read_sums(folder))
    assert [step for step, _ in rows] == steps
    for step, sums in rows:
        wanted = made_up(step, measured=step % 3 == 0)
        for field in fields(StepSums):
            value, right = getattr(sums, field.name), getattr(wanted, field.name)
            assert value is right is None or torch.equal(value.nan_to_num(7.7), right.nan_to_num(7.7)), (step, field.name)


@pytest.mark.parametrize(
    ("content", "reason"), [("nothing", "cannot be read"), ("half", "cannot be read"), ("other columns", "holds no raw sums")]
)
def test_a_damaged_file_of_raw_sums_is_one_error_with_its_path(tmp_path, content, reason):
    written(tmp_path, 4, (2, 4))
    _, second = raw_files(tmp_path)
    if content == "other columns":
        pq.write_table(pa.table({"step": [3]}), second)
    else:
        second.write_bytes(second.read_bytes()[: 500 if content == "half" else 0])
    rows = read_sums(tmp_path)
    assert [next(rows)[0], next(rows)[0]] == [1, 2]
    assert f"{second}: {reason}" in one_line(RawSumsError, next, rows)


@pytest.mark.parametrize(("last", "names"), [(7, ["1-4", "5-7"]), (6, ["1-4", "5-6"]), (4, ["1-4"]), (2, ["1-2"]), (0, [])])
def test_raw_sums_come_back_bit_for_bit_and_those_after_a_step_are_cut_and_written_anew(tmp_path, last, names):
    written(tmp_path, 7, (4, 7))
    again = RawSums(tmp_path, EDGES, GEOMETRIES)
    again.cut(last)
    files = [[int(number) for number in path.stem.split("-")[1:]] for path in raw_files(tmp_path)]
    assert [f"{first}-{end}" for first, end in files] == names
    assert_rows(tmp_path, list(range(1, last + 1)))
    for step in range(last + 1, 9):
        again.add(step, made_up(step, measured=step % 3 == 0))
    again.flush()
    assert_rows(tmp_path, list(range(1, 9)))
    assert not list(tmp_path.glob("*.tmp"))


def test_rows_in_memory_are_bounded_by_those_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_sums, "ROWS_PER_FILE", 3)
    raw, most = RawSums(tmp_path, EDGES, GEOMETRIES), 0
    for step in range(1, 12):
        raw.add(step, made_up(step, measured=step % 3 == 0))
        most = max(most, len(raw._rows))
        if raw._thread:
            raw._thread.join()
    assert most <= 3 and [path.name for path in raw_files(tmp_path)] == [
        f"raw-{first:08d}-{first + 2:08d}.parquet" for first in (1, 4, 7)
    ]  # fmt: skip
    raw.flush()
    assert_rows(tmp_path, list(range(1, 12)))


# ---------------------------------------------------------------------- edges


def edges_of(objective: dict | None = None, **config) -> list[float]:
    built = build_objective(DenoisingConfig(**(objective or {})), seed=0)
    return inner_edges(GNSConfig(**config), built.timestep_sampler.density).tolist()


def test_bins_without_edges_are_of_equal_mass():
    assert edges_of({"timesteps": timesteps("uniform")}, num_bins=4) == pytest.approx([0.25, 0.5, 0.75])
    quartile = 1 / (1 + math.exp(0.6744897501960817))  # of the logistic of a standard normal
    assert edges_of(num_bins=4) == pytest.approx([quartile, 0.5, 1 - quartile], rel=1e-6)
    assert edges_of(num_bins=1) == []


def test_given_edges_are_in_t():
    assert edges_of(bin_edges=[0.0, 0.2, 0.7, 1.0]) == [0.2, 0.7]
