"""Configurations that cannot run: each is refused in exact words, all at once."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.configurations import problems
from torchtitan.data import DATASETS, DataConfig, DatasetError
from torchtitan.diffusion.timesteps.registry import TIMESTEPS
from torchtitan.models import MODELS
from torchtitan.settings import setting
from torchtitan.settings.schema import quoted


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


SYNTHETIC = '[data]\nname = "synthetic"\n'


UNLABELLED = SYNTHETIC + "num_classes = 0\n"


BAD_FILES = [
    (
        "[training]\nlocal_batch_size = -1",
        "training.local_batch_size: only one of it and training.global_batch_size can be -1",
    ),
    (
        "[training]\nlocal_batch_size = 0",
        "training.local_batch_size: must be at least 1, or -1 for a rank's share, is 0",
    ),
    (
        "[training]\nlocal_batchsize = 3",
        "training.local_batchsize: unknown key (did you mean training.local_batch_size?)",
    ),
    ("[training]\nlr = 1e-3", "training.lr: unknown key (did you mean optimizer.lr?)"),
    ("[training]\nwarmup_steps = 5", "training.warmup_steps: unknown key (did you mean lr_scheduler.warmup_steps?)"),
    ("[training]\nbatch_size = 5", "training.batch_size: unknown key (did you mean training.global_batch_size"
        " for all devices together, or training.local_batch_size for each?)"),
    ("[training]\nqqqqqq = 5", "training.qqqqqq: unknown key (--help training lists its keys)"),
    ('[training]\n"a\\nb" = 5', r"training.'a\nb': unknown key (--help training lists its keys)"),
    ("[trainig]\nsteps = 5", "trainig: unknown section (did you mean training?)"),
    ("[zzz]\nsteps = 5", "zzz: unknown section (--help lists all)"),
    ("steps = 5", "steps: is in no section (did you mean training.steps?)"),
    ("training = 5", "training: must be a table, is 5 (write [training] and its keys)"),
    ("[[training]]\nsteps = 5", "training: must be a table, is [{'steps': 5}] (write [training] and its keys)"),
    ('[training]\nsteps = "10"', "training.steps: must be an integer, is '10'"),
    ("[training]\nsteps = 1.5", "training.steps: must be an integer, is 1.5"),
    ("[training]\nsteps = true", "training.steps: must be an integer, is true"),
    ("[training]\nsteps = 2024-01-01", "training.steps: must be an integer, is datetime.date(2024, 1, 1)"),
    ("[training.steps]\na = 1", "training.steps: must be an integer, is {'a': 1}"),
    ("[training]\nsteps = 0", "training.steps: must be at least 1, is 0"),
    ("[training]\nsteps = 9223372036854775808", "training.steps: must fit in 64 bits, is 9223372036854775808"),
    ("[training]\nsteps = 0x" + "f" * 5000, "training.steps: must fit in 64 bits, is a value too long to print"),
    ("[optimizer]\nlr = nan", "optimizer.lr: must be a finite number, is nan"),
    ("[optimizer]\nlr = inf", "optimizer.lr: must be a finite number, is inf"),
    ("[optimizer]\nlr = 0", "optimizer.lr: must be above 0, is 0"),
    ("[optimizer]\nbeta1 = 1.0", "optimizer.beta1: must be at least 0 and below 1, is 1.0"),
    ("[compile]\nenable = 1", "compile.enable: must be true or false, is 1"),
    ("[job]\ndump_folder = 1", "job.dump_folder: must be a string, is 1"),
    ('[job]\ndump_folder = "a\\u0000b"', r"job.dump_folder: must have printable characters only, is 'a\x00b'"),
    (
        '[objective]\ntimesteps.name = "unifrom"',
        f"objective.timesteps.name: must be one of {', '.join(TIMESTEPS)}, is 'unifrom' (did you mean uniform?)",
    ),
    ('[metrics]\npeak_tflops = "x"', "metrics.peak_tflops: must be a number, or none, is 'x'"),
    ("[sampling]\nclasses = [1, 2.5]", "sampling.classes[1]: must be an integer, is 2.5"),
    ("[sampling]\nclasses = 3", "sampling.classes: must be a list of integers, is 3"),
    ("[ema]\ntracks = [3]", "ema.tracks[0]: must be a table, is 3"),
    ("[[ema.tracks]]\nname = 'ema'\ndecy = 0.9", "ema.tracks[0].decy: unknown key (did you mean decay?)"),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = 'slow'\nkind = 'power'\ndecay = 0.9",
        "ema.tracks[1].decay: has no effect when kind = power; remove it or set kind = constant",
    ),
    ("[[ema.tracks]]\nsigma_rel = 0.3", "ema.tracks[0].sigma_rel: must be above 0 and below 0.288675, is 0.3"),
    ("[[ema.tracks]]\ndecay = 2", "ema.tracks[0].decay: must be at least 0 and below 1, is 2"),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = 'ema'",
        "ema.tracks[1].name: 'ema' is the name of an earlier track",
    ),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = 'none'",
        "ema.tracks[1].name: 'none' stands for the trained weights (choose another name)",
    ),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = '../x'",
        "ema.tracks[1].name: '../x' names a file (use up to 64 letters, digits, '.', '_' and '-', no '.' or '-' first)",
    ),
    (
        '[data]\nname = "cifar1"\nx = 1',
        f"data.name: must be one of {', '.join(DATASETS)}, is 'cifar1' (did you mean cifar10?)",
    ),
    ("[model]\nname = 3", f"model.name: must be one of {', '.join(MODELS)}, is 3"),
    (
        '[model]\nflavor = "digit"',
        f"model.flavor: must be one of {', '.join(MODELS['dit'].flavors)}, is 'digit' (did you mean digits?)",
    ),
    (
        "[model]\nflavor = 'digits'\nnum_heads = 5",
        "model.num_heads: 5 does not divide model.dim = 192",
    ),
    ("[model]\nflavor = 'digits'\npatch_size = 3", "model.patch_size: 3 does not divide the image of 8 x 8"),
    (
        "[model]\nflavor = 'digits'\nnum_heads = 32",
        "model.num_heads: heads of 6 channels; rotary embedding needs a multiple of 4",
    ),
    (
        "[model]\nlearned_variance = true",
        "model.learned_variance: objective.path = rectified_flow has no integer steps, whose variance it would be"
        " (set it to false)",
    ),
    (
        "[model]\nlearned_variance = true\n[objective]\npath = 'ddpm_cosine_continuous'",
        "model.learned_variance: objective.path = ddpm_cosine_continuous has no integer steps, whose variance it would"
        " be (set it to false)",
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
        "objective.preconditioning: objective.path = edm has no DDPM indices (use identity or edm)",
    ),
    (
        '[objective]\nprediction = "v"\npreconditioning = "sit"',
        "objective.preconditioning: sit is for the velocity of the rectified flow, not objective.prediction = v on"
        " objective.path = rectified_flow (use identity)",
    ),
    (
        "[objective]\npreconditioning = 'edm'\nprediction = 'v'",
        "objective.preconditioning: edm makes x0 of the network's output, not objective.prediction = v (use x0 or edm)",
    ),
    (
        "[objective]\npath = 'ddpm_linear'\ntimesteps.name = 'logit_normal'\ntimesteps.mean = 30.0",
        "objective.timesteps.name: the density has a mass of 0 from t = 0.00990148 to 0.993687: logit_normal lies"
        " outside objective.path = ddpm_linear",
    ),
    (
        "[objective]\nt_min = 0.6\nt_max = 0.4",
        "objective.t_min: 0.6 is not below objective.t_max = 0.4 (no time is left)",
    ),
    ("[objective]\nt_max = 0.0", "objective.t_max: must be above 0 and at most 1, is 0.0"),
    (
        "[objective]\npath = 'ddpm_linear'\ntimesteps.name = 'uniform'\nt_min = 0.5000001\nt_max = 0.5000002",
        "objective.timesteps.name: no index of the path has a time from 0.5000001 to 0.5000002: uniform lies outside"
        " objective.path = ddpm_linear",
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
        "[objective]\ntimesteps.name = 'slots'\ntimesteps.edges = [0, 0.5, 0.5, 1]",
        "objective.timesteps.edges: must rise from 0 to 1, in t: is [0, 0.5, 0.5, 1]",
    ),
    (
        "[objective]\ntimesteps.name = 'slots'\ntimesteps.edges = [0, 1]\ntimesteps.edges_path = 'edges.json'",
        "objective.timesteps.edges_path: objective.timesteps.edges is given too (remove one of them)",
    ),
    (
        "[objective]\ntimesteps.importance = true",
        "objective.timesteps.importance: unknown key (it is a key of objective.timesteps.name = slots)",
    ),
    (
        "[objective]\ntimesteps.name = 'beta'\ntimesteps.a = 0.1",
        "objective.timesteps.a: must be at least 0.2 and at most 50, is 0.1",
    ),
    (
        "[objective]\ntimesteps.name = 'time_warping'\n[gns]\nenable = true",
        "gns.enable: objective.timesteps draws with a state or importance weights of its own, of which the"
        " measured bins know nothing (set it to false, or use another sampler)",
    ),
    (
        "[objective]\ntimesteps.name = 'adaptive_log_snr'\nprediction = 'x0'\nweighting.name = 'snr_plus_one'",
        "objective.timesteps.name: adaptive_log_snr draws so many timesteps near clean data that objective.weighting.name ="
        " snr_plus_one on objective.prediction = x0 has an infinite mean loss (use logit_normal or another weighting)",
    ),
    (
        "[objective]\ntimesteps.name = 'uniform'\nprediction = 'x0'\nweighting.name = 'snr_plus_one'",
        "objective.timesteps.name: uniform draws so many timesteps near clean data that objective.weighting.name ="
        " snr_plus_one on objective.prediction = x0 has an infinite mean loss (use logit_normal or another weighting)",
    ),
    (
        "[objective]\npath = 'edm'\ntimesteps.name = 'cosmap'\nprediction = 'v'",
        "objective.timesteps.name: cosmap draws so many timesteps near noise that objective.weighting.name ="
        " none on objective.prediction = v has an infinite mean loss (use logit_normal or another weighting)",
    ),
    (
        "[objective]\nsigma_data = 0.3",
        "objective.sigma_data: has no effect when objective.prediction = velocity; remove it or set"
        " objective.prediction = edm",
    ),
    (
        "[objective]\nweighting.gamma = 5.0\nweighting.name = 'snr_plus_one'",
        "objective.weighting.gamma: unknown key (it is a key of objective.weighting.name = min_snr or soft_min_snr or p2)",
    ),
    (
        "[objective]\nname = 'consistency'\nweighting.name = 'p2'",
        "objective.weighting: unknown key (it is a key of objective.name = denoising)",
    ),
    ("[objective]\ntimesteps.scale = 1.0\ntimesteps.name = 'mode'\nshift = 0.0", "objective.shift: must be at least 0.01"
     " and at most 100, is 0.0"),
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
        "sampling.guide_track: 'long' is not a name in ema.tracks (set it to one of ema, none)",
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
    ("[validation]\nenable = true\ntimesteps = [0.5, 0.5]", "validation.timesteps: 0.5 is given twice (leave it out once)"),
    (
        "[validation]\nenable = true\ntimesteps = [0.2, 0.5]\nnum_images = 1",
        "validation.timesteps: 2 times are more than validation.num_images = 1 (each image has one)",
    ),
    ("[validation]\nenable = true\ntimesteps = [nan]", "validation.timesteps[0]: must be a finite number, is nan"),
    ("[validation]\ninterval = 5", "validation.interval: has no effect when validation.enable = false; remove it or set"
     " validation.enable = true"),
    (
        "[sampling]\nclasses = [0, 10, -1]",
        "sampling.classes: [10, -1] is not in data.name = digits, which has the classes 0 to 9",
    ),
    (
        "[sampling]\nema_track = 'emma'",
        "sampling.ema_track: 'emma' is not a name in ema.tracks (did you mean ema?)",
    ),
    (
        "[training]\nglobal_batch_size = 48",
        "training.global_batch_size: 48 is not a multiple of 32 = 1 rank x training.local_batch_size"
        " (set a multiple, or -1 for 32, or set training.local_batch_size = -1)",
    ),
    (
        "[parallelism]\ndata_parallel_replicate_degree = -1",
        "parallelism.data_parallel_replicate_degree: only one of it and parallelism.data_parallel_shard_degree"
        " can be -1",
    ),
    (
        "[parallelism]\ndata_parallel_shard_degree = 0",
        "parallelism.data_parallel_shard_degree: must be at least 1, or -1 for as many as remain, is 0",
    ),
    (
        "[parallelism]\ndata_parallel_replicate_degree = 2",
        "parallelism.data_parallel_replicate_degree: 2 does not divide the 1 process of this run"
        " (for 2 processes NGPU=2 scripts/train.sh, to check only WORLD_SIZE=2)",
    ),
    (
        "[parallelism]\ndata_parallel_shard_degree = 2",
        "parallelism.data_parallel_shard_degree: 1 replicas x 2 shards are not the 1 process of this run"
        " (-1 is as many as remain; for 2 processes NGPU=2 scripts/train.sh, to check only WORLD_SIZE=2)",
    ),
    (
        "[training]\nglobal_batch_size = 1099511627776",
        "training.global_batch_size: 34,359,738,368 microbatches on each rank (at most 1,048,576)",
    ),
    (
        "[training]\nglobal_batch_size = 1099511627776\nlocal_batch_size = -1\nmax_local_batch_size = 128",
        "training.global_batch_size: 8,589,934,592 microbatches on each rank (at most 1,048,576)",
    ),
    (
        "[training]\nglobal_batch_size = 1099511627776\nlocal_batch_size = -1",
        "training.global_batch_size: 1,099,511,627,776 images in one forward (at most 16,777,216; set"
        " training.max_local_batch_size)",
    ),
    ('[job]\nname = "a/b"', "job.name: 'a/b' has a slash; it names the run's folder (set --job.name NAME)"),
    ('[job]\nname = ".."', "job.name: '..' is no folder name; it names the run's folder (set --job.name NAME)"),
    ('[job]\nconfig_file = "x"', "job.config_file: is for the command line only (remove it)"),
    (
        "[objective]\ntimesteps.name = 'uniform'\ntimesteps.mean = 0.0",
        "objective.timesteps.mean: unknown key (it is a key of objective.timesteps.name = logit_normal or laplace)",
    ),
    (
        "[lr_scheduler]\nmin_lr_factor = 0.1",
        "lr_scheduler.min_lr_factor: has no effect when lr_scheduler.decay_type = constant;"
        " remove it or set lr_scheduler.decay_type = linear or cosine",
    ),
    (
        "[checkpoint]\nenable = false\nload_step = 5",
        "checkpoint.load_step: has no effect when checkpoint.enable = false; remove it or set checkpoint.enable = true",
    ),
    (
        '[data]\nname = "synthetic"\nshape = [8, 8]',
        "data.shape: [8, 8] is not three positive numbers: channels, height, width",
    ),
    ("[training]\nsteps 5", "TOML syntax: Expected '=' after a key in a key/value pair (at line 2, column 7)"),
]


@pytest.mark.parametrize("toml, line", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_file_gives_one_exact_line(toml, line):
    assert problems(toml) == [f"run.toml: {line}"]


def test_file_that_is_not_utf8_is_one_line():
    Path("run.toml").write_bytes(b"[job]\nname = '\xff'\n")
    assert problems(arguments=["--job.config_file", "run.toml"]) == [
        "run.toml: is not UTF-8 text, see byte 14 (save it as UTF-8)"
    ]


def test_toml_nested_too_deeply_is_one_line():
    found = problems("x = " + "[" * 100_000)
    assert len(found) == 1 and found[0].startswith("run.toml: TOML syntax: ")


def test_all_problems_are_reported_at_once_with_where_each_value_came_from():
    toml = "[training]\nsteps = 0\nlr = 1\n[objective]\ntimesteps.name = 'uniform'\n[sampling]\nclasses = [99]\n"
    found = problems(
        toml, ["--objective.timesteps.std", "2", "--debug.sede", "1", "--parallelism.data_parallel_shard_degree=4"]
    )
    assert [line.rsplit(": ", 1)[0] for line in found] == [
        "command line: --objective.timesteps.std",
        "command line: --debug.sede",
        "run.toml: training.steps",
        "run.toml: training.lr",
        "command line: --parallelism.data_parallel_shard_degree",
        "run.toml: sampling.classes",
    ]


def test_impossible_default_says_that_it_is_a_default():
    assert problems("[ema]\ntracks = []") == [
        "default: sampling.ema_track: 'ema' is not a name in ema.tracks (set it to one of none)"
    ]


def test_check_that_reads_a_refused_value_is_silent():
    assert problems("[model]\ndim = 'wide'\nnum_heads = 7") == ["run.toml: model.dim: must be an integer, is 'wide'"]


def test_wrong_number_is_not_measured_against_a_default():
    found = problems("[training]\nsteps = 'x'\n[lr_scheduler]\nwarmup_steps = 20000")
    assert found == ["run.toml: training.steps: must be an integer, is 'x'"]


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

    class Broken:
        Config = BrokenConfig

        @staticmethod
        def info(config):
            raise error

    monkeypatch.setitem(DATASETS, "broken", Broken)
    text = "has no images (download it)"
    text = text if isinstance(error, DatasetError) else f"cannot be read: {text}"
    assert problems("[data]\nname = 'broken'\npath = 'x'") == [f"run.toml: data.path: {text}"]


@pytest.mark.parametrize("depth", [100, 900, 990, 5000, 100_000])
def test_deeply_nested_list_is_one_line(depth):
    found = problems(arguments=["--sampling.classes", "[" * depth + "]" * depth])
    assert len(found) == 1 and len(found[0]) < 200
    nested = []
    for _ in range(depth):
        nested = [nested]
    assert len(quoted(nested)) <= 60
