"""The training objective."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.settings import setting


@dataclass(kw_only=True)
class ObjectiveConfig:
    """`[objective]`: what the model is trained to predict, at which noise levels, and how errors are weighted."""

    path: Literal["rectified_flow"] = setting("rectified_flow", "how data turns into noise: x_t = a(t) x0 + b(t) noise")
    prediction: Literal["velocity"] = setting("velocity", "what the network's output stands for")
    preconditioning: Literal["identity"] = setting("identity", "scaling of the network's input, output and time")
    weighting: Literal["none"] = setting("none", "factor on the squared error as a function of the noise level")
    timestep_sampler: Literal["uniform", "logit_normal"] = setting("logit_normal", "density of the training timesteps")
    logit_mean: float = setting(0.0, "mean of logit(t)", applies={"timestep_sampler": ("logit_normal",)})
    logit_std: float = setting(
        1.0, "standard deviation of logit(t)", gt=0, applies={"timestep_sampler": ("logit_normal",)}
    )
    stratified: bool = setting(False, "spread the timesteps of a global batch evenly over the density's quantiles")
