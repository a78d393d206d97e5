"""Monitor of the gradient noise scale of every timestep bin while a model trains, called by the trainer.

A gradient's way through the room: in the backward each layer's tap measures it (taps.py; on measured steps by fresh projections,
projections.py), capture.py sums what the taps measured over a step and over the ranks, and step_sums.py brings the sums to the
host once the step counts. There pool.py leaves out outliers and adds the others to the decayed sums (decayed.py) of every
estimator (composite.py corrects measured steps by the free ones before them). Estimates are quotients of sums (statistics.py).
raw_sums.py writes every step to the disk. ranks.py measures without taps, on the gradients' way through the reduction.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from PIL import Image
from torch import Tensor, nn

from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, LogitNormal, Uniform
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps, bin_masses, bin_means
from torchtitan.distributed.mesh import Layout
from torchtitan.gns.allocate import (
    FROM_WEIGHT,
    PredictedRatio,
    SharesSchedule,
    neyman_shares,
    predicted_ratios,
    weight_shares,
)
from torchtitan.gns.batch_size import HalfProgress, half_progress
from torchtitan.gns.capture import GradientTaps
from torchtitan.gns.conclusion import logged, steps_to_know
from torchtitan.gns.config import GNS_FOLDER, GNSConfig, bin_tags, of_bins
from torchtitan.gns.decayed import BinEstimates, tags
from torchtitan.gns.pictures import draw_noise_scale
from torchtitan.gns.pool import ESTIMATORS, Agreement, Pool
from torchtitan.gns.ranks import RankMonitor
from torchtitan.gns.raw_sums import RawSums
from torchtitan.gns.step_sums import LateSums, StepSums

logger = logging.getLogger(__name__)



class GNSMonitor:
    """Monitor that measures, pools, logs and stores; its state is part of the checkpoint."""

    def __init__(
        self,
        config: GNSConfig,
        *,
        objective: Objective,
        edges: Tensor,
        taps: GradientTaps | None,
        ranks: RankMonitor | None,
        layout: Layout,
        folder: Path,
        adam: bool,
    ) -> None:
        """
        Args:
            objective: whose gradients are measured, with the timestep sampler in use.
            edges: inner edges of the bins in t.
            adam: whether the updates are Adam's, measured in its geometry or not.
        """
        self._config, self._objective, self._edges = config, objective, edges
        self._taps, self._ranks, self._layout, self._folder = taps, ranks, layout, folder / GNS_FOLDER
        self._adam = adam
        self.masses = bin_masses(objective.timestep_sampler.density, edges)  # [K], in the objective
        self.pool = Pool(taps.num_bins, len(taps.geometries), config.half_life) if taps else None
        self._raw = RawSums(self._folder, edges, len(taps.geometries)) if taps and layout.rank == 0 else None
        self._measured: StepSums | None = None  # of a step that no verdict has been given on
        self._late = LateSums()
        self._step, self._samples = 0, 0
        self._schedule = None
        if config.allocate_timesteps:
            self._schedule = SharesSchedule(
                self.masses, warmup=config.allocation_warmup, interval=config.allocation_interval
            )

    @property
    def separate_microbatches(self) -> bool:
        """True if every microbatch's gradient is reduced separately."""
        return self._ranks is not None and self._ranks.separate

    # ------------------------------------------------------------------ a step, in the order of calls

    def discard_backward(self) -> None:
        """Discard what a backward handed to the reduction."""
        if self._ranks:
            self._ranks.discard_backward()

    def begin_step(self, step: int, optimizer_state: dict[Tensor, dict], beta2: float) -> None:
        """Begin a step, before its first microbatch; collective on a measured step."""
        self._step = step
        if self._ranks:
            self._ranks.begin_step(step)
        if self._taps:
            self._taps.begin_step(step, step % self._config.interval == 0, optimizer_state, beta2, self._layout)

    def begin_microbatch(self, t: Tensor) -> None:
        """Begin a microbatch, before the forward of samples at times t [B]."""
        if self._taps:
            self._taps.begin_microbatch(t)

    def end_microbatch(
        self, loss: Tensor, microbatches: int, parameters: Sequence[nn.Parameter], samples: GlobalBatch, number: int
    ) -> None:
        """End a microbatch, after its backward; collective where microbatches are reduced separately.

        Args:
            loss: per-sample losses [B], whose mean over `microbatches` backward was given.
            microbatches: of each rank in this step.
            number: of this microbatch within the step.
        """
        if self._taps:
            self._taps.end_microbatch(len(loss) * microbatches, loss)
        if self._ranks:
            sampler = self._objective.timestep_sampler
            k = sampler.bin_of_microbatch(samples, number)
            of_bins = sampler.bin_importance()
            importance = 1.0 if k is None or of_bins is None else float(of_bins[k])
            self._ranks.end_microbatch(parameters, len(loss), k or 0, importance)

    def end_step(self, parameters: Sequence[nn.Parameter], samples_per_rank: int, microbatches: int) -> None:
        """End a step, after its last microbatch and before clipping; collective. Raises CannotMeasure."""
        if self._ranks:
            of_group = samples_per_rank // microbatches if self.separate_microbatches else samples_per_rank
            self._ranks.end_step(parameters, of_group)
        if self._taps:
            sums = self._taps.end_step(self._layout)
            importance = self._objective.timestep_sampler.bin_importance(sums.count.device)
            if importance is not None:  # what is measured is the objective, however its timesteps are drawn
                sums = sums.rescaled(1.0 / importance)
            self._measured = sums
        self._samples += samples_per_rank * self._layout.world_size

    def keep_step(self, skip: Tensor) -> None:
        """Keep the measurement of a step after its verdict, unless the step is skipped.

        A measured step sends its sums and those of the free steps before it to the host, which pools them in the next
        step, while the device computes. Only where the next step depends on them, the host waits.

        Args:
            skip: whether the optimizer leaves the step out, bool scalar, equal on all ranks.
        """
        if self._ranks:
            self._ranks.keep_step(skip)
        self._pool_received()
        if self._measured is not None:
            self._late.add(self._step, self._measured, skip)
            self._measured = None
        if self._step % self._config.interval:
            return
        self._late.send()
        if self._schedule:
            self.pool_kept_steps()
            measured = self._pooled.by_bin(*self._for_samplers)
            shares = self._schedule.update(self._step, self._samples, measured, stratified=self._stratified)
            if shares is not None:
                self._allocated.set_shares(shares)
                if self._layout.rank == 0:
                    logger.info(self._drawn_now(shares))

    def _drawn_now(self, shares: list[float]) -> str:
        """Line on new shares of the bins, by the one that is most above the objective's."""
        ends, masses = [0.0, *self._edges.tolist(), 1.0], self.masses.tolist()
        k = max(range(len(shares)), key=lambda each: shares[each] / masses[each])
        part = f"{shares[k]:.0%} of them in t from {ends[k]:.2g} to {ends[k + 1]:.2g}, where the objective has {masses[k]:.0%}"
        return f"step {self._step}: timesteps are drawn by measured noise now, {part}"

    # ------------------------------------------------------------------ what came of it

    def pool_kept_steps(self) -> None:
        """Pool all steps that were kept, after bringing their sums to the host; waits for the device."""
        self._pool_received()
        self._late.send()
        self._pool_received()
        if self._ranks:
            self._ranks.pool_kept_steps()

    def _pool_received(self) -> None:
        """Pool the steps sent to the host, in their order."""
        for step, sums in self._late.receive():
            if self.pool and not self.pool.add(sums) and self._layout.rank == 0:
                logger.warning(f"step {step}: left out of the gradient noise scale: its gradients are outliers")
            if self._raw:
                self._raw.add(step, sums)

    def metrics(self) -> dict[str, float]:
        """Metrics by tag, `gns/<geometry>/<estimator>/<bin or all>/<quantity>`; unknown ones are left out."""
        self.pool_kept_steps()
        found = bin_tags(self._edges.tolist()) | (self._ranks.metrics() if self._ranks else {})
        if self.pool and self.pool.outliers:
            found["gns/outlier_steps"] = float(self.pool.outliers)
        if self._ranks and self._ranks.separate:
            found["gns/reductions_per_step"] = float(self._ranks.microbatches)
        for geometry in self.pool.geometries if self.pool else ():
            headline = self._pooled.narrowest(geometry)
            for estimator in ESTIMATORS:
                prefix = f"gns/{geometry}/{estimator}"
                found |= tags(f"{prefix}/{{}}", self._pooled.by_bin(geometry, estimator))
                found |= tags(f"{prefix}/all", self._whole(geometry, estimator))
                found[f"{prefix}/all/headline"] = float(estimator == headline)
            parts = self._pooled.parts_of_whole(geometry, self.masses, self._stratified)
            found |= {f"gns/{geometry}/sketch/all/{name}": value for name, value in parts.items() if math.isfinite(value)}
        if half := self._half_progress():
            found |= tags("gns/half_progress/{}", half, ("batch", "lower", "upper"))
        if self.pool and not (whole := self._whole(*self._for_batch_size)).noise.isnan().all():
            found |= logged(self.predicted_ratios(), self._more_steps(whole))
        if self._schedule:
            shares = self._allocated.shares.tolist()
            found |= {f"gns/shares/{k}": share for k, share in enumerate(shares)}
        return found

    def predicted_ratios(self) -> list[PredictedRatio]:
        """Gradient variance of other timestep samplers over the present one's, for the same objective."""
        density, others = self._objective.timestep_sampler.density, {}
        multiplier = bin_means(density, self._edges, lambda t: self._objective.learned_weighting(t / (1.0 - t)))
        if multiplier.max() > 1.01 * multiplier.min():
            others[FROM_WEIGHT] = weight_shares(self.masses, multiplier)
        if not self._objective.learns_weights:
            # In proportion to pi_b sqrt(E[L^2]) of single samples: Nichol and Dhariwal, arXiv 2102.09672, eq. 18.
            others["loss_second_moment"] = neyman_shares(self.masses, self._pooled.mean_square_loss())
        for name, density in (("uniform", Uniform()), ("logit_normal", LogitNormal())):
            masses = bin_masses(density, self._edges)
            if (masses / self.masses - 1.0).abs().max() > 0.01:
                others[name] = masses
        return predicted_ratios(
            self.masses, self._pooled.by_bin(*self._for_samplers), others, stratified=self._stratified, present=self._present
        )

    def draw(self, points: Sequence[dict], global_batch_size: int) -> Image.Image | None:
        """Draw the picture of the run so far from its logged points; None if there is nothing to draw."""
        if not self.pool:
            return None
        self.pool_kept_steps()
        names = {geometry: self.pool.narrowest(geometry) for geometry in self.pool.geometries}
        estimates = {
            geometry: [self.pool.by_bin(geometry, name), *self.pool.agreement.estimates(geometry, self.pool.window(geometry))]
            for geometry, name in names.items()
        }
        points = [point for point in points if of_bins(point, self._edges.tolist())]
        shares = self.masses if self._present is None else self._present
        return draw_noise_scale(points, self._edges, estimates, global_batch_size, names, shares, self._half_progress())

    def flush(self) -> None:
        """Write the raw sums of all steps so far."""
        self.pool_kept_steps()
        self.sync()

    def sync(self) -> None:
        """Sync the raw sums on the host to the disk, if the disk allows; any thread may call it, during training."""
        if self._raw:
            self._raw.flush()

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the state by name, equal on all ranks."""
        return self._taps.tensors() if self._taps else {}

    def state_dict(self) -> dict:
        """Return the rest of the state, and the tensors' sizes."""
        self.pool_kept_steps()
        sizes = {name: len(tensor) for name, tensor in self.tensors().items()}
        parts = {name: part.state_dict() for name, part in self._parts.items() if part}
        return {"samples": self._samples, "sizes": sizes} | self._measured_as | parts

    def fits(self, state: dict) -> bool:
        """Check whether the tensors of a state have this monitor's number and sizes."""
        return state.get("sizes") == {name: len(tensor) for name, tensor in self.tensors().items()}

    def load_state_dict(self, state: dict, step: int) -> None:
        """Resume after a step; quantities that the state lacks are measured anew from there."""
        self._late.clear()
        self._measured = None
        self._samples = state.get("samples", 0)
        differing = [name for name, present in self._measured_as.items() if state.get(name, present) != present]
        if differing and self._layout.rank == 0:
            logger.warning(f"gns: other {' and '.join(differing)} than at step {step}: noise scales are measured anew")
        for name, part in self._parts.items():
            if part and name in state and not differing:
                part.load_state_dict(state[name])
        if self._raw:
            self._raw.cut(step)

    @property
    def _measured_as(self) -> dict[str, list]:
        """Edges of the bins, and geometries: sums of others are not resumed."""
        geometries = list(self.pool.geometries) if self.pool else []
        return {"edges of timestep bins": self._edges.tolist(), "geometries": geometries}

    @property
    def _parts(self) -> dict[str, Pool | Agreement | RankMonitor | SharesSchedule | None]:
        agreement = self.pool.agreement if self.pool else None
        return {"pool": self.pool, "agreement": agreement, "ranks": self._ranks, "schedule": self._schedule}

    @property
    def _allocated(self) -> AllocatedTimesteps:
        return cast(AllocatedTimesteps, self._objective.timestep_sampler)  # with allocate_timesteps

    @property
    def _present(self) -> Tensor | None:
        """Shares of the bins in the present draws, [K], where these are not the objective's."""
        importance = self._objective.timestep_sampler.bin_importance()
        return None if importance is None else self.masses / importance

    @property
    def _pooled(self) -> Pool:
        assert self.pool is not None, "measured with taps alone"
        return self.pool

    @property
    def _stratified(self) -> bool:
        return self._objective.timestep_sampler.spread != "none"

    def _whole(self, geometry: str, estimator: str) -> BinEstimates:
        as_drawn = not (self._stratified or self._config.allocate_timesteps or self._config.bin_pure_microbatches)
        return self._pooled.whole(geometry, estimator, None if as_drawn else self.masses, self._stratified)

    def _more_steps(self, whole: BinEstimates) -> int | None:
        """Further steps that would give the noise scale of the whole objective an upper end; None: not known."""
        return steps_to_know(whole.signal.item(), whole.signal_stderr.item(), whole.steps.item(), self._config.interval)

    @property
    def _for_batch_size(self) -> tuple[str, str]:
        """Plain geometry, which predicts half-progress of single bins (the whole: not measured), and its estimator."""
        geometry = self._pooled.geometries[0]
        return geometry, self._pooled.narrowest(geometry)

    @property
    def _for_samplers(self) -> tuple[str, str]:
        """Geometry of the updates, Adam's if measured, in which allocation and ramps were tested; its estimator."""
        geometry = self._pooled.geometries[-1]
        return geometry, self._pooled.narrowest(geometry)

    def _half_progress(self) -> HalfProgress | None:
        """Half-progress batches by bin; None where updates are not Adam's, for which no ratio was measured."""
        if not self.pool or not self._adam:
            return None
        return half_progress(self.pool.by_bin(*self._for_batch_size))
