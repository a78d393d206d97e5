"""Summary that closes a run, and messages about files that could not be written."""

import logging
from collections.abc import Mapping
from typing import Any

from torchtitan import errors
from torchtitan.checkpoint.finding import BRANCHED_FROM
from torchtitan.distributed.compile import CompileCounter
from torchtitan.files.optional import OptionalOutputs
from torchtitan.runs.folder import versions
from torchtitan.settings.plugins import loaded_plugins
from torchtitan.state.run_state import RunState
from torchtitan.training.clock import RunClock
from torchtitan.training.hardware import device_name
from torchtitan.training.metric_points import TIMED
from torchtitan.training.metrics import METRICS_FILE, MetricsLog, tail_medians

logger = logging.getLogger(__name__)

_LOSS = ("loss_metrics/global_avg_loss",)
_SPEEDS = (
    "throughput(img/s)",
    "throughput(tps)",
    "tflops",
    "mfu(%)",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(%)",
)


def with_conditions(results: Mapping[str, Any], state: RunState) -> dict[str, Any]:
    """Results of a checkpoint, with what a run's speeds depend on now, and the last step at which that was otherwise."""
    config, device = state.config, device_name(state.layout.device)
    layout, batch = config.parallelism.degrees.describe(), config.training.describe_batch(config.parallelism.data_ranks)
    compiled = f"compile {config.compile.mode}" if config.compile.enable else "eager"
    now = f"{layout} on {device}; {batch}; {compiled}; activation checkpointing {config.activation_checkpoint.mode}"
    before = results.get(TIMED, {"as": now, "after_step": 0})
    return {**results, TIMED: before if before["as"] == now else {"as": now, "after_step": state.step}}


class RunSummary:
    """Summary of a run, `summary.json`; used by one rank."""

    def __init__(
        self, state: RunState, outputs: OptionalOutputs, compilations: CompileCounter, clock: RunClock,
        hardware: dict[str, Any],
    ) -> None:  # fmt: skip
        """outputs: says which files cannot be written; hardware: as found so far; the caller may add to it."""
        self._state = state
        self._clock, self._hardware = clock, hardware
        self._outputs = outputs
        self._compilations = compilations
        self.clock: dict[str, Any] = {}  # of the closed summary: totals of the run's clock, with speeds and cost

    def close(self, log: MetricsLog, status: str, results: dict[str, Any]) -> str | None:
        """Write the last metrics and the summary; return the missing files that matter, in words, if any."""
        completed, safe = status == "completed", self._state.config.checkpoint.enable
        lacking, points = log.settle()
        if lacking:
            problem = f"{lacking} of {points} metric points could not be written to {METRICS_FILE}; they are lost"
            if completed:
                return problem
            logger.error(problem)
        summary = self._content(status, results)
        self.clock = summary["clock"]
        written = self._write(summary)
        if completed and not (written or safe):
            return f"{self._state.folder.summary.name} could not be written, and checkpoint.enable is false"
        return None

    def fail(self, status: str, reason: str, results: dict[str, Any]) -> None:
        """Write the summary of a run that cannot continue."""
        self._write(self._content(status, results) | {"reason": reason})

    def _write(self, summary: dict[str, Any]) -> bool:
        fate = f"the run has ended: {summary['status']}"
        if self._state.config.checkpoint.enable and summary["status"] == "completed":
            fate = "the run has completed, and the same command writes it from the last checkpoint"
        with self._outputs.attempt("the summary", self._state.folder.summary, consequence=fate):
            self._state.folder.write_summary(summary)
            return True
        return False

    def _content(self, status: str, results: dict[str, Any]) -> dict[str, Any]:
        """Content: the end of the run, its hardware, medians of its last points, and its results."""
        state, config = self._state, self._state.config
        step, images = state.before_step or (state.step, state.data.next_sample)  # one that fails is not made
        return {
            "status": status,
            "step": step,
            **({"progress": state.progress, "grown_batch_size": state.grown_batch_size} if state.batch_grows else {}),
            **({BRANCHED_FROM: state.branched_from} if state.branched_from is not None else {}),
            "n_images_seen": images,
            **state.guard.counts(),
            **({"rollbacks": state.guard.rollbacks} if state.guard.rollbacks else {}),
            **self.session(results),
            "tail_medians": self._tail_medians(results[TIMED]["after_step"]),
            **({"compile": self._compilations.counts()} if config.compile.enable else {}),
            "clock": self._clock.totals().summary(),
            **results,
            **({"checkpoint_failures": state.checkpointer.failures} if state.checkpointer.failures else {}),
        }

    def session(self, results: dict[str, Any]) -> dict[str, Any]:
        """What is known of a run before its end: its past changes, what it runs on, since when, and its last samples' quality."""
        state = self._state
        return {
            **({"config_changes": state.config_changes} if state.config_changes else {}),
            "layout": state.config.parallelism.degrees.describe(),
            "device": device_name(state.layout.device),
            "hardware": self._hardware,
            "num_parameters": state.num_parameters,
            "flops_per_image": state.flops_per_image,
            TIMED: results[TIMED],
            "versions": versions(),
            **({"plugins": plugins} if (plugins := loaded_plugins()) else {}),
            **({"evaluation": results["evaluation"]} if "evaluation" in results else {}),
        }

    def _tail_medians(self, timed_after: int) -> dict[str, float]:
        path = self._state.folder.path / METRICS_FILE
        try:
            return tail_medians(path, _LOSS) | tail_medians(path, _SPEEDS, timed_after)
        except OSError as error:
            logger.error(f"{path}: cannot be read: {errors.reason(error)}; the summary has no medians")
            return {}
