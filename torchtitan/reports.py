"""Reports of a training run: progress bar, metrics, validation, grids of samples, and the closing lines."""

import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

from PIL import Image
from torch import Tensor
from tqdm import tqdm

from torchtitan.checkpoint.checkpointer import checkpoint_path
from torchtitan.checkpoint.manifest import read_json
from torchtitan.console import closing_lines, introduce, method_ends
from torchtitan.distributed.collectives import from_first_rank, group_for_work, highest_over_ranks
from torchtitan.distributed.compile import CompileCounter
from torchtitan.errors import CheckpointError, DamagedFile, EvaluationError, RunFolderError, TrainingError, reason
from torchtitan.evaluation.during_training import EvaluatedRun, Evaluation
from torchtitan.evaluation.targets import described, described_text, newly_reached, scalars
from torchtitan.files.optional import OptionalOutputs
from torchtitan.files.weight_files import saved_buffers
from torchtitan.gns.config import is_drawn
from torchtitan.run_pictures import RunPictures
from torchtitan.settings.record import effective
from torchtitan.state.run_state import RunState
from torchtitan.summary import RunSummary, with_conditions
from torchtitan.training.clock import Phases, RunClock
from torchtitan.training.hardware import ALLOCATOR_RETRIES, PEAK_MEMORY, memory_metrics, peak_tflops, reset_peak_memory
from torchtitan.training.hardware_description import describe_hardware
from torchtitan.training.metric_points import TIMED, ThinnedPoints, iter_points
from torchtitan.training.metric_sinks import Callback
from torchtitan.training.metrics import METRICS_FILE, MetricsLog, highest
from torchtitan.training.rates import Rates
from torchtitan.training.schedules import completed
from torchtitan.training.utilisation import products_of
from torchtitan.weights.final_weights import write_final_weights

logger = logging.getLogger(__name__)

# Of the clock: TensorBoard and Weights & Biases show these, metrics.jsonl has all.
_SHOWN_TIMES = ("clock/wall(s)", "clock/train(s)")
# What one looks at of the noise scale; the rest is in metrics.jsonl.
_SHOWN_OF_THE_NOISE = {"b_simple", "batch", "ratio", "lower", "upper", "outlier_steps"}
_OF_MEMORY = ("peak_memory_GiB", "held_memory_GiB", "num_alloc_retries")
# From the start of the process on: after them, every graph that is trained with has been compiled.
_STEPS_TO_COMPILE = 3
_SILENT_SECONDS = 5.0
_POINTS_A_PICTURE = 10  # logged noise scales between their pictures


class Reports:
    """Reports of a run. Collective methods say so; the first rank alone writes.

    A failing disk loses a picture, never the run; points of metrics wait for it.
    """

    def __init__(self, state: RunState, clock: RunClock, phases: Phases, callbacks: Sequence[Callback] = ()) -> None:
        """Open the reports; collective.

        Args:
            clock: of this process; gets the totals of the processes before it.
            callbacks: called with every logged point on the first rank.

        Raises:
            RunFolderError: metrics.jsonl cannot be written; on every rank.
        """
        self._state, self._clock, self._phases, self._callbacks = state, clock, phases, callbacks
        self._config = config = state.config
        self._first = state.layout.rank == 0
        self._device = state.layout.device
        peak = config.metrics.peak_tflops or peak_tflops(self._device, products_of(vars(config.training)))
        self._rates = Rates(
            state.data, flops_of=cache(state.network.flops_of), tokens_of=cache(state.network.tokens_of),
            world_size=state.layout.world_size, peak_tflops=peak,
        )  # fmt: skip
        evaluated = EvaluatedRun(
            state.model, state.objective, state.ema, state.layout, config.data, state.info, config.debug.seed,
            config.training.mixed_precision_param, state.decoder, state.encoder,
        )  # fmt: skip
        self._evaluation = Evaluation(evaluated, config.sampling)
        # Steps that measure the gradients of single samples have separate graphs.
        expected = max(_STEPS_TO_COMPILE, config.gns.interval if config.gns.enable and config.gns.single_pass else 0)
        self._compilations = CompileCounter(expected)
        self._results = with_conditions(state.reported["results"], state)
        self._outputs = OptionalOutputs()
        self._pictures = RunPictures(state.folder, config, self._outputs)
        self._hardware = describe_hardware(self._device, state.layout.world_size)
        self._summary = RunSummary(state, self._outputs, self._compilations, clock, self._hardware)
        self._held_out_shown = self._logged = False
        self._held_out_picture: Image.Image | None = None  # until it is written
        self._peak_memory: float = 0.0  # GiB, of this rank, up to the last logged point
        self._peak_before: float = 0.0  # of the processes before this one, as their summary has it
        self._allocator_retries: float = 0
        self._pace_since: tuple[float, int] | None = None  # time and progress of the first logged point
        self._clock.resume(state.reported["clock"])
        self._log = self._new_log() if self._first else None
        self._noise_points = self._new_noise_points()
        from_first_rank(self._open)
        self._method_ends = method_ends(state)
        if self._first:
            introduce(state)
        self._bar = tqdm(
            total=config.training.steps, initial=state.progress, unit="step", dynamic_ncols=True, smoothing=0.05,
            disable=not (self._first and sys.stderr.isatty()),
        )
        self._rates.restart(state.step)

    def rewind(self) -> None:
        """Rewind to the run's step after a rollback; it lies before the step reported last."""
        if self._log:
            self._log.close()
            self._log = self._new_log()
        self._noise_points = self._new_noise_points()
        self._clock.roll_back(self._state.reported["clock"])
        self._results = with_conditions(self._state.reported["results"], self._state)
        self._bar.n, self._pace_since = self._state.progress, None
        self._bar.refresh()
        self._rates.restart(self._state.step)
        if self._log:
            self._write_session()

    def _new_log(self) -> MetricsLog:
        state, config = self._state, self._config
        name, callbacks = config.job.name, self._callbacks
        return MetricsLog(state.folder.path, config.metrics, name, effective(config), state.step, callbacks)

    def _new_noise_points(self) -> ThinnedPoints:
        """Points of the noise scale up to the run's step, as far as its picture shows them; of the first rank."""
        found = ThinnedPoints()
        if self._first and self._state.gns and self._state.step:
            with suppress(OSError):  # the picture lacks them
                for point in iter_points(self._state.folder.path / METRICS_FILE, '"gns/'):
                    if point["step"] <= self._state.step:
                        found.add(_drawn(point))
        return found

    def _open(self) -> None:
        path = self._state.folder.path / METRICS_FILE
        try:
            if self._log:
                self._log.open()
        except OSError as error:
            raise RunFolderError([f"{path}: cannot be written: {reason(error)}"]) from error
        self._pictures.remove_unfinished()
        folder = self._state.folder
        with suppress(DamagedFile, TypeError):  # of another program
            earlier = read_json(folder.summary, dict)
            if earlier.get(TIMED) == self._results[TIMED]:  # equally laid out; forgotten at the first logged point
                self._peak_before = earlier.get("peak_memory_GiB", 0.0)
            if earlier.get("step", 0) > self._state.step or earlier.get("status") in ("failed", "oom"):  # steps come again
                self._forget_summary()
        self._write_session()

    def _write_session(self) -> None:
        folder, lacking = self._state.folder, "pages lack it until the run ends"
        with self._outputs.attempt("the record of this session", folder.session, consequence=lacking):
            folder.write_session(self._summary.session(self._results))

    def state_dict(self) -> dict[str, Any]:
        """Return results and clock, for a run that resumes from here: for the first rank's checkpoint."""
        return {"results": self._results, "clock": self._clock.totals().state_dict()}

    def sync(self) -> None:
        """Sync metrics and lists to the disk, as far as it allows; any thread may call it, during training."""
        if self._log:
            self._log.sync()
        self._state.corrupt_images.sync()

    @contextmanager
    def excluded(self, doing: str) -> Iterator[None]:
        """Exclude the work inside, named by `doing`, from training time, and what it compiles from warnings."""
        with self._rates.excluded(), self.named(doing):
            yield
        self._compilations.expect()

    @contextmanager
    def named(self, doing: str) -> Iterator[None]:
        """Name the work inside in a line of the first rank, once it has taken some seconds."""
        line = threading.Timer(_SILENT_SECONDS, self._say, [f"step {self._state.step:>6}  {doing} ..."])
        if self._first:
            line.start()
        try:
            yield
        finally:
            line.cancel()

    def excluded_step(self) -> AbstractContextManager:
        """Exclude the train step inside from every rate: its time and its images."""
        return self._rates.excluded_step()

    def advance(self) -> None:
        """Advance the progress bar by one step, or by as many as the step's batch is times the first one."""
        if self._config.compile.enable and self._first:
            self._compilations.end_step(self._state.step)
        self._bar.update(self._state.progress - self._bar.n)
        for end, line in self._method_ends if self._first else ():
            if self._state.progress_before < end <= self._state.progress:
                self._say(f"step {self._state.step:>6}  {line}")

    def log(self, norm: Tensor, lr: float) -> None:
        """Write one point of metrics, with the step's gradient norm before clipping; collective."""
        state, config = self._state, self._config
        with self._phases("waiting"):  # for other ranks
            metrics = state.window.reduce() | {"grad_norm": float(norm), "lr": lr}
        metrics |= self._rates.lap(state.step) | self._memory()
        metrics |= self._evaluation.log_uncertainties(config.metrics.loss_bins)
        if config.compile.enable:
            counts = self._compilations.counts()
            metrics |= {f"compile/{name}": counts[name] for name in ("recompiles", "graph_breaks")}
        metrics |= {"n_images_seen": state.data.next_sample, "global_batch_size": state.batch_size}
        if num_corrupt := state.corrupt_images.count():
            metrics["data/corrupt_images"] = num_corrupt
        metrics |= state.guard.counts()
        reset_peak_memory(self._device)
        if self._log:
            if not self._logged:
                self._forget_summary()
            times = self._clock.totals().metrics()
            metrics |= {tag: times.pop(tag) for tag in _SHOWN_TIMES}
            self._log.write(state.step, metrics, times)
            self._show(metrics)

    def _forget_summary(self) -> None:
        """Remove the summary of the session before, once this one has made steps: it writes its own at its end."""
        self._logged, summary = True, self._state.folder.summary
        with self._outputs.attempt("the summary of the session before", summary, consequence="pages show it until the run ends"):
            summary.unlink(missing_ok=True)

    def _show(self, metrics: dict[str, float]) -> None:
        state, training = self._state, self._config.training
        loss, rate = metrics["loss_metrics/global_avg_loss"], metrics.get("throughput(img/s)")
        self._bar.set_postfix_str(f"loss {loss:.4f}" + (f", {rate:.0f} img/s" if rate else ""))
        if not self._bar.disable:
            return
        speed = f"{rate:.1f} img/s" if rate else "not timed"
        left = self._seconds_left(rate)
        eta = "" if left is None else f"  ETA {_duration(left)}"
        mfu = f"  mfu {metrics['mfu(%)']:.1f} %" if "mfu(%)" in metrics else ""
        done = f"step {state.step:>6}/{training.steps}"
        if state.batch_grows:
            done = f"step {state.step:>6} ({state.progress / training.steps:.1%} done, batch {state.batch_size})"
        logger.info(f"{done}  loss {loss:.4f}  grad_norm {metrics['grad_norm']:.3f}  {speed}{mfu}{eta}")

    def _seconds_left(self, rate: float | None) -> float | None:
        """Seconds to the end at the pace since the first logged point, with grids and saves; until there is one by images/s."""
        now, progress, training = time.perf_counter(), self._state.progress, self._config.training
        then, done = self._pace_since = self._pace_since or (now, progress)
        if progress > done:
            return (now - then) / (progress - done) * (training.steps - progress)
        return (training.steps - progress) * training.global_batch_size / rate if rate else None

    def log_gns(self) -> None:
        """Log the estimates of the gradient noise scale, and its picture at intervals; work of the first rank alone."""
        state, config, gns = self._state, self._config.gns, self._state.gns
        if not self._log or not gns:
            return
        with self.excluded("estimating and drawing the gradient noise scale"):
            found = gns.metrics()
            shown = {tag: value for tag, value in found.items() if tag.rpartition("/")[2] in _SHOWN_OF_THE_NOISE}
            self._log.write(state.step, shown, {tag: value for tag, value in found.items() if tag not in shown})
            self._noise_points.add(_drawn({"step": state.step} | found))
            logged_before = state.progress_before // config.log_interval * config.log_interval
            if state.last_step or completed(_POINTS_A_PICTURE * config.log_interval, logged_before, state.progress):
                picture = self._pictures.save_noise_scale(
                    lambda: gns.draw(self._noise_points.read(), state.grown_batch_size)
                )
                if picture and state.last_step:
                    self._log.write_image(state.step, "gns", picture)

    def validate(self) -> None:
        """Measure the held-out loss with the trained and with every averaged weight; collective."""
        with self.excluded("measuring the held-out loss"):
            self._show_held_out()
            metrics = self._evaluation.validate(
                self._config.validation, self._state.bin_edges, self._state.corrupt_images.record
            )
        self._results |= metrics
        if self._log:
            self._log.write(self._state.step, metrics)
            labels = {name: name.removeprefix("validation_metrics/") for name in metrics if name.endswith("/loss")}
            shown = ", ".join(
                f"{label} {metrics[name]:.4f} ± {_spread(metrics.get(f'{name}_stderr'))}" for name, label in labels.items()
            )
            self._say(f"step {self._state.step:>6}  held-out {shown}")

    def sample_grid(self) -> None:
        """Draw the grid of samples of this step; collective."""
        with self.excluded("drawing the grid of samples"):
            self._show_held_out()
            started = time.perf_counter()
            grid = self._evaluation.sample_grid()
            if grid is None or not self._log:
                return
            self._results["seconds_per_picture"] = (time.perf_counter() - started) / grid.count
            step, config = self._state.step, self._config
            self._pictures.save_grid(step, grid.picture)
            self._log.write_image(step, "samples", grid.picture)
            if config.sampling.previews:
                self._pictures.save_previews(step, grid.first, self._evaluation.row_names, config.data.trigger_word)

    def evaluate(self) -> None:
        """Measure newly drawn samples by the metrics of `[evaluation]`; collective.

        A measurement that fails, as without its reference, is left out: it must not end the run.
        """
        state, metrics = self._state, self._state.sample_metrics
        assert metrics is not None
        with self.excluded(f"drawing and measuring {self._config.evaluation.count:,} samples"):
            try:
                measurement = self._evaluation.measure(metrics, self._config.evaluation.guidance_scale)
            except EvaluationError as error:
                if self._first:
                    logger.warning(f"step {state.step}: samples were not measured: {error}")
                return
        values = measurement.values
        measured, config = {name: described(each) for name, each in values.items()}, self._config.evaluation
        how = config.describe(self._config.sampling, self._config.data)
        self._results["evaluation"] = {"step": state.step, "how": how, "metrics": list(config.metrics)} | measured
        reached = newly_reached(self._config.evaluation, values, self._results.get("first_reached", {}))
        images = state.data.next_sample
        found = {"step": state.step, "epoch": round(images / state.images_per_epoch, 3), "n_images_seen": images}
        if reached:
            self._results["first_reached"] = self._results.get("first_reached", {}) | dict.fromkeys(reached, found)
        if self._log:
            self._log.write(state.step, scalars(values))
            self._write_session()
            shown = ", ".join(f"{name} {described_text(each)}" for name, each in measured.items())
            self._say(f"step {state.step:>6}  {self._config.evaluation.count:,} samples: {shown}")
            for text in (*measurement.notes, *(f"first {text}, after {found['epoch']:g} epochs" for text in reached)):
                self._say(f"  {text}")

    def _show_held_out(self) -> None:
        """Save decoded held-out latents, once; collective."""
        if not self._held_out_shown:
            self._held_out_shown = True
            picture = self._evaluation.held_out_picture()
            if picture and self._log:
                self._held_out_picture = picture
                self._log.write_image(self._state.step, "held_out", picture)
        if self._held_out_picture and self._pictures.save_held_out(self._held_out_picture):
            self._held_out_picture = None

    def finish(self, status: str) -> None:
        """Finish: write animation, final weights and summary, and log the paths; collective.

        Raises:
            TrainingError: a file of a completed run that a later start needs could not be written.
        """
        state, sampling = self._state, self._config.sampling
        self._bar.close()
        if num_corrupt := state.corrupt_images.count():
            self._results["corrupt_images"] = num_corrupt
        if self._peak_memory:
            self._results |= self._memory_over_ranks()
        elif self._first:  # without a logged point: as the summary before has it
            with suppress(DamagedFile):
                known = read_json(state.folder.summary, dict)
                self._results |= {name: known[name] for name in _OF_MEMORY if name in known}
        if self._first:
            self._pictures.animate(state.step)
            if sampling.enable and sampling.previews:
                changes = self._pictures.preview_changes(self._evaluation.row_names, self._config.data.trigger_word)
                self._results |= {"preview_change_percent": changes} if changes else {}
        if status == "completed":
            self._write_final_weights()
        if problem := from_first_rank(self._summary.close, self._log, status, self._results):
            raise TrainingError(f"step {state.step}: {problem}")
        if self._log:
            self._log.summarise(_numbers(self._results) | {"status": status})
        if self._first:
            self._say("\n".join(closing_lines(
                state, status, self._results, self._summary.clock, self._pictures.held_out, self._pictures.animation,
                self._noise_points.read(),
            )))

    def _write_final_weights(self) -> None:
        """Write the final weights, if the run does; collective. Raises TrainingError."""
        state, config = self._state, self._config
        if not config.checkpoint.enable or config.checkpoint.final_weights == "none":
            return
        path = state.folder.final_weights(state.step)
        checkpoint = checkpoint_path(state.folder.checkpoints, state.step)
        arguments = (path, checkpoint, config, state.step, frozenset(saved_buffers(state.model)))
        try:
            from_first_rank(write_final_weights, *arguments, group=group_for_work())
        except CheckpointError as error:
            raise TrainingError(f"step {state.step}: {error} (the same command writes it again)") from error

    def fail(self, status: str, reason: str) -> None:
        """Close the summary of a failed run; called by one rank, any, since others may be gone."""
        self._bar.close()
        self._summary.fail(status, reason, self._results)

    def close(self) -> None:
        if self._log:
            self._log.close()

    # ------------------------------------------------------------------ inside

    def _memory(self) -> dict[str, float]:
        metrics = memory_metrics(self._device)
        self._peak_memory = max(self._peak_memory, metrics[PEAK_MEMORY[self._device.type]])
        self._allocator_retries = metrics.get(ALLOCATOR_RETRIES, 0)
        return metrics

    def _memory_over_ranks(self) -> dict[str, Any]:
        """Memory of the fullest rank, up to the last logged point, and what every step holds of it; collective."""
        held = self._state.held_gib()
        peak = max(self._peak_memory, self._peak_before)
        if self._first:  # also of processes that left no summary
            with suppress(OSError):
                path, since = self._state.folder.path / METRICS_FILE, self._results[TIMED]["after_step"]
                peak = max(peak, highest(path, PEAK_MEMORY[self._device.type], since))
        peak, retries, *parts = highest_over_ranks(peak, self._allocator_retries, *held.values())
        by_part = {name: round(part, 6) for name, part in zip(held, parts, strict=True)}
        return dict(zip(_OF_MEMORY, (round(peak, 6), by_part, int(retries)), strict=True))

    def _say(self, text: str) -> None:
        if self._bar.disable:
            logger.info(text)
        else:
            tqdm.write(text, file=sys.stderr)


def _numbers(results: Mapping[str, Any]) -> dict[str, float | str]:
    return {name: value for name, value in results.items() if isinstance(value, int | float)}


def _drawn(point: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a point that the picture of the noise scale shows, and its step."""
    return {tag: value for tag, value in point.items() if tag == "step" or is_drawn(tag)}


def _spread(stderr: float | None) -> str:
    """Text of a standard error; one image has none."""
    return "unknown" if stderr is None else f"{stderr:.2g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
