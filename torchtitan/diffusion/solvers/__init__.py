"""Solvers: from noise to images, all behind one signature.

    solver(predict, path, x, times, draw_noise, **options) -> x at the last time

x [B, C, H, W] is the state at times[0], b(times[0]) x noise; times [N + 1] fall to 0, float64 on the CPU. What a
solver computes from times alone is float64, the state is of x's dtype. Options are keywords with defaults.
"""

from torchtitan.diffusion.solvers.ancestral import ddim, ddpm
from torchtitan.diffusion.solvers.contract import DrawNoise, Predict, Prediction, Solver
from torchtitan.diffusion.solvers.dpm_solver import dpmpp_2m
from torchtitan.diffusion.solvers.edm import edm_heun
from torchtitan.diffusion.solvers.flow import euler, euler_maruyama, heun
from torchtitan.diffusion.solvers.schedules import SCHEDULES, ddpm_times, edm_times, respaced_indices, uniform_times

SOLVERS: dict[str, Solver] = {
    "euler": euler,
    "heun": heun,
    "euler_maruyama": euler_maruyama,
    "edm_heun": edm_heun,
    "ddim": ddim,
    "ddpm": ddpm,
    "dpmpp_2m": dpmpp_2m,
}

__all__ = [
    "SCHEDULES",
    "SOLVERS",
    "DrawNoise",
    "Predict",
    "Prediction",
    "Solver",
    "ddpm_times",
    "edm_times",
    "respaced_indices",
    "uniform_times",
]
