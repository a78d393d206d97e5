"""A loop in one's own process, as in a notebook: train, follow the loss, look at the network, draw.

    python -m examples.notebook     # a minute on two CPU cores; the cells are between the lines of #%%
"""

# %% Train in this process: a configuration by name, and keys over it.
from collections.abc import Mapping

from torchtitan_dit import Trainer, configure, load

losses: dict[int, float] = {}


def follow(step: int, metrics: Mapping[str, float]) -> None:
    if "loss_metrics/global_avg_loss" in metrics:
        losses[step] = metrics["loss_metrics/global_avg_loss"]


config = configure("digits", {
    "job.name": "loop", "training.steps": 50, "lr_scheduler.warmup_steps": 5, "gns.enable": False,
    "evaluation.enable": False, "sampling.interval": 50,
})  # fmt: skip
with Trainer(config, callbacks=[follow]) as trainer:
    trainer.train()
    network = trainer.state.model  # a torch.nn.Module, trained

# %% Follow: the mean loss since the point before, by step.
print({step: round(loss, 3) for step, loss in losses.items()} or "outputs/loop had ended before: remove it to train again")
print(f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters")

# %% Draw from the run's newest checkpoint.
images = load("outputs/loop").sample([3, 7], images_per_class=2)
print(f"{len(images)} images of {images[0].size}")
