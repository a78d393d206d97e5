"""Cost of averages of the weights: python benchmarks/ema_cost.py [--pairs N] [--batch B]

Train steps of DiT-S/2 on 3x32x32 images, without averages and with three of them, one of each kind. Steps are
interleaved in one process and the ratio is taken pair by pair. Writes benchmarks/results/ema_cost.json.
"""

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import shared
from torchtitan.distributed.mesh import compute_device

TRACKS = [{"name": "constant"}, {"name": "half_life", "kind": "half_life"}, {"name": "power", "kind": "power"}]


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    settings = shared.SYNTHETIC | {"model.flavor": "DiT-S/2", "training.local_batch_size": arguments.batch}
    trainers = [shared.build_trainer(settings | {"ema.tracks": tracks}) for tracks in (TRACKS, [])]
    steps = [functools.partial(shared.train_step, trainer) for trainer in trainers]
    times = shared.time_in_turns(steps, arguments.pairs, compute_device())
    cost = shared.figures("cost_share", [averaging / plain - 1.0 for averaging, plain in times])
    result = {
        "model": "DiT-S/2 on 3x32x32, float32", "batch": arguments.batch, "pairs": arguments.pairs,
        "tracks": len(TRACKS), "step_seconds": shared.medians(times)[1], **cost,
        "cost_share_per_track": cost["cost_share"] / len(TRACKS), **shared.conditions(),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    shared.write_results("ema_cost", result)


if __name__ == "__main__":
    main()
