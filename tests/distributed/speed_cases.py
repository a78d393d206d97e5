"""What the ranks of the tests of speed settings run; see tests.launcher."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.distributed import cases
from tests.distributed.cases import make_trainer, remove, shared_folder, whole
from torchtitan.config.job import load_config
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.distributed.parallelize import fsdp_modules
from torchtitan.gns.ranks import RankGradients
from torchtitan.state.resume import checkpointed_state


@contextmanager
def gathers():
    """Number of gathers of weights in here, so far, as a list of one."""
    count = [0]
    original = _fsdp_param_group.foreach_all_gather

    def counting(*args, **kwargs):
        count[0] += 1
        return original(*args, **kwargs)

    with patch.object(_fsdp_param_group, "foreach_all_gather", counting):
        yield count


def gathered(layouts: dict[str, dict]) -> dict[str, dict]:
    """For each case: gathers of a step, and gradient norms of two steps."""
    folder = shared_folder()
    found = {}
    for name, case in layouts.items():
        trainer = make_trainer(folder, name, steps=10, accumulation=1, **case)
        with gathers() as count:
            trainer.state.step += 1
            first = float(trainer.train_step()[0])
            in_step = count[0]
            trainer.state.step += 1
            second = float(trainer.train_step()[0])
        found[name] = {"gathers": in_step, "norms": [first, second]}
        trainer.close()
    remove(folder)
    assert torch.get_float32_matmul_precision() == "highest"
    return found


def reduced(layouts: dict[str, dict]) -> dict[str, dict]:
    """For each case: the reduced gradient of one batch, as a flat list, and the mean over ranks of their own norms."""
    folder = shared_folder()
    found = {}
    for name, case in layouts.items():
        trainer = make_trainer(folder, name, steps=10, accumulation=1, **case)
        state, count = trainer.state, trainer.config.training.local_batch_size
        measured = RankGradients(state.train_module, state.layout)
        batch = state.to_device(state.data.next_batch())
        state.loss_terms(batch, GlobalBatch(0, count * dist.get_world_size())).loss.mean().backward()
        own = measured.pop_square_norm().sqrt()
        dist.all_reduce(own)
        gradient = torch.cat([whole(p.grad).flatten() for p in state.parameters.values()])
        found[name] = {"gradient": gradient.tolist(), "own": own.item() / dist.get_world_size(), "dtype": str(gradient.dtype)}
        trainer.close()
    remove(folder)
    return found


def offloaded() -> dict[str, list]:
    """Loss-dependent numbers of runs with shards in host memory, as on a GPU, and without; saved, resumed, sampled by."""
    found: dict[str, list] = {}
    folder = shared_folder()
    for name, offload in (("kept", False), ("offloaded", True)):
        with patch.object(cases, "load_config", partial(_loaded, offload)):
            for last in (2, 4):
                settings = ("--checkpoint.enable", "true", "--training.max_norm", "0.5")
                trainer = make_trainer(folder, name, steps=10, replicas=1, shards=2, accumulation=1, overrides=settings)
                state = trainer.state
                assert state.step == last - 2
                norms = []
                while state.step < last:
                    state.step += 1
                    norms.append(float(trainer.train_step()[0]))
                state.checkpointer.save(last, state.tensors(), checkpointed_state(state, trainer.reports.state_dict()))
                found.setdefault(name, []).extend(norms)
                groups = [module._get_fsdp_state()._fsdp_param_group for module in fsdp_modules(state.model)]
                policies = {type(group.offload_policy).__name__ for group in groups}
                trainer.close()
            with state.ema.weights("ema", state.model), torch.no_grad():
                weights = torch.cat([whole(p).flatten() for p in state.parameters.values()])
            found[name] += [weights.norm().item(), sorted(policies)]
    remove(folder)
    return found


def _loaded(offload: bool, arguments: list[str], ranks: int):
    config = load_config(arguments, ranks)
    config.training.enable_cpu_offload = offload  # refused on a machine without a GPU
    return config
