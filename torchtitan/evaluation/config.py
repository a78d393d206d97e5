"""`[sampling]`, `[validation]` and `[autoencoder]`: their keys, and unsupported combinations."""

from dataclasses import dataclass
from typing import Any, Literal

from data import DATASETS
from torchtitan.autoencoders import AUTOENCODERS
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.solvers import SOLVERS
from torchtitan.settings import OneOf, setting

DECODERS = ("none", *AUTOENCODERS)
WITH_WEIGHTS = tuple(name for name in AUTOENCODERS if name != "identity")
LATENT_DATASETS = tuple(name for name, dataset in DATASETS.items() if hasattr(dataset, "store"))
OF_LATENTS = {"data.name": LATENT_DATASETS}


@dataclass(kw_only=True)
class SamplingConfig:
    """`[sampling]`: the grids drawn during training, and the defaults of scripts/sample.py."""

    enable: bool = setting(True, "draw a grid of samples at intervals and at the end", trajectory=False)
    interval: int = setting(1000, "steps between grids", ge=1, applies={"enable": (True,)}, trajectory=False)
    solver: OneOf[str, SOLVERS] = setting(
        "euler", "integrator from noise to image", applies={"enable": (True,)}, trajectory=False
    )
    num_steps: int = setting(
        50, "solver steps from noise to image", ge=1, le=1_000_000, applies={"enable": (True,)}, trajectory=False
    )
    schedule: Literal["uniform", "edm", "ddpm"] = setting(
        "uniform", "times of the steps: equally spaced in t, in sigma^(1/rho), or in DDPM indices (the default on"
        " discrete paths)", applies={"enable": (True,)}, trajectory=False,
    )
    shift: float = setting(
        1.0, "factor on sigma that moves the steps towards noise: 1 is none", gt=0,
        applies={"enable": (True,), "schedule": ("uniform",)}, trajectory=False,
    )
    sigma_min: float = setting(
        0.002, "lowest noise level before 0", gt=0, applies={"enable": (True,), "schedule": ("edm",)}, trajectory=False
    )
    sigma_max: float = setting(
        80.0, "noise level of the first step", gt=0, applies={"enable": (True,), "schedule": ("edm",)},
        trajectory=False,
    )
    rho: float = setting(
        7.0, "larger values make the steps near data shorter", gt=0,
        applies={"enable": (True,), "schedule": ("edm",)}, trajectory=False,
    )
    ddim_eta: float = setting(
        0.0, "DDIM's eta, share of fresh noise: 0 is deterministic, 1 is DDPM", ge=0, le=1,
        applies={"enable": (True,), "solver": ("ddim",)}, trajectory=False,
    )
    ddpm_variance: Literal["small", "large", "learned"] = setting(
        "small", "variance of a step: the posterior's, the forward process's, or the model's",
        applies={"enable": (True,), "solver": ("ddpm",)}, trajectory=False,
    )
    churn: float = setting(
        0.0, "noise added over all steps, EDM's S_churn: 0 is deterministic", ge=0,
        applies={"enable": (True,), "solver": ("edm_heun",)}, trajectory=False,
    )
    churn_min: float = setting(
        0.05, "lowest sigma of churn, S_min", ge=0, applies={"enable": (True,), "churn": ">0"}, trajectory=False
    )
    churn_max: float = setting(
        50.0, "highest sigma of churn, S_max", ge=0, applies={"enable": (True,), "churn": ">0"}, trajectory=False
    )
    churn_noise: float = setting(
        1.003, "deviation of the noise of churn, S_noise", gt=0, applies={"enable": (True,), "churn": ">0"},
        trajectory=False,
    )
    diffusion: Literal["sigma", "sin_squared", "constant"] = setting(
        "sigma", "squared diffusion w_t of the stochastic flow: t, sin^2(pi t), or 1",
        applies={"enable": (True,), "solver": ("euler_maruyama",)}, trajectory=False,
    )
    diffusion_scale: float = setting(
        1.0, "factor on the squared diffusion", ge=0, applies={"enable": (True,), "solver": ("euler_maruyama",)},
        trajectory=False,
    )
    guidance_scale: float = setting(
        2.0, "classifier-free guidance: 1 is none", ge=0, applies={"enable": (True,)}, trajectory=False
    )
    guidance_interval: list[float] = setting(
        [0.0, 1.0], "lowest and highest t with guidance; the plain conditional model outside",
        applies={"enable": (True,)}, trajectory=False,
    )
    guidance_channels: Literal["all", "first_three"] = setting(
        "all", "channels with guidance; the plain conditional model's beyond", applies={"enable": (True,)},
        trajectory=False,
    )
    classes: list[int] = setting(
        [], "classes of the grid, a row each; empty: the first ten", applies={"enable": (True,)}, trajectory=False
    )
    images_per_class: int = setting(
        8, "columns of the grid", ge=1, le=10_000, applies={"enable": (True,)}, trajectory=False
    )
    ema_track: str = setting(
        "ema", "weights to sample with: a name of ema.tracks, or 'none' for the trained weights",
        applies={"enable": (True,)}, trajectory=False,
    )
    judge_images: int = setting(
        0, "images drawn at the end and judged against real ones; 0: none (the dataset must have a judge)", ge=0,
        le=10_000_000, applies={"enable": (True,)}, trajectory=False,
    )
    batch_size: int = setting(
        256, "images drawn at a time on each rank", ge=1, le=1_000_000, applies={"enable": (True,)}, trajectory=False
    )

    def method(self) -> dict[str, Any]:
        """Sampling method as keyword arguments of `ImageSampler.draw`."""
        return {
            "solver": self.solver,
            "num_steps": self.num_steps,
            "guidance_scale": self.guidance_scale,
            "guidance_interval": tuple(self.guidance_interval),
            "guidance_channels": self.guidance_channels,
            "schedule": self.schedule,
            "solver_options": {option: getattr(self, key) for option, key in SOLVER_KEYS.get(self.solver, {}).items()},
            "schedule_options": {option: getattr(self, option) for option in SCHEDULE_KEYS[self.schedule]},
        }


# solver -> its option -> the key of `[sampling]`
SOLVER_KEYS = {
    "ddim": {"eta": "ddim_eta"},
    "ddpm": {"variance": "ddpm_variance"},
    "edm_heun": {key: key for key in ("churn", "churn_min", "churn_max", "churn_noise")},
    "euler_maruyama": {key: key for key in ("diffusion", "diffusion_scale")},
}
# schedule -> its options, keys of `[sampling]`
SCHEDULE_KEYS = {"uniform": ("shift",), "edm": ("sigma_min", "sigma_max", "rho"), "ddpm": ()}


@dataclass(kw_only=True)
class ValidationConfig:
    """`[validation]`"""

    enable: bool = setting(False, "measure the loss on held-out images", trajectory=False)
    interval: int = setting(
        1000, "steps between measurements; also at the last step", ge=1, applies={"enable": (True,)}, trajectory=False
    )
    num_images: int = setting(
        1000, "held-out images, each at one fixed timestep with fixed noise", ge=1, applies={"enable": (True,)},
        trajectory=False,
    )
    batch_size: int = setting(
        128, "images at a time on each rank", ge=1, le=1_000_000, applies={"enable": (True,)}, trajectory=False
    )


@dataclass(kw_only=True)
class AutoencoderConfig:
    """`[autoencoder]`: decodes the latents of data.name = "latents", in grids and in scripts/sample.py."""

    name: OneOf[str, DECODERS] = setting(
        "none", "autoencoder that decodes drawn latents to images; none: grids show latent channels as colours",
        applies=OF_LATENTS, because="training encodes no images (scripts/extract_latents.py does, once)",
        trajectory=False,
    )  # fmt: skip
    path: str = setting(
        "", "folder of its weights, or for cosmos and diffusers a name on the Hugging Face hub",
        applies=OF_LATENTS | {"name": WITH_WEIGHTS}, trajectory=False,
    )  # fmt: skip
    dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "dtype of compute; default: float32, and for cosmos that of its files",
        applies=OF_LATENTS | {"name": WITH_WEIGHTS}, trajectory=False,
    )  # fmt: skip
    tile: int = setting(
        0, "side in pixels of the overlapping tiles that larger images are decoded in; 0: none", ge=0,
        applies=OF_LATENTS | {"name": tuple(AUTOENCODERS)}, trajectory=False,
    )  # fmt: skip
    overlap: int | None = setting(
        None, "pixels that neighbouring tiles share; default: a quarter of a tile", ge=1,
        applies=OF_LATENTS | {"name": tuple(AUTOENCODERS), "tile": ">0"}, trajectory=False,
    )  # fmt: skip
    batch_size: int = setting(
        16, "images decoded at a time on each rank", ge=1, le=1_000_000, applies=OF_LATENTS | {"name": tuple(AUTOENCODERS)},
        trajectory=False,
    )  # fmt: skip


def sampling_problems(
    config: SamplingConfig, path_name: str, learned_variance: bool, heads: bool = False
) -> list[tuple[str, str]]:
    """Problems of sampling a model in this way.

    Args:
        config: of sampling.
        path_name: a key of PATHS, the path of its training.
        learned_variance: whether the model has learned the variance of the reverse step.
        heads: whether it makes several predictions.

    Returns:
        (key of `[sampling]`, cause and remedy) of each problem.
    """
    path, found, trained_on = PATHS[path_name](), [], f"objective.path = {path_name}"
    if len(config.guidance_interval) != 2:
        found.append(("guidance_interval", f"takes two times, has {len(config.guidance_interval)} (as [0.0, 1.0])"))
    elif not 0.0 <= config.guidance_interval[0] <= config.guidance_interval[1] <= 1.0:
        low, high = config.guidance_interval
        reason = "runs backwards" if low > high else "leaves 0..1"
        found.append(("guidance_interval", f"[{low:g}, {high:g}] {reason} (give the lower t first, both in 0..1)"))
    indices = getattr(path, "num_indices", 0)
    if config.schedule == "ddpm" and not indices:
        found.append(("schedule", f"{trained_on} has no DDPM indices (use uniform or edm)"))
    elif config.schedule == "ddpm" and config.num_steps > indices:
        text = f"{config.num_steps} steps cannot be chosen from the {indices} indices of {trained_on}"
        found.append(("num_steps", f"{text} (use at most {indices})"))
    elif config.schedule != "ddpm" and path.discrete:
        found.append(("schedule", f"{trained_on} is trained at integer indices only (use ddpm)"))
    if config.schedule == "edm" and config.sigma_min >= config.sigma_max:
        text = f"{config.sigma_min:g} is not below sampling.sigma_max = {config.sigma_max:g} (make it smaller)"
        found.append(("sigma_min", text))
    if config.solver == "euler_maruyama" and path_name != "rectified_flow":
        text = f"euler_maruyama is for rectified_flow, and {trained_on} (use ddpm, or edm_heun with churn)"
        found.append(("solver", text))
    if config.solver == "edm_heun" and config.schedule == "uniform" and path.t_max >= 1.0:
        text = f"edm_heun needs a finite sigma to start from, and {trained_on} (use sampling.schedule = edm)"
        found.append(("solver", text))
    if config.solver == "edm_heun" and config.churn > 0 and config.churn_min > config.churn_max:
        text = f"{config.churn_min:g} is above sampling.churn_max = {config.churn_max:g} (make it smaller)"
        found.append(("churn_min", text))
    if config.solver == "ddpm" and config.ddpm_variance == "learned" and not learned_variance:
        text = "the model has not learned the variance (use small or large, or train with model.learned_variance)"
        found.append(("ddpm_variance", text))
    if heads and config.guidance_channels != "all":
        found.append(("guidance_channels", "first_three is for a network of one prediction (use all)"))
    return found


def default_schedule(path_name: str) -> str:
    """Default schedule of a path: the trained indices of a discrete path, EDM's own, else uniform."""
    return "ddpm" if PATHS[path_name]().discrete else "edm" if path_name == "edm" else "uniform"
