"""The port's YAML configurations become the same training, every key that cannot be honoured is named, the rest refused."""

import io
import math
import os
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from torchtitan.config.edm2_yaml import KEYS
from torchtitan.config.job import JobConfig, load_config
from torchtitan.estimate.memory import model_on_meta
from torchtitan.files.plain_yaml import PlainYamlError, read_plain_yaml
from torchtitan.settings.record import effective
from torchtitan.training.lr_scheduler import lr_factor
from torchtitan_dit.commands.import_edm2_config import main

ROOT = Path(__file__).resolve().parents[2]

# Of the port's files: dataset, network; images, side, attention, n_blocks, dropout; epochs, batch, rate, epochs of the warm-up
# and before the decay, flip.
CIFAR = (50_000, 32, "[False, True, False, False]", 3, 0.13)
TINY = (100_000, 64, "[False, False, True, False]", 5, 0.1)
FILES = {
    "cifar10_c": ("cifar", "UNetC", *CIFAR, 1000, 512, 4e-4, 200, None, True),
    "cifar10_e": ("cifar", "UNetE", *CIFAR, 2000, 512, 2e-2, 200, 400, True),
    "cifar10_g": ("cifar", "UNetG", *CIFAR, 2000, 512, 2e-2, 200, 400, True),
    "cifar100_c": ("cifar100", "UNetC", *CIFAR, 1000, 512, 4e-4, 200, None, True),
    "cifar100_e": ("cifar100", "UNetE", *CIFAR, 2000, 512, 2e-2, 200, 400, True),
    "cifar100_g": ("cifar100", "UNetG", *CIFAR, 2000, 512, 2e-2, 200, 400, True),
    "tiny_imagenet_c": ("tiny", "UNetC", *TINY, 2000, 192, 1.5e-4, 200, None, False),
    "tiny_imagenet_e": ("tiny", "UNetE", *TINY, 2000, 192, 7.5e-3, 200, 400, False),
}
PARAMETERS = {"UNetC": 39_509_888, "UNetE": 39_509_888, "UNetG": 39_542_685}
NAMES = {"cifar": "cifar10", "cifar100": "cifar100", "tiny": "tinyimagenet"}


def yaml(name: str = "cifar10_e", **changes: str) -> str:
    """Text of one of the port's configurations; a change replaces the value of a top-level key, or removes it ("")."""
    dataset, net, _, side, attention, blocks, dropout, epochs, batch, rate, warm, tref, flip = FILES[name]
    values = {
        "dataset": dataset, "classes": "10", "model_type": "EDM", "net_type": f"'{net}'",
        "diffusion": "\n  sigma_data: 0.5\n  p_mean: -1.2\n  p_std: 1.2\n  sigma_min: 0.002\n  sigma_max: 80\n  rho: 7\n"
        "  S_min: 0.01\n  S_max: 1\n  S_noise: 1.007",
        "network": f"\n  image_shape: [3, {side}, {side}]\n  n_channels: 128\n  ch_mults: [1, 2, 2, 2]\n  is_attn: {attention}\n"
        f"  dropout: {dropout}\n  n_blocks: {blocks} # of the decoder",
        "n_epoch": str(epochs), "batch_size": str(batch), "lrate": f"{rate:.1e}", "warm_epoch": str(warm),
        "tref_epoch": "" if tref is None else str(tref), "load_epoch": "-1", "flip": str(flip), "ema": "0.9993",
        "n_sample": "30", "save_dir": "'./output_E10'", "save_model": "True",
        "linear": "\n  n_epoch: 15\n  batch_size: 128\n  lrate: 1.0e-3\n  timestep: 4\n  blockname: 'out_6'",
    }  # fmt: skip
    return "".join(f"{key}: {value}\n" for key, value in (values | changes).items() if value)


def imported(folder: Path, text: str, *words: str) -> JobConfig:
    """Import a text with the command, and load the TOML as training would, on images of the same shape."""
    (folder / "port.yaml").write_text(text)
    assert main([str(folder / "port.yaml"), "--output", str(folder / "new.toml"), *words]) == 0
    side = 64 if "tiny" in text else 32
    return load_config(
        ["--job.config_file", str(folder / "new.toml"), "--data.name", "synthetic", "--data.shape", f"[3, {side}, {side}]"], 1
    )


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_of_the_port_becomes_the_same_training(name, tmp_path, capsys):
    dataset, net, images, side, _, blocks, dropout, epochs, batch, rate, warm, tref, flip = FILES[name]
    config = imported(tmp_path, yaml(name))
    assert f'name = "{NAMES[dataset]}"' in (tmp_path / "new.toml").read_text()
    assert f"horizontal_flip = {str(flip).lower()}" in (tmp_path / "new.toml").read_text()
    counted = PARAMETERS[net] if side == 32 else 62_414_720
    assert model_on_meta(config).num_parameters() == counted
    model, objective, training = config.model, config.objective, config.training
    assert (model.config, model.num_blocks + 1, model.dropout) == (net[-1], blocks, dropout)
    assert model.attention_resolutions == [16] and model.channels_per_head == 0 and not config.data.labels
    assert (objective.sigma_data, objective.timesteps.p_mean, objective.timesteps.p_std) == (0.5, -1.2, 1.2)
    assert objective.learned_uncertainty and objective.uncertainty_features == 256
    assert (training.global_batch_size, training.max_norm) == (batch, 0.0)
    assert 0 <= training.steps * batch - epochs * images < batch
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps, config.optimizer.weight_decay) == (
        0.9, 0.999, 1e-8, 0.0,
    )  # fmt: skip
    for epoch in (0, 99, 199, 400, 800, 999, 1600, 1999):
        step = -(-epoch * images // batch) + 1
        if step > training.steps:
            continue
        factor = (epoch + 1) / warm if epoch < warm else 1 / math.sqrt(max(epoch / (tref or epochs), 1))
        found = config.optimizer.lr * lr_factor(config.lr_scheduler, step, training.steps, batch)
        assert found == pytest.approx(rate * factor, rel=1e-12), epoch
    (track,) = config.ema.tracks
    assert (track.kind, track.decay, track.warmup_power) == ("constant", 0.9993, 2 / 3)
    sampling = config.sampling
    assert (sampling.num_steps, sampling.images_per_class, sampling.clip_x0, sampling.state_dtype) == (18, 30, True, "float64")
    schedule = config.sampling.schedule
    assert (schedule.name, schedule.sigma_min, schedule.sigma_max, schedule.rho) == ("edm", 0.002, 80.0, 7.0)
    assert (config.job.dump_folder, config.job.name) == (".", "output_E10")
    said = capsys.readouterr().err
    for key in ("classes", "diffusion.S_min", "diffusion.S_max", "diffusion.S_noise", "linear.timestep", "linear.blockname"):
        assert key in said
    probe = "linear_probe RUN --weights ema --probe port --blocks out_6 --levels 4 --passes 15 --batch-size 128;"
    assert probe in said
    assert all(line.startswith(f"{tmp_path}/port.yaml: not honoured: ") for line in said.splitlines())


@pytest.mark.parametrize("name", [*FILES, "tiny_imagenet_g"])
def test_presets_are_the_imported_configurations(name, tmp_path):
    text = yaml("tiny_imagenet_e", net_type="UNetG") if name == "tiny_imagenet_g" else yaml(name)
    wanted = effective(imported(tmp_path, text))
    side = 64 if "tiny" in name else 32
    found = effective(load_config([
        "--job.config_file", str(ROOT / "train_configs" / "edm2" / f"{name}.toml"), "--data.name", "synthetic",
        "--data.shape", f"[3, {side}, {side}]",
    ], 1))  # fmt: skip
    for table in (wanted, found):  # the port chooses half precision on its command line, and accumulates nothing
        del table["training"]["mixed_precision_param"], table["training"]["max_local_batch_size"]
    for section in ("model", "objective", "optimizer", "lr_scheduler", "training", "ema", "parallelism", "checkpoint"):
        assert found[section] == wanted[section], section
    assert found["sampling"]["solver"] == wanted["sampling"]["solver"]
    assert found["sampling"]["schedule"] == wanted["sampling"]["schedule"]


def test_numbers_of_each_process_are_those_of_all(tmp_path):
    text = yaml("cifar10_g", batch_size="128", lrate="5.0e-3")
    config = imported(tmp_path, text, "--per-process", "4")
    assert (config.training.global_batch_size, config.optimizer.lr) == (512, 0.02)


@pytest.mark.parametrize(("changes", "wanted", "said"), [
    ({"optim": "Adam", "optim_args": "{betas: [0.9, 0.99]}"}, (0.9, 0.99, 1e-8, 0.0), ""),
    ({"optim": "AdamW", "optim_args": "\n  eps: 1e-6\n  betas:\n    - 0.8\n    - 0.95"}, (0.8, 0.95, 1e-6, 0.0),
     "optim_args.weight_decay: 0.01 has no effect on weights that are normalised before each step"),
    ({"optim": "AdamW", "net_type": "UNetC"}, (0.9, 0.999, 1e-8, 0.01), ""),
    ({"optim": "Adam", "optim_args": "{weight_decay: 0.1, amsgrad: true}"}, (0.9, 0.999, 1e-8, 0.0),
     "optim_args.weight_decay: Adam adds it to the gradient"),
    ({"optim_args": "{betas: [0.5, 0.5]}"}, (0.9, 0.999, 1e-8, 0.0), "optim_args.betas: without optim"),
    ({"optim": "# none", "load_epoch": "300"}, (0.9, 0.999, 1e-8, 0.0), "load_epoch: 300 is a checkpoint of the port"),
])  # fmt: skip
def test_constants_of_adam_are_taken_over_or_named(changes, wanted, said, tmp_path, capsys):
    optimizer = imported(tmp_path, yaml(**changes)).optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay) == wanted
    assert said in capsys.readouterr().err


def test_the_dataset_is_opened_where_its_place_is_given(tmp_path, capsys):
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    rows = [{"img": {"bytes": file.getvalue(), "path": ""}, "label": number % 10} for number in range(20)]
    (tmp_path / "images").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "images" / "train-00000-of-00001.parquet")
    (tmp_path / "port.yaml").write_text(yaml())
    words = [str(tmp_path / "port.yaml"), "--output", str(tmp_path / "new.toml"), "--data-path"]
    assert main([*words, str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/port.yaml: becomes data.path: ")
    assert not (tmp_path / "new.toml").exists()
    assert main([*words, str(tmp_path / "images")]) == 0
    assert load_config(["--job.config_file", str(tmp_path / "new.toml")], 1).data.path == str(tmp_path / "images")


# --- bad input


@pytest.mark.parametrize(("changes", "line"), [
    ({"lrates": "1"}, "lrates: unknown key (did you mean lrate?)"),
    ({"network": "\n  n_blocks: 3\n  width: 3"}, "network.width: unknown key"),
    ({"network.dropout": "3"}, "network.dropout: unknown key (it is a key within a mapping)"),
    ({"lrate": ""}, "lrate: is missing"),
    ({"lrate": "fast"}, "lrate: must be a number, is 'fast'"),
    ({"lrate": "-1.0"}, "becomes optimizer.lr: must be above 0, is -1.0"),
    ({"lrate": ".nan"}, "lrate: must be a number, is nan"),
    ({"lrate": "1e999"}, "lrate: must be a number, is inf"),
    ({"batch_size": "0"}, "batch_size: must be at least 1, is 0"),
    ({"batch_size": "512.0"}, "batch_size: must be a whole number, is 512.0"),
    ({"batch_size": "True"}, "batch_size: must be a whole number, is true"),
    ({"n_epoch": "9" * 60}, "n_epoch: must be a whole number, is 9"),
    ({"flip": "1"}, "flip: must be true or false, is 1"),
    ({"dataset": "imagenet"}, "dataset: must be one of cifar, cifar100, tiny, is 'imagenet'"),
    ({"dataset": "tiny"}, "network.image_shape: [3, 32, 32] is not [3, 64, 64], that of dataset: tiny"),
    ({"net_type": "UNetH"}, "net_type: must be one of UNetC, UNetE, UNetG, is 'UNetH'"),
    ({"model_type": "DDPM"}, "model_type: must be one of EDM, is 'DDPM'"),
    ({"optim": "SGD"}, "optim: must be one of Adam, AdamW, is 'SGD'"),
    ({"optim": "Adam", "optim_args": "{betas: [0.9]}"}, "optim_args.betas: must be two numbers, is [0.9]"),
    ({"optim": "Adam", "optim_args": "{betas: 0.9}"}, "optim_args.betas: must be a list, each entry a number, is 0.9"),
    ({"linear": "3"}, "linear: must be a mapping, is 3"),
    ({"ema": "1.0"}, "becomes ema.tracks[0].decay: must be at least 0 and below 1, is 1.0"),
    ({"warm_epoch": "2001"}, "becomes lr_scheduler.warmup_images: 100050000 is more than 100000256, the images of"),
    ({"tref_epoch": "0"}, "tref_epoch: must be at least 1, is 0"),
    ({"save_dir": "'..'"}, "becomes job.name: '..' is no folder name"),
    ({"diffusion": "\n  sigma_data: 0.5\n  p_mean: -1.2\n  p_std: 0\n  sigma_min: 90\n  sigma_max: 80\n  rho: 7"},
     "becomes objective.timesteps.p_std: must be above 0, is 0.0"),
    ({"lrate": "&a 0.1"}, "line 24: an anchor is no plain YAML"),
])  # fmt: skip
def test_bad_configurations_are_refused_in_a_line_and_nothing_is_written(changes, line, tmp_path, capsys):
    (tmp_path / "port.yaml").write_text(yaml(**changes))
    assert main([str(tmp_path / "port.yaml"), "--output", str(tmp_path / "new.toml")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert any(each.startswith(f"{tmp_path}/port.yaml: {line}") for each in said), said
    assert os.listdir(tmp_path) == ["port.yaml"]


@pytest.mark.parametrize("there", ["file", "dangling link", "folder"])
def test_no_file_is_replaced(there, tmp_path, capsys):
    output = tmp_path / "new.toml"
    make = {"file": lambda: output.write_text("mine"), "dangling link": lambda: output.symlink_to("none"), "folder": output.mkdir}
    make[there]()
    (tmp_path / "port.yaml").write_text(yaml())
    assert main([str(tmp_path / "port.yaml"), "--output", str(output)]) == 2
    assert capsys.readouterr().err == f"{output}: exists already; nothing is replaced (give another --output)\n"
    assert there != "file" or output.read_text() == "mine"
    assert main([str(tmp_path / "port.yaml"), "--output", str(tmp_path / "none" / "new.toml")]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/none/new.toml: {tmp_path}/none is no folder (")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"# nothing\n", b"a" * 300_000, None])
def test_files_that_are_no_configuration_are_refused(content, tmp_path, capsys):
    path = tmp_path / "port.yaml"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    assert main([str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"{path}: ") and said.err.count("\n") == 1


# --- plain YAML


def test_plain_yaml_has_mappings_lists_and_scalars():
    text = (
        "---\n# comment\na: 'it''s' # why\nb:\n  c: [False, yes, 'x, y', 1e-3, -.5, 1_000]\n  d: {e: [1, 2], f: \"a#\\n\"}\n"
        "  g:\n  - 1\n  - two words\nh:\ni: ~\nj: it's # so\nk: 0x10\nl: []\nm: 012\nn: 2020-01-01\no: 1:30\np: ''\n"
    )
    assert read_plain_yaml(text) == {
        "a": "it's", "b": {"c": [False, True, "x, y", 0.001, -0.5, 1000], "d": {"e": [1, 2], "f": "a#\n"}, "g": [1, "two words"]},
        "h": None, "i": None, "j": "it's", "k": "0x10", "l": [], "m": "012", "n": "2020-01-01", "o": "1:30", "p": "",
    }  # fmt: skip


@pytest.mark.parametrize(("text", "line"), [
    ("a: &x [1]\nb: *x", "line 1: an anchor is no plain YAML"),
    ("a: [*x, *x]", "line 1: an alias is no plain YAML"),
    ("a: !!python/object/apply:os.system [ls]", "line 1: a tag is no plain YAML"),
    ("a: 1\n\n---\nb: 1", "line 3: but found another document"),
    ("a: 1\na: 2", "line 2: a: is given twice"),
    ("a: {b: 1, b: 2}", "line 1: b: is given twice"),
    ("a:\n\tb: 1", "line 2: found character '\\t' that cannot start any token"),
    ("a:\n    b: 1\n  c: 1", "line 3: expected <block end>"),
    ("  a: 1\nb: 1", "line 2: expected '<document start>'"),
    ("a: [1, 2", "line 1: expected ',' or ']'"),
    ("a: [1,, 2]", "line 1: expected the node content"),
    ("a: 'x", "line 1: found unexpected end of stream"),
    ("a: b: c", "line 1: mapping values are not allowed here"),
    ("a: \x00", "unacceptable character"),
    ("1: a", "line 1: a key is no name"),
    ("[1]: a", "line 1: a key is no name"),
    ("a: " + "[" * 9 + "]" * 9, "line 1: more than 8 mappings and lists lie in one another"),
    ("a: " + "[" * 60_000, "line 1: more than 8"),
    ("".join(f"{' ' * n}a:\n" for n in range(10)), "line 9: more than 8 mappings"),
    ("a: " + "9" * 300, "line 1: a value of 300 characters is longer than 256"),
    ("a: |\n  " + "x" * 300, "line 1: a value of 3"),
    ("- a", "holds no `key: value`"),
    ("just text", "holds no `key: value`"),
])  # fmt: skip
def test_the_rest_of_yaml_is_refused_with_its_line(text, line):
    with pytest.raises(PlainYamlError) as refused:
        read_plain_yaml(text)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_every_key_of_the_port_is_read_or_named():
    of_file = {line.partition(":")[0] for line in yaml().splitlines() if line[0] != " "}
    assert {key.partition(".")[0] for key in KEYS} == of_file | {"optim", "optim_args"}
