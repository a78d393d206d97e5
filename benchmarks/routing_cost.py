"""Cost of routed steps: python benchmarks/routing_cost.py [--rounds N] [--batch B]

Train steps of DiT-S/2 on 4x32x32 images (256 tokens) with routed blocks, by the share of the tokens that they keep, beside the
plain network's. Steps are interleaved in one process and the ratio is taken round by round; floating-point operations are
those that the run counts. Writes benchmarks/results/routing_cost.json.
"""

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import shared
from torchtitan.distributed.mesh import compute_device

CASES: dict[str, shared.Settings] = {
    "plain": {},
    "tread, 0.5": {"model.routing.name": "tread"},
    "tread, 0.25": {"model.routing.name": "tread", "model.routing.keep": 0.25},
    "sprint, 0.25": {"model.routing.name": "sprint"},
}


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of steps (default: 9)")
    parser.add_argument("--batch", type=int, default=8, help="images in a step (default: 8)")
    arguments, device = parser.parse_args(), compute_device()
    fixed = {"model.flavor": "DiT-S/2", "data.shape": (4, 32, 32), "training.local_batch_size": arguments.batch}
    trainers = [shared.build_trainer(shared.SYNTHETIC | fixed | case) for case in CASES.values()]
    steps = [functools.partial(shared.train_step, trainer) for trainer in trainers]
    times = shared.time_in_turns(steps, arguments.rounds, device)
    plain = trainers[0].state.flops_per_image
    rows = [
        {
            "routing": name, "flops_ratio": trainer.state.flops_per_image / plain, "step_seconds": seconds,
            **shared.figures("step_ratio", [of_round[number] / of_round[0] for of_round in times]),
        }
        for number, (name, trainer, seconds) in enumerate(zip(CASES, trainers, shared.medians(times), strict=True))
    ]  # fmt: skip
    result = {"batch": arguments.batch, "rounds": arguments.rounds, "rows": rows, **shared.conditions(device)}
    print(json.dumps(result, indent=1))
    shared.write_results("routing_cost", result)


if __name__ == "__main__":
    main()
