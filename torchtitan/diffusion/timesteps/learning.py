"""Learning timestep samplers: they choose the timesteps by the losses of the run.

Their state is a function of the losses in the order of the samples' numbers: the same on every rank, and on any number
of ranks with the same losses. It changes after each step, so that a step is drawn from earlier steps' losses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.diffusion.paths import IndexedPath, Path, indexed
from torchtitan.diffusion.timesteps.placement import Density, Placement, SmoothDensity
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepsConfig, uniform_density
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps
from torchtitan.settings import setting

HISTORY = 10  # losses kept of each index, as in improved DDPM
SECOND_MOMENT_FLOOR = 0.001  # share of the objective's own density, as in improved DDPM
NUM_BINS = 100
BINNED_FLOOR = 0.01
# Losses of the mean of all that every bin is thought to have had before its first. Few: a bin that is drawn as rarely as
# the floor allows has weight 3 at the default half-life, and may have a ten-thousandth of the mean loss.
_PRIOR_LOSSES = 0.02
# Outside of these quantiles of the density, and beyond what float64 tells from t = 1, bins of ln sigma are open.
_TAIL = 1e-3
_LOG_SIGMA_LIMIT = 30.0


class LearningTimesteps(AllocatedTimesteps):
    """Learning sampler: shares that follow from losses, by rules of the classes below.

    The loss of a sample is the objective's, whole, before importance. Non-finite losses and skipped steps are ignored.

    Attributes:
        keeps_objective: whether importance weights undo the effect of the shares on the mean loss.
    """

    name: str
    keeps_objective = True

    def __init__(self, density: Density, seed: int, spread: str = "none", *, edges: Tensor) -> None:
        super().__init__(density, seed, spread, edges=edges)
        self._seen: Tensor | None = None  # [2, B] of the step under way: losses, K - bins; 0 of a sample not seen
        self._state = {key: value.to(torch.float64) for key, value in self._fresh_state().items()}

    def sample(
        self, batch: GlobalBatch, indices: Tensor, drawn: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw timesteps: see AllocatedTimesteps.sample; all weights are 1 where the objective is not kept."""
        t, importance = super().sample(batch, indices, drawn)
        return t, importance if self.keeps_objective else torch.ones_like(importance)

    def observe(self, batch: GlobalBatch, indices: Tensor, t: Tensor, loss: Tensor) -> None:
        """Observe the losses of a microbatch."""
        if self._seen is None:
            self._move(loss.device)
            self._seen = torch.zeros(2, batch.size, dtype=torch.float64, device=loss.device)
        bins = torch.bucketize(t, self.edges)
        loss = loss.detach().to(torch.float64)
        if self.keeps_objective:
            _, lookup = self._tables_on(loss.device)
            loss = loss / lookup.stretch.index_select(0, bins)
        seen = torch.stack((loss, (len(self.masses) - bins).to(torch.float64)))
        self._seen.index_copy_(1, indices - batch.first_sample, seen)

    def update(self, skip: Tensor) -> None:
        """Update from the step; collective: one sum of 16 bytes per sample over the ranks. Never waits for the device.

        Args:
            skip: whether the optimizer leaves this step out, bool scalar, equal on all ranks.
        """
        seen, self._seen = self._seen, None
        assert seen is not None, "update() without observe()"
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(seen)  # each sample has been seen by one rank and is 0 on the others: exact
        ignored = ~(seen[0].abs() < torch.inf) | skip
        losses, from_the_last = seen.masked_fill_(ignored, 0.0)
        self._learn(len(self.masses) - from_the_last.long(), losses)
        self._use(self._wanted_shares())

    def state_dict(self) -> dict:
        """Return the learned state as plain numbers, which JSON holds exactly."""
        state = {key: value.tolist() for key, value in self._state.items()} | {"shares": self.shares.tolist()}
        return {"sampler": self.name, "edges": self.edges.tolist(), **state}

    def load_state_dict(self, state: dict) -> None:
        """Resume a state, {} in a new run. Raises ValueError: of another sampler or other bins."""
        self._seen = None
        fresh = {key: value.to(torch.float64) for key, value in self._fresh_state().items()}
        fresh["shares"] = self.masses.clone()
        if state:
            if state.get("sampler") != self.name:
                raise ValueError(f"it is not of {self.name}")
            found = {key: torch.tensor(state[key], dtype=torch.float64) for key in fresh}
            if state["edges"] != self.edges.tolist() or any(found[key].shape != fresh[key].shape for key in fresh):
                raise ValueError("it has other bins of timesteps")
            fresh = found
        self._state = {key: value.to(self.masses.device) for key, value in fresh.items()}
        # Kept, because another device would find them again only up to rounding.
        self._use(self._state.pop("shares"))

    def _fresh_state(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _learn(self, bins: Tensor, losses: Tensor) -> None:
        """Learn from losses [B] in bins [B] of a global batch, in the order of sample numbers; bin K does not count."""
        raise NotImplementedError

    def _wanted_shares(self) -> Tensor:
        raise NotImplementedError

    def _move(self, device: torch.device) -> None:
        if self.masses.device == device:
            return
        for name in ("edges", "masses", "shares"):
            setattr(self, name, getattr(self, name).to(device))
        self._bins = self._bins.on(device)
        self._state = {key: value.to(device) for key, value in self._state.items()}
        self._use(self.shares)

    def _mixed(self, wanted: Tensor, floor: float) -> Tensor:
        """Shares as `wanted`, mixed with a floor of the masses; these alone where `wanted` is all 0 or not finite."""
        total = wanted.sum()
        mixed = floor * self.masses + (1.0 - floor) * wanted / total
        return torch.where((total > 0) & (total < torch.inf), mixed, self.masses)


@dataclass(kw_only=True)
class LearningConfig(TimestepsConfig):
    """Sampler that starts from uniform timesteps, the density of its mean loss, and learns from losses."""

    learns = True

    def density(self, path: Path) -> SmoothDensity:
        return uniform_density(path)


class LossSecondMoment(LearningTimesteps):
    """Second moment of the loss: every index by the root mean square of its last 10 losses, times its mass.

    With 0.001 of the density itself mixed in, and importance weights; the density alone until every index has had 10
    losses. Source: Nichol and Dhariwal, "Improved denoising diffusion probabilistic models", arXiv 2102.09672, eq. 18.
    """

    name = "loss_second_moment"

    def _fresh_state(self) -> dict[str, Tensor]:
        bins = len(self.masses)
        return {"losses": torch.zeros(bins, HISTORY), "count": torch.zeros(bins)}

    def _learn(self, bins: Tensor, losses: Tensor) -> None:
        history, count = self._state["losses"], self._state["count"].long()
        num_bins = len(count)
        ordered, order = bins.sort(stable=True)
        # Of each bin, and in the last place of what does not count. (`bincount` would wait for the device.)
        counts = bins.new_zeros(num_bins + 1).scatter_add_(0, bins, torch.ones_like(bins))
        places = torch.arange(len(bins), device=bins.device)
        left = counts.cumsum(0).index_select(0, ordered) - places  # of the bin's losses of this batch, from each on
        counts[:-1] += count
        column = (counts.index_select(0, ordered) - left) % HISTORY
        row = ordered.masked_fill(left > HISTORY, num_bins)
        extended = torch.cat((history, history.new_zeros(1, HISTORY)))
        extended[row, column] = losses[order]
        self._state = {"losses": extended[:-1], "count": counts[:-1].to(torch.float64)}

    def _wanted_shares(self) -> Tensor:
        root_mean_square = self._state["losses"].square().mean(1).sqrt()
        ready = ((self._state["count"] >= HISTORY) | self._bins.empty).all()
        return self._mixed(self.masses * root_mean_square * ready, SECOND_MOMENT_FLOOR)


@dataclass(kw_only=True)
class LossSecondMomentConfig(LearningConfig):
    """Indices of a discrete DDPM path by the root mean square of their last losses."""

    def sampler(self, placement: Placement, seed: int, spread: str) -> LossSecondMoment:
        if not placement.path.discrete:
            raise ValueError("loss_second_moment keeps losses of every index, and the path has no integer ones")
        density = placement.on_path(self.density(placement.path))
        return LossSecondMoment(density, seed, spread, edges=index_edges(indexed(placement.path)))

    def problems(self, path: Path, path_name: str) -> Iterator[tuple[str, str]]:
        yield from super().problems(path, path_name)
        if not path.discrete:
            yield "name", (
                f"{self.name} keeps losses of every integer index, and objective.path = {path_name} has none (use"
                " ddpm_linear or ddpm_cosine, or adaptive_log_snr)"
            )


class _BinnedLoss(LearningTimesteps):
    """Binned loss: bins by their share of the mean loss under the objective's density: mass x running mean.

    A mean loses half of its weight with every `half_life` samples of the run. 0.01 of the density is mixed in.
    """

    def __init__(self, density: Density, seed: int, spread: str = "none", *, edges: Tensor, half_life: float) -> None:
        """half_life: in samples, > 0; see AllocatedTimesteps for the others."""
        self._half_life = half_life
        super().__init__(density, seed, spread, edges=edges)

    def _fresh_state(self) -> dict[str, Tensor]:
        return {"sum": torch.zeros(len(self.masses)), "weight": torch.zeros(len(self.masses))}

    def _learn(self, bins: Tensor, losses: Tensor) -> None:
        counted = (bins < len(self.masses)).to(torch.float64)
        decay = torch.exp2(-counted.sum() / self._half_life)
        values = torch.stack((losses, counted), dim=1)  # [B, 2]
        sums = _sums_by_bin(bins, values, len(self.masses) + 1)[:-1]
        self._state = {
            "sum": decay * self._state["sum"] + sums[:, 0], "weight": decay * self._state["weight"] + sums[:, 1],
        }  # fmt: skip

    def _wanted_shares(self) -> Tensor:
        total, weight = self._state["sum"], self._state["weight"]
        unmet = weight <= 0
        met = self.masses.masked_fill(unmet, 0.0)
        # Under the density, not under the shares, which lean to where losses are large. NaN before the first loss.
        overall = (met * total / weight.masked_fill(unmet, 1.0)).sum() / met.sum()
        mean = (total + _PRIOR_LOSSES * overall) / (weight + _PRIOR_LOSSES)
        return self._mixed(self.masses * mean.clamp_min(0.0), BINNED_FLOOR)


class TimeWarping(_BinnedLoss):
    """Time warping t = F^-1(u) of uniform u, F piecewise linear, fitted to the loss below t: stretches of equal loss.

    Without importance weights: timesteps of much loss count more. F has 100 pieces, of equal mass in the density.

    Source: Dieleman et al., "Continuous diffusion for categorical data", arXiv 2211.15089, section 4. F there is fitted
    to a cross-entropy, which itself rises with t; a squared error does not, and is summed up to t here.
    """

    name = "time_warping"
    keeps_objective = False


class AdaptiveLogSNR(_BinnedLoss):
    """Adaptive ln snr, in proportion to weight x running mean of the noise's squared error, with importance weights.

    That is the share of the mean loss under the density, in 100 bins of equal width in ln snr; within a bin timesteps
    follow the density. Source: Kingma and Gao, "Understanding diffusion objectives as the ELBO with simple data
    augmentation", arXiv 2303.00848, the adaptive noise schedule.
    """

    name = "adaptive_log_snr"


@dataclass(kw_only=True)
class BinnedLossConfig(LearningConfig):
    """Keys of the samplers that keep a running mean of the loss in bins."""

    half_life: float = setting(20000.0, "half-life of an observed loss, in images", ge=1)


@dataclass(kw_only=True)
class TimeWarpingConfig(BinnedLossConfig):
    """Equal stretches of equal loss."""

    def sampler(self, placement: Placement, seed: int, spread: str) -> TimeWarping:
        density = placement.on_path(self.density(placement.path))
        return TimeWarping(density, seed, spread, edges=equal_mass_edges(density), half_life=self.half_life)


@dataclass(kw_only=True)
class AdaptiveLogSNRConfig(BinnedLossConfig):
    """Noise levels by their share of the mean loss."""

    def sampler(self, placement: Placement, seed: int, spread: str) -> AdaptiveLogSNR:
        density = placement.on_path(self.density(placement.path))
        return AdaptiveLogSNR(density, seed, spread, edges=equal_width_edges(density), half_life=self.half_life)


def _sums_by_bin(bins: Tensor, values: Tensor, num_bins: int) -> Tensor:
    """Sums by bin of values [B, N] in bins [B], [K, N], each always in the same order."""
    sums = values.new_zeros(num_bins, values.shape[1])
    if sums.device.type == "cpu":
        return sums.index_add_(0, bins, values)  # one after another
    return sums.index_put_((bins,), values, accumulate=True)  # sorted first, where index_add_ would race


def index_edges(path: IndexedPath) -> Tensor:
    """Edges in t between all indices of a discrete path, float32 [T - 1]."""
    return path.index_to_t(torch.arange(path.num_indices - 1) + 0.5).to(torch.float32)


def equal_mass_edges(density: Density) -> Tensor:
    """Inner edges in t of 100 bins of equal mass, float32 [99]."""
    return density.quantile(torch.arange(1, NUM_BINS, dtype=torch.float64) / NUM_BINS).to(torch.float32)


def equal_width_edges(density: Density) -> Tensor:
    """Inner edges in t of 100 bins, all but the two outermost of equal width in ln sigma, float32 [99]."""
    ends = torch.logit(density.quantile(torch.tensor([_TAIL, 1.0 - _TAIL], dtype=torch.float64)))
    low, high = ends.clamp(-_LOG_SIGMA_LIMIT, _LOG_SIGMA_LIMIT).tolist()
    return torch.sigmoid(torch.linspace(low, high, NUM_BINS - 1, dtype=torch.float64)).to(torch.float32)
