"""Configurations that cannot run: each is refused in exact words, all at once."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.configurations import problems
from torchtitan.data import DATASETS, DataConfig, DatasetError
from torchtitan.models import MODELS
from torchtitan.settings import setting

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SYNTHETIC = '[data]\nname = "synthetic"\n'
UNLABELLED = SYNTHETIC + "num_classes = 0\n"
BAD_FILES = [
    (
        "[training]\nlocal_batch_size = -1",
        "training.local_batch_size: is -1, and so is training.global_batch_size (set one of the two to a number)",
    ),
    (
        "[training]\nlocal_batchsize = 3",
        "training.local_batchsize: unknown key (did you mean training.local_batch_size?)",
    ),
    ("[training]\nlr = 1e-3", "training.lr: unknown key (did you mean optimizer.lr?)"),
    ("[training]\nwarmup_steps = 5", "training.warmup_steps: unknown key (did you mean lr_scheduler.warmup_steps?)"),
    ("[training]\nbatch_size = 5", "training.batch_size: unknown key (did you mean training.global_batch_size"
        " for all devices together, or training.local_batch_size for each?)"),
    ('[training]\n"a\\nb" = 5', r"training.'a\nb': unknown key (--help training lists its keys)"),
    ("[trainig]\nsteps = 5", "trainig: unknown section (did you mean training?)"),
    ("[memory_estimation]\nenable = true", "memory_estimation: unknown section (scripts/estimate.py CONFIG estimates memory)"),
    ("[axes]\nlayout = []", "is a grid of runs, which scripts/sweep.py trains (give the configuration of one run)"),
    ("steps = 5", "steps: is in no section (did you mean training.steps?)"),
    ('[training]\nsteps = "10"', "training.steps: must be an integer, is '10'"),
    ("[training]\nsteps = 0", "training.steps: must be at least 1, is 0"),
    ("[optimizer]\nlr = 0", "optimizer.lr: must be above 0, is 0"),
    ("[[ema.tracks]]\nname = 'ema'\ndecy = 0.9", "ema.tracks[0].decy: unknown key (did you mean decay?)"),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = 'slow'\nkind = 'power'\ndecay = 0.9",
        "ema.tracks[1].decay: has no effect when kind = power; remove it or set kind = constant",
    ),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = 'ema'",
        "ema.tracks[1].name: 'ema' is the name of an earlier track",
    ),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = '../x'",
        "ema.tracks[1].name: '../x' names a file (use up to 64 letters, digits, '.', '_' and '-', no '.' or '-' first)",
    ),
    (
        '[model]\nflavor = "digit"',
        f"model.flavor: must be one of {', '.join(MODELS['dit'].flavors)}, is 'digit' (did you mean digits?)",
    ),
    ("[model]\nflavor = 'digits'\nnum_heads = 5", "model.num_heads: 5 does not divide model.dim = 192"),
    ("[model]\nflavor = 'digits'\npatch_size = 3", "model.patch_size: 3 does not divide the image of 8 x 8"),
    (
        "[model]\nlearned_variance = true",
        "model.learned_variance: objective.path = rectified_flow has no integer steps, whose variance it would be"
        " (set it to false)",
    ),
    (
        "[model]\nnum_predictions = 2\n[objective]\nheads = ['x0', 'v', 'velocity']",
        "model.num_predictions: 2 is not 3, the number of objective.heads (leave it out: it follows)",
    ),
    (
        "[model]\nlearned_variance = true\n[objective]\npath = 'ddpm_linear'\nheads = ['x0', 'v']",
        "model.learned_variance: is for a network of one prediction, without objective.heads (set it to false)",
    ),
    (
        "[objective]\nheads = ['x0', 'v']\n[sampling]\nguidance_channels = 'first_three'",
        "sampling.guidance_channels: first_three is for a network of one prediction (use all)",
    ),
    (
        "[objective]\ncombine.name = 'minimum'",
        "objective.combine.name: has no effect when objective.heads = []; remove it or set objective.heads",
    ),
    (
        "[objective]\nprediction = 'noise'",
        "objective.prediction: the noise does not determine x0 at t = 1, where objective.path = rectified_flow starts"
        " to sample (use velocity, v, x0 or edm)",
    ),
    (
        "[objective]\npath = 'edm'\npreconditioning = 'index'",
        "objective.preconditioning: objective.path = edm has no DDPM indices (use identity)",
    ),
    (
        '[objective]\nprediction = "v"\npreconditioning = "sit"',
        "objective.preconditioning: sit is for the velocity of the rectified flow, not objective.prediction = v on"
        " objective.path = rectified_flow (use identity)",
    ),
    (
        "[objective]\npreconditioning = 'edm'\nprediction = 'v'",
        "objective.preconditioning: edm makes x0 of the network's output, not objective.prediction = v"
        " (set that to x0 or edm, or this to identity)",
    ),
    (
        "[objective]\npath = 'ddpm_linear'\ntimesteps.name = 'logit_normal'\ntimesteps.mean = 30.0",
        "objective.timesteps.name: the density has a mass of 0 from t = 0.00990148 to 0.993687 (logit_normal from"
        " objective.t_min to t_max on objective.path = ddpm_linear)",
    ),
    (
        "[objective]\ntimesteps.name = 'speed'",
        "objective.timesteps.name: speed goes by how noise grows along a DDPM's indices, and objective.path ="
        " rectified_flow has none (use a ddpm path, or cubic)",
    ),
    (
        "[objective]\ntimesteps.name = 'loss_second_moment'\npath = 'ddpm_linear_continuous'",
        "objective.timesteps.name: loss_second_moment keeps losses of every integer index, and objective.path ="
        " ddpm_linear_continuous has none (use ddpm_linear or ddpm_cosine, or adaptive_log_snr)",
    ),
    (
        "[objective]\ntimesteps.name = 'slots'",
        "objective.timesteps.name: slots needs objective.timesteps.edges, rising from 0 to 1, in t (or"
        " objective.timesteps.edges_path, a file of them)",
    ),
    (
        "[objective]\ntimesteps.name = 'slots'\npath = 'ddpm_linear'\ntimesteps.edges = [0, 10.5, 1000]",
        "objective.timesteps.edges: must be whole numbers, indices of the path: is [0, 10.5, 1000]",
    ),
    (
        "[objective]\ntimesteps.name = 'slots'\ntimesteps.edges = [0, 1]\ntimesteps.edges_path = 'edges.json'",
        "objective.timesteps.edges_path: objective.timesteps.edges is given too (remove one of them)",
    ),
    (
        "[objective]\ntimesteps.name = 'time_warping'\n[gns]\nenable = true",
        "gns.enable: objective.timesteps has state or importance weights, which the measured bins do not account for"
        " (set it to false, or use another sampler)",
    ),
    (
        "[objective]\ntimesteps.name = 'uniform'\nprediction = 'x0'\nweighting.name = 'snr_plus_one'",
        "objective.timesteps.name: uniform draws so many timesteps near clean data that objective.weighting.name ="
        " snr_plus_one on objective.prediction = x0 has an infinite mean loss"
        " (use logit_normal, or another objective.weighting.name)",
    ),
    (
        "[objective]\npath = 'edm'\ntimesteps.name = 'cosmap'\nprediction = 'v'",
        "objective.timesteps.name: cosmap draws so many timesteps near noise that objective.weighting.name ="
        " none on objective.prediction = v has an infinite mean loss"
        " (use logit_normal, or another objective.weighting.name)",
    ),
    (
        "[objective]\nsigma_data = 0.3",
        "objective.sigma_data: has no effect when objective.prediction = velocity; remove it or set"
        " objective.prediction = edm",
    ),
    (
        "[objective]\nname = 'consistency'\nweighting.name = 'p2'",
        "objective.weighting.name: unknown key (it is a key of objective.name = denoising)",
    ),
    (
        UNLABELLED + "[model]\nlabel_dropout = 0.2",
        "model.label_dropout: data.name = synthetic has no classes to drop (remove it or set it to 0)",
    ),
    (
        UNLABELLED + "[sampling]\nguidance_scale = 2",
        "sampling.guidance_scale: data.name = synthetic has no classes to guide away from (remove it or set it to 1)",
    ),
    (
        "[data]\nlabels = false\n[model]\nlabel_dropout = 0.2",
        "model.label_dropout: data.name = digits with data.labels = false has no classes to drop (remove it or set it to 0)",
    ),
    (
        "[model]\nlabel_dropout = 0.0\n[sampling]\nguidance_scale = 2",
        "sampling.guidance_scale: model.label_dropout = 0 trains no unconditional prediction to guide away from"
        " (remove it or set it to 1)",
    ),
    (
        "[sampling]\nguide_track = 'long'\nema_track = 'ema'",
        "sampling.guide_track: 'long' is not a name in ema.tracks (set it to one of ema, none, head)",
    ),
    (
        "[sampling]\nguide_track = 'ema'",
        "sampling.guide_track: 'ema' is sampling.ema_track itself (give another, or remove it)",
    ),
    (
        "[sampling]\nguide_track = 'none'\nguidance_scale = 1",
        "sampling.guide_track: has no effect when sampling.guidance_scale = 1 (remove it)",
    ),
    (
        "[validation]\nenable = true\ntimesteps = [0.0, 1.0, 1.5]",
        "validation.timesteps: 1.5 is not a time of objective.path = rectified_flow (give times from 0 to 1: 0 is clean data,"
        " 1 noise)",
    ),
    (
        "[validation]\nenable = true\ntimesteps = [0.5, 1.0]\n[objective]\npath = 'ddpm_linear'\nprediction = 'noise'",
        "validation.timesteps: 1 is not a time of objective.path = ddpm_linear (give times from 0.009901 to 0.9937: 0 is clean"
        " data, 1 noise)",
    ),
    (
        "[validation]\nenable = true\ntimesteps = [0.0]\n[objective]\nname = 'consistency'",
        "validation.timesteps: 0 has no loss in an objective that compares it with an earlier time (give times above 0)",
    ),
    (
        "[validation]\nenable = true\ntimesteps = [0.2, 0.5]\nnum_images = 1",
        "validation.timesteps: 2 times are more than validation.num_images = 1 (each image has one)",
    ),
    (
        "[sampling]\nclasses = [0, 10, -1]",
        "sampling.classes: [10, -1] is not in data.name = digits, which has the classes 0 to 9",
    ),
    ("[sampling]\nema_track = 'emma'", "sampling.ema_track: 'emma' is not a name in ema.tracks (did you mean ema?)"),
    (
        "[training]\nglobal_batch_size = 48",
        "training.global_batch_size: 48 is not a multiple of 32 = 1 rank x training.local_batch_size"
        " (set a multiple, or -1 for 32, or set training.local_batch_size = -1)",
    ),
    (
        "[parallelism]\ndata_parallel_replicate_degree = 2",
        "parallelism.data_parallel_replicate_degree: 2 does not divide the 1 process of this run"
        " (NGPU=2 scripts/train.sh starts 2, also to check only; an estimate has --world-size)",
    ),
    (
        "[parallelism]\ndata_parallel_shard_degree = 2",
        "parallelism.data_parallel_shard_degree: 1 replicas x 2 shards are not the 1 process of this run"
        " (-1 is as many as remain; NGPU=2 scripts/train.sh starts 2, also to check only; an estimate has --world-size)",
    ),
    ('[job]\nname = "a/b"', "job.name: 'a/b' has a slash; it names the run's folder (set --job.name NAME)"),
    ('[job]\nconfig_file = "x"', "job.config_file: is for the command line only (remove it)"),
    (
        "[objective]\ntimesteps.name = 'uniform'\ntimesteps.mean = 0.0",
        "objective.timesteps.mean: unknown key (it is a key of objective.timesteps.name = logit_normal or laplace)",
    ),
    (
        "[checkpoint]\nenable = false\nload_step = 5",
        "checkpoint.load_step: has no effect when checkpoint.enable = false; remove it or set checkpoint.enable = true",
    ),
    ("[training]\nsteps 5", "TOML syntax: Expected '=' after a key in a key/value pair (at line 2, column 7)"),
]


@pytest.mark.parametrize("toml, line", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_file_gives_one_exact_line(toml, line):
    assert problems(toml) == [f"run.toml: {line}"]


@pytest.mark.parametrize(("size", "advice"), [(32, "set 30 or 33"), (2, "set 3")])
def test_a_batch_that_ranks_cannot_share_is_answered_with_the_nearest(size, advice):
    found = problems(None, ["digits", "--training.local_batch_size=-1", f"--training.global_batch_size={size}"], world_size=3)
    assert f"training.global_batch_size: {size} is not a multiple of 3 ranks ({advice})" in "\n".join(found)


def test_file_that_is_not_utf8_is_one_line():
    Path("run.toml").write_bytes(b"[job]\nname = '\xff'\n")
    assert problems(arguments=["--job.config_file", "run.toml"]) == [
        "run.toml: is not UTF-8 text, see byte 14 (save it as UTF-8)"
    ]


def test_all_problems_are_reported_at_once_with_where_each_value_came_from():
    toml = "[training]\nsteps = 0\nlr = 1\n[objective]\ntimesteps.name = 'uniform'\n[sampling]\nclasses = [99]\n"
    found = problems(
        toml, ["--objective.timesteps.std", "2", "--debug.sede", "1", "--parallelism.data_parallel_shard_degree=4"]
    )
    assert [line.rsplit(": ", 1)[0] for line in found] == [
        "run.toml: training.lr",
        "command line: --objective.timesteps.std",
        "command line: --debug.sede",
        "run.toml: training.steps",
        "command line: --parallelism.data_parallel_shard_degree",
        "run.toml: sampling.classes",
    ]


def test_impossible_default_says_that_it_is_a_default():
    assert problems("[ema]\ntracks = []") == [
        "default: sampling.ema_track: 'ema' is not a name in ema.tracks (set it to none)"
    ]


def test_check_that_reads_a_refused_value_is_silent():
    assert problems("[model]\ndim = 'wide'\nnum_heads = 7") == ["run.toml: model.dim: must be an integer, is 'wide'"]


def test_keys_of_an_unknown_dataset_are_not_judged():
    found = problems("[data]\npath = 'x'\nfolder = 3", ["--data.name", "cifar1", "--data.shards", "3"])
    assert len(found) == 1 and found[0].startswith("command line: --data.name: ")


@pytest.mark.parametrize(
    "error", [DatasetError("has no images\n(download it)"), OSError(36, "has no images (download it)")]
)
def test_dataset_that_cannot_be_opened_is_one_line(error, monkeypatch):
    @dataclass(kw_only=True)
    class BrokenConfig(DataConfig):
        path: str = setting("", "folder")

    class Broken(DATASETS["synthetic"]):
        Config = BrokenConfig

        @staticmethod
        def info(config):
            raise error

    monkeypatch.setitem(DATASETS, "broken", Broken)
    text = "has no images (download it)"
    text = text if isinstance(error, DatasetError) else f"cannot be read: {text}"
    assert problems("[data]\nname = 'broken'\npath = 'x'") == [f"run.toml: data.path: {text}"]


def test_sizes_that_are_possible_each_but_not_together_are_refused():
    def refused(*words: str) -> str:
        return "\n".join(problems(None, ["--data.name=synthetic", "--model.flavor=debug", *words]))

    wide = ["--model.dim=65536", "--model.num_heads=64", "--model.mlp_hidden_dim=524288"]
    assert "model.num_layers: 4096 blocks of about 1e+11 parameters are more than 1e+13" in refused(
        *wide, "--model.num_layers=4096"
    )
    assert "model.patch_size: 1 makes 1073741824 tokens of an image" in refused(
        "--data.shape=[1,32768,32768]", "--model.patch_size=1"
    )
