"""Every shipped configuration trains, samples and validates; made small, and all else as it stands."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from tests.end_to_end.runs import write_config
from tests.forked import run_script
from tests.launcher import ROOT, run_on_ranks
from torchtitan.config.job import load_config
from torchtitan.config.smoke import smoke_words
from torchtitan.estimate.memory import estimate_memory
from torchtitan_dit.commands.train import main as train

SMALL = [  # beside what a smoke run cuts
    "--training.mixed_precision_param", "float32", "--checkpoint.enable", "false", "--metrics.enable_tensorboard", "false",
    "--compile.enable", "false",
]  # fmt: skip
SMALL_NETWORKS = {
    "dit": ["--model.num_layers", "2", "--model.dim", "64", "--model.num_heads", "4", "--model.mlp_hidden_dim", "128"],
    "edm2": [
        "--model.channels", "32", "--model.channel_mults", "[1, 2]", "--model.num_blocks", "1", "--model.channels_per_head", "0",
    ],
    "flux": [
        "--model.dim", "64", "--model.num_heads", "4", "--model.axes_dim", "[4, 6, 6]", "--model.mlp_hidden_dim", "128",
        "--model.num_double_layers", "1", "--model.num_single_layers", "1", "--model.text_dim", "16", "--model.pooled_dim", "8",
    ],
}  # fmt: skip
# Of presets with options of the transformer: these are made small too.
OF_JIT = ["--model.patch_size", "4", "--model.patch_bottleneck", "16", "--model.class_tokens_start", "1"]
OPTIONS_OF_DIT = {
    "lightningdit_xl1": [], "rae_dh_xl": ["--model.wide_dim", "64", "--model.wide_heads", "4"],
    # With the shift of the large latents.
    "rae_v2": ["--model.wide_dim", "64", "--model.wide_heads", "4", "--model.intermediate_head", "1", "--objective.shift", "6.9"],
    "sit_b2_repa": ["--model.patch_size", "1", "--alignment.block", "1"],
    "sr_dit_b1": ["--model.num_layers", "4", "--model.routing.last_block", "3", "--model.routing.finish_steps", "300"],
}  # fmt: skip
PRESETS = sorted(str(path.relative_to(ROOT / "train_configs")) for path in (ROOT / "train_configs").rglob("*.toml"))
PRESETS = [name for name in PRESETS if not name.startswith("sweeps")]
# Loaded only: each differs from one that trains in data, sizes and rates, which tests of the presets' numbers hold.
LIKE_OTHERS = {f"edm2/{name}.toml" for name in ("cifar10_e", "cifar100_c", "cifar100_g", "tiny_imagenet_c", "tiny_imagenet_g")}
LIKE_OTHERS |= {"edm2/img512_s.toml", "sit_b2_256.toml", "flux_dev_lora.toml"}
LIKE_OTHERS |= {"imagenet512_dit_xl2.toml", "imagenet512_jit_b32.toml"}
# One of each network, objective and kind of image: what they compute with depends on nothing else.
KINDS = (
    "digits", "cifar10_edm", "dit_xl2_256", "sit_xl2_256", "edm2/cifar10_c", "edm2/img512_xs", "flux_cifar10", "flux_lora_tiny",
    "imagenet256/jit_b16", "imagenet256/rae_dh_xl", "imagenet256/rae_v2", "imagenet256/sit_b2_repa", "imagenet256/sr_dit_b1",
)
LARGE = {
    "dit_xl2_256.toml", "sit_xl2_256.toml", "sit_b2_256.toml", "imagenet256_cosmos_dit_l2.toml", "imagenet256_dit_xl2.toml",
    "imagenet512_dit_xl2.toml", "flux_schnell_256.toml", "edm2/img512_s.toml", "edm2/img512_xs.toml", "edm2/img64_s.toml",
    "imagenet256/jit_b16.toml", "imagenet512_jit_b32.toml",
    *(f"imagenet256/{name}.toml" for name in OPTIONS_OF_DIT),
}  # fmt: skip


def small(name: str, folders: dict, latents: list[str], dump_folder, data: str | None = None) -> list[str]:
    """Command line of a preset with a small network, on its data or others."""
    preset = tomllib.loads((ROOT / "train_configs" / name).read_text())
    model, data = preset["model"].get("name", "dit"), data or preset["data"]["name"]
    words = ["--job.config_file", str(ROOT / "train_configs" / name), "--job.dump_folder", str(dump_folder), *SMALL]
    words += SMALL_NETWORKS[model] + (OF_JIT if "jit" in name else OPTIONS_OF_DIT.get(Path(name).stem, []))
    if preset["data"].get("labels", True):
        words += ["--sampling.classes", "[0, 1]" if data in ("imagenet", "image_folder") else "[1, 2]"]
    if "cache" in preset:
        words += ["--data.path", str(folders[data]), "--data.trigger_word", "sks", "--data.resolutions", "[64]"]
        words += ["--data.text_encoder", "stub:16", "--data.pooled_encoder", "stub:8", "--data.text_length", "5"]
        words += ["--checkpoint.initial_weights", ""] if "initial_weights" in preset["checkpoint"] else []
        return [*words, "--autoencoder.name", "identity", "--model.patch_size", "8", "--lora.rank", "4", "--lora.alpha", "4"]
    if model == "flux":
        words += ["--data.path", str(folders["captions"]), "--data.num_workers", "0", "--autoencoder.name", "identity"]
        words += ["--data.validation_path", str(folders["captions"])] if "validation_path" in preset["data"] else []
        return words
    if data in folders:
        words += ["--data.path", str(folders[data]), "--data.num_workers", "0"]
    if data == "latents":
        words += latents
    if data == "image_folder":
        words += ["--data.path", str(folders["imagenet"] / "train"), "--data.image_size", "16"]
    if "validation_path" in preset["data"]:
        words += ["--data.validation_path", latents[1]]
    if data == "imagenet":
        words += ["--data.image_size", "16"]
    if preset.get("autoencoder", {}).get("encode"):
        words += ["--data.image_size", "32", "--autoencoder.dtype", "float32", "--autoencoder.name", "cosmos"]
        words += ["--autoencoder.path", latents[-1], "--autoencoder.statistics", latents[1]]
    if "alignment" in preset:
        words += ["--alignment.teacher", "cifar10"]
    if model == "edm2":
        words += ["--model.attention_resolutions", {"latents": "[2]", "imagenet": "[8]"}.get(data, "[16]")]
    if data == "tinyimagenet":
        words += ["--model.channel_mults", "[1, 1, 1]"]
    return words


def test_the_recipe_of_dev_differs_from_that_of_schnell_in_what_must():
    def leaves(name):
        tables = tomllib.loads((ROOT / "train_configs" / f"flux_{name}_lora.toml").read_text())
        return {(section, key): value for section, table in tables.items() if section != "ema" for key, value in table.items()}

    dev, schnell = leaves("dev"), leaves("schnell")
    differing = {".".join(key) for key in dev.keys() | schnell.keys() if dev.get(key) != schnell.get(key)}
    assert differing == {
        "model.flavor", "data.text_encoder", "data.pooled_encoder", "data.text_length", "autoencoder.path",
        "checkpoint.initial_weights",
    }  # fmt: skip


def test_no_configuration_trains_on_synthetic_images_unless_it_is_asked_to(capsys):
    names = {name: tomllib.loads((ROOT / "train_configs" / name).read_text())["data"]["name"] for name in PRESETS}
    assert not [name for name, data in names.items() if data == "synthetic"]
    for name in ("dit_xl2_256", "sit_xl2_256"):
        with pytest.raises(SystemExit):
            train(["--job.config_file", name, "--check-only"])
        assert "(scripts/extract_latents.py makes one of images, or of their --features, and with" in capsys.readouterr().err


def test_large_configurations_are_compiled():
    enabled = {name: tomllib.loads((ROOT / "train_configs" / name).read_text()).get("compile", {}) for name in PRESETS}
    assert {name for name, section in enabled.items() if section.get("enable")} == LARGE


def test_smoke_runs_of_shipped_configurations_train(folders, latents, tmp_path):
    arguments = {name: small(name, folders, latents, tmp_path) for name in PRESETS}
    for name in LIKE_OTHERS:
        assert load_config(arguments.pop(name), 1).job.name == Path(name).stem
    run_on_ranks("tests.end_to_end.test_presets:train_all", 1, {"arguments": list(arguments.values())})
    for name in arguments:
        text, folder = (ROOT / "train_configs" / name).read_text(), tmp_path / f"{Path(name).stem}-smoke"
        points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = [point["loss_metrics/global_avg_loss"] for point in points if "grad_norm" in point]
        assert len(losses) == 2 and all(0 < loss < 10 for loss in losses), (name, losses)
        assert (folder / "samples" / "step-00000002.png").exists(), name
        latent = 'name = "latents"' in text or "encode = true" in text
        all_train = "validation_fraction = 0.0 " in text
        assert (folder / "samples" / "held-out.png").exists() == (latent and not all_train), name
        assert ("finish_steps = 1\n" in (folder / "config.toml").read_text()) == ("[model.routing]" in text), name
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed", name


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_configuration_makes_a_step_in_bfloat16_under_the_autocast_policy_of_cuda(folders, latents, tmp_path, name):
    """CUDA computes some operations in float32 that the CPU computes in bfloat16: tensors of both dtypes must not be combined."""
    words = [*small(f"{name}.toml", folders, latents, tmp_path), "--training.mixed_precision_param", "bfloat16"]
    words, _ = smoke_words(words, 1)
    assert estimate_memory(load_config(words, 1), 1).total > 0


def test_a_smoke_run_has_a_folder_beside_the_runs_and_begins_anew_each_time(tmp_path):
    config, runs = write_config(tmp_path), tmp_path / "outputs"
    words = [str(config), "--job.dump_folder", str(runs), "--checkpoint.async_mode", "disabled", "--smoke"]
    for seed in "12":
        done = run_script("train.py", *words, "--debug.seed", seed)
        assert done.returncode == 0 and "resumed" not in done.stderr, done.stderr
        assert f"smoke run in {runs}/small-smoke: training.global_batch_size 16 -> 8, training.steps 60 -> 2" in done.stderr
        points = [json.loads(line) for line in (runs / "small-smoke" / "metrics.jsonl").read_text().splitlines()]
        assert [point["step"] for point in points if "grad_norm" in point] == [1, 2]
        assert f"seed = {seed}" in (runs / "small-smoke" / "config.toml").read_text()
    evaluated = ("--evaluation.enable", "true", "--evaluation.extractor", "digits", "--evaluation.metrics", "kid")
    done = run_script("train.py", *words, *evaluated, "--evaluation.count", "30", "--evaluation.reference", "train")
    assert (done.returncode, "30 images (samples) are too few" in done.stderr) == (2, True), done.stderr
    assert [path.name for path in runs.iterdir()] == ["small-smoke"]
    assert [path.name for path in (runs / "small-smoke" / "checkpoint").iterdir()] == ["step-00000002"]
    (runs / "small-smoke" / "config.toml").write_text("[training]\nsteps = 60\n")  # of somebody's run
    done = run_script("train.py", *words)
    assert (done.returncode, "holds a run of 60 steps, which is no smoke run" in done.stderr) == (2, True), done.stderr
    assert (runs / "small-smoke" / "checkpoint" / "step-00000002").exists()


def train_all(arguments: list[list[str]]) -> None:
    from torchtitan.extraction.cache_filling import fill_cache
    from torchtitan.trainer import Trainer

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for argv in arguments:
        argv, _ = smoke_words(argv, world_size)
        config = load_config(argv, world_size)
        if config.cache.enable:
            fill_cache(config)
            config = load_config(argv, world_size)
        trainer = Trainer(config)
        assert trainer.train() == 0
        trainer.close()
