"""What the ranks of test_async_checkpoints.py run."""

import errno
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.cases import make_trainer, remove, shared_folder, whole
from torchtitan.checkpoint import checkpointer as checkpoint
from torchtitan.checkpoint.checkpointer import checkpoint_path, checkpoint_steps, newest_good
from torchtitan.files.shard_files import write_shard
from torchtitan.state.resume import checkpointed_state
from torchtitan.weights.trained_model import load_run

ENABLED = ("--checkpoint.enable", "true", "--ema.tracks", '[{"name": "ema", "decay": 0.9}]')


def saved_while_training(layouts: dict[str, dict]) -> dict[str, dict]:
    """For each layout, what becomes of a save at step 2 that one rank writes slowly while both train on."""
    folder = shared_folder()
    found = {}
    for name, layout in layouts.items():
        contents, norms = {}, {}
        for mode in ("disabled", "async"):
            trainer = make_trainer(
                folder, f"{name}-{mode}", steps=10, accumulation=1, **layout,
                overrides=(*ENABLED, "--checkpoint.async_mode", mode),
            )  # fmt: skip
            norms[mode] = []
            for step in range(1, 5):
                trainer.state.step = step
                norms[mode].append(float(trainer.train_step()[0]))
                if step == 2:
                    checkpoint.write_shard = slowly
                    trainer.state.checkpointer.save(
                        step, trainer.state.tensors(), checkpointed_state(trainer.state, trainer.reports.state_dict())
                    )
                    under_way = not checkpoint_steps(trainer.state.folder.checkpoints)
            assert trainer.state.checkpointer.wait() is None
            checkpoint.write_shard = write_shard
            path = checkpoint_path(trainer.state.folder.checkpoints, 2)
            contents[mode] = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
            contents[mode]["manifest.json"] = b""  # sums of the others
            state = json.loads(contents[mode]["state.json"])
            del state["config"], state["reports"]["clock"]  # the run's name and the mode; times
            contents[mode]["state.json"] = state
            trainer.close()
        found[name] = {
            "written beside training": under_way, "files": list(contents["async"]), "norms": norms,
            "same bytes": contents["async"] == contents["disabled"],
        }  # fmt: skip
    remove(folder)
    return found


def resumed_from_a_store(replicas: int, shards: int) -> dict[str, object]:
    """A run whose checkpoints are in a store: its steps, those of the run resumed, and what a reader of it finds."""
    folder, name = shared_folder(), "remote"
    given = {
        "steps": 10, "accumulation": 1, "replicas": replicas, "shards": shards,
        "overrides": (*ENABLED, "--checkpoint.folder", f"file://{folder}/store", "--checkpoint.async_mode", "async"),
    }  # fmt: skip
    copies = Path(folder) / "copies"
    copies.mkdir(exist_ok=True)
    tempfile.tempdir = str(copies)
    trainer = make_trainer(folder, name, **given)
    straight = train(trainer, 2)
    trainer.state.checkpointer.save(2, trainer.state.tensors(), checkpointed_state(trainer.state, trainer.reports.state_dict()))
    weights = {name: whole(parameter).clone() for name, parameter in trainer.state.parameters.items()}
    straight += train(trainer, 4)
    trainer.state.checkpointer.require_saved()
    trainer.close()
    resumed = make_trainer(folder, name, **given)
    begins = resumed.state.step
    again = train(resumed, 4)
    resumed.close()
    read = load_run(Path(folder) / name, "none", None, torch.device("cpu"))
    tempfile.tempdir = None
    dist.barrier()
    found = {
        "norms": straight, "resumed after": begins, "resumed": again, "read": read.label,
        "weights": all(torch.equal(value, weights[name]) for name, value in read.model.named_parameters()),
        "files": sorted(path.name for path in Path(folder, "store", name, "step-00000002").iterdir()),
        "copies left": [path.name for path in copies.glob("step-*")],
        "in the run's folder": (Path(folder) / name / "checkpoint").exists(),
    }  # fmt: skip
    remove(folder)
    return found


def train(trainer, last: int) -> list[float]:
    trainer._warm_up()
    norms = []
    while trainer.state.step < last:
        trainer.state.step += 1
        norms.append(float(trainer.train_step()[0]))
    return norms


def slowly(path, pieces):
    """The last rank's write of a shard lasts longer than the steps beside it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(2)
    return write_shard(path, pieces)


def failed_on_one_rank(mode: str) -> dict[str, object]:
    """What every rank knows when one of them could not write, and after the next save."""
    folder = Path(shared_folder())
    config = checkpoint.CheckpointConfig(async_mode=mode, keep_latest_k=1)
    keeper = checkpoint.Checkpointer(folder / "checkpoint", config, dist.get_rank())
    values = {"a": torch.arange(6.0), "b": torch.ones(3)}
    keeper.save(1, values, {})
    keeper.wait()
    checkpoint.write_shard = full_on_the_last
    keeper.save(2, values, {})
    problem = keeper.wait()
    checkpoint.write_shard = write_shard
    dist.barrier()
    left = sorted(path.name for path in keeper.folder.iterdir())
    dist.barrier()
    keeper.save(3, values, {})
    again = keeper.wait()
    keeper.close()
    good = newest_good(keeper.folder)
    remove(str(folder))
    said = problem.split(": ", 1)[1]
    return {"problem": said, "failures": keeper.failures, "left": left, "again": again, "good": good}


def full_on_the_last(path, pieces):
    if dist.get_rank() == dist.get_world_size() - 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    return write_shard(path, pieces)


def all_cases(layouts: dict[str, dict]) -> dict[str, dict]:
    failed = {mode: failed_on_one_rank(mode) for mode in ("disabled", "async")}
    stores = {name: resumed_from_a_store(**layout) for name, layout in layouts.items()}
    return {"stores": stores, "failed": failed, "saved": saved_while_training(layouts)}
