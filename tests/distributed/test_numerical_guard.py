"""The ladder on real ranks: skip, go back, stop; the same on all of them, and the fault named."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cases import make_trainer, remove, shared_folder, whole
from tests.launcher import run_on_ranks
from torchtitan.errors import TrainingError
from torchtitan.training.metrics import METRICS_FILE

STEPS, INTERVAL = 12, 4
LAYOUTS = {"ddp": (2, 1), "fsdp": (1, 2)}
GUARD = (
    "--checkpoint.enable=true", f"--checkpoint.interval={INTERVAL}", "--training.max_skipped_steps=2",
    "--gns.enable=true", "--gns.num_bins=2", "--gns.interval=2",
)  # fmt: skip


def broken(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * math.nan


def inject(trainer, fault: str, when) -> None:
    """Break something of the last rank at the steps for which `when(trainer)` is true."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    layer = trainer.state.model.get_submodule("layers.1.mlp.out")
    if fault == "gradient":

        def break_gradient(module, inputs, output):
            if when(trainer):
                output.register_hook(broken)

        layer.register_forward_hook(break_gradient)
    elif fault == "layer":
        layer.register_forward_hook(lambda m, i, output: output * math.nan if when(trainer) else output)
    else:
        dataset = trainer.state.data.dataset
        fetch = dataset.fetch

        def broken_fetch(indices):
            batch = fetch(indices)
            return batch | {"images": batch["images"] * math.nan} if when(trainer) else batch

        dataset.fetch = broken_fetch


WHEN = {
    "once": lambda trainer: trainer.state.step == 6,
    "one attempt": lambda trainer: trainer.state.step >= 6 and trainer.state.data.attempt == 0,
    "for ever": lambda trainer: trainer.state.step >= 6,
}


def ladder(layout: str, cases: list[list[str]]) -> dict[str, dict]:
    """Train with a fault; what became of it."""
    folder, found = shared_folder(), {}
    replicas, shards = LAYOUTS[layout]
    for fault, when in cases:
        name = f"{fault} {when}"
        trainer = make_trainer(
            folder, name.replace(" ", "_"), steps=STEPS, replicas=replicas, shards=shards, accumulation=2, overrides=GUARD
        )
        inject(trainer, fault, WHEN[when])
        before: dict[int, dict] = {}
        train_step = trainer.train_step

        def watched_step(trainer=trainer, train_step=train_step, before=before):
            before[trainer.state.step] = {key: whole(p).clone() for key, p in trainer.state.parameters.items()}
            return train_step()

        trainer.train_step = watched_step
        message = ""
        try:
            trainer.train()
        except TrainingError as error:
            message = str(error)
        after = {key: whole(p) for key, p in trainer.state.parameters.items()}
        lines = (Path(folder) / trainer.config.job.name / METRICS_FILE).read_text().splitlines()
        found[name] = {
            "message": message,
            "step": trainer.state.step,
            "skipped": trainer.state.guard.skipped,
            "rollbacks": trainer.state.guard.rollbacks,
            "attempt": trainer.state.data.attempt,
            "same": [step for step in before if step > 1 and step - 1 in before and same(before[step], before[step - 1])],
            "finite": all(tensor.isfinite().all().item() for tensor in after.values()),
            "sum": sum(tensor.double().abs().sum().item() for tensor in after.values()),
            "logged": [json.loads(line)["step"] for line in lines if "loss_metrics/global_avg_loss" in line],
        }
        trainer.close()
    remove(folder)
    return found


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_is_skipped_then_gone_back_from_then_named(layout):
    cases = [["gradient", "once"], ["gradient", "one attempt"]]
    cases += [["gradient", "for ever"], ["data", "for ever"]] if layout == "ddp" else [["layer", "for ever"]]
    ranks = run_on_ranks("tests.distributed.test_numerical_guard:ladder", 2, {"layout": layout, "cases": cases})
    assert ranks[0] == ranks[1], "ranks went different ways"
    found = ranks[0]
    assert all(case["finite"] for case in found.values())

    once = found["gradient once"]
    assert (once["message"], once["step"], once["skipped"], once["rollbacks"]) == ("", STEPS, 1, 0)
    assert once["same"] == [7]  # the weights before step 7 are those before step 6, and no others
    assert once["logged"] == list(range(1, STEPS + 1))

    # Steps 6, 7 and 8 are skipped, two of them are tolerated: rolled back to step 4, with other draws.
    attempt = found["gradient one attempt"]
    assert (attempt["message"], attempt["step"], attempt["skipped"]) == ("", STEPS, 3)
    assert (attempt["rollbacks"], attempt["attempt"]) == (1, 1)
    assert attempt["logged"] == list(range(1, STEPS + 1))

    named = {
        "gradient for ever": "the gradient of the output of layers.1.mlp.out on rank 1",
        "layer for ever": "the output of layers.1.mlp.out on rank 1",
        "data for ever": "images among samples",
    }
    for name, words in named.items():
        if name in found:
            assert f"the first value that is not finite: {words}" in found[name]["message"], name
            assert "the gradient norm is nan" in found[name]["message"] and "\n" not in found[name]["message"]
            assert "it was already rolled back to step 4" in found[name]["message"]
            assert (found[name]["rollbacks"], found[name]["skipped"]) == (1, 6)
