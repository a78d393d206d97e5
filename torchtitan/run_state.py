"""State of a run on one process: model, optimizer, averages, data and counters; built, saved and resumed as one.

The loop is elsewhere: `torchtitan.trainer` advances the state from step to step, `torchtitan.reports` reads it, and
`torchtitan.supervision` resumes it from an earlier checkpoint after a fault.
"""

import functools
import logging
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from torchtitan.checkpoint.checkpointer import (
    BRANCHED_FROM,
    Checkpointer,
    checkpoint_path,
    read_state,
    read_tensors_together,
)
from torchtitan.conditions import Condition, Texts
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import cache_folder
from torchtitan.data import DATASETS, dataset_info
from torchtitan.data.base import Batch, DatasetError
from torchtitan.diffusion.objective import LossTerms, Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.distributed.collectives import from_first_rank, group_for_work
from torchtitan.distributed.kernel_choices import check_attention, kernel_choices
from torchtitan.distributed.mesh import Layout, init_process_group
from torchtitan.distributed.parallelize import local, named_parameters, parallelize, release_unsharded
from torchtitan.distributed.precision import DTYPES, compute_context
from torchtitan.distributed.shard_drawing import place_shards
from torchtitan.errors import CheckpointError
from torchtitan.evaluation.config import LATENT_DATASETS
from torchtitan.evaluation.dataset_images import DatasetImages
from torchtitan.evaluation.decoding import run_decoder
from torchtitan.evaluation.sample_metrics import SampleMetrics
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import saved_buffers
from torchtitan.gns.capture import check_measurable
from torchtitan.gns.config import bin_edges
from torchtitan.gns.of_run import build_monitor, build_taps, sampler_of_bins
from torchtitan.models.adapters.adapters import draw_adapter_dropout, trained_parameters
from torchtitan.models.adapters.flops import training_flops
from torchtitan.models.adapters.frozen_network import quantized_kind
from torchtitan.models.base import DiffusionModel
from torchtitan.models.float8 import check_convertible, compute_gather_scales, convert_to_float8
from torchtitan.models.flops import check_macs
from torchtitan.models.magnitude import normalize_rows, normalized_weights
from torchtitan.runs.folder import RunFolder
from torchtitan.runs.status import remove_status
from torchtitan.settings.record import effective
from torchtitan.training.batch_ramp import largest_growth, ramp_factor
from torchtitan.training.buckets import images_of_shapes
from torchtitan.training.clock import ClockTotals
from torchtitan.training.corrupt_images import CorruptImages
from torchtitan.training.data_loading import TrainingData, microbatches_per_step
from torchtitan.training.ema import EMABank
from torchtitan.training.ema_snapshots import EMASnapshots
from torchtitan.training.lr_scheduler import schedule_changes
from torchtitan.training.metrics import LossWindow, checked_lines
from torchtitan.training.non_finite import not_finite
from torchtitan.training.numerical_guard import NumericalGuard
from torchtitan.training.optimizer import build_optimizer, materialise_state, optimizer_tensors
from torchtitan.weights.data_changes import IMAGES, data_changes
from torchtitan.weights.initial_weights import check_initial_weights
from torchtitan.weights.model_record import RECORD, record_of
from torchtitan.weights.network import (
    BASE_SHA256,
    add_adapters,
    check_adapters,
    check_base,
    drawn_sha256,
    frozen_sha256,
    network_on_meta,
    new_network,
    sharded_network,
)

logger = logging.getLogger(__name__)


class RunState:
    """State of a run: everything in a checkpoint, and the objects that compute with it.

    Attributes:
        step: optimizer steps made.
        progress: the same in steps of training.global_batch_size: above `step` once the batch has grown.
        batch_size: images of the last step, over all ranks.
        branched_from: the `checkpoint.load_step` applied last, by this process or one before it.
        reported: state of the reports in the checkpoint that the run resumed from.
    """

    def __init__(self, config: JobConfig) -> None:
        """Build the run, or resume it from its newest good checkpoint; collective.

        Raises:
            AutoencoderError: before there is a process group.
            Busy: another process writes into the run's folder; on every rank.
            EvaluationError, RunFolderError, MiscountedModel, CannotMeasure, CheckpointError, DatasetError, OptimizerError,
                Float8Error, KernelError: on every rank, before anything is overwritten.
        """
        self.config = config
        if config.cache.enable:
            raise DatasetError(f"cache.enable: {cache_folder(config)} is not filled yet (scripts/train.sh fills it)")
        self.decoder = run_decoder(config.autoencoder, config.data, config.draws_pictures)
        init_process_group(config.comm)
        self.layout = layout = Layout(config.parallelism)
        self.sample_metrics = self._sample_metrics() if config.evaluation.enable else None
        self.folder = RunFolder(config)
        from_first_rank(check_macs, _model_on_meta(config), config.model.name)
        base_sha256 = check_initial_weights(config, dataset_info(config.data), self.folder.checkpoints)
        if config.lora.enable:
            check_adapters(config, dataset_info(config.data))
        if config.float8.enable:
            shapes = dataset_info(config.data).shapes
            check_convertible(_model_on_meta(config), config.float8, config.training.local_batch_size, shapes, layout.degree)
        if config.gns.enable and config.gns.single_pass:
            check_measurable(_model_on_meta(config))
        self._check_attention()
        from_first_rank(self._open_folder)
        torch.use_deterministic_algorithms(config.debug.deterministic)

        dataset = DATASETS[config.data.name](config.data, "train")
        self.images_per_epoch = len(dataset)
        self.info = dataset_info(config.data)
        self._images_of_shapes = images_of_shapes(dataset, self.info)
        edges = sampler_of = taps = None
        if config.gns.enable:
            edges = bin_edges(config.gns, config.objective)
            training = config.training
            microbatches = microbatches_per_step(training.global_batch_size, training.local_batch_size, layout.data_ranks)
            sampler_of = sampler_of_bins(config.gns, edges, microbatches)
        self.objective = build_objective(config.objective, config.debug.seed, sampler_of)
        self.checkpointer = Checkpointer(self.folder.checkpoints, config.checkpoint, layout.rank)
        resumed_step = self.checkpointer.find() if config.checkpoint.enable else None
        self.model, shards = self._build_model(new=resumed_step is None)
        self.objective.attach(self.model)
        self.objective.to(layout.device)
        if edges is not None and config.gns.single_pass:
            taps = build_taps(config, self.model, edges, layout)
        if config.float8.enable:
            convert_to_float8(self.model, config.float8)
        self.train_module = parallelize(
            self.model,
            layout,
            checkpointing=config.activation_checkpoint,
            compiling=config.compile,
            objective=self.objective,
            sharding=config.parallelism,
            param_dtype=config.training.mixed_precision_param,
            reduce_dtype=config.training.mixed_precision_reduce,
            num_shapes=len(self.shapes),
            cpu_offload=config.training.enable_cpu_offload,
        )
        if shards:
            place_shards(self.model, shards, on_host=config.training.enable_cpu_offload)
        if config.lora.enable:
            self._base_sha256 = frozen_sha256(config, base_sha256 or drawn_sha256(self.model))
        self.parameters = trained_parameters(named_parameters(self.model))
        self._normalized = normalized_weights(self.model)
        beside = self.objective.parameters()
        self.optimizer = build_optimizer(
            self.parameters | beside, config.optimizer, self.model.blocks(),
            lr_scales=self.objective.lr_scales(),
        )  # fmt: skip
        self.ema = EMABank(self.parameters, config.ema, config.training.global_batch_size)
        self.snapshots = EMASnapshots(self.folder.path, config, self.ema, self.parameters)
        self.corrupt_images = CorruptImages(self.folder.path)
        self.data = TrainingData(
            dataset,
            config.data,
            info=self.info,
            seed=config.debug.seed,
            end_sample=config.training.steps * config.training.global_batch_size,
            global_batch_size=config.training.global_batch_size,
            local_batch_size=config.training.local_batch_size,
            rank=layout.data_rank,
            world_size=layout.data_ranks,
            pin_memory=layout.device.type == "cuda",
            on_unreadable=self.corrupt_images.record,
        )
        self.gns = None
        if edges is not None:
            self.gns = build_monitor(
                config, self.objective, edges, taps, self.train_module, layout, self.folder.path,
                microbatches=self.data.microbatches_per_step,
            )  # fmt: skip
        param_dtype = config.training.mixed_precision_param
        self._precision = compute_context(param_dtype, layout.device, layout.sharded)
        self.bin_edges = self._bin_edges(config.metrics.loss_bins)
        self.window = LossWindow(self.bin_edges, self.objective.diagnostics)
        self.guard = NumericalGuard(
            config.training.max_skipped_steps, config.training.spike_threshold, layout.device, self.data.image_of,
            zeroes=config.training.non_finite_gradients == "zero",
        )  # fmt: skip
        self._kernels = ExitStack()
        self.step = 0
        self.progress = 0
        self.batch_size = config.training.global_batch_size
        self.branched_from: int | None = None
        self.reported: dict = {}
        if resumed_step is None:
            self.snapshots.load_state_dict([], 0)
            if self.gns:
                self.gns.load_state_dict({}, 0)  # cuts what a process that was killed before its first checkpoint has written
        else:
            self.resume(resumed_step)
        training = config.training
        self._kernels.enter_context(kernel_choices(training.attention_backend, training.float32_matmul_precision))

    # ------------------------------------------------------------------ where the run stands

    @property
    def batch_factor(self) -> int:
        """Batch factor: multiple of training.global_batch_size in the next step; above 1 once the batch has grown."""
        return min(self._grown_factor, self.config.training.steps - self.progress)

    @property
    def _grown_factor(self) -> int:
        training = self.config.training
        return ramp_factor(training.double_batch_after, self.progress * training.global_batch_size)

    @property
    def grown_batch_size(self) -> int:
        """Images of a step over all ranks, as far as the batch has grown; the last step may have fewer."""
        return self._grown_factor * self.config.training.global_batch_size

    @property
    def batch_grows(self) -> bool:
        """True if the batch may come to differ from training.global_batch_size."""
        return largest_growth(self.config) > 1

    @property
    def progress_before(self) -> int:
        """Progress before the last step."""
        return self.progress - self.batch_size // self.config.training.global_batch_size

    @property
    def last_step(self) -> bool:
        """True after the run's last step."""
        return self.progress >= self.config.training.steps

    @property
    def num_parameters(self) -> int:
        """Number of parameters that train."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def flops_per_image(self) -> int:
        """Floating-point operations of training on one image; of images of several shapes their mean over an epoch."""
        total = sum(count * self.flops_of(shape) for shape, count in self._images_of_shapes.items())
        return round(total / self.images_per_epoch)

    def flops_of(self, shape: tuple[int, ...]) -> int:
        """Floating-point operations of training on one image of a shape (C, H, W)."""
        channels, height, width = shape
        return training_flops(self.model, (channels, height, width), self.objective.untrained_forwards)

    def tokens_of(self, shape: tuple[int, ...]) -> int:
        """Tokens of the network for one image of a shape (C, H, W)."""
        channels, height, width = shape
        return self.model.tokens_per_image((channels, height, width))

    @property
    def has_normalized_weights(self) -> bool:
        """True if the network preserves magnitudes by weights that are normalised at the start of each step."""
        return bool(self._normalized)

    @property
    def encodes_texts(self) -> bool:
        """True if the captions of each batch are encoded while the network trains."""
        return isinstance(self.model.condition_kind, Texts)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Shapes (C, H, W) of the training images: one, or those of the buckets with images."""
        return list(self._images_of_shapes)

    # ------------------------------------------------------------------ the loss of a microbatch

    def to_device(self, batch: Batch) -> Batch:
        """Move a microbatch to the model's device."""
        return {name: value.to(self.layout.device, non_blocking=True) for name, value in batch.items()}

    def loss_terms(
        self, batch: Batch, samples: GlobalBatch, condition: Condition = None, *, measure: bool = False
    ) -> LossTerms:
        """Losses of a microbatch of a global batch.

        Args:
            batch: on the model's device.
            samples: of the global batch.
            condition: of the microbatch, as from `condition`; None: formed here.
            measure: notify the monitor of gradient noise.
        """
        images = batch["images"]
        draw = self.objective.draw(tuple(images.shape[1:]), samples, batch["samples"])
        if condition is None:
            condition = self.condition(batch, samples.attempt, draw.dropping)
        if self.config.model.dropout > 0:
            self.model.draw_dropout(self.config.debug.seed, batch["samples"], samples.attempt)
        if self.config.lora.enable:
            draw_adapter_dropout(self.model, self.config.debug.seed, batch["samples"], samples.attempt)
        if measure and self.gns:
            self.gns.begin_microbatch(draw.t)
        with self._precision:
            return self.objective.loss(self.train_module, Microbatch(images, condition, batch), draw)

    def condition(self, batch: Batch, attempt: int, dropping: Tensor | None = None) -> Condition:
        """Conditions of a microbatch with dropout, as the network is trained on them; dropping: as of a `Draw`."""
        kind, dropout = self.model.condition_kind, self.config.model.label_dropout
        condition = kind.of(batch)
        if dropping is not None:
            return kind.drop(condition, dropping < dropout)
        return kind.drop_some(condition, dropout, self.config.debug.seed, batch["samples"], attempt)

    def normalize_weights(self) -> None:
        """Normalise the raw weights of a magnitude-preserving network in place, as at the start of each step."""
        if self.has_normalized_weights:
            normalize_rows([local(weight.detach()) for weight in self._normalized])
            release_unsharded(self.model)

    def after_update(self) -> None:
        """Prepare the updated weights for their next gather; collective where it is in float8."""
        if self.config.float8.enable and self.config.float8.enable_fsdp_float8_all_gather:
            compute_gather_scales(self.model)

    # ------------------------------------------------------------------ saving and resuming

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the run's state by name; the tensors themselves."""
        parts = {
            "model": {name: parameter.detach() for name, parameter in self.parameters.items()} | saved_buffers(self.model),
            "objective": self.objective.tensors(),
            "optimizer": optimizer_tensors(self.optimizer, self.parameters | self.objective.parameters()),
            "ema": self.ema.tensors(),
            "gns": self.gns.tensors() if self.gns else {},
        }
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def state_dict(self, reports: dict) -> dict:
        """Return the rest of the run's state; called by all ranks, and equal on them except `reports`.

        Args:
            reports: state of the first rank's reports.
        """
        return {
            "config": effective(self.config),
            "step": self.step,
            "progress": self.progress,
            "data": self.data.state_dict(),
            "corrupt_images": self.corrupt_images.state_dict(),
            "timestep_sampler": self.objective.timestep_sampler.state_dict(),
            "loss_window": self.window.state_dict(),
            "guard": self.guard.state_dict(),
            "ema_snapshots": self.snapshots.state_dict(),
            "reports": reports,
            BRANCHED_FROM: self.branched_from,
            RECORD: self._data_record,
            IMAGES: self.images_per_epoch,
            "gns": self.gns.state_dict() if self.gns else {},
        } | ({BASE_SHA256: self._base_sha256} if self.config.lora.enable else {})

    @functools.cached_property
    def _data_record(self) -> dict:
        """What sampling needs of the data, for a checkpoint that is taken elsewhere."""
        return record_of(self.config, self.info).data_table()

    @property
    def snapshot_due(self) -> bool:
        """True where the averages belong into a snapshot after the last step."""
        due = self.snapshots.due(self.progress, self.batch_size)
        return due or (self.snapshots.enabled and self.last_step)

    def save_snapshot(self) -> None:
        """Save a snapshot of the averages; collective."""
        self.snapshots.save(self.step, self.progress, saved_buffers(self.model), self.objective.tensors())

    def fault(self) -> str:
        """Name the weights, averages and optimizer states that are not finite; "" if all are; collective."""
        measured = "gns."  # only looked at, never trained by
        return not_finite({name: tensor for name, tensor in self.tensors().items() if not name.startswith(measured)})

    def resume(self, step: int) -> None:
        """Resume the state after a step from its checkpoint; collective. Raises CheckpointError."""
        checkpoint = checkpoint_path(self.folder.checkpoints, step)
        logger.info(f"reading {checkpoint}")
        materialise_state(self.optimizer)
        state, tensors = read_state(checkpoint), self.tensors()
        tolerated = self.config.job.allow_config_change
        place, record = str(checkpoint), self._data_record
        changes = data_changes(state, place, self.info, self.images_per_epoch, tolerated=tolerated, record=record)
        for change in changes + schedule_changes(self.config, state):
            if self.layout.rank == 0:
                logger.warning(change)
        if self.config.lora.enable:
            check_base(state, self._base_sha256, str(checkpoint), self.config.checkpoint.initial_weights)
        if self.gns and not self.gns.fits(state.get("gns", {})):
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("gns.")}
        read_tensors_together(checkpoint, tensors)
        release_unsharded(self.model)
        if found := self.fault():
            raise CheckpointError(f"{checkpoint}: {found} (checkpoint.load_step resumes from an earlier one)")
        try:
            self._load_state(checkpoint, state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint}: state.json does not fit this run: {error!r}") from error

    def _load_state(self, checkpoint: AnyPath, state: dict) -> None:
        self.step = state["step"]
        self.progress = state.get("progress", self.step)
        load_step = self.config.checkpoint.load_step
        self.branched_from = load_step if load_step >= 0 else state.get(BRANCHED_FROM)
        images_left = (self.config.training.steps - self.progress) * self.config.training.global_batch_size
        self.data.load_state_dict(state["data"], images_left)
        self.corrupt_images.load_state_dict(state.get("corrupt_images", {}))
        gns_state = dict(state.get("gns", {}))
        try:
            self.objective.timestep_sampler.load_state_dict(state["timestep_sampler"])
        except ValueError as other:  # the sampler or its bins are others now
            logger.warning(f"ignoring the state of the timestep sampler in {checkpoint}: {other}")
            gns_state.pop("schedule", None)
        self.window.load_state_dict(state["loss_window"])
        self.guard.load_state_dict(state.get("guard", {}))
        self.snapshots.load_state_dict(state.get("ema_snapshots", []), self.step)
        self.reported = _checked_reports(state.get("reports", {}), self.step)
        if self.gns:
            self.gns.load_state_dict(gns_state, self.step)

    def close(self) -> None:
        """Close: stop the loader's workers, let a save end, and restore the process's kernels."""
        self._kernels.close()
        self.data.close()
        self.checkpointer.close()

    # ------------------------------------------------------------------ building

    def _open_folder(self) -> None:
        self.folder.open()
        remove_status(self.folder.path)

    def _check_attention(self) -> None:
        """Check that the chosen attention is there, where the network says how wide its heads are. Raises KernelError."""
        training = self.config.training
        if (width := self.config.model.head_width) is not None:
            dtype = DTYPES[training.mixed_precision_param]
            check_attention(training.attention_backend, width, dtype, self.layout.device)

    def _sample_metrics(self) -> SampleMetrics:
        """Metrics of samples, checked before the run's folder is made; collective. Raises EvaluationError."""
        data = self.config.data
        info = dataset_info(data)
        size = None if data.name in LATENT_DATASETS else info.image_shape[1:]
        open_split = partial(DatasetImages, data, info)
        return SampleMetrics(self.config.evaluation, self.layout.device, size, group_for_work(), open_split, info.num_classes)

    def _build_model(self, new: bool) -> tuple[DiffusionModel, dict[str, Tensor]]:
        """Build the network, with the same weights on any layout; and its shards if it is still to be sharded on meta."""
        config, info, device = self.config, self.info, self.layout.device
        shards: dict[str, Tensor] = {}
        initial_weights = config.checkpoint.initial_weights if new or config.lora.enable else ""
        if config.lora.enable and new and not initial_weights and self.layout.rank == 0:
            logger.warning("lora: the frozen network is drawn at random (checkpoint.initial_weights names a trained one)")
        if self.layout.sharded and not quantized_kind(config.lora):
            model, shards = sharded_network(config, info, self.layout, initial_weights)
        else:
            model = new_network(config, info, device, initial_weights)
        if config.lora.enable:
            add_adapters(model, config, info, device)
        return model.train(), shards

    def _bin_edges(self, bins: int) -> Tensor:
        quantiles = torch.arange(1, bins, dtype=torch.float64) / bins
        density = self.objective.timestep_sampler.density
        return density.quantile(quantiles).to(torch.float32).to(self.layout.device)


def _model_on_meta(config: JobConfig) -> DiffusionModel:
    return network_on_meta(config, dataset_info(config.data))


def _checked_reports(state: dict, step: int) -> dict:
    """Check the state of reports in a checkpoint of a step. Raises ValueError, TypeError: it is no such state."""
    results, lines = state.get("results", {}), state.get("unsaved_metrics", [])
    if not _are_numbers(dict(results)):
        raise ValueError("the results are no numbers")
    clock = ClockTotals.from_state(state.get("clock", {}))
    return {"results": dict(results), "unsaved_metrics": checked_lines(lines, step), "clock": clock}


def _are_numbers(results: dict) -> bool:
    """Check whether results are numbers by name, or tables of them, as of a measurement."""
    return all(_are_numbers(value) if isinstance(value, dict) else isinstance(value, int | float) for value in results.values())
