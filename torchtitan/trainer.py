"""The train loop: batch -> clean images -> objective -> backward -> clip -> optimizer -> EMA -> reports."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from torchtitan.config.job import JobConfig
from torchtitan.data.base import Batch
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.distributed.collectives import StopRequest
from torchtitan.distributed.compile import begin_graphs
from torchtitan.distributed.mesh import set_train_timeout
from torchtitan.distributed.parallelize import (
    accumulate_locally,
    average_gradients,
    clip_gradients,
    gradient_norm,
    whole_gradient_norm,
)
from torchtitan.models.float8 import compute_gather_scales
from torchtitan.processes.host_allocator import keep_freed_memory
from torchtitan.profiling.profiler import Profiler
from torchtitan.reports import Reports
from torchtitan.runs.folder import RunFolder
from torchtitan.state.resume import checkpointed_state, open_run
from torchtitan.supervision.recovery import gone_back, require_finite_start
from torchtitan.supervision.supervision import Supervision
from torchtitan.training.clock import BEFORE_FIRST_STEP, Phases, RunClock
from torchtitan.training.metric_sinks import Callback
from torchtitan.training.numerical_guard import StepSamples, backward
from torchtitan.training.optimizer import set_lr
from torchtitan.training.schedules import completed, lr_factor

logger = logging.getLogger(__name__)


class Trainer:
    """Trainer: the loop over a run's state, with its reports and its supervision."""

    def __init__(
        self, config: JobConfig, clock: RunClock | None = None, callbacks: Sequence[Callback] = (),
        folder: RunFolder | None = None,
    ) -> None:  # fmt: skip
        """Build the run, or resume it; collective. Raises as RunState does.

        Args:
            clock: of this process; None: one that starts now.
            callbacks: called with the step and the metrics of every logged point, on the first rank.
            folder: of the run, which stays open if that cannot be built; None: it is closed then, for another attempt.
        """
        opened = folder or RunFolder(config)
        try:
            self._build(config, clock, callbacks, opened)
        except BaseException:
            if folder is None:
                opened.close()
            raise

    def _build(self, config: JobConfig, clock: RunClock | None, callbacks: Sequence[Callback], folder: RunFolder) -> None:
        self.config = config
        self.clock = clock or RunClock()
        self.phases = Phases(self.clock.now, self.clock.switch)
        self.state = open_run(config, folder)
        if self.state.encoder is not None:
            self.state.encoder.phase = partial(self.phases, "encode")
        if self.state.layout.device.type == "cpu":
            keep_freed_memory()
        self.reports = Reports(self.state, self.clock, self.phases, callbacks)
        beside = (config.validation, config.sampling, config.evaluation, config.checkpoint)
        self.profiler = Profiler(
            config.profiling, self.state.folder.path, self.state.layout, partial(self.reports.excluded, "writing the profile"),
            config.training.steps,
            [config.metrics.log_freq, *([config.gns.log_interval] if config.gns.enable else [])],
            [section.interval for section in beside if section.enable],
        )  # fmt: skip
        self.supervision = Supervision(self.state, self.phases, self.reports.fail)
        self._parameters = list(self.state.parameters.values())
        self._beside = list(self.state.objective.parameters().values())
        self._replays_graphs = config.compile.cuda_graphs
        self._has_trained, self._failure = False, ""
        self._starting = True  # until this process has made its first step
        # Steps of which a first one compiles: steps with taps measure or do not, and neither is the backward before the first.
        taps_compile = config.compile.enable and self.state.network.taps and len(self.state.shapes) == 1
        self._to_compile = {config.gns.interval == 1, True} if taps_compile else set()

    # ------------------------------------------------------------------ the loop

    def train(self) -> int:
        """Train to the last step or to a signal.

        Returns:
            0, or 128 + the signal's number for a run that was interrupted by a signal and saved.

        Raises:
            CheckpointError: the last checkpoint could not be saved.
            TrainingError: a state that is not finite, at the start or without a checkpoint to roll back to.
        """
        if self._has_trained:
            raise RuntimeError("this Trainer has trained: close() it and make another, which resumes from the last checkpoint")
        self._has_trained, state = True, self.state
        # Listening first: starting the supervision takes a second, in which a signal would be lost.
        with self._keeping_failure(), StopRequest(self._acknowledgement()) as stop, self.supervision:
            with self.phases(BEFORE_FIRST_STEP):
                require_finite_start(state)
                with self.reports.excluded("compiling" if self.config.compile.enable else "trying a backward"):
                    self._warm_up()
                if state.step == 0 and self.config.sampling.enable and self.config.sampling.previews:
                    self.reports.sample_grid()
            signal_number = self._loop(stop)
            with self.phases("finish"), self.reports.named("finishing: last files, animation, summary"):
                if state.gns:
                    state.gns.flush()
                with self.phases("checkpoint"):
                    state.checkpointer.require_saved()
                self.reports.finish("interrupted" if signal_number else "completed")
        return 128 + signal_number if signal_number else 0

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = f"step {self.state.step}: {type(error).__name__}: {error}"
            raise

    def _acknowledgement(self) -> str:
        """Line that answers a request to stop, of one rank: a step, a grid or a validation may take minutes to its end."""
        if self.state.layout.rank != 0:
            return ""
        steps = "this step" if self.state.layout.world_size == 1 else "this step and perhaps the next"  # until all ranks know
        saving = ", then saving" if self.config.checkpoint.enable else ""
        return f"stopping: finishing {steps} and what is being drawn or measured{saving} (a second signal does not wait)"

    def _loop(self, stop: StopRequest) -> int:
        state, signal_number, save_due = self.state, 0, False
        while not (state.last_step or signal_number):
            state.before_step = state.step, state.data.next_sample
            state.step += 1
            self.phases.step = state.step
            with self.profiler.step(state.step) as traced:
                with self._beside_the_rates(traced) if traced or self._to_compile else nullcontext():
                    norm, lr = self.train_step()
                state.before_step = None
                self._report(norm, lr)
            save_due |= self._due(self.config.checkpoint.interval)
            if self._gone_back(saving=save_due):
                save_due = False
                continue
            if self.config.validation.enable and self._due(self.config.validation.interval):
                with self._beside_training("validation"):
                    self.reports.validate()
            if state.snapshot_due:  # before the checkpoint, which names it
                with self._beside_training("checkpoint"), self.reports.excluded("saving the averages"):
                    state.save_snapshot()
            if self.config.sampling.enable and self._due(self.config.sampling.interval):
                with self._beside_training("sampling"):
                    self.reports.sample_grid()
            if self.config.evaluation.enable and self._due(self.config.evaluation.interval):
                with self._beside_training("evaluation"):
                    self.reports.evaluate()
            signal_number = stop.poll()
            if signal_number and not save_due and self._gone_back(saving=True):
                break  # to what is saved
            if signal_number or state.last_step or (save_due and not state.guard.in_doubt):
                save_due = False
                if self.config.checkpoint.enable:
                    with self._beside_training("checkpoint"):
                        self._save()
        return signal_number

    @contextmanager
    def _beside_the_rates(self, traced: bool) -> Iterator[None]:
        """Exclude a traced step from every rate, and one that compiles, of which the time counts as the start's."""
        measured = self.state.step % self.config.gns.interval == 0
        compiles, before = measured in self._to_compile, self.clock.totals()
        self._to_compile.discard(measured)
        with self.reports.excluded_step() if traced or compiles else nullcontext():
            yield
        if compiles:
            self.clock.count_as_start(before)

    @contextmanager
    def _beside_training(self, name: str) -> Iterator[None]:
        """Enter a phase that trains nothing; unfinished work of the device on earlier steps counts as training."""
        if self.state.layout.device.type == "cuda":
            with self.phases("waiting"):
                torch.cuda.synchronize(self.state.layout.device)
        with self.phases(name):
            yield

    def _report(self, norm: Tensor, lr: float) -> None:
        state = self.state
        logged = state.step == 1 or self._due(self.config.metrics.log_freq)
        gns_logged = state.gns is not None and self._due(self.config.gns.log_interval)
        with self._beside_training("report") if logged or gns_logged else self.phases("report"):
            if logged:
                self.reports.log(norm, lr)
            if gns_logged:
                self.reports.log_gns()
            self.reports.advance()
            self.supervision.step_done(state.step)

    def train_step(self) -> tuple[Tensor, float]:
        """Train one optimizer step, unless the guard skips it; return the gradient norm before clipping and the rate."""
        state, config, training = self.state, self.config, self.config.training
        if self._replays_graphs:
            begin_graphs()
        factor = min(state.grown_factor, training.steps - state.progress)
        state.batch_size = factor * training.global_batch_size
        samples = GlobalBatch(state.data.next_sample, state.batch_size, state.data.attempt)
        microbatches = factor * state.data.microbatches_per_step
        if state.network.normalizes_weights:
            with self.phases("optimizer"):
                state.network.normalize_weights()
        if state.gns:
            with self.phases("gradients"):
                state.gns.begin_step(state.step, state.optimizer.state, config.optimizer.beta2)
        for number in range(microbatches):
            with self.phases("data"):
                batch = state.to_device(state.data.next_batch())
            self._forward_backward(batch, samples, number, microbatches)
        with self.phases("gradients"):
            norms = self._treat_gradients(microbatches)
            skip = state.guard.judge(StepSamples(state.step, samples, microbatches), *norms)
        of_step = lr_factor(config.lr_scheduler, state.progress + 1, training.steps, training.global_batch_size)
        # Of Adam, a batch `factor` times as large takes the square root of it (Malladi et al., arXiv 2205.10287).
        lr = config.optimizer.lr * of_step * math.sqrt(factor)
        with self.phases("optimizer"):
            set_lr(state.optimizer, lr)
            state.objective.update(skip)
            if state.gns:
                state.gns.keep_step(skip)
            state.optimizer.step(skip)
            if state.network.gathers_float8:
                compute_gather_scales(state.model)
            state.optimizer.zero_grad()
        state.progress += factor
        with self.phases("ema"):
            state.ema.update(state.progress, factor)
        if self._starting:
            if config.checkpoint.enable:
                state.optimizer.require_tensors()
            set_train_timeout(config.comm, state.layout)
            self.supervision.first_step_done()
            self._starting = False
        self.clock.steps += 1
        return norms[0], lr

    def _forward_backward(self, batch: Batch, samples: GlobalBatch, number: int, microbatches: int) -> None:
        state = self.state
        reduce_now = number == microbatches - 1 or (state.gns is not None and state.gns.separate_microbatches)
        with accumulate_locally(state.train_module, last=reduce_now):
            encoded = None
            if state.encodes_texts:
                with self.phases("encode"):
                    encoded = state.model.condition_kind.of(batch)
            with self.phases("forward"):
                terms = state.loss_terms(batch, samples, encoded, measure=state.gns is not None)
            with self.phases("backward"):
                # The mean over the global batch: ranks are averaged by the reduction, microbatches here.
                backward(terms.minimised.mean() / microbatches)
        with self.phases("gradients"):
            if state.gns:
                state.gns.end_microbatch(terms.loss, microbatches, self._parameters, samples, number)
            state.window.add(terms)
            state.objective.observe(samples, batch["samples"], terms)
            state.guard.add_images(batch["images"], batch["samples"])

    def _treat_gradients(self, microbatches: int) -> list[Tensor]:
        """Measure the step's gradients, then clip them.

        The objective's own parameters have a separate norm, the second if there are any, and are clipped by it: in one
        norm, u would scale the network's updates down, and grad_norm would not compare between runs with and without u.

        Returns:
            norms before clipping, the network's first.
        """
        state, max_norm = self.state, self.config.training.max_norm
        if state.gns:
            state.gns.end_step(self._parameters, state.batch_size // state.layout.world_size, microbatches)
        norms = [gradient_norm(self._parameters, state.layout)]
        if self._beside:
            average_gradients(self._beside, state.layout)
            norms.append(whole_gradient_norm(self._beside).to(state.layout.device))
        if max_norm > 0:
            for group, norm in zip((self._parameters, self._beside), norms, strict=False):
                clip_gradients(group, norm, max_norm)
        return norms

    def _warm_up(self) -> None:
        """Run a backward of images of the largest shape, or of every shape, and discard it.

        DDP arranges its buckets of gradients anew after the first backward, and the order of sums depends on them: without
        this, a resumed run would differ from a straight one in the last bit. A compiled model has graphs for each shape:
        the first step of a rare shape would compile for minutes in the middle of a run, longer than its collectives wait, and
        that of a rare largest shape may run out of memory.
        With a single shape the time counts as the start's, not as training. Steps with taps have other graphs than this
        backward: see `_beside_the_rates`.
        """
        state, layout = self.state, self.state.layout
        compiles = self.config.compile.enable and not self._to_compile
        arranges_buckets = layout.world_size > 1 and not layout.sharded
        largest = max(state.shapes, key=math.prod)
        for shape in state.shapes if compiles else [largest] * (arranges_buckets or len(state.shapes) > 1):
            self._discarded_backward(shape, state.grown_batch_size)
        if compiles and state.batch_grows:  # what is drawn for a step of another size has a graph for all others
            self._discarded_backward(largest, 2 * state.grown_batch_size)

    def _discarded_backward(self, shape: tuple[int, int, int], batch_size: int) -> None:
        """batch_size: images of the step that it stands for; a stratified draw is of all of them."""
        state, count = self.state, self.config.training.local_batch_size
        if self._replays_graphs:
            begin_graphs()
        batch = state.info.placeholder(count, shape) | {"samples": torch.arange(count)}
        with accumulate_locally(state.train_module, last=True):
            state.loss_terms(state.to_device(batch), GlobalBatch(0, batch_size)).minimised.mean().backward()
        state.optimizer.zero_grad()
        if state.gns:
            state.gns.discard_backward()

    def _due(self, interval: int) -> bool:
        """Whether the step just made completes an interval in steps of the first batch size, or is the last."""
        state = self.state
        return completed(interval, state.progress_before, state.progress) or state.last_step

    # ------------------------------------------------------------------ saving

    def _gone_back(self, saving: bool) -> bool:
        """Roll back after bad steps, reports included; whether that was needed; collective."""
        with self._beside_training("checkpoint") if saving else nullcontext():
            if not gone_back(self.state, self.phases, saving):
                return False
        self.reports.rewind()
        return True

    def _save(self) -> None:
        state = self.state
        with self.reports.excluded("saving the checkpoint"):
            content = checkpointed_state(state, self.reports.state_dict())
            state.checkpointer.save(state.step, state.tensors(), content, self._sync_outputs)
        # An asynchronous save is assumed to succeed: it ends at different moments on the ranks.
        if self.config.checkpoint.async_mode != "disabled" or state.checkpointer.wait() is None:
            state.guard.checkpoint_saved()

    def _sync_outputs(self) -> None:
        """Sync the outputs that a run finds with its checkpoint on resume; called during training."""
        if self.state.gns:
            self.state.gns.sync()
        self.reports.sync()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close: stop the profiler and the loader's workers, let a save end, close the sinks, and release the folder."""
        if self._failure and not self.supervision.has_failed:  # in one's own process nothing else says why
            self.supervision.failed("failed", self._failure, lost=False)
        self.profiler.close()
        self.state.close()
        self.reports.close()
        self.state.folder.close()
