"""On Gaussian images the best loss of any model is known at every timestep: a trained one comes close, never below.

Every path and prediction is measured in one parametrisation, the squared error of the rectified flow's velocity.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.launcher import run_on_ranks
from torchtitan.config.job import load_config
from torchtitan.data.synthetic import Synthetic, mode_variances
from torchtitan.diffusion.paths import per_image
from torchtitan.evaluation.validation import held_out_draw

BINS, HELD_OUT = 5, 10_000

CONFIG = """
[model]
flavor = "debug"
label_dropout = 0.0
[data]
name = "synthetic"
kind = "gaussian"
shape = [1, 8, 8]
[objective]
spread = "stratified"
sigma_data = 1.0
{objective}
[optimizer]
lr = 3e-3
beta2 = 0.99
[lr_scheduler]
warmup_steps = 100
decay_type = "cosine"
[training]
steps = 2500
local_batch_size = 64
[[ema.tracks]]
name = "ema"
decay = 0.99
[metrics]
enable_tensorboard = false
log_freq = 500
loss_bins = 5
[checkpoint]
enable = false
[sampling]
enable = false
"""

# Half of the noise levels on either side of sigma = 1, few so far out that it turns small errors into large.
CENTRED = {"timesteps.name": "logit_normal"}
LEVELS = {"timesteps.name": "lognormal_sigma", "timesteps.p_mean": 0.0, "timesteps.p_std": 1.2}
# name -> path, what goes with it, and the predictions it can be sampled from
PATHS = {
    "flow": ("rectified_flow", {}, ("velocity", "v", "x0", "edm")),
    "DDPM linear": ("ddpm_linear", {"preconditioning": "index"}, ("noise", "x0", "v", "velocity", "edm")),
    "DDPM linear, continuous": ("ddpm_linear_continuous", CENTRED, ("noise", "x0", "v", "velocity", "edm")),
    "DDPM cosine": ("ddpm_cosine", {"preconditioning": "index", **CENTRED}, ("noise", "x0", "v", "velocity", "edm")),
    "DDPM cosine, continuous": ("ddpm_cosine_continuous", CENTRED, ("noise", "x0", "v", "velocity", "edm")),
    "EDM": ("edm", LEVELS, ("noise", "x0", "v", "velocity", "edm")),
}
OBJECTIVES = {
    f"{name}, {prediction}": {"path": path, "prediction": prediction, "weighting.name": "snr_plus_one", **settings}
    for name, (path, settings, predictions) in PATHS.items()
    for prediction in predictions
}
OBJECTIVES["flow, velocity, uniform"] = {"timesteps.name": "uniform"}
for prediction in ("x0", "edm"):  # EDM's own input scaling, and its weighting
    OBJECTIVES[f"EDM, {prediction}"] |= {"preconditioning": "edm", "weighting.name": "edm"}
# Noise in images that no scaling tames: an error of the noise counts sigma^2 in the common parametrisation.
OBJECTIVES["EDM, noise"] |= {"timesteps.p_std": 0.7}


@pytest.mark.long
def test_trained_loss_approaches_the_closed_form_on_every_path_and_prediction(tmp_path):
    def measure(name: str) -> tuple[str, list[float]]:
        settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in OBJECTIVES[name].items())
        uses_sigma_data = "edm" in [OBJECTIVES[name].get(key) for key in ("prediction", "preconditioning", "weighting.name")]
        keys = CONFIG if uses_sigma_data else CONFIG.replace("sigma_data = 1.0\n", "")
        path = tmp_path / f"{''.join(filter(str.isalnum, name))}.toml"
        path.write_text(keys.format(objective=settings))
        arguments = {"arguments": ["--job.config_file", str(path), "--job.dump_folder", str(tmp_path)]}
        return name, run_on_ranks("tests.end_to_end.test_gaussian:train_and_measure", 1, arguments, timeout=900)[0]

    with ThreadPoolExecutor(2) as pool:
        ratios = dict(pool.map(measure, OBJECTIVES))
    for name, ratio in ratios.items():
        print(f"{name:<28}", "trained / closed form by bin:", [round(value, 4) for value in ratio])
    # An error of n independent Gaussian numbers has relative variance 2 / n; 64 modes of unequal size are worth 16.
    noise = (2 / 16 / (HELD_OUT / BINS)) ** 0.5
    assert min(min(ratio) for ratio in ratios.values()) > 1 - 3 * noise, ratios
    assert max(max(ratio) for ratio in ratios.values()) < 1.10, ratios


def train_and_measure(arguments: list[str]) -> list[float]:
    """Train; mean velocity error over held-out images as a multiple of the least possible, by bins of equal mass."""
    from torchtitan.trainer import Trainer

    config = load_config(arguments, 1)
    trainer = Trainer(config)
    assert trainer.train() == 0
    trainer.close()
    held_out = Synthetic(config.data, "validation")
    indices = torch.arange(HELD_OUT)
    draw = held_out_draw(trainer.state.objective, 0, indices, HELD_OUT, trainer.state.info.image_shape)
    found = []
    with trainer.state.ema.weights("ema", trainer.state.model), torch.no_grad():
        for chunk in indices.split(500):
            batch = held_out.fetch(chunk.numpy())
            x0, t, noise = batch["images"], draw.t[chunk], draw.noise[chunk]
            model, objective = trainer.state.model, trainer.state.objective
            a, b = (per_image(value, x0) for value in objective.path.coefficients(t))
            condition = model.condition_kind.of(batch)
            x0_found, noise_found, *_ = objective.predict(model, a * x0 + b * noise, t, condition)
            error = (noise_found - x0_found) - (noise - x0)
            found.append(error.square().flatten(1).mean(1).double())
    t, variances = draw.t.double()[:, None], mode_variances(config.data)[0].flatten()
    # Of a Gaussian mode: the velocity's variance less what the best linear prediction explains, 1 + s - (t - (1 - t) s)^2 / v.
    best = (variances / ((1 - t) ** 2 * variances + t**2)).mean(dim=1)
    bins = torch.bucketize(draw.t, trainer.state.bin_edges)
    return [(torch.cat(found)[bins == k].mean() / best[bins == k].mean()).item() for k in range(BINS)]
