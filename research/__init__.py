"""Studies of trained models by the name for `python -m research NAME`; a new one is a module of that name and a line here."""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class StudyEntry:
    """Entry of a study: its description and its arguments.

    Attributes:
        description: in one line.
        of_a_run: True: it measures cells of one run, named on the command line with --weights and --steps, and is a
            `Study`; False: its own options name its subject, and it has `run_alone`.
        several_weights: its cells are of several weights, --weights both.
    """

    description: str
    of_a_run: bool = True
    several_weights: bool = False


STUDIES: dict[str, StudyEntry] = {
    "gns_accuracy": StudyEntry("gradient noise scale against the share of the data it is measured on"),
    "gns_hyperparameters": StudyEntry("spread and run time of that estimate over a grid of (b, B, reps)"),
    "gns_bins": StudyEntry("gradient noise scale per timestep bin over the checkpoints of a training"),
    "gns_critical_batch": StudyEntry(
        "noise scale as an estimate of the critical batch size, and allocations to bins by it"
    ),
    "gns_calibration": StudyEntry("noise scale per bin against the batch at which a step makes half of its best progress"),
    "muon_calibration": StudyEntry("noise scale in Muon's norm per bin against the half-progress batch of its step"),
    "gns_calibration_report": StudyEntry("statistics and picture of calibrations, from their tables alone", of_a_run=False),
    "critical_batch": StudyEntry(
        "critical batch size of a checkpoint, by branches of the training at several batch sizes", of_a_run=False
    ),
    "forgetting": StudyEntry("effect of training on one slot of timesteps on the others"),
    "linear_probe": StudyEntry("accuracy of a linear classifier by block and noise level, against raw pixels"),
    "sampling_sweep": StudyEntry(
        "guidance scales, weight averages and solver steps compared on samples, as heat maps", several_weights=True
    ),
    "oracle_replace": StudyEntry("sampling with the true image instead of some predictions"),
    "loss_curve": StudyEntry(
        "error at every timestep, of trained and EMA weights, on fixed noise", several_weights=True
    ),
    "slots": StudyEntry(
        "timesteps cut into slots of equal loss, from a loss_curve, as a file of slot edges", of_a_run=False
    ),
    "compare_settings": StudyEntry(
        "settings of a config, as timestep samplers, at equal samples; trains runs of it", of_a_run=False
    ),
    "compare_methods": StudyEntry(
        "methods by name at equal images and equal FLOPs, by what runs measure; trains runs of a config", of_a_run=False
    ),
    "alignment_noise": StudyEntry(
        "gradients of flow and alignment over training, and a stop by rule; trains runs of a config", of_a_run=False
    ),
    "coordinate_check": StudyEntry("change of activations by width, with and without maximal updates", of_a_run=False),
    "width_transfer": StudyEntry("best learning rate by width, with and without maximal updates; trains runs", of_a_run=False),
    "prediction_types": StudyEntry("prediction types of trained runs compared in one parametrisation", of_a_run=False),
}


def load_study(name: str) -> ModuleType:
    """Load the study's module, named as its key of STUDIES."""
    return importlib.import_module(f"research.{name}")
