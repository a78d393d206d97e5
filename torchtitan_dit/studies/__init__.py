"""Studies of trained models by the name for scripts/study.py; a new one is a module of that name and a line here."""

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
    "gns_calibration_report": StudyEntry(
        "statistics, decision and picture of calibrations, from their records alone", of_a_run=False
    ),
    "gns_conflict": StudyEntry("training on one timestep bin: measured change of every bin's loss against the first order"),
    "gns_conflict_report": StudyEntry(
        "statistics, decision and pictures of conflict matrices, from their records alone", of_a_run=False
    ),
    "gns_lags": StudyEntry("noise scale of checkpoints against the log of the training, and how fast the mean gradient turns"),
    "gns_lags_report": StudyEntry("statistics, decision and picture of gns_lags, from its records alone", of_a_run=False),
    "forgetting": StudyEntry("effect of training on one slot of timesteps on the others"),
    "guidance": StudyEntry("guidance at equal evaluations: none, by the null condition, by other weights"),
    "linear_probe": StudyEntry("accuracy of a linear classifier by block and noise level, against raw pixels"),
    "sampling_sweep": StudyEntry(
        "guidance scales, weight averages and solver steps compared on samples, as heat maps", several_weights=True
    ),
    "oracle_replace": StudyEntry("sampling with the true image instead of some predictions"),
    "gns_published": StudyEntry("published tables of the noise scale, as reported and corrected", of_a_run=False),
    "loss_curve": StudyEntry(
        "error at every timestep, of trained and EMA weights, on fixed noise", several_weights=True
    ),
    "autoguidance": StudyEntry(
        "guidance by the null condition and by the run's own past, on a fractal in two dimensions", of_a_run=False
    ),
    "metric_responses": StudyEntry(
        "metrics of samples under known changes of real images, in a small extractor's features", of_a_run=False
    ),
    "slots": StudyEntry(
        "timesteps cut into slots of equal loss, from a loss_curve, as a file of slot edges", of_a_run=False
    ),
    "posterior_coefficients": StudyEntry(
        "weights of the image and the noisy image in the reverse step of a DDPM path", of_a_run=False
    ),
    "compare_samplers": StudyEntry("timestep samplers at equal samples; trains runs of a config", of_a_run=False),
    "batch_size": StudyEntry(
        "batch sizes and learning rates at equal samples; trains runs of a config", of_a_run=False
    ),
    "samples_to_target": StudyEntry(
        "samples to target losses over batch sizes and learning rates, and B_c beside B; trains runs of a config", of_a_run=False
    ),
    "samples_to_target_report": StudyEntry(
        "best rates, B_c and decision of samples_to_target, from its records alone", of_a_run=False
    ),
    "compare_settings": StudyEntry("settings of a config at equal samples; trains runs of it", of_a_run=False),
    "prediction_types": StudyEntry(
        "prediction types compared in one parametrisation: of runs, or trained", of_a_run=False
    ),
}


def load_study(name: str) -> ModuleType:
    """Load the study's module, named as its key of STUDIES."""
    return importlib.import_module(f"torchtitan_dit.studies.{name}")
