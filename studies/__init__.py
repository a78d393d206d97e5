"""Studies of trained models, by the name that scripts/study.py takes; a new one is a module and a line here."""

import importlib
from typing import NamedTuple

from torchtitan.experiments.cells import StudyModule


class StudyEntry(NamedTuple):
    """Where a study is, and what it is in one line."""

    module: str
    description: str


STUDIES: dict[str, StudyEntry] = {
    "gns_accuracy": StudyEntry("gns_accuracy", "gradient noise scale against the share of the data it is measured on"),
    "gns_hyperparameters": StudyEntry("gns_hyperparameters", "its spread and run time over a grid of (b, B, reps)"),
    "gns_bins": StudyEntry("gns_bins", "gradient noise scale per timestep bin over the checkpoints of a training"),
    "gns_critical_batch": StudyEntry(
        "gns_critical_batch", "noise scale as an estimate of the critical batch size, and allocations to bins by it"
    ),
    "forgetting": StudyEntry("forgetting", "what training on one slot of timesteps does to the others"),
    "oracle_replace": StudyEntry("oracle_replace", "sampling with the true image in the place of some predictions"),
    "gns_published": StudyEntry("gns_published", "published tables of the noise scale, as reported and corrected"),
    "loss_curve": StudyEntry("loss_curve", "error at every timestep, of trained and EMA weights, on fixed noise"),
    "slots": StudyEntry("slots", "timesteps cut into slots of equal loss, from a loss_curve, as a file of slot edges"),
    "posterior_coefficients": StudyEntry(
        "posterior_coefficients", "what the image and the noisy image weigh in the reverse step of a DDPM path"
    ),
    "compare_samplers": StudyEntry("compare_samplers", "timestep samplers at equal samples; trains runs of a config"),
    "batch_size": StudyEntry("batch_size", "batch sizes and learning rates at equal samples; trains runs of a config"),
    "prediction_types": StudyEntry("prediction_types", "what models predict, in one currency: of runs, or trained"),
}


def load_study(name: str) -> StudyModule:
    """The study of this name, a key of STUDIES."""
    return importlib.import_module(f"studies.{STUDIES[name].module}")
