"""Timestep samplers that learn: one state on every rank and layout, and a trainer that stops, goes on and goes back."""

import torch
import torch.distributed as dist

from tests.distributed.cases import make_trainer, remove, shared_folder, stop_after
from tests.launcher import run_on_ranks
from tests.objectives import LEARNING, timesteps
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.registry import build_sampler
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.supervision.recovery import Fault, go_back

GLOBAL_BATCH = 2000  # stratified, two of every index


def learned(name: str, local_batch: int) -> dict:
    """The state after 8 steps of losses that are functions of sample number and t, fed rank by rank.

    Of elementary arithmetic: transcendental functions may round by where a number stands in memory.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    keys = {} if name == "loss_second_moment" else {"half_life": 3000}
    config = DenoisingConfig(path="ddpm_linear", timesteps=timesteps(name, **keys), spread="stratified")
    sampler = build_sampler(config, PATHS["ddpm_linear"](), seed=5)
    for number in range(8):
        first = number * GLOBAL_BATCH
        batch = GlobalBatch(first, GLOBAL_BATCH)
        for part in range(GLOBAL_BATCH // (ranks * local_batch)):  # microbatches, as the loader divides them
            start = first + (part * ranks + rank) * local_batch
            indices = torch.arange(start, start + local_batch)
            t, importance = sampler.sample(batch, indices)
            sampler.observe(batch, indices, t, importance * (0.1 + t) * (1 + indices % 7))
        sampler.update(torch.tensor(number == 3))
    return {"state": sampler.state_dict(), "shares": sampler.shares.tolist()}


def learned_by_all(local_batch: int) -> dict[str, dict]:
    return {name: learned(name, local_batch) for name in LEARNING}


def test_state_is_bit_equal_on_one_two_and_four_ranks():
    (alone,) = run_on_ranks("tests.distributed.test_loss_fed_ranks:learned_by_all", 1, {"local_batch": GLOBAL_BATCH})
    for ranks, local_batch in ((2, 250), (4, 500)):
        of_ranks = run_on_ranks(
            "tests.distributed.test_loss_fed_ranks:learned_by_all", ranks, {"local_batch": local_batch}
        )
        assert all(found == alone for found in of_ranks), ranks
    shares = {name: torch.tensor(found["shares"]) for name, found in alone.items()}
    assert all((share / share.mean() - 1).abs().max() > 0.2 for share in shares.values())  # they have learned


OVERRIDES = (
    "--checkpoint.enable=true", "--checkpoint.interval=4", "--objective.path=ddpm_linear", "--objective.prediction=v",
    "--training.global_batch_size=-1", "--training.local_batch_size=16",
)  # fmt: skip


def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path):
    """And one that goes back has the state of the checkpoint."""
    overrides = (*OVERRIDES, "--objective.timesteps.name=loss_second_moment")
    arguments = dict(replicas=1, shards=1, accumulation=1, overrides=overrides)
    straight = make_trainer(str(tmp_path), "straight", steps=12, **arguments)
    states = {}
    update = straight.state.objective.timestep_sampler.update

    def watched(skip: torch.Tensor) -> None:
        update(skip)
        states[straight.state.step] = straight.state.objective.timestep_sampler.state_dict()

    straight.state.objective.timestep_sampler.update = watched
    assert straight.train() == 0
    straight.close()

    stopped = make_trainer(str(tmp_path), "stopped", steps=12, **arguments)
    stop_after(stopped, 6, saved=4)
    resumed = make_trainer(str(tmp_path), "stopped", steps=12, **arguments)
    sampler = resumed.state.objective.timestep_sampler
    assert resumed.state.step == 4 and sampler.state_dict() == states[4] != states[6]
    resumed.state.step += 1
    resumed.train_step()
    assert sampler.state_dict() == states[5]
    # A rollback: other draws from here on, by the state of the checkpoint.
    go_back(resumed.state, Fault(resumed.state.step, "a fault"))
    assert resumed.state.step == 4 and resumed.state.data.attempt == 1 and sampler.state_dict() == states[4]
    resumed.state.step += 1
    resumed.train_step()
    assert sampler.state_dict() != states[5]
    resumed.close()
    again = make_trainer(str(tmp_path), "stopped", steps=12, **arguments)
    assert again.train() == 0
    assert again.state.objective.timestep_sampler.state_dict() == states[12]
    for key, parameter in again.state.parameters.items():
        assert torch.equal(parameter, straight.state.parameters[key]), key
    again.close()


def trained() -> dict:
    folder = shared_folder()
    trainer = make_trainer(
        folder, "run", steps=5, replicas=1, shards=2, accumulation=2,
        overrides=(*OVERRIDES[2:4], "--objective.timesteps.name=loss_second_moment"),
    )  # fmt: skip
    assert trainer.train() == 0
    state = trainer.state.objective.timestep_sampler.state_dict()
    trainer.close()
    remove(folder)
    return state


def test_ranks_of_a_run_agree_on_what_all_of_them_saw():
    one, other = run_on_ranks("tests.distributed.test_loss_fed_ranks:trained", 2)
    assert one == other
    assert sum(one["count"]) == 80  # 5 steps of 16 samples
    assert sum(loss > 0 for losses in one["losses"] for loss in losses) == 80
