"""State of a run on one process: model, optimizer, averages, data and counters.

The loop is elsewhere: `torchtitan.trainer` advances the state from step to step, `torchtitan.reports` reads it, and
`torchtitan.state.resume` opens it, and takes it back to a checkpoint.
"""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import cast

import torch
from torch import Tensor

from torchtitan.checkpoint.checkpointer import Checkpointer
from torchtitan.conditions import Condition, Texts
from torchtitan.config.job import JobConfig
from torchtitan.data.base import Batch
from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.distributed.collectives import from_first_rank
from torchtitan.distributed.kernel_choices import kernel_choices
from torchtitan.distributed.mesh import Layout, init_process_group
from torchtitan.distributed.precision import compute_context
from torchtitan.errors import TrainingError
from torchtitan.gns.config import bin_edges
from torchtitan.runs.folder import RunFolder
from torchtitan.state.data import RunData
from torchtitan.state.network import RunNetwork
from torchtitan.state.preflight import (
    check_run,
    checked_decoder,
    checked_sample_metrics,
    open_folder,
    opened_alignment,
    opened_encoder,
)
from torchtitan.training.clock import ClockTotals
from torchtitan.training.ema import EMABank
from torchtitan.training.ema_snapshots import EMASnapshots
from torchtitan.training.metrics import LossWindow
from torchtitan.training.non_finite import not_finite
from torchtitan.training.numerical_guard import NumericalGuard
from torchtitan.training.optimizer import build_optimizer, optimizer_tensors
from torchtitan.training.schedules import largest_growth, ramp_factor


class RunState:
    """State of a run: everything in a checkpoint, and the objects that compute with it.

    Attributes:
        resumed_step: step of the checkpoint to resume from; None: the run begins.
        step: optimizer steps made, the one under way included.
        before_step: steps made and images seen before the one under way; None between steps.
        progress: the same in steps of training.global_batch_size: above `step` once the batch has grown.
        batch_size: images of the last step, over all ranks.
        branched_from: the `checkpoint.load_step` applied last, by this process or one before it.
        config_changes: changes of keys over resumes, as "after step 50: optimizer.lr: 0.002 -> 0.001".
        encodes_texts: whether the captions of each batch are encoded while the network trains.
        reported: state of the reports in the checkpoint that the run resumed from.
    """

    def __init__(self, config: JobConfig, folder: RunFolder) -> None:
        """Build the run as it is before its first step; collective.

        Raises:
            AutoencoderError: before there is a process group.
            Busy: another process writes into the run's folder; on every rank.
            ConfigError, EvaluationError, RunFolderError, MiscountedModel, CannotMeasure, CheckpointError, DatasetError,
                OptimizerError, Float8Error, KernelError: on every rank, before anything is overwritten.
        """
        self.config = config
        self.decoder = checked_decoder(config)
        init_process_group(config.comm)
        self.layout = layout = Layout(config.parallelism)
        self.sample_metrics = checked_sample_metrics(config, layout) if config.evaluation.enable else None
        self.folder = folder
        self.encoder = opened_encoder(config, layout)
        base_sha256 = check_run(config, layout, self.folder.checkpoints)
        self.alignment = opened_alignment(config, layout)
        from_first_rank(open_folder, self.folder)
        torch.use_deterministic_algorithms(config.debug.deterministic)

        data = RunData(config, layout, self.folder, None if self.encoder is None else self.encoder.training)
        self.data, self.info, self.corrupt_images = data.loader, data.info, data.corrupt_images
        self.data_record, self.teacher, self.listing = data.record, data.teacher, data.listing
        self.images_per_epoch, self._images_of_shapes = data.images_per_epoch, data.images_of_shapes
        edges = sampler_of = None
        if config.gns.enable:
            from torchtitan.gns.build import build_monitor, sampler_of_bins

            edges = bin_edges(config.gns, config.objective)
            sampler_of = sampler_of_bins(config.gns, edges, self.data.microbatches_per_step)
        self.objective = build_objective(config.objective, config.debug.seed, sampler_of)
        self.checkpointer = Checkpointer(self.folder.checkpoints, config.checkpoint, layout.rank)
        self.resumed_step = self.checkpointer.find() if config.checkpoint.enable else None
        self.network = RunNetwork(
            config, self.info, layout, self.objective, edges,
            num_shapes=len(self.shapes), base_sha256=base_sha256, new=self.resumed_step is None,
        )  # fmt: skip
        self.model, self.train_module = self.network.model, self.network.train_module
        self.parameters = self.network.parameters
        diagnostics = self.objective.diagnostics
        if self.alignment is not None:
            self.alignment.attach(self.model, self.objective)
            self.network.flops_beside = self.alignment.flops_per_image
            diagnostics = (*diagnostics, *self.alignment.diagnostics)
        self.encodes_texts = isinstance(self.model.condition_kind, Texts)
        self._drops = config.model.dropout > 0 or len(config.model.routed_blocks) > 0
        self.optimizer = build_optimizer(
            self.parameters | self.objective.parameters(), config.optimizer, self.model.blocks(),
            lr_scales=self.objective.lr_scales(), fan_in_ratios=self.network.fan_in_ratios,
        )  # fmt: skip
        self.ema = EMABank(self.parameters, config.ema, config.training.global_batch_size)
        self.snapshots = EMASnapshots(self.folder.path, config, self.ema, self.parameters)
        self.gns = None
        if edges is not None:
            if self.network.taps is not None:
                self.network.taps.attach(layout, self.optimizer.lr_scales())
            self.gns = build_monitor(
                config, self.objective, edges, self.network.taps, self.train_module, layout, self.folder.path,
                microbatches=self.data.microbatches_per_step, matrices=self.optimizer.matrices(),
            )  # fmt: skip
        self._precision = compute_context(config.training.mixed_precision_param, layout.device, layout.sharded)
        self.bin_edges = self._bin_edges(config.metrics.loss_bins)
        self.window = LossWindow(self.bin_edges, diagnostics)
        self.guard = NumericalGuard(config.training.max_skipped_steps, self.data.image_of)
        self._kernels = ExitStack()
        self.step = self.progress = 0
        self.before_step: tuple[int, int] | None = None
        self.batch_size = config.training.global_batch_size
        self.branched_from: int | None = None
        self.config_changes: list[str] = []
        self.reported: dict = {"results": {}, "clock": ClockTotals()}

    def choose_kernels(self) -> None:
        """Choose the kernels of `[training]` for this process, until `close`."""
        training = self.config.training
        self._kernels.enter_context(kernel_choices(training.attention_backend, training.float32_matmul_precision))

    # ------------------------------------------------------------------ where the run stands

    @property
    def grown_factor(self) -> int:
        """Multiple of training.global_batch_size to which the batch has grown; the last step may have fewer images."""
        training = self.config.training
        return ramp_factor(training.double_batch_after, self.progress * training.global_batch_size)

    @property
    def grown_batch_size(self) -> int:
        """Images of a step over all ranks, as far as the batch has grown; the last step may have fewer."""
        return self.grown_factor * self.config.training.global_batch_size

    @property
    def batch_grows(self) -> bool:
        """True if the batch may come to differ from training.global_batch_size."""
        return largest_growth(self.config) > 1

    @property
    def progress_before(self) -> int:
        return self.progress - self.batch_size // self.config.training.global_batch_size

    @property
    def last_step(self) -> bool:
        return self.progress >= self.config.training.steps

    @property
    def num_parameters(self) -> int:
        """Number of parameters that train."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def flops_per_image(self) -> int:
        """Floating-point operations of training on one image; of images of several shapes their mean over an epoch."""
        total = sum(count * self.network.flops_of(shape) for shape, count in self._images_of_shapes.items())
        return round(total / self.images_per_epoch)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Shapes (C, H, W) of the training images: one, or those of the buckets with images."""
        return list(self._images_of_shapes)

    # ------------------------------------------------------------------ the loss of a microbatch

    def to_device(self, batch: Batch) -> Batch:
        """Move a microbatch to the model's device."""
        return {name: value.to(self.layout.device, non_blocking=True) for name, value in batch.items()}

    def loss_terms(
        self, batch: Batch, samples: GlobalBatch, encoded: Condition = None, *, measure: bool = False
    ) -> LossTerms:
        """Losses of a microbatch of a global batch; encoded: its conditions, None where they are formed here."""
        images = batch["images"]
        draw = self.objective.draw(tuple(images.shape[1:]), samples, batch["samples"])
        condition = self.condition(batch, draw, encoded)
        kept = self.objective.kept(cast(Tensor, draw.dropping), self.config.model.label_dropout)
        if self._drops:
            steps_left = self.config.training.steps - self.progress
            self.model.draw_dropout(self.config.debug.seed, batch["samples"], samples.attempt, steps_left)
        microbatch = Microbatch(images, condition, batch, kept)
        aligned, features = self.alignment, None
        if aligned is not None and aligned.lasts(self.progress):
            draw = aligned.drawn(draw, batch["samples"], samples.attempt)
            # Before taps measure: the average's forward has no gradient.
            features = aligned.features(microbatch, draw, samples.attempt, self.ema)
        if measure and self.gns:
            self.gns.begin_microbatch(draw.t)
        with self._precision, nullcontext() if aligned is None or features is None else aligned.tapped():
            terms = self.objective.loss(self.train_module, microbatch, draw)
        if not isinstance(terms, LossTerms):  # a plugin's
            name = self.config.objective.name
            raise TrainingError(f"objective {name}: loss() returns {type(terms).__name__} (return LossTerms)")
        return terms if aligned is None else aligned.added(terms, features, draw)

    def condition(self, batch: Batch, draw: Draw, encoded: Condition = None) -> Condition:
        """Conditions of a microbatch as the network is trained on them: null ones where the draw drops them."""
        kind, dropped = self.model.condition_kind, cast(Tensor, draw.dropping) < self.config.model.label_dropout
        return kind.drop(kind.of(batch) if encoded is None else encoded, dropped)

    # ------------------------------------------------------------------ what is saved

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the run's state by name; the tensors themselves."""
        parts = {
            "model": self.network.tensors(),
            "objective": self.objective.tensors(),
            "optimizer": optimizer_tensors(self.optimizer, self.parameters | self.objective.parameters()),
            "ema": self.ema.tensors(),
            "gns": self.gns.tensors() if self.gns else {},
        }
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def held_gib(self) -> dict[str, float]:
        """GiB of this rank's device that every step holds, by part, after the first one; of activations and buffers no part."""
        trained = self.parameters | self.objective.parameters()
        parts: dict[str, Mapping[str, Tensor]] = {
            "gradients": trained, "optimizer": optimizer_tensors(self.optimizer, trained), "averages": self.ema.tensors(),
        }  # fmt: skip
        return self.network.held_gib(parts)

    @property
    def snapshot_due(self) -> bool:
        """True where the averages belong into a snapshot after the last step."""
        due = self.snapshots.due(self.progress, self.batch_size)
        return due or (self.snapshots.enabled and self.last_step)

    def save_snapshot(self) -> None:
        """Save a snapshot of the averages, of which samples are drawn without an alignment's projector; collective."""
        learned = self.objective.tensors()
        if self.alignment is not None:
            learned = self.alignment.left_out(learned)
        self.snapshots.save(self.step, self.progress, self.network.buffers(), learned)

    def fault(self) -> str:
        """Name the weights, averages and optimizer states that are not finite; "" if all are; collective."""
        measured = "gns."  # only looked at, never trained by
        return not_finite({name: tensor for name, tensor in self.tensors().items() if not name.startswith(measured)})

    def close(self) -> None:
        """Close: stop the loader's workers, let a save end, and restore the process's kernels."""
        self._kernels.close()
        self.data.close()
        self.checkpointer.close()

    def _bin_edges(self, bins: int) -> Tensor:
        quantiles = torch.arange(1, bins, dtype=torch.float64) / bins
        density = self.objective.timestep_sampler.density
        return density.quantile(quantiles).to(torch.float32).to(self.layout.device)
