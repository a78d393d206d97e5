"""One finite pixel of 1e20 in one image, and states that are not finite: finite weights at the end, or a stop that names it."""

import logging
import math
import os
import signal

import pytest
import torch
from safetensors.torch import save_file

from tests.distributed.cases import make_trainer, remove, shared_folder
from tests.launcher import run_on_ranks
from torchtitan.checkpoint.checkpointer import CheckpointError, checkpoint_steps
from torchtitan.errors import TrainingError
from torchtitan.files.weight_files import WeightsError
from torchtitan.gns.raw_sums import read_sums
from torchtitan.training.non_finite import not_finite

HEADS = '--objective.heads=["x0","noise","v"]'
DDPM = ("--objective.path=ddpm_linear", "--objective.prediction=v", "--objective.preconditioning=index")
UNIFORM = "--objective.timesteps.name=uniform"
OBJECTIVES = {
    "plain": ("--gns.enable=true", "--gns.num_bins=2", "--gns.interval=2"),
    "bf16": ("--training.mixed_precision_param=bfloat16",),
    "learned uncertainty": ("--objective.learned_uncertainty=true", "--objective.uncertainty_features=8"),
    "inverse variance": (*DDPM, UNIFORM, HEADS),
    "soft minimum": (*DDPM, UNIFORM, HEADS, "--objective.combine.name=soft_minimum"),
    "adaptive timesteps": (*DDPM, "--objective.timesteps.name=loss_second_moment"),
}
CHECKPOINTS = ("--checkpoint.enable=true", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0")
SAMPLE = 37  # of the third step of 16


def build(folder, steps: int, *overrides: str, shards: int = 1, name: str = "run"):
    overrides = ("--lr_scheduler.warmup_steps=0", *overrides)
    return make_trainer(str(folder), name, steps=steps, replicas=1, shards=shards, accumulation=1, overrides=overrides)


def poison(trainer, sample: int = SAMPLE, value: float = 1e20, always: bool = False) -> int:
    """Give the image that a sample stands for a pixel of `value`; always: every image, from that sample's step on."""
    dataset, image = trainer.state.data.dataset, trainer.state.data.image_of(sample, 0)
    fetch = dataset.fetch

    def poisoned(indices):
        batch = fetch(indices)
        images = batch["images"].clone()
        struck = trainer.state.step > sample // 16 if always else torch.as_tensor(indices) == image
        images[struck, 0, 0, 0] = value
        return batch | {"images": images}

    dataset.fetch = poisoned
    return image


def is_finite(trainer) -> bool:
    return not_finite(trainer.state.tensors()) == ""


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "bf16"])
def test_one_pixel_of_1e20_costs_one_step_at_most_and_its_image_is_named(objective, tmp_path, caplog):
    # Where the target is not the image, the network's normalisation makes an ordinary step of it: nothing is skipped.
    skipped = 0 if objective == "soft minimum" else 1
    trainer = build(tmp_path, 5, *OBJECTIVES[objective])
    image, weights = poison(trainer), {}
    train_step = trainer.train_step
    trained = trainer.state.parameters | trainer.state.objective.parameters()

    def watched_step():
        weights[trainer.state.step] = {name: p.detach().clone() for name, p in trained.items()}
        return train_step()

    trainer.train_step = watched_step
    with caplog.at_level(logging.WARNING):
        assert trainer.train() == 0
    assert is_finite(trainer) and trainer.state.guard.skipped == skipped
    assert all(torch.equal(weights[3][name], weights[4][name]) == bool(skipped) for name in trained)
    named = [message for message in caplog.messages if "has a value of" in message]
    assert named == [
        f"step 3: sample {SAMPLE}, image {image} of the dataset, has a value of 1e+20 (images lie within [-1, 1]): check it"
    ]
    if objective == "plain":
        assert [step for step, _ in read_sums(trainer.state.folder.path / "gns")] == [1, 2, 4, 5]
        assert trainer.state.gns.pool.outliers == 0
        assert trainer.state.gns.pool.by_bin("plain", "sketch").samples.sum() <= 2 * 16  # of the measured steps 2 and 4
    if objective == "adaptive timesteps":
        assert sum(trainer.state.objective.timestep_sampler.state_dict()["count"]) == 4 * 16
    trainer.close()


def struck(objectives: list[str]) -> dict[str, dict]:
    """Train with the pixel on two shards; what became of it."""
    folder, found = shared_folder(), {}
    for number, name in enumerate(objectives):
        trainer = build(folder, 5, *OBJECTIVES[name], shards=2, name=f"run{number}")
        poison(trainer)
        code = trainer.train()
        learned = {key: p.tolist() for key, p in trainer.state.objective.parameters().items()}
        found[name] = {"code": code, "skipped": trainer.state.guard.skipped, "finite": is_finite(trainer), "learned": learned}
        trainer.close()
    remove(folder)
    return found


def test_one_pixel_of_1e20_costs_one_step_on_sharded_ranks_alike():
    objectives = ["plain", "learned uncertainty", "bf16"]
    one, other = run_on_ranks("tests.distributed.test_absurd_values:struck", 2, {"objectives": objectives})
    assert one == other
    for name, found in one.items():
        assert (found["code"], found["skipped"], found["finite"]) == (0, 1, True), name


# ---------------------------------------------------------------------- the ladder


def test_data_full_of_such_values_end_the_run_with_the_name_of_one(tmp_path):
    trainer = build(tmp_path, 5, *CHECKPOINTS, "--training.max_skipped_steps=0")
    poison(trainer, always=True)
    with pytest.raises(
        TrainingError,
        match=r"it was already rolled back to step 2.*; sample \d+, image \d+ of the dataset, has a value",
    ):
        trainer.train()
    assert is_finite(trainer)
    trainer.close()


def test_a_last_step_skipped_for_its_samples_is_no_reason_to_train_again(tmp_path):
    """There is no checkpoint to roll back to: the step before, repeated, shows that the weights are sound."""
    trainer = build(tmp_path, 3, "--checkpoint.enable=true", "--checkpoint.interval=100")
    poison(trainer)
    assert trainer.train() == 0
    assert (trainer.state.guard.skipped, trainer.state.guard.rollbacks, trainer.state.step) == (1, 0, 3)
    assert checkpoint_steps(trainer.state.folder.checkpoints) == [3] and is_finite(trainer)
    trainer.close()


@pytest.mark.parametrize("saved", [True, False])
def test_a_last_step_skipped_for_its_weights_is_never_saved(saved, tmp_path):
    """The optimizer's last update but one is absurd, finite: gone back from where there is a checkpoint, else stopped."""
    interval = 2 if saved else 100
    trainer = build(tmp_path, 4, "--checkpoint.enable=true", f"--checkpoint.interval={interval}")
    train_step = trainer.train_step

    def then_break():
        done = train_step()
        if trainer.state.step == 3 and trainer.state.data.attempt == 0:
            with torch.no_grad():
                trainer.state.parameters["layers.1.mlp.out.weight"].fill_(3e38)
        return done

    trainer.train_step = then_break
    if saved:
        assert trainer.train() == 0
        assert (trainer.state.guard.rollbacks, trainer.state.step) == (1, 4) and is_finite(trainer)
        assert checkpoint_steps(trainer.state.folder.checkpoints) == [4, 2]
    else:
        with pytest.raises(TrainingError, match="in the last step, and there is no checkpoint to roll back to; the first"):
            trainer.train()
        assert checkpoint_steps(trainer.state.folder.checkpoints) == []
    trainer.close()


# ---------------------------------------------------------------------- states that are not finite


PARTS = {
    "model": lambda trainer: trainer.state.parameters["layers.0.mlp.out.weight"],
    "ema": lambda trainer: trainer.state.ema.tracks["ema"]["layers.0.mlp.out.weight"],
    "second moment": lambda trainer: trainer.state.optimizer.state[trainer.state.parameters["layers.0.mlp.out.weight"]][
        "exp_avg_sq"
    ],
    "u": lambda trainer: trainer.state.objective.uncertainty.weight,
}
NAMES = {
    "model": "model.layers.0.mlp.out.weight", "ema": "ema.ema.layers.0.mlp.out.weight",
    "second moment": "optimizer.layers.0.mlp.out.weight.exp_avg_sq", "u": "objective.uncertainty.weight",
}  # fmt: skip


@pytest.mark.parametrize("part", ["ema", "u"])
def test_a_state_that_is_not_finite_is_never_saved_and_never_completes(part, tmp_path, caplog):
    """Broken after the last step before a save, where no verdict sees it: gone back from once, then the end."""
    trainer = build(tmp_path, 4, *CHECKPOINTS, *OBJECTIVES["learned uncertainty"])
    train_step = trainer.train_step

    def then_break():
        done = train_step()
        if trainer.state.step == 4:
            with torch.no_grad():
                PARTS[part](trainer).view(-1)[3] = math.inf
        return done

    trainer.train_step = then_break
    with caplog.at_level(logging.WARNING), pytest.raises(TrainingError) as stopped:
        trainer.train()
    assert f"step 4: {NAMES[part]} is not finite, and it was already rolled back to step 2" in str(stopped.value)
    assert any(f"{NAMES[part]} is not finite; rolled back to the checkpoint of step 2" in text for text in caplog.messages)
    assert checkpoint_steps(trainer.state.folder.checkpoints) == [2]
    trainer.close()


def test_weights_that_are_not_finite_from_the_start_are_refused_by_name(tmp_path):
    trainer = build(tmp_path, 4)
    with torch.no_grad():
        trainer.state.parameters["layers.0.mlp.out.weight"][0, 0] = math.nan
    with pytest.raises(TrainingError, match=r"before step 1: model.layers.0.mlp.out.weight is not finite: the run cannot"):
        trainer.train()
    trainer.close()


def test_a_checkpoint_that_is_not_finite_is_not_resumed_from(tmp_path):
    trainer = build(tmp_path, 4, *CHECKPOINTS)
    for _ in range(2):
        trainer.state.step += 1
        trainer.train_step()
    with torch.no_grad():
        PARTS["second moment"](trainer).view(-1)[0] = math.inf
    trainer._save()
    trainer.close()
    with pytest.raises(CheckpointError, match=r"step-00000002: optimizer.*exp_avg_sq is not finite \(checkpoint.load_step"):
        build(tmp_path, 4, *CHECKPOINTS)


def test_initial_weights_that_are_not_finite_are_refused_before_anything_is_written(tmp_path):
    trainer = build(tmp_path, 4, name="first")
    weights = {name: p.detach().clone() for name, p in trainer.state.parameters.items()}
    trainer.close()
    weights["layers.0.mlp.out.weight"][1, 2] = math.nan
    save_file(weights, file := tmp_path / "start.safetensors")
    with pytest.raises(WeightsError) as refused:  # which ends a run with exit code 2
        build(tmp_path, 4, f"--checkpoint.initial_weights={file}", name="second")
    told = f"{file}: 1 tensors hold values that are not finite: layers.0.mlp.out.weight"
    assert str(refused.value) == f"checkpoint.initial_weights: {told}"
    assert not (tmp_path / "second").exists()


def test_a_signal_does_not_save_a_state_that_is_not_finite(tmp_path):
    trainer = build(tmp_path, 50, *CHECKPOINTS[:1], "--checkpoint.interval=4")
    train_step = trainer.train_step

    def then_break():
        done = train_step()
        if trainer.state.step >= 5 and trainer.state.data.attempt == 0:
            PARTS["ema"](trainer).view(-1)[0] = math.nan
        if trainer.state.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    trainer.train_step = then_break
    assert trainer.train() == 128 + signal.SIGTERM
    assert checkpoint_steps(trainer.state.folder.checkpoints) == [4]
    assert trainer.state.step == 4 and is_finite(trainer)
    trainer.close()


# ---------------------------------------------------------------------- what is learned beside the network


def test_gradients_of_u_are_clipped_by_a_norm_of_their_own(tmp_path):
    trainer = build(tmp_path, 4, *OBJECTIVES["learned uncertainty"], "--training.max_norm=2")
    network, u = list(trainer.state.parameters.values()), trainer.state.objective.uncertainty.weight
    for parameter in network:
        parameter.grad = torch.zeros_like(parameter)
    network[0].grad.view(-1)[:2] = torch.tensor([0.3, 0.4])
    u.grad = torch.zeros_like(u)
    u.grad[0, :2] = torch.tensor([40.0, 30.0])
    norms = trainer._treat_gradients(1)
    assert [norm.item() for norm in norms] == pytest.approx([0.5, 50.0])
    torch.testing.assert_close(network[0].grad.view(-1)[:2], torch.tensor([0.3, 0.4]))  # u takes nothing of it
    torch.testing.assert_close(u.grad[0, :2], torch.tensor([1.6, 1.2]))
    trainer.close()


def test_a_fault_of_u_alone_is_skipped_and_named(tmp_path):
    trainer = build(tmp_path, 4, *OBJECTIVES["learned uncertainty"], *CHECKPOINTS, "--training.max_skipped_steps=0")
    trainer.state.objective.uncertainty.weight.register_hook(lambda grad: grad * math.inf if trainer.state.step > 2 else grad)
    with pytest.raises(TrainingError) as stopped:
        trainer.train()
    assert "step 4: the gradient norm of the objective's parameters is " in str(stopped.value)
    assert "the first value that is not finite: the gradient of objective.uncertainty.weight (" in str(stopped.value)
    assert is_finite(trainer)
    trainer.close()
