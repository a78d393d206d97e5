"""Solvers: from noise to images, all behind one signature.

    solver(predict, path, x, times, draw_noise, **options) -> x at the last time

x [B, C, H, W] is the state at times[0], b(times[0]) x noise; times [N + 1] fall to 0, float64 on the CPU. What a
solver computes from times alone is float64, the state is of x's dtype. Options are keywords with defaults.
"""

from torchtitan.diffusion.solvers.contract import DrawNoise, Predict, Prediction, ScheduleConfig, Solver, SolverConfig
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
from torchtitan.settings import Registry

# Name -> class of the solver's keys, whose `solve` is the solver; to add one: its file, and a line here.
SOLVERS: Registry[type[SolverConfig]] = Registry("torchtitan.diffusion.solvers", {
    "euler": "flow.EulerConfig",
    "heun": "flow.HeunConfig",
    "dopri5": "dormand_prince.Dopri5Config",
    "euler_maruyama": "flow.EulerMaruyamaConfig",
    "edm_heun": "edm.EDMHeunConfig",
    "ddim": "ancestral.DDIMConfig",
    "ddpm": "ancestral.DDPMConfig",
    "dpmpp_2m": "dpm_solver.DPMPP2MConfig",
    "mean_flow": "mean_flow.MeanFlowSolverConfig",
}, type[SolverConfig])
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
