"""Solvers: from noise to images, all behind one signature.

    solver(predict, path, x, times, draw_noise, **options) -> x at the last time

x [B, C, H, W] is the state at times[0], b(times[0]) x noise; times [N + 1] fall to 0, float64 on the CPU. What a
solver computes from times alone is float64, the state is of x's dtype. Options are keywords with defaults.
"""

from torchtitan.diffusion.solvers.ancestral import DDIMConfig, DDPMConfig
from torchtitan.diffusion.solvers.contract import DrawNoise, Predict, Prediction, ScheduleConfig, Solver, SolverConfig
from torchtitan.diffusion.solvers.dormand_prince import Dopri5Config
from torchtitan.diffusion.solvers.dpm_solver import DPMPP2MConfig
from torchtitan.diffusion.solvers.edm import EDMHeunConfig
from torchtitan.diffusion.solvers.flow import EulerConfig, EulerMaruyamaConfig, HeunConfig
from torchtitan.diffusion.solvers.schedules import (
    DDPMScheduleConfig,
    EDMScheduleConfig,
    FluxShiftScheduleConfig,
    UniformScheduleConfig,
    ddpm_times,
    edm_times,
    flux_log_shift,
    respaced_indices,
    uniform_times,
)

# Name -> class of the solver's keys, whose `solve` is the solver; to add one: its file, and a line here.
SOLVERS: dict[str, type[SolverConfig]] = {
    "euler": EulerConfig,
    "heun": HeunConfig,
    "dopri5": Dopri5Config,
    "euler_maruyama": EulerMaruyamaConfig,
    "edm_heun": EDMHeunConfig,
    "ddim": DDIMConfig,
    "ddpm": DDPMConfig,
    "dpmpp_2m": DPMPP2MConfig,
}
SCHEDULES: dict[str, type[ScheduleConfig]] = {
    "uniform": UniformScheduleConfig,
    "flux_shift": FluxShiftScheduleConfig,
    "edm": EDMScheduleConfig,
    "ddpm": DDPMScheduleConfig,
}

__all__ = [
    "SCHEDULES",
    "SOLVERS",
    "DrawNoise",
    "Predict",
    "Prediction",
    "ScheduleConfig",
    "Solver",
    "SolverConfig",
    "ddpm_times",
    "edm_times",
    "flux_log_shift",
    "respaced_indices",
    "uniform_times",
]
