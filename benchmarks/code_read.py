"""Count the code that a plain flow step executes, from its batch to its loss and as a whole: lines, functions, files.

    python benchmarks/code_read.py

A reader who follows one training step meets exactly this code. The run is a rectified flow on synthetic
images, one process, eager, nothing measured; its third step is computed under a line tracer.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

OPTIONS = [
    "--data.name", "synthetic", "--training.steps", "4", "--training.local_batch_size", "4",
    "--training.global_batch_size", "4", "--lr_scheduler.warmup_steps", "0", "--model.flavor", "debug",
    "--checkpoint.enable", "false", "--sampling.enable", "false", "--validation.enable", "false",
    "--metrics.enable_tensorboard", "false", "--debug.seed", "0",
]  # fmt: skip


class Executed:
    """Lines and functions of this repository that were executed inside `traced`."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.functions: set[CodeType] = set()

    @property
    def files(self) -> dict[str, int]:
        """Executed lines of each file."""
        counts: dict[str, int] = {}
        for file, _ in self.lines:
            counts[file] = counts.get(file, 0) + 1
        return counts

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Trace the lines executed inside."""
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT) or ".venv" in path.parts or path == Path(__file__):
            return None
        if event == "call":
            self.functions.add(frame.f_code)
        elif event == "line":
            self.lines.add((str(path.relative_to(ROOT)), frame.f_lineno))
        return self._trace


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from torchtitan.config.job import load_config
    from torchtitan.diffusion.timesteps.sampler import GlobalBatch
    from torchtitan.distributed.mesh import process_group
    from torchtitan.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder, process_group():
        with contextlib.redirect_stderr(sys.stdout):
            trainer = Trainer(load_config([*OPTIONS, "--job.dump_folder", folder], 1))
        for _ in range(2):
            trainer.state.step += 1
            trainer.train_step()
        state = trainer.state
        batch, samples = state.to_device(state.data.next_batch()), GlobalBatch(state.data.next_sample, 4)
        loss, step = Executed(), Executed()
        with loss.traced():
            state.loss_terms(batch, samples)
        state.step += 1
        with step.traced():
            trainer.train_step()
        trainer.close()
    for name, executed in (("from batch to loss", loss), ("the whole step", step)):
        print(f"{name}: {len(executed.lines)} lines, {len(executed.functions)} functions, {len(executed.files)} files")
        for file, lines in sorted(executed.files.items(), key=lambda found: -found[1]):
            print(f"{lines:4}  {file}")


if __name__ == "__main__":
    main()
