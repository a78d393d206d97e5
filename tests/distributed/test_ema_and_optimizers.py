"""Averages and optimizers on sharded weights do what they do on whole ones, and resume bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.cases import make_trainer, remove, shared_folder, whole
from tests.launcher import run_on_ranks
from torchtitan.state.resume import checkpointed_state

HERE = "tests.distributed.test_ema_and_optimizers"
TRACKS = (
    '--ema.tracks=[{"name": "ema"}, {"name": "half", "kind": "half_life", "half_life": 100, "rampup_ratio": 0.5},'
    ' {"name": "power", "kind": "power", "sigma_rel": 0.15}]'
)


def walked_averages(shards: int) -> dict[str, list[float]]:
    """Averages of weights that walk the same way on every layout; a few values of each tensor."""
    folder = shared_folder()
    trainer = make_trainer(folder, "walk", steps=10, replicas=1, shards=shards, accumulation=1, overrides=(TRACKS,))
    generator = torch.Generator().manual_seed(5)
    for step in range(1, 9):
        for parameter in trainer.state.parameters.values():
            moved = whole(parameter) + 0.1 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                rows = moved.chunk(shards)
                moved = rows[dist.get_rank()] if dist.get_rank() < len(rows) else moved[:0]
                parameter.to_local().detach().copy_(moved)
            else:
                parameter.detach().copy_(moved)
        trainer.state.ema.update(step)
    found = {name: whole(tensor).flatten()[::37].tolist() for name, tensor in trainer.state.ema.tensors().items()}
    trainer.close()
    remove(folder)
    return found


@torch.compiler.set_stance("force_eager")  # torchao compiles its update for each shape of weights: a minute, and no other state
def differences_after_resume(cases: dict[str, dict]) -> dict[str, list[str]]:
    """For each case, the tensors in which a resumed run differs from a straight one."""
    folder = shared_folder()
    found = {}
    for name, case in cases.items():
        trainers = []
        for last in (4, 4):
            trainer = make_trainer(folder, name, steps=10, accumulation=1, **case)
            while trainer.state.step < last:
                trainer.state.step += 1
                trainer.train_step()
                if trainer.state.step == 3 and not trainers:
                    trainer.state.checkpointer.save(
                        3, trainer.state.tensors(), checkpointed_state(trainer.state, trainer.reports.state_dict())
                    )
            trainer.close()
            trainers.append(trainer)
        straight, resumed = (trainer.state.tensors() for trainer in trainers)
        assert straight.keys() == resumed.keys()
        found[name] = [key for key in straight if not torch.equal(whole(straight[key]), whole(resumed[key]))]
        found[name] += [] if any(ENDINGS[name] in key for key in straight) else [f"no {ENDINGS[name]}"]
    remove(folder)
    return found


ENDINGS = {"Muon": ".momentum", "AdamW8bit": ".exp_avg.scale"}


def test_sharded_averages_equal_those_of_one_process():
    on_one = run_on_ranks(f"{HERE}:walked_averages", 1, {"shards": 1})[0]
    on_four = run_on_ranks(f"{HERE}:walked_averages", 4, {"shards": 4})
    assert len(on_one) > 90 and {name.split(".")[0] for name in on_one} == {"ema", "half", "power"}
    for name, values in on_one.items():
        for rank in on_four:
            assert rank[name] == pytest.approx(values, rel=1e-6, abs=1e-7)


def test_sharded_runs_resume_bit_for_bit_with_every_optimizer():
    names = ["Muon"]  # AdamW: tests/end_to_end/test_resume.py
    try:
        import torchao  # noqa: F401

        names.append("AdamW8bit")
    except ImportError:
        pass
    cases = {
        name: {
            "replicas": 1, "shards": 2,
            "overrides": ("--checkpoint.enable=true", f"--optimizer.name={name}", "--optimizer.weight_decay=0.1"),
        }
        for name in names
    }
    for rank in run_on_ranks(f"{HERE}:differences_after_resume", 2, {"cases": cases}):
        assert rank == {name: [] for name in names}
