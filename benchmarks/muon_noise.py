"""Noise scale in the norm of Muon's step by the size b of a rank's batch: python benchmarks/muon_noise.py [--ages STEP ...]

The digits model trains with Muon. At each age gradients of pairs of batches of b fresh samples give b E[|n_b|]^2 in the dual norm
of Muon's step (torchtitan/gns/nuclear.py), all gradients |G|^2, corrected by halves; the quotient is the noise scale of b;
beside it the Euclidean one of the same matrices. Writes benchmarks/results/muon_noise.json.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks import shared
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.gns.nuclear import nuclear_norm
from torchtitan.trainer import Trainer

LARGEST = 128


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--ages", type=int, nargs="+", default=[50, 200, 800], help="steps of training")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of batches of each size")
    arguments = parser.parse_args()
    trainer = shared.build_trainer({
        "job.config_file": str(shared.ROOT / "train_configs" / "digits.toml"), "training.steps": 2000, "optimizer.name": "Muon",
        "lr_scheduler.decay_type": "constant", "gns.enable": False, "evaluation.enable": False, "validation.enable": False,
    })  # fmt: skip
    found = {}
    for age in arguments.ages:
        shared.train_to(trainer, age)
        found[str(age)] = at_age(trainer, arguments.pairs)
        print(age, json.dumps(found[str(age)], indent=1), flush=True)
    result = {"ages": found, "pairs": arguments.pairs, **shared.conditions(trainer.state.layout.device)}
    shared.write_results("muon_noise", result)


def at_age(trainer: Trainer, pairs: int) -> dict[str, dict[str, float]]:
    """Noise scales by batch size at these weights."""
    sizes = list(trainer.state.optimizer.matrices().values())

    def norm(matrices: Sequence[Tensor]) -> float:
        return sum(size * nuclear_norm(matrix).item() for size, matrix in zip(sizes, matrices, strict=True))

    halves, noise, square_noise = [zeros(trainer), zeros(trainer)], {}, 0.0
    batches = [2**power for power in range(LARGEST.bit_length())]
    for b in batches:
        of_pairs = []
        for _ in range(pairs):
            both = [mean_gradient(trainer, b) for _ in range(2)]
            for total, gradient in zip(halves, both, strict=True):
                torch._foreach_add_(total, gradient, alpha=b)
            apart = torch._foreach_sub(both[0], both[1])
            torch._foreach_div_(apart, 2**0.5)
            of_pairs.append(norm(apart))
            square_noise += b * sum(matrix.square().sum().item() for matrix in apart) / pairs / len(batches)
        noise[b] = b * (sum(of_pairs) / pairs) ** 2
    samples = pairs * sum(batches)  # of a half
    means = [[matrix / samples for matrix in half] for half in halves]
    whole = [(one + other) / 2 for one, other in zip(*means, strict=True)]
    signal = 2 * norm(whole) ** 2 - sum(norm(half) ** 2 for half in means) / 2
    euclidean = sum((one * other).sum().item() for one, other in zip(*means, strict=True))
    return {"noise_scale": {str(b): value / signal for b, value in noise.items()}, "euclidean": {"all": square_noise / euclidean},
            "step_noise_over_signal": {"all": (noise[LARGEST] / (2 * samples * signal)) ** 0.5}}  # fmt: skip


def zeros(trainer: Trainer) -> list[Tensor]:
    return [torch.zeros_like(parameter) for parameter in trainer.state.optimizer.matrices()]


def mean_gradient(trainer: Trainer, samples: int) -> list[Tensor]:
    """Mean gradient of Muon's matrices over fresh samples; weights stay."""
    state = trainer.state
    first, batch = state.data.next_sample, state.data.next_batch()
    few = {name: value[:samples] for name, value in batch.items()}
    loss = state.loss_terms(state.to_device(few), GlobalBatch(first, LARGEST, state.data.attempt), None).minimised.mean()
    return list(torch.autograd.grad(loss, list(state.optimizer.matrices())))


if __name__ == "__main__":
    main()
