"""What a run shows and leaves behind: progress, metrics, validation, grids of samples, the closing summary."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from data import DATASETS
from torchtitan.console import closing_lines, grids, introduce
from torchtitan.distributed.collectives import from_first_rank, highest_over_ranks
from torchtitan.distributed.compile import CompileCounter
from torchtitan.errors import RunFolderError, TrainingError, reason
from torchtitan.evaluation.decoding import held_out_picture
from torchtitan.evaluation.judges import build_judge
from torchtitan.evaluation.sampling import ImageSampler, balanced_labels, grid_labels
from torchtitan.evaluation.validation import validation_loss
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file
from torchtitan.files.optional import OptionalOutputs
from torchtitan.gns.monitor import GNS_FOLDER
from torchtitan.gns.pictures import PICTURE_FILE
from torchtitan.pictures.grids import class_labels, image_grid, save_animation
from torchtitan.runs.folder import versions
from torchtitan.settings.record import effective
from torchtitan.training.data_loading import validation_batches
from torchtitan.training.hardware import (
    ALLOCATOR_RETRIES,
    PEAK_MEMORY,
    device_name,
    memory_metrics,
    peak_tflops,
    reset_peak_memory,
)
from torchtitan.training.metric_sinks import as_png
from torchtitan.training.metrics import METRICS_FILE, MetricsLog, Stopwatch, checked_lines, read_points, tail_medians

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

logger = logging.getLogger(__name__)

_TAIL_TAGS = (
    "loss_metrics/global_avg_loss",
    "throughput(img/s)",
    "throughput(tps)",
    "tflops",
    "mfu(%)",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(%)",
)

_LAST_TRIES_SECONDS = 10.0  # for what a completed run cannot write
# From the start of the process on: after them, whatever is trained with has been seen.
_STEPS_TO_COMPILE = 3


class Reports:
    """The reporting side of a Trainer. Collective methods say so; the first rank alone writes.

    A disk that cannot be written costs a picture, never the run; points of metrics wait for it.
    """

    def __init__(self, trainer: "Trainer") -> None:
        """Raises RunFolderError on every rank: metrics.jsonl cannot be written; collective."""
        self._trainer = trainer
        self._config = trainer.config
        self._first = trainer.layout.rank == 0
        self._device = trainer.layout.device
        self._peak_tflops = self._config.metrics.peak_tflops or peak_tflops(self._device)
        self._flops_per_image = trainer.model.flops_per_image(trainer.info.image_shape)
        self._tokens_per_image = trainer.model.tokens_per_image(trainer.info.image_shape)
        self._sampler = ImageSampler(
            trainer.model, trainer.objective, self._config.training.mixed_precision_param, self._device
        )
        gns = self._config.gns
        # Steps that measure the gradients of single samples have graphs of their own.
        expected = max(_STEPS_TO_COMPILE, gns.interval if gns.enable and gns.single_pass else 0)
        self._compilations = CompileCounter(expected)
        self._results: dict[str, Any] = dict(trainer.reported.get("results", {}))
        self._outputs = OptionalOutputs()
        self._held_out_shown = False
        self._held_out_picture: Image.Image | None = None  # until it is written
        self._peak_memory: float = 0.0  # GiB, of this rank, up to the last logged point
        self._allocator_retries: float = 0
        self._log = self._new_log() if self._first else None
        from_first_rank(self._open)
        if self._first:
            introduce(trainer, self._num_parameters())
        self._bar = tqdm(
            total=self._config.training.steps, initial=trainer.progress, unit="step", dynamic_ncols=True, smoothing=0.05,
            disable=not (self._first and sys.stderr.isatty()),
        )
        self._started = time.perf_counter()
        self._watch = Stopwatch()
        self._start_lap()

    def rewind(self) -> None:
        """Roll back to the trainer's step, which lies before what was reported last."""
        if self._first:
            self._log.close()
            self._log = self._new_log()
        self._results = dict(self._trainer.reported.get("results", {}))
        self._bar.n = self._trainer.progress
        self._bar.refresh()
        self._watch.lap()
        self._start_lap()

    def _new_log(self) -> MetricsLog:
        trainer, config = self._trainer, self._config
        return MetricsLog(
            trainer.folder.path, config.metrics, config.job.name, effective(config), trainer.step,
            trainer.reported.get("unsaved_metrics", ()),
        )  # fmt: skip

    def _open(self) -> None:
        path = self._trainer.folder.path / METRICS_FILE
        try:
            self._log.open()
        except OSError as error:
            raise RunFolderError([f"{path}: cannot be written: {reason(error)}"]) from error
        for folder in (self._trainer.folder.samples, self._noise_scale.parent):
            with self._outputs.attempt("unfinished pictures", folder):
                remove_unfinished(folder)

    def state_dict(self) -> dict[str, Any]:
        """What a run that resumes from here reports beside its own: for the first rank's checkpoint."""
        return {"results": self._results, "unsaved_metrics": self._log.unsaved() if self._log else []}

    def sync(self) -> None:
        """Bring metrics and lists to the disk, as far as it allows; any thread may call it, beside training."""
        if self._log:
            self._log.sync()
        self._trainer.corrupt_images.sync()

    def _start_lap(self) -> None:
        data = self._trainer.data
        self._step_of_last_lap, self._images_of_last_lap = self._trainer.step, data.next_sample
        self._waited_at_last_lap = data.data_seconds

    def excluded(self) -> AbstractContextManager:
        """What runs inside is not training time."""
        return self._watch.excluded()

    @contextmanager
    def excluded_step(self) -> Iterator[None]:
        """The train step inside counts in no rate: neither its time nor its images."""
        data = self._trainer.data
        images, waited = data.next_sample, data.data_seconds
        with self._watch.excluded():
            yield
        self._step_of_last_lap += 1
        self._images_of_last_lap += data.next_sample - images
        self._waited_at_last_lap += data.data_seconds - waited

    def advance(self) -> None:
        """One step of the progress bar; as many as its batch is times the first one."""
        if self._config.compile.enable and self._first:
            self._compilations.end_step(self._trainer.step)
        self._bar.update(self._trainer.progress - self._bar.n)

    def log(self, norm: Tensor, lr: float) -> None:
        """Write one point of metrics; collective.

        Args:
            norm: gradient norm of this step before clipping.
            lr: learning rate of this step.
        """
        step = self._trainer.step
        metrics = self._trainer.window.reduce() | {"grad_norm": float(norm), "lr": lr}
        metrics |= self._rates(step) | self._memory() | self._uncertainties()
        if self._config.compile.enable:
            counts = self._compilations.counts()
            metrics |= {f"compile/{name}": counts[name] for name in ("recompiles", "graph_breaks")}
        metrics |= {"n_images_seen": self._trainer.data.next_sample, "global_batch_size": self._trainer.batch_size}
        num_corrupt = self._trainer.corrupt_images.count()
        if num_corrupt:
            metrics["data/corrupt_images"] = num_corrupt
        if self._trainer.guard.skipped:
            metrics["skipped_steps"] = self._trainer.guard.skipped
        reset_peak_memory(self._device)
        if not self._first:
            return
        self._log.write(step, metrics)
        loss, rate = metrics["loss_metrics/global_avg_loss"], metrics.get("throughput(img/s)")
        self._bar.set_postfix_str(f"loss {loss:.4f}" + (f", {rate:.0f} img/s" if rate else ""))
        if self._bar.disable:
            training, progress, batch = self._config.training, self._trainer.progress, self._trainer.batch_size
            left = (training.steps - progress) * training.global_batch_size
            speed = f"{rate:.1f} img/s" if rate else "traced"
            eta = f"  ETA {_duration(left / rate)}" if rate else ""
            mfu = f"  mfu {metrics['mfu(%)']:.1f} %" if "mfu(%)" in metrics else ""
            done = f"step {step:>6}/{training.steps}"
            if self._config.gns.grow_batch:
                done = f"step {step:>6} ({progress / training.steps:.1%} done, batch {batch})"
            logger.info(
                f"{done}  loss {loss:.4f}  grad_norm {float(norm):.3f}  {speed}{mfu}{eta}"
            )

    def log_gns(self) -> None:
        """Write the estimates of the gradient noise scale, and its picture now and then; the first rank alone has work."""
        trainer, config = self._trainer, self._config.gns
        if not self._first:
            return
        with self.excluded():
            self._log.write(trainer.step, trainer.gns.metrics())
            last = trainer.last_step
            if last or trainer.step % config.picture_interval < config.log_interval:
                with self._outputs.attempt("the picture of the noise scale", self._noise_scale):
                    points = list(read_points(trainer.folder.path / METRICS_FILE, '"gns/'))
                    if picture := trainer.gns.draw(points, self._trainer.batch_size):
                        self._write_picture(self._noise_scale, picture)
                        if last:
                            self._log.write_image(trainer.step, "gns", picture)

    def validate(self) -> None:
        """Measure the held-out loss with the trained and with every averaged weight; collective."""
        trainer, config = self._trainer, self._config.validation
        with self.excluded():
            self._show_held_out()
            dataset = DATASETS[self._config.data.name](self._config.data, "validation")
            count = min(config.num_images, len(dataset))
            metrics = {}
            for track in ("none", *trainer.ema.tracks):
                batches = validation_batches(
                    dataset, trainer.info, count, config.batch_size, trainer.layout.rank, trainer.layout.world_size,
                    on_unreadable=trainer.corrupt_images.record,
                )
                with trainer.ema.weights(track, trainer.model):
                    losses = validation_loss(
                        trainer.model, trainer.objective, batches,
                        count=count, seed=self._config.debug.seed, bin_edges=trainer.bin_edges,
                        param_dtype=self._config.training.mixed_precision_param, device=self._device,
                        sharded=trainer.layout.sharded,
                    )
                prefix = "validation_metrics" if track == "none" else f"validation_metrics/{track}"
                metrics |= {f"{prefix}/{name}": value for name, value in losses.items()}
        self._results |= metrics
        if self._first:
            self._log.write(trainer.step, metrics)
            shown = ", ".join(
                f"{name.removeprefix('validation_metrics/')} {value:.4f} ± {metrics.get(f'{name}_stderr', 0.0):.2g}"
                for name, value in metrics.items()
                if name.endswith("loss")
            )
            self._say(f"step {trainer.step:>6}  held-out {shown}")

    def sample_grid(self) -> None:
        """Draw the grid of samples of this step; collective."""
        trainer, config = self._trainer, self._config.sampling
        with self.excluded():
            self._show_held_out()
            labels = grid_labels(config.classes, trainer.info.num_classes, config.images_per_class)
            images = self._draw(labels, config.guidance_scale, "sampling")
            if trainer.decoder:
                images = trainer.decoder.decode(images)
            if not self._first:
                return
            rows = labels[:: config.images_per_class].tolist()
            names = class_labels(rows, trainer.info.class_names)
            path = trainer.folder.samples / f"step-{trainer.step:08d}.png"
            title = f"guidance {config.guidance_scale:g}"  # the animation writes the step
            picture = image_grid(images, len(rows), config.images_per_class, names, title)
            with self._outputs.attempt("the grid of samples", path):
                self._write_picture(path, picture)
            self._log.write_image(trainer.step, "samples", picture)

    def finish(self, status: str) -> None:
        """Judge the samples, write the animation and the summary, and say where everything is; collective.

        Raises:
            TrainingError: of a completed run, what a later start needs could not be written.
        """
        trainer, config = self._trainer, self._config
        self._bar.close()
        training_seconds = time.perf_counter() - self._started
        if status == "completed" and config.sampling.enable and config.sampling.judge_images:
            self._judge()
        num_corrupt = trainer.corrupt_images.count()
        if num_corrupt:
            self._results["corrupt_images"] = num_corrupt
        self._results |= self._memory_over_ranks()
        if self._first:
            self._animate()
        if problem := from_first_rank(self._close_run, status, training_seconds):
            raise TrainingError(f"step {trainer.step}: {problem}")
        if self._first:
            self._say("\n".join(closing_lines(trainer, status, self._results, self._held_out, self._animation)))

    def fail(self, status: str, reason: str) -> None:
        """Close the summary of a run that cannot go on; called by one rank, any, for others may be gone."""
        self._bar.close()
        self._write_summary(self._summary(status) | {"reason": reason})

    def close(self) -> None:
        if self._log:
            self._log.close()

    # ------------------------------------------------------------------ inside

    def _rates(self, step: int) -> dict[str, float]:
        steps, seconds = step - self._step_of_last_lap, self._watch.lap()
        if steps == 0:  # all of them traced
            return {}
        seen = self._trainer.data.next_sample
        images = (seen - self._images_of_last_lap) / seconds
        self._step_of_last_lap, self._images_of_last_lap = step, seen
        tflops = images * self._flops_per_image / self._trainer.layout.world_size / 1e12
        waited = self._trainer.data.data_seconds - self._waited_at_last_lap
        self._waited_at_last_lap += waited
        rates = {
            "throughput(img/s)": images,
            "throughput(tps)": images * self._tokens_per_image,
            "tflops": tflops,
            "time_metrics/end_to_end(s)": seconds / steps,
            "time_metrics/data_loading(%)": 100.0 * waited / seconds,
        }
        if self._peak_tflops:
            rates["mfu(%)"] = 100.0 * tflops / self._peak_tflops
        return rates

    def _memory(self) -> dict[str, float]:
        metrics = memory_metrics(self._device)
        self._peak_memory = max(self._peak_memory, metrics[PEAK_MEMORY[self._device.type]])
        self._allocator_retries = metrics.get(ALLOCATOR_RETRIES, 0)
        return metrics

    def _memory_over_ranks(self) -> dict[str, float]:
        """What the rank that needs most needed up to the last logged point; collective."""
        peak, retries = highest_over_ranks(self._peak_memory, self._allocator_retries)
        return {"peak_memory_GiB": round(peak, 6), "num_alloc_retries": int(retries)}

    def _close_run(self, status: str, training_seconds: float) -> str | None:
        """Write what is left to write; what of it is missing and would be missed."""
        completed, safe = status == "completed", self._config.checkpoint.enable
        lacking, points = self._log.settle(_LAST_TRIES_SECONDS if completed else 0.0)
        if lacking:
            held = len(self._log.unsaved())
            those = "them" if held == lacking else f"the last {held}"
            fate = f"the last checkpoint holds {those}, and the same command writes them" if safe else "they are lost"
            problem = f"{lacking} of {points} metric points could not be written to {METRICS_FILE}; {fate}"
            if completed:
                return problem
            logger.error(problem)
        summary = self._summary(status) | {"seconds_since_start": round(training_seconds, 1)}
        written = _within(_LAST_TRIES_SECONDS if completed else 0.0, lambda: self._write_summary(summary))
        if completed and not (written or safe):
            return f"{self._trainer.folder.summary.name} could not be written, and checkpoint.enable is false"
        return None

    def _write_summary(self, summary: dict[str, Any]) -> bool:
        fate = f"the run has ended: {summary['status']}"
        if self._config.checkpoint.enable and summary["status"] == "completed":
            fate = "the run has completed, and the same command writes it from the last checkpoint"
        with self._outputs.attempt("the summary", self._trainer.folder.summary, consequence=fate):
            self._trainer.folder.write_summary(summary)
            return True
        return False

    def _write_picture(self, path: Path, picture: Image.Image) -> None:
        make_folder(path.parent)
        replace_file(path, as_png(picture))

    def _draw(self, labels: Tensor, guidance_scale: float, purpose: str) -> Tensor:
        trainer, config = self._trainer, self._config.sampling
        with trainer.ema.weights(config.ema_track, trainer.model):
            return self._sampler.draw(
                labels, self._config.debug.seed, **config.method() | {"guidance_scale": guidance_scale},
                batch_size=config.batch_size, sharded=trainer.layout.sharded, purpose=purpose,
            )

    def _show_held_out(self) -> None:
        """Save decoded held-out latents, once: whether scale and shift are right; collective."""
        trainer = self._trainer
        if trainer.decoder is None or not trainer.info.has_validation:
            return
        if not self._held_out_shown:
            self._held_out_shown = True
            dataset = DATASETS[self._config.data.name](self._config.data, "validation")
            picture = held_out_picture(dataset, trainer.decoder, trainer.info.class_names)
            if self._first:
                self._held_out_picture = picture
                self._log.write_image(trainer.step, "held_out", picture)
        if self._held_out_picture:
            with self._outputs.attempt("the picture of held-out images", self._held_out):
                self._write_picture(self._held_out, self._held_out_picture)
                self._held_out_picture = None

    def _judge(self) -> None:
        trainer, config = self._trainer, self._config.sampling
        labels = balanced_labels(config.judge_images, trainer.info.num_classes)
        if self._first:
            logger.info(f"drawing 2 x {len(labels)} images to judge, guided and unguided")
        guided = self._draw(labels, config.guidance_scale, "evaluation")
        unguided = self._draw(labels, 1.0, "evaluation")
        verdicts = from_first_rank(self._judge_images, labels, {"": guided, "_unguided": unguided})
        self._results |= verdicts

    def _judge_images(self, labels: Tensor, sets: dict[str, Tensor]) -> dict[str, float]:
        judge = build_judge(self._config.data)
        return {
            f"sample_{name}{suffix}": round(value, 4)
            for suffix, images in sets.items()
            for name, value in judge.judge(images, labels).items()
            if not (suffix and name.endswith("_real"))  # the real images are the same
        }

    def _animate(self) -> None:
        with self._outputs.attempt("the animation", self._animation, consequence="the grids are beside it"):
            if len(frames := grids(self._trainer.folder.samples)) > 1:
                save_animation(frames, self._animation)

    @property
    def _animation(self) -> Path:
        return self._trainer.folder.samples / "training.gif"

    @property
    def _held_out(self) -> Path:
        return self._trainer.folder.samples / "held-out.png"

    @property
    def _noise_scale(self) -> Path:
        return self._trainer.folder.path / GNS_FOLDER / PICTURE_FILE

    def _uncertainties(self) -> dict[str, float]:
        """The learned ln of the loss in the middle of each bin of `loss_by_bin`."""
        bins, density = self._config.metrics.loss_bins, self._trainer.objective.timestep_sampler.density
        t = density.quantile((torch.arange(bins, dtype=torch.float64) + 0.5) / bins)
        return self._trainer.objective.log_uncertainties(torch.logit(t).to(self._device))

    def _summary(self, status: str) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "status": status,
            "step": trainer.step,
            **({"progress": trainer.progress} if self._config.gns.grow_batch else {}),
            "n_images_seen": trainer.data.next_sample,
            **({"skipped_steps": trainer.guard.skipped} if trainer.guard.skipped else {}),
            **({"rollbacks": trainer.guard.rollbacks} if trainer.guard.rollbacks else {}),
            "layout": trainer.layout.describe(),
            "device": device_name(self._device),
            "num_parameters": self._num_parameters(),
            "flops_per_image": self._flops_per_image,
            "tail_medians": self._tail_medians(),
            **({"compile": self._compilations.counts()} if self._config.compile.enable else {}),
            **self._results,
            **({"checkpoint_failures": trainer.checkpointer.failures} if trainer.checkpointer.failures else {}),
            "versions": versions(),
        }

    def _tail_medians(self) -> dict[str, float]:
        path = self._trainer.folder.path / METRICS_FILE
        try:
            return tail_medians(path, _TAIL_TAGS)
        except OSError as error:
            logger.error(f"{path}: cannot be read: {reason(error)}; the summary has no medians")
            return {}

    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._trainer.parameters.values())

    def _say(self, text: str) -> None:
        if self._bar.disable:
            logger.info(text)
        else:
            tqdm.write(text, file=sys.stderr)


def checked_state(state: dict[str, Any], step: int) -> dict[str, Any]:
    """The state of reports in a checkpoint of a step. Raises ValueError, TypeError: it is no such state."""
    results, lines = state.get("results", {}), state.get("unsaved_metrics", [])
    if not all(isinstance(value, int | float) for value in dict(results).values()):
        raise ValueError("the results are no numbers")
    return {"results": dict(results), "unsaved_metrics": checked_lines(lines, step)}


def _within(seconds: float, work: Callable[[], bool]) -> bool:
    """Do something, again and again for that time while it fails; whether it came off."""
    deadline = time.monotonic() + seconds
    while not (done := work()) and time.monotonic() < deadline:
        time.sleep(min(1.0, seconds / 10))
    return done


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
