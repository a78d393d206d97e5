"""Studies of trained models by the name for scripts/study.py; a new one is a module and a line here."""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class StudyEntry:
    """Entry of a study: its module, its description and its arguments.

    Attributes:
        module: in this folder.
        description: in one line.
        of_a_run: True: it measures cells of one run, named on the command line with --weights and --steps, and is a
            `Study`; False: its options name what it is of, and it has `run_alone`.
        several_weights: its cells are of several weights, --weights both.
    """

    module: str
    description: str
    of_a_run: bool = True
    several_weights: bool = False


STUDIES: dict[str, StudyEntry] = {
    "gns_accuracy": StudyEntry("gns_accuracy", "gradient noise scale against the share of the data it is measured on"),
    "gns_hyperparameters": StudyEntry(
        "gns_hyperparameters", "spread and run time of that estimate over a grid of (b, B, reps)"
    ),
    "gns_bins": StudyEntry("gns_bins", "gradient noise scale per timestep bin over the checkpoints of a training"),
    "gns_critical_batch": StudyEntry(
        "gns_critical_batch", "noise scale as an estimate of the critical batch size, and allocations to bins by it"
    ),
    "forgetting": StudyEntry("forgetting", "effect of training on one slot of timesteps on the others"),
    "oracle_replace": StudyEntry("oracle_replace", "sampling with the true image instead of some predictions"),
    "gns_published": StudyEntry(
        "gns_published", "published tables of the noise scale, as reported and corrected", of_a_run=False
    ),
    "loss_curve": StudyEntry(
        "loss_curve", "error at every timestep, of trained and EMA weights, on fixed noise", several_weights=True
    ),
    "slots": StudyEntry(
        "slots", "timesteps cut into slots of equal loss, from a loss_curve, as a file of slot edges", of_a_run=False
    ),
    "posterior_coefficients": StudyEntry(
        "posterior_coefficients", "weights of the image and the noisy image in the reverse step of a DDPM path",
        of_a_run=False,
    ),
    "compare_samplers": StudyEntry(
        "compare_samplers", "timestep samplers at equal samples; trains runs of a config", of_a_run=False
    ),
    "batch_size": StudyEntry(
        "batch_size", "batch sizes and learning rates at equal samples; trains runs of a config", of_a_run=False
    ),
    "prediction_types": StudyEntry(
        "prediction_types", "prediction types compared in one parametrisation: of runs, or trained", of_a_run=False
    ),
}


def load_study(name: str) -> ModuleType:
    """Load the study of this name, a key of STUDIES: a `studies.frame.Study` with `add_options`, or one with
    `run_alone`.
    """
    return importlib.import_module(f"studies.{STUDIES[name].module}")
