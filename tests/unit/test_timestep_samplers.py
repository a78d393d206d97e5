"""Densities of published timestep samplers against scipy, closed forms and their own integrals; slots; ranges of t."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tests.objectives import timesteps
from tests.unit.test_timestep_densities import middles
from torchtitan.config.job import load_config
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective, objective_problems
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.registry import build_density, build_sampler
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, Laplace, TimestepSampler
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps
from torchtitan.diffusion.timesteps.slot_edges import read_slot_edges, write_slot_edges
from torchtitan.diffusion.timesteps.warps import Beta, speed_start
from torchtitan.settings.record import dump_config

# Xie and Agam, Table 1, as half-open slots of the 1000 indices.
PAPER_EDGES = [0.0, 5.0, 13.0, 23.0, 37.0, 56.0, 82.0, 120.0, 177.0, 277.0, 1000.0]
CASES = {
    "laplace": dict(timesteps=timesteps("laplace", mean=-1.0, scale=1.5)),
    "cubic to noise": dict(timesteps=timesteps("cubic")),
    "cubic to data": dict(timesteps=timesteps("cubic", towards="data")),
    "beta": dict(timesteps=timesteps("beta", a=0.6, b=2.5)),
}
ON_INDICES = CASES | {
    "speed": dict(timesteps=timesteps("speed")),
    "slots": dict(timesteps=timesteps("slots", edges=PAPER_EDGES)),
}
ON_FLOW = CASES | {"slots": dict(timesteps=timesteps("slots", edges=[0.0, 0.1, 0.15, 0.6, 1.0]))}


def draw(sampler: TimestepSampler, size: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return sampler.sample(GlobalBatch(first, size), torch.arange(first, first + size))


def density_of(path: str, **keys):
    return build_density(DenoisingConfig(path=path, **keys), PATHS[path]())


def index_masses(density, path) -> torch.Tensor:
    """Probability of every index of a discrete path, by counting quantiles of a fine grid of 500 per index."""
    index = path.t_to_index(density.quantile(middles(500_000)))
    return torch.bincount(index, minlength=path.num_indices) / 5e5


# --- closed forms


def test_laplace_is_scipy_s_of_the_log_snr():
    for mean, scale in ((0.0, 0.5), (-1.3, 3.0)):
        density, u = Laplace(mean, scale), middles(2001)
        snr = stats.laplace(mean, scale)
        log_sigma = torch.logit(density.quantile(u))
        np.testing.assert_allclose(-2 * log_sigma, snr.isf(u.numpy()), rtol=0, atol=1e-9)
        np.testing.assert_allclose(density.distribution(log_sigma), u, rtol=1e-12)
        np.testing.assert_allclose(density.log_sigma_density(log_sigma), 2 * snr.pdf(-2 * log_sigma), rtol=1e-10)


def test_cubic_moments_and_quartiles_have_their_closed_form():
    to_data, to_noise = (density_of("rectified_flow", **CASES[f"cubic to {end}"]) for end in ("data", "noise"))
    t = to_data.quantile(middles(100_000))
    assert t.mean().item() == pytest.approx(1 / 4, abs=1e-9)
    assert t.square().mean().item() == pytest.approx(1 / 7, abs=1e-9)
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    assert to_data.quantile(quartiles).tolist() == pytest.approx([1 / 64, 8 / 64, 27 / 64], rel=1e-12)
    assert to_noise.quantile(quartiles).tolist() == pytest.approx([37 / 64, 56 / 64, 63 / 64], rel=1e-12)


@pytest.mark.parametrize(("a", "b"), [(1.5, 1.0), (0.2, 0.2), (0.2, 50.0), (50.0, 50.0), (0.7, 3.0), (1.0, 1.0)])
def test_beta_is_scipy_s(a, b):
    tails = torch.tensor([1e-12, 1e-6, 1 - 1e-9], dtype=torch.float64)
    warp, u = Beta(a, b), torch.cat((tails, middles(999))).sort().values
    x = warp.quantile(u)
    expected = stats.beta(a, b)
    seen = x < 1 - 1e-7 * 0.5 ** (1 / b)  # beyond, x has too few digits left for small b
    assert seen.sum() > 950
    np.testing.assert_allclose(expected.cdf(x[seen].numpy()), u[seen], rtol=0, atol=1e-8)
    np.testing.assert_allclose(warp.distribution(x[seen]), expected.cdf(x[seen].numpy()), rtol=0, atol=1e-8)
    inner = x[(x > 1e-200) & (x < 1 - 1e-12)]
    np.testing.assert_allclose(warp.density(inner), expected.pdf(inner.numpy()), rtol=1e-9)
    assert (x.diff() >= 0).all()


def test_speed_has_its_published_tau_and_ratio():
    path = PATHS["ddpm_linear"]()
    assert speed_start(path) == 642
    masses = index_masses(density_of("ddpm_linear", **ON_INDICES["speed"]), path)
    one = 1 / (1000 + 642 * 4)
    expected = torch.where(torch.arange(1000) < 642, 5 * one, one)
    torch.testing.assert_close(masses, expected, rtol=0, atol=4.1e-6)
    density = density_of("ddpm_linear", **ON_INDICES["speed"])
    torch.testing.assert_close(density.cumulative.diff(), expected.double(), rtol=1e-5, atol=0)
    assert density.cumulative[-1] == 1 and density.cumulative[642].item() == pytest.approx(3210 * one, rel=1e-12)


# --- every density, on every kind of path


@pytest.mark.parametrize("path", ["rectified_flow", "edm", "ddpm_linear_continuous", "ddpm_cosine_continuous"])
@pytest.mark.parametrize("name", ["laplace", "cubic to noise", "cubic to data", "beta", "speed", "slots"])
@pytest.mark.parametrize("more", [{}, dict(shift=2.5, t_min=0.07, t_max=0.93)], ids=["plain", "cut"])
def test_quantiles_are_those_of_the_integrated_density(path, name, more):
    cases = ON_INDICES if path.startswith("ddpm") else ON_FLOW
    if name not in cases:
        return
    density = density_of(path, **cases[name], **more)
    u = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    wanted = torch.logit(density.quantile(u))
    points = wanted
    if path.startswith("ddpm"):  # the density jumps at every index
        jumps = PATHS[path]().index_to_log_sigma(torch.arange(1000)) + np.log(more.get("shift", 1.0))
        points = torch.cat((points, jumps[(jumps > points[0]) & (jumps < points[-1])])).unique()
    if name == "slots" and not path.startswith("ddpm"):
        jumps = torch.logit(torch.tensor(cases[name]["timesteps"].edges[1:-1]).double()) + np.log(more.get("shift", 1.0))
        points = torch.cat((points, jumps[(jumps > points[0]) & (jumps < points[-1])])).unique()
    if name == "speed":
        jump = PATHS[path]().index_to_log_sigma(torch.tensor([641.5])) + np.log(more.get("shift", 1.0))
        points = torch.cat((points, jump)).unique()
    if name == "laplace":
        points = torch.cat((points, torch.tensor([0.5 + np.log(more.get("shift", 1.0))]))).unique()
    nodes, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(12))
    half = 0.5 * points.diff()
    # Not on the points themselves, so that either side of a jump is met.
    values = density.log_sigma_density(((points[:-1] + half)[:, None] + half[:, None] * nodes).flatten()).view(-1, 12)
    running = torch.cat((torch.zeros(1).double(), (half * (values * weights).sum(1)).cumsum(0)))
    found = running[torch.searchsorted(points, wanted)] + u[0]
    torch.testing.assert_close(found, u, rtol=0, atol=2e-7)


@pytest.mark.parametrize("path", ["ddpm_linear", "ddpm_cosine"])
@pytest.mark.parametrize("name", ON_INDICES)
def test_masses_of_integer_indices_are_the_distribution_s_over_index_over_t(path, name):
    found = density_of(path, **ON_INDICES[name]).cumulative
    x = torch.arange(1001).double() / 1000
    expected = {
        "cubic to noise": lambda: 1 - (1 - x) ** (1 / 3),
        "cubic to data": lambda: x ** (1 / 3),
        "beta": lambda: torch.from_numpy(stats.beta(0.6, 2.5).cdf(x.numpy())),
        "slots": lambda: torch.from_numpy(np.interp(x.numpy(), np.array(PAPER_EDGES) / 1000, np.arange(11) / 10)),
    }.get(name)
    if expected:
        # The cubic's density is infinite at an end, where rounding of the index counts.
        torch.testing.assert_close(found, expected(), rtol=0, atol=2e-6 if "cubic" in name else 1e-8)
    assert found[0] == 0 and found[-1] == 1 and (found.diff() > 0).all()


@pytest.mark.parametrize("path", ["rectified_flow", "ddpm_linear", "ddpm_linear_continuous"])
@pytest.mark.parametrize("name", ["cubic to data", "beta", "slots"])
def test_new_densities_compose_with_allocation(path, name):
    cases = ON_FLOW if path == "rectified_flow" else ON_INDICES
    density = density_of(path, **cases[name], t_min=0.02)
    edges = density.quantile(torch.tensor([0.3, 0.6], dtype=torch.float64)).float()
    allocated = AllocatedTimesteps(density, seed=1, spread="stratified", edges=edges)
    allocated.set_shares([0.5, 0.25, 0.25])
    t, importance = draw(allocated, 4000)
    assert torch.bincount(torch.bucketize(t, edges)).tolist() == [2000, 1000, 1000] and t.min() >= 0.0199
    wanted = density.quantile(middles(100_000)).square().mean().item()
    assert (importance.double() * t.double().square()).mean().item() == pytest.approx(wanted, rel=5e-3)


# --- a range of t


@pytest.mark.parametrize("name", ["uniform", "logit_normal", "mode", "cosmap", "cubic", "beta", "laplace"])
def test_a_cut_density_is_the_whole_one_given_that_t_lies_in_the_range(name):
    low, high = 0.2, 0.65
    whole = density_of("rectified_flow", timesteps=timesteps(name), shift=1.7)
    cut = density_of("rectified_flow", timesteps=timesteps(name), shift=1.7, t_min=low, t_max=high)
    kept = whole.quantile(middles(400_000))
    kept = kept[(kept >= low) & (kept <= high)]
    off, gaps = (cut.quantile(middles(len(kept))) - kept).abs(), kept.diff()
    assert (off[1:-1] <= 1.01 * torch.maximum(gaps[:-1], gaps[1:])).all()  # the grid's own resolution
    inside = torch.logit(kept[::997])
    ratio = cut.log_sigma_density(inside) / whole.log_sigma_density(inside)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 400_000 / len(kept)), rtol=2e-5, atol=0)
    outside = torch.logit(torch.tensor([low - 1e-6, high + 1e-6], dtype=torch.float64))
    assert (cut.log_sigma_density(outside) == 0).all()
    torch.testing.assert_close(cut.distribution(torch.logit(cut.quantile(middles(50)))), middles(50), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["uniform", "logit_normal", "cubic", "slots", "speed"])
def test_a_cut_discrete_path_keeps_whole_indices_and_their_proportions(name):
    path, keys = PATHS["ddpm_linear"](), {"edges": PAPER_EDGES} if name == "slots" else {}
    t = path.index_to_t(torch.tensor([23, 36])).float().tolist()  # one slot of the paper's, ends included
    whole = density_of("ddpm_linear", timesteps=timesteps(name, **keys)).cumulative.diff()
    cut = density_of("ddpm_linear", timesteps=timesteps(name, **keys), t_min=t[0], t_max=t[1])
    found = cut.cumulative.diff()
    expected = torch.zeros_like(whole)
    expected[23:37] = whole[23:37] / whole[23:37].sum()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    index = path.t_to_index(cut.quantile(middles(20_000)))
    assert index.unique().tolist() == list(range(23, 37))


# --- slots


def test_slots_of_the_paper_are_as_likely_as_each_other():
    path = PATHS["ddpm_linear"]()
    masses = density_of("ddpm_linear", **ON_INDICES["slots"]).cumulative.diff()
    edges = [int(edge) for edge in PAPER_EDGES]
    for low, high in itertools.pairwise(edges):
        expected = torch.full((high - low,), 0.1 / (high - low), dtype=torch.float64)
        torch.testing.assert_close(masses[low:high], expected, rtol=1e-9, atol=0)
    # Equal sums: the mean loss in a slot goes as 1 / width. The paper's last slot counts index 1000 too.
    assert (1001 - 277) / 5 == pytest.approx(144.8) and masses[0] / masses[-1] == pytest.approx(723 / 5, rel=1e-9)
    assert path.num_indices == edges[-1]


@pytest.mark.parametrize("spread", ["stratified", "low_discrepancy"])
@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("path", ["ddpm_linear", "rectified_flow"])
def test_a_spread_batch_goes_round_all_slots_equally(path, importance, spread):
    edges = [0.0, 0.1, 0.15, 0.6, 1.0] if path == "rectified_flow" else PAPER_EDGES
    config = DenoisingConfig(path=path, timesteps=timesteps("slots", edges=edges, importance=importance), spread=spread)
    the_path = PATHS[path]()
    sampler, slots = build_sampler(config, the_path, seed=3), len(edges) - 1
    for step in range(40):
        t, _ = draw(sampler, 6 * slots, 6 * slots * step)
        place = t.double() if path == "rectified_flow" else the_path.t_to_index(t).double()
        slot = torch.searchsorted(torch.tensor(edges[1:-1]).double(), place, right=True)
        assert torch.bincount(slot, minlength=slots).tolist() == [6] * slots


@pytest.mark.parametrize("path", ["ddpm_linear", "ddpm_cosine"])
def test_weighted_slots_are_unbiased_at_every_index(path):
    config = DenoisingConfig(path=path, timesteps=timesteps("slots", edges=PAPER_EDGES, importance=True))
    the_path = PATHS[path]()
    sampler = build_sampler(config, the_path, seed=4)
    drawn = density_of(path, **ON_INDICES["slots"]).cumulative.diff()
    t, importance = draw(sampler, 60_000)
    index = the_path.t_to_index(t)
    # p_t x importance_t = 1 / T at each index: the mean of any loss is its plain mean over the indices.
    torch.testing.assert_close(drawn[index] * importance, torch.full((60_000,), 1e-3).double(), rtol=2e-7, atol=0)
    assert len(index.unique()) > 990
    plain = build_objective(DenoisingConfig(path=path, timesteps=timesteps("uniform")), 0)
    log_sigma = torch.linspace(-4, 4, 81, dtype=torch.float64)
    torch.testing.assert_close(build_objective(config, 0).effective_weight(log_sigma), plain.effective_weight(log_sigma))


def test_weighted_slots_compose_with_shift_and_range():
    keys = dict(timesteps=timesteps("slots", edges=[0.0, 0.05, 0.4, 1.0], importance=True), shift=2.0, t_min=0.3, t_max=0.9)
    config = DenoisingConfig(**keys, spread="stratified")
    sampler = build_sampler(config, PATHS["rectified_flow"](), seed=5)
    t, importance = draw(sampler, 20_000)
    ordinary, _ = draw(TimestepSampler(build_density(config, PATHS["rectified_flow"]()), 5, "stratified"), 20_000)
    assert (t.sort().values - ordinary.sort().values).abs().max() < 2e-4  # they are drawn as without weights
    uniform = density_of("rectified_flow", timesteps=timesteps("uniform"), shift=2.0, t_min=0.3, t_max=0.9)
    wanted = uniform.quantile(middles(100_000)).square().mean().item()
    assert (importance.double() * t.double().square()).mean().item() == pytest.approx(wanted, rel=1e-4)


# --- where slots are cut


def test_slots_from_a_file_are_put_into_the_recorded_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_slot_edges(Path("edges.json"), PAPER_EDGES, "index")
    assert read_slot_edges(Path("edges.json"), "index") == PAPER_EDGES
    Path("run.toml").write_text(
        '[objective]\npath = "ddpm_linear"\ntimesteps.name = "slots"\ntimesteps.edges_path = "edges.json"\n'
    )
    config = load_config(["--job.config_file", "run.toml"], 1)
    assert config.objective.timesteps == timesteps("slots", edges=PAPER_EDGES)
    Path("edges.json").unlink()
    Path("recorded.toml").write_text(dump_config(config))
    assert load_config(["--job.config_file", "recorded.toml"], 1).objective == config.objective


@pytest.mark.parametrize(("content", "reason"), [
    (None, "No such file"),
    ("{", "no JSON"),
    (json.dumps({"unit": "t", "edges": [0, 0.5, 1]}), "unit is 't', objective.path needs 'index'"),
    (json.dumps({"unit": "index", "edges": [0, 900, 500, 1000]}), "must rise from 0 to 1000"),
])
def test_wrong_files_of_slots_are_refused_in_a_line(content, reason, tmp_path):
    file = tmp_path / "edges.json"
    if content is not None:
        file.write_text(content)
    config = DenoisingConfig(path="ddpm_linear", timesteps=timesteps("slots", edges_path=str(file)))
    ((key, text),) = objective_problems(config)
    assert key == "objective.timesteps.edges_path" and reason in text and "\n" not in text
