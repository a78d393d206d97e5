"""What the ranks of the tests of images of several shapes run; see tests.launcher."""

import json
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from tests.bucketed_images import registered
from tests.distributed.cases import make_trainer, remove, shared_folder
from torchtitan.gns.raw_sums import read_sums
from torchtitan.state.run_state import RunState
from torchtitan.training.metrics import METRICS_FILE

FLUX = (
    "--model.name", "flux", "--model.num_double_layers", "1", "--model.num_single_layers", "1",
    "--data.name", "bucketed", "--data.counts", "[40, 24, 0, 17]",
    "--optimizer.lr", "1e-3", "--gns.enable", "true", "--gns.num_bins", "3", "--gns.interval", "2", "--gns.sketch_size", "2",
)  # fmt: skip


def train_all(cases: dict[str, dict]) -> dict[str, dict]:
    """Train each case; on the first rank, loss, gradient norm and raw sums of every step, and the shapes of its images."""
    folder, found = shared_folder(), {}
    for name, case in cases.items():
        options = {"steps": 8, "accumulation": 1, **case}
        options["overrides"] = (*FLUX, *case.get("overrides", ()))
        factor = options.pop("factor", 1)
        with registered(), patch.object(RunState, "grown_factor", factor):
            trainer = make_trainer(folder, name, **options)
            seen, shapes = Counter(), []
            advance = trainer.reports.advance

            def note(trainer=trainer, seen=seen, shapes=shapes, advance=advance) -> None:
                now = Counter(trainer.state.data.images_by_shape)
                shapes.append(sorted([list(shape), count] for shape, count in (now - seen).items()))
                seen.update(now - seen)
                advance()

            trainer.reports.advance = note
            assert trainer.train() == 0
            trainer.close()
        if not dist.is_initialized() or dist.get_rank() == 0:
            points = [json.loads(line) for line in (Path(folder) / name / METRICS_FILE).read_text().splitlines()]
            of_steps = [sums.squares for _, sums in read_sums(Path(folder) / name / "gns")]  # [P, G, K]
            found[name] = {
                "curve": [
                    [point["loss_metrics/global_avg_loss"], point["grad_norm"]] for point in points if "grad_norm" in point
                ],
                "squares": [squares.nan_to_num().movedim(1, 0).flatten(1).tolist() for squares in of_steps],
                "shapes": shapes,
            }
    remove(folder)
    return found
