"""The one train loop: batch -> clean images -> objective -> backward -> clip -> optimizer -> EMA -> reports."""

import logging
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from data import DATASETS
from torchtitan.checkpoint.checkpointer import (
    Checkpointer,
    CheckpointError,
    checkpoint_path,
    checkpoint_steps,
    read_state,
    read_tensors,
)
from torchtitan.config.job import JobConfig
from torchtitan.diffusion.guidance import drop_labels
from torchtitan.diffusion.objective import LossTerms, Objective
from torchtitan.diffusion.timesteps.one_bin_per_microbatch import BinPureTimesteps
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepSampler
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps
from torchtitan.distributed.collectives import StopRequest, from_first_rank
from torchtitan.distributed.mesh import Layout, init_process_group, set_train_timeout
from torchtitan.distributed.parallelize import (
    accumulate_locally,
    average_gradients,
    clamp_gradients,
    clip_gradients,
    gradient_norm,
    named_parameters,
    parallelize,
    whole_gradient_norm,
)
from torchtitan.distributed.precision import compute_context
from torchtitan.evaluation.decoding import run_decoder
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import check_finite, check_fits, fill
from torchtitan.gns.batch_schedule import lr_multiple
from torchtitan.gns.capture import GradientTaps
from torchtitan.gns.monitor import GNSMonitor, inner_edges
from torchtitan.gns.rank_monitor import RankMonitor
from torchtitan.models import MODELS
from torchtitan.models.float8 import check_convertible, convert_to_float8
from torchtitan.models.flops import check_macs
from torchtitan.reports import Reports, checked_state
from torchtitan.runs.folder import RunFolder
from torchtitan.settings.record import effective
from torchtitan.supervision.heartbeat import remove_heartbeats
from torchtitan.supervision.phases import BEFORE_FIRST_STEP, Phases
from torchtitan.supervision.profiling import Profiler
from torchtitan.supervision.recovery import gone_back, require_finite_start, state_fault
from torchtitan.supervision.run_status import remove_status
from torchtitan.supervision.supervision import Supervision
from torchtitan.training.corrupt_images import CorruptImages
from torchtitan.training.data_loading import TrainingData, microbatches_per_step
from torchtitan.training.ema import EMABank
from torchtitan.training.lr_scheduler import lr_factor
from torchtitan.training.metrics import LossWindow
from torchtitan.training.numerical_guard import NumericalGuard, StepSamples, backward
from torchtitan.training.optimizer import build_optimizer, materialise_state, optimizer_tensors, set_lr

logger = logging.getLogger(__name__)


class Trainer:
    """Everything that one process holds of a run, and the loop over it."""

    def __init__(self, config: JobConfig) -> None:
        """Build the run, or resume it from its newest good checkpoint.

        Raises:
            AutoencoderError: before there is a process group.
            Busy: another process writes into the run's folder; on every rank.
            RunFolderError, MiscountedModel, CheckpointError, DatasetError, OptimizerError, Float8Error: on every rank,
                before anything is overwritten.
        """
        self.config = config
        self.decoder = run_decoder(config.autoencoder, config.data, config.draws_pictures)
        init_process_group(config.comm)
        self.layout = layout = Layout(config.parallelism)
        self.folder = RunFolder(config)
        self.phases = Phases()
        from_first_rank(check_macs, self._model_on_meta(), config.model.name)
        self._check_initial_weights()
        if config.float8.enable:
            check_convertible(self._model_on_meta(), config.float8, config.training.local_batch_size)
        from_first_rank(self._open_folder)
        torch.use_deterministic_algorithms(config.debug.deterministic)

        dataset = DATASETS[config.data.name](config.data, "train")
        self.info = DATASETS[config.data.name].info(config.data)
        self.objective = Objective(config.objective, config.debug.seed).to(layout.device)
        self.checkpointer = Checkpointer(self.folder.checkpoints, config.checkpoint, layout.rank)
        resumed_step = self.checkpointer.find() if config.checkpoint.enable else None
        self.model = self._build_model(new=resumed_step is None)
        edges = taps = None
        if config.gns.enable:
            edges = inner_edges(config.gns, self.objective.timestep_sampler.density, self.objective.path)
            self.objective.timestep_sampler = self._timestep_sampler(edges)
            taps = self._build_taps(edges) if config.gns.single_pass else None
        if config.float8.enable:
            convert_to_float8(self.model, config.float8)
        self.train_module = parallelize(
            self.model,
            layout,
            checkpointing=config.activation_checkpoint,
            compiling=config.compile,
            param_dtype=config.training.mixed_precision_param,
            reduce_dtype=config.training.mixed_precision_reduce,
        )
        self.parameters = named_parameters(self.model)
        beside = self.objective.parameters()
        self.optimizer = build_optimizer(
            self.parameters | beside, config.optimizer, self.model.blocks(),
            lr_scales=dict.fromkeys(beside, config.objective.uncertainty_lr_scale),
        )  # fmt: skip
        self.ema = EMABank(self.parameters, config.ema, config.training.global_batch_size)
        self.corrupt_images = CorruptImages(self.folder.path)
        self.data = TrainingData(
            dataset,
            config.data,
            info=self.info,
            seed=config.debug.seed,
            end_sample=config.training.steps * config.training.global_batch_size,
            global_batch_size=config.training.global_batch_size,
            local_batch_size=config.training.local_batch_size,
            rank=layout.rank,
            world_size=layout.world_size,
            pin_memory=layout.device.type == "cuda",
            on_unreadable=self.corrupt_images.record,
        )
        self.gns = self._build_gns(edges, taps) if config.gns.enable else None
        self.bin_edges = self._bin_edges(config.metrics.loss_bins)
        self.window = LossWindow(self.bin_edges, config.objective.heads)
        self.guard = NumericalGuard(
            config.training.max_skipped_steps, config.training.spike_threshold, layout.device, self.data.image_of
        )
        self.step = 0
        self.progress = 0  # in steps of training.global_batch_size: ahead of `step` once the batch has grown
        self.batch_size = config.training.global_batch_size  # of the step just made
        self.reported: dict = {}  # state of the reports in the checkpoint that the run resumes from
        if resumed_step is not None:
            self.resume(resumed_step)
        self.reports = Reports(self)
        self.profiler = Profiler(config.profiling, self.folder.path, layout, self.reports.excluded)
        self.supervision = Supervision(self)
        self._starting = True  # until this process has made its first step

    # ------------------------------------------------------------------ the loop

    def train(self) -> int:
        """Train to the last step, or to a signal.

        Returns:
            0, or 128 + the signal's number after a run that a signal interrupted and that was saved.

        Raises:
            CheckpointError: the last checkpoint could not be saved.
            TrainingError: a state that is not finite, at the start or with no checkpoint to go back to.
        """
        with self.supervision, StopRequest() as stop:
            with self.phases(BEFORE_FIRST_STEP):
                require_finite_start(self)
                self._settle_gradient_buckets()
            signal_number = self._loop(stop)
            with self.phases("finish"):
                if self.gns:
                    self.gns.flush()
                self.checkpointer.require_saved()
                self.reports.finish("interrupted" if signal_number else "completed")
        return 128 + signal_number if signal_number else 0

    def _loop(self, stop: StopRequest) -> int:
        signal_number, save_due = 0, False
        while not (self.last_step or signal_number):
            self.step += 1
            self.phases.step = self.step
            with self.profiler.step(self.step) as traced:
                with self.reports.excluded_step() if traced else nullcontext():
                    norm, lr = self.train_step()
                self._report(norm, lr)
            save_due |= self._due(self.config.checkpoint.interval)
            if gone_back(self, saving=save_due):
                save_due = False
                continue
            if self.config.validation.enable and self._due(self.config.validation.interval):
                with self.phases("validation"):
                    self.reports.validate()
            if self.config.sampling.enable and self._due(self.config.sampling.interval):
                with self.phases("sampling"):
                    self.reports.sample_grid()
            signal_number = stop.poll()
            if signal_number and not save_due and gone_back(self, saving=True):
                break  # to what is saved
            if signal_number or self.last_step or (save_due and not self.guard.in_doubt):
                save_due = False
                if self.config.checkpoint.enable:
                    with self.phases("checkpoint"):
                        self._save()
        return signal_number

    def _report(self, norm: Tensor, lr: float) -> None:
        with self.phases("report"):
            logged = self.step == 1 or self.step % self.config.metrics.log_freq == 0 or self.last_step
            if logged:
                self.reports.log(norm, lr)
            if self.gns and self._due(self.config.gns.log_interval):
                self.reports.log_gns()
            self.reports.advance()
            self.supervision.step_done(self.step, logged)

    def train_step(self) -> tuple[Tensor, float]:
        """One optimizer step, unless the guard has it skipped; returns the gradient norm before clipping and the rate."""
        config = self.config
        factor = self.batch_factor
        self.batch_size = factor * config.training.global_batch_size
        samples = GlobalBatch(self.data.next_sample, self.batch_size, self.data.attempt)
        microbatches = factor * self.data.microbatches_per_step
        if self.gns:
            self.gns.begin_step(self.step, self.optimizer.state, config.optimizer.beta2)
        for number in range(microbatches):
            with self.phases("data"):
                batch = self.to_device(self.data.next_batch())
            self._forward_backward(batch, samples, number, microbatches)
        with self.phases("gradients"):
            norms = self._treat_gradients(microbatches)
        lr = config.optimizer.lr * lr_factor(config.lr_scheduler, self.progress + 1, config.training.steps)
        lr *= lr_multiple(factor)
        set_lr(self.optimizer, lr)
        skip = self.guard.judge(StepSamples(self.step, samples, microbatches), *norms)
        self.objective.update(skip)
        if self.gns:
            self.gns.conclude(skip)
        with self.phases("optimizer"):
            self.optimizer.step(skip)
            self.optimizer.zero_grad(set_to_none=True)
        self.progress += factor
        with self.phases("ema"):
            self.ema.update(self.progress, factor)
        if self._starting:
            set_train_timeout(config.comm, self.layout)
            self.supervision.first_step_done()
            self._starting = False
        return norms[0], lr

    def to_device(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Images, sample numbers and labels of a microbatch, where the model is."""
        device = self.layout.device
        return tuple(batch[key].to(device, non_blocking=True) for key in ("images", "samples", "labels"))

    def _forward_backward(
        self, batch: tuple[Tensor, Tensor, Tensor], samples: GlobalBatch, number: int, microbatches: int
    ) -> None:
        reduce_now = number == microbatches - 1 or (self.gns is not None and self.gns.separate_microbatches)
        with accumulate_locally(self.train_module, last=reduce_now):
            with self.phases("forward"):
                terms = self.loss_terms(batch, samples, measure=self.gns is not None)
            with self.phases("backward"):
                # The mean over the global batch: ranks are averaged by the reduction, microbatches here.
                backward(terms.loss.mean() / microbatches)
        with self.phases("gradients"):
            if self.gns:
                self.gns.end_microbatch(terms.loss, microbatches, list(self.parameters.values()), samples, number)
            self.window.add(terms)
            self.objective.observe(samples, batch[1], terms)
            self.guard.add_loss(terms.weighted, microbatches)
            self.guard.add_images(batch[0], batch[1])

    def loss_terms(
        self, batch: tuple[Tensor, Tensor, Tensor], samples: GlobalBatch, *, measure: bool = False
    ) -> LossTerms:
        """Losses of a microbatch of a global batch; measure: tell the monitor of gradient noise that they begin."""
        images, indices, labels = batch
        draw = self.objective.draw(tuple(images.shape[1:]), samples, indices)
        condition = self._condition(labels, indices, samples.attempt)
        if measure:
            self.gns.begin_microbatch(draw.t)
        with self._compute_context():
            return self.objective.loss(self.train_module, images, condition, draw)

    def _treat_gradients(self, microbatches: int) -> list[Tensor]:
        """Measure the step's gradients, then clip them; returns the norm before that of the network's.

        What is trained beside the network has a norm of its own, the second if there is any, and is clipped by it: in one
        norm, u would scale the network's updates down, and grad_norm would not compare between runs with and without u.
        """
        training, parameters = self.config.training, list(self.parameters.values())
        if self.gns:
            self.gns.end_step(parameters, self.batch_size // self.layout.world_size, microbatches)
        clipped = [(parameters, gradient_norm(parameters, self.layout))]
        if beside := list(self.objective.parameters().values()):
            average_gradients(beside, self.layout)
            clipped.append((beside, whole_gradient_norm(beside)))
        for group, norm in clipped:
            if training.max_norm > 0:
                clip_gradients(group, norm, training.max_norm)
            if training.clip_value > 0:
                clamp_gradients(group, training.clip_value)
        return [norm for _, norm in clipped]

    def _condition(self, labels: Tensor, indices: Tensor, attempt: int) -> Tensor | None:
        null_class = self.model.null_class
        if null_class is None:
            return None
        return drop_labels(
            labels, null_class, self.config.model.label_dropout, self.config.debug.seed, indices, attempt
        )

    def _compute_context(self):
        return compute_context(
            self.config.training.mixed_precision_param, self.layout.device, self.layout.sharded
        )

    @property
    def batch_factor(self) -> int:
        """Times training.global_batch_size in the next step: more than 1 where the batch has grown."""
        wanted = self.gns.batch_factor if self.gns else 1
        return min(wanted, self.config.training.steps - self.progress)

    @property
    def last_step(self) -> bool:
        """Whether the run's last step has been made."""
        return self.progress >= self.config.training.steps

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self.last_step

    # ------------------------------------------------------------------ building

    def _open_folder(self) -> None:
        self.folder.open()
        remove_status(self.folder.path)
        remove_heartbeats(self.folder.path)

    def _build_model(self, new: bool) -> torch.nn.Module:
        model = self._model_on_meta()
        # Drawn whole on every rank, before sharding: the same weights on any layout.
        torch.manual_seed(self.config.debug.seed)
        model.to_empty(device=self.layout.device)
        model.init_weights()
        if new and self.config.checkpoint.initial_weights:
            fill(model, Path(self.config.checkpoint.initial_weights))
        return model.train()

    def _build_taps(self, edges: Tensor) -> GradientTaps:
        return GradientTaps(
            self.model,
            bin_edges=edges,
            local_batch_size=self.config.training.local_batch_size,
            sketch_size=self.config.gns.sketch_size,
            seed=self.config.debug.seed,
            adam=self.config.optimizer.name != "Muon",
            device=self.layout.device,
        )

    def _build_gns(self, edges: Tensor, taps: GradientTaps | None) -> GNSMonitor:
        config, ranks = self.config.gns, None
        if config.rank_gradients:
            ranks = RankMonitor(
                self.train_module,
                self.layout,
                microbatches=self.data.microbatches_per_step,
                num_bins=len(edges) + 1 if config.bin_pure_microbatches else None,
                half_life=config.half_life * (1 if config.bin_pure_microbatches else len(edges) + 1),
            )
        return GNSMonitor(
            config, objective=self.objective, edges=edges, taps=taps, ranks=ranks, layout=self.layout,
            folder=self.folder.path, global_batch_size=self.config.training.global_batch_size,
        )  # fmt: skip

    def _timestep_sampler(self, edges: Tensor) -> TimestepSampler:
        config, training = self.config, self.config.training
        ordinary = self.objective.timestep_sampler
        arguments = (ordinary.density, config.debug.seed, ordinary.spread)
        if config.gns.bin_pure_microbatches:
            parts = microbatches_per_step(
                training.global_batch_size, training.local_batch_size, self.layout.world_size
            )
            return BinPureTimesteps(*arguments, edges=edges, microbatches_per_step=parts)
        return AllocatedTimesteps(*arguments, edges=edges) if config.gns.allocate_timesteps else ordinary

    def _model_on_meta(self) -> torch.nn.Module:
        info = DATASETS[self.config.data.name].info(self.config.data)
        with torch.device("meta"):
            return MODELS[self.config.model.name].build(self.config.model, info.image_shape, info.num_classes)

    def _check_initial_weights(self) -> None:
        """Refuse weights that do not fit or are not finite before the run's folder is made. Raises CheckpointError."""
        path = self.config.checkpoint.initial_weights
        if path and not checkpoint_steps(self.folder.checkpoints):
            check_fits(Path(path), self._model_on_meta())
            check_finite(Path(path))

    def _bin_edges(self, bins: int) -> Tensor:
        quantiles = torch.arange(1, bins, dtype=torch.float64) / bins
        density = self.objective.timestep_sampler.density
        return density.quantile(quantiles).to(torch.float32).to(self.layout.device)

    def _settle_gradient_buckets(self) -> None:
        """Run one backward and throw it away.

        DDP arranges its buckets anew after the first backward, and the order of sums depends on them: without
        this, a resumed run would differ from a straight one in the last bit.
        """
        if self.layout.world_size == 1 or self.layout.sharded:
            return
        count = self.config.training.local_batch_size
        batch = {"images": torch.zeros(count, *self.info.image_shape), "samples": torch.arange(count)}
        batch["labels"] = torch.zeros_like(batch["samples"])
        self.loss_terms(self.to_device(batch), GlobalBatch(0, count)).loss.mean().backward()
        self.optimizer.zero_grad(set_to_none=True)
        if self.gns:
            self.gns.forget()

    # ------------------------------------------------------------------ state

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the run's state by name; the tensors themselves."""
        parts = {
            "model": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "objective": self.objective.tensors(),
            "optimizer": optimizer_tensors(self.optimizer, self.parameters | self.objective.parameters()),
            "ema": self.ema.tensors(),
            "gns": self.gns.tensors() if self.gns else {},
        }
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def state(self) -> dict:
        """Everything else of the run's state; called by all ranks, and equal on them but for `reports`, the first rank's."""
        return {
            "config": effective(self.config),
            "step": self.step,
            "progress": self.progress,
            "data": self.data.state_dict(),
            "corrupt_images": self.corrupt_images.state_dict(),
            "timestep_sampler": self.objective.timestep_sampler.state_dict(),
            "loss_window": self.window.state_dict(),
            "guard": self.guard.state_dict(),
            "reports": self.reports.state_dict(),
            "gns": self.gns.state_dict() if self.gns else {},
        }

    def _save(self) -> None:
        with self.reports.excluded():
            self.checkpointer.save(self.step, self.tensors(), self.state(), self._sync_outputs)
        # A save beside training is taken to come off: when it ends is not the same moment on every rank.
        if self.config.checkpoint.async_mode != "disabled" or self.checkpointer.wait() is None:
            self.guard.checkpoint_saved()

    def _sync_outputs(self) -> None:
        """Bring to the disk what a run that resumes finds beside its checkpoint; called beside training."""
        if self.gns:
            self.gns.sync()
        self.reports.sync()
        self.supervision.sync()

    def resume(self, step: int) -> None:
        """Be what the run was after a step, from its checkpoint; collective."""
        checkpoint = checkpoint_path(self.folder.checkpoints, step)
        materialise_state(self.optimizer)
        state, tensors = read_state(checkpoint), self.tensors()
        if self.gns and not self.gns.fits(state.get("gns", {})):
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("gns.")}
        read_tensors(checkpoint, tensors)
        if found := state_fault(self):
            raise CheckpointError(f"{checkpoint}: {found} (checkpoint.load_step resumes from an earlier one)")
        try:
            self._load_state(checkpoint, state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint}: state.json does not fit this run: {error!r}") from error

    def _load_state(self, checkpoint: AnyPath, state: dict) -> None:
        self.step = state["step"]
        self.progress = state.get("progress", self.step)
        images_left = (self.config.training.steps - self.progress) * self.config.training.global_batch_size
        self.data.load_state_dict(state["data"], images_left)
        self.corrupt_images.load_state_dict(state.get("corrupt_images", {}))
        gns_state = dict(state.get("gns", {}))
        try:
            self.objective.timestep_sampler.load_state_dict(state["timestep_sampler"])
        except ValueError as other:  # the sampler or its bins are others now
            logger.warning(f"the state of the timestep sampler in {checkpoint} is not gone on with: {other}")
            gns_state.pop("schedule", None)
        self.window.load_state_dict(state["loss_window"])
        self.guard.load_state_dict(state.get("guard", {}))
        self.reported = checked_state(state.get("reports", {}), self.step)
        if self.gns:
            self.gns.load_state_dict(gns_state, self.step)

    def close(self) -> None:
        """Stop the profiler and the loader's workers, let a save end, close the sinks, and leave the folder to others."""
        self.profiler.close()
        self.data.close()
        self.checkpointer.close()
        self.reports.close()
        self.folder.close()
