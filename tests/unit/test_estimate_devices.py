"""The estimate for a named device asks that device, not this machine."""

import importlib.util
import json
import re
import sys

import pytest
import torch

from tests.end_to_end.test_presets import PRESETS
from tests.launcher import ROOT
from tests.unit.test_latent_cache import write_pictures
from torchtitan.config import checks
from torchtitan.config.job import ConfigError, load_config
from torchtitan.data.left_out import say_once
from torchtitan.estimate import measured
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan_dit.commands import estimate

FLOAT8 = ["--training.mixed_precision_param", "bfloat16", "--float8.enable", "true"]
# Published counts: FLUX.1 [schnell], DiT-XL/2, ai-toolkit's adapters of rank 16.
COUNTS = {
    "flux_schnell_256.toml": 11_891_178_560, "flux_dev_lora.toml": 85_917_696, "dit_xl2_256.toml": 674_834_720,
    "imagenet256/jit_b16.toml": 131_123_712, "imagenet256/rae_dh_xl.toml": 838_380_628,
    "imagenet256/sit_b2_repa.toml": 130_303_504, "imagenet512_jit_b32.toml": 133_190_400,
    "imagenet256/lightningdit_xl1.toml": 675_256_736 - 256 * 1152,  # they count the fixed table of positions
}  # fmt: skip
FIND_SPEC = importlib.util.find_spec


@pytest.fixture
def bare_machine(monkeypatch):
    """No torchao, tensorboard or wandb, no compiler and no GPU."""
    missing = ("torchao", "tensorboard", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else FIND_SPEC(name))
    monkeypatch.setattr(checks, "_no_compiler", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_named_device_does_not_need_this_machine_s_packages_or_device(bare_machine):
    words = [
        "--model.flavor", "debug", *FLOAT8, "--metrics.enable_wandb", "true", "--optimizer.name", "AdamW8bit",
        "--compile.enable", "true", "--checkpoint.async_mode", "async_with_pinned_mem",
    ]  # fmt: skip
    assert load_config(words, 1, elsewhere=True).float8.enable
    with pytest.raises(ConfigError) as refused:
        load_config(words, 1)
    assert len(refused.value.problems) == 8
    with pytest.raises(ConfigError, match="set training.mixed_precision_param to bfloat16"):
        load_config([*words, "--training.mixed_precision_param", "float32"], 1, elsewhere=True)


def test_the_command_refuses_float8_on_a_device_without_it_alone(bare_machine, tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text('[model]\nflavor = "debug"\n')
    words = [str(config), "--world-size", "1", *FLOAT8]
    assert estimate.main([*words, "--device", "A6000"]) == 2
    assert capsys.readouterr().err == (
        "float8.enable: A6000 has no float8 matrix products (set float8.emulate to true, or float8.enable to false)\n"
    )
    assert estimate.main([*words, "--device", "MI300X"]) == 0


def test_adapters_that_do_not_fit_are_offered_int8_which_needs_no_package_here(bare_machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchao", None)
    config = tmp_path / "run.toml"
    config.write_text('[model]\nflavor = "debug"\n[lora]\nenable = true\n[metrics]\nenable_tensorboard = false\n')
    words = [str(config), "--device", "CPU", "--tflops", "1", "--memory-bandwidth", "1", "--memory", "0.0001"]
    assert estimate.main(words) == 0
    advice = "--lora.base_dtype int8, more devices and a larger --parallelism.data_parallel_shard_degree"
    assert f"does not fit into 90% of it (less with {advice})" in capsys.readouterr().out
    small = ["--training.local_batch_size", "1", "--training.global_batch_size", "1", "--gns.enable", "false"]
    wide = [*words[:2], "X", *words[3:-1], "0.0825", "--model.dim", "1024", "--model.num_heads", "16", *small]
    assert estimate.main([*wide, "--lora.base_dtype", "int8"]) == 0  # 81.5 MB, by int4 78.4
    assert "(less with --lora.base_dtype int4" in capsys.readouterr().out
    of_no_group = ["--model.dim", "96", "--model.num_heads", "4", "--lora.base_dtype"]  # which int4 does not take
    assert estimate.main([*words[:2], "X", *words[3:], *of_no_group, "int8"]) == 0 and "int4" not in capsys.readouterr().out
    assert estimate.main([*words[:2], "X", *words[3:], *of_no_group, "float32"]) == 0
    assert "(less with --lora.base_dtype int8," in capsys.readouterr().out
    assert estimate.main([str(config), "--device", "4090", "--lora.base_dtype", "int8"]) == 0
    assert "23.60 GiB: fits" in capsys.readouterr().out


def test_a_batch_far_too_large_is_offered_one_that_may_fit(bare_machine, tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text('[model]\nflavor = "debug"\n[metrics]\nenable_tensorboard = false\n')
    words = [str(config), "--device", "CPU", "--tflops", "1", "--memory-bandwidth", "1", "--memory", "0.02"]
    assert estimate.main([*words, "--training.local_batch_size=1024", "--training.global_batch_size=1024"]) == 0
    (offered,) = re.findall(r"does not fit .*--training.local_batch_size (\d+)", capsys.readouterr().out)
    assert int(offered) < 512  # half of it does not fit either
    sizes = {batch: f"--training.local_batch_size={batch}" for batch in (512, int(offered) // 2)}
    for batch, word in sizes.items():
        assert estimate.main([*words, word, f"--training.global_batch_size={batch}"]) == 0
        assert ("does not fit" in capsys.readouterr().out) == (batch == 512)


# Of a step with the update of 675 M weights a tenth: each is read or written nine times, in float32.
UPDATE = {"ms": 10 * 675e6 * 36 / 4.32e9}
VISIT = {
    "NVIDIA H200": {
        "XL/2 eager": {"machine": {"date": "2026-11-28"}, "XL/2 eager": {"images": 128, "mfu_percent": 45.0} | UPDATE},
        "XL/2 compiled": {"machine": {"date": "2026-11-28"}, "XL/2 compiled": {"images": 128, "mfu_percent": 54.0} | UPDATE},
        "XL/2 compiled, float8": {
            "machine": {"date": "2026-11-27"}, "XL/2 compiled, float8": {"images": 64, "mfu_percent": 51.3} | UPDATE,
        },
        "ceilings": {"machine": {"date": "2026-11-29"}, "copy": {"TB_per_s": 4.32}},
    },
    "NVIDIA H100 PCIe": {
        "XL/2 compiled": {"machine": {"date": "2026-11-28"}, "XL/2 compiled": {"images": 128, "mfu_percent": 60.0}},
        "XL/2 compiled, 32 images": {"XL/2 compiled, 32 images": {"ms": 105.2}},
    },
}  # fmt: skip


def test_a_visited_device_has_its_measured_speed_and_every_other_figure_says_assumed(monkeypatch, tmp_path, capsys):
    digits, memories = str(ROOT / "train_configs" / "digits.toml"), {}

    def remembered(config, *rest):
        dtype = config.training.mixed_precision_param
        return memories.get(dtype) or memories.setdefault(dtype, estimate_memory(config, *rest))

    def said(device, *words, dtype="bfloat16"):
        given = [digits, "--world-size", "1", "--device", device, "--training.mixed_precision_param", dtype, *words]
        assert estimate.main(given) == 0
        return capsys.readouterr().out

    def lines(*words, **dtype):
        return [line for line in said(*words, **dtype).splitlines() if not line.startswith("  not counted")][-6:]

    monkeypatch.setattr(estimate, "estimate_memory", remembered)
    monkeypatch.setattr(measured, "RESULTS", tmp_path / "gpu_day.json")
    unknown, before = lines("H200"), json.loads(said("H200", "--json"))["time"]
    (tmp_path / "gpu_day.json").write_text(json.dumps(VISIT))
    for found in (unknown, lines("H100")):
        assert found[0].startswith("time of a step, at assumed 45% of the compute peak, 80% of memory bandwidth, ")
        assert [line.partition(";")[0].rpartition("(")[2] for line in found[4:]] == ["assumed)"] * 2
    waits = "not counted           the host, which starts kernels: XL/2 compiled, 32 images took 0.105 s on NVIDIA H100 PCIe\n"
    assert waits in said("H200") and waits not in said("H200", "--compute", "0.0001")
    hours = 0.1052 * json.loads(said("H200", "--json"))["time"]["hours"] / json.loads(said("H200", "--json"))["time"]["step"]
    told = float(re.search(r"; with such a host up to ([\d.]+) hours\n", said("H200"))[1])
    assert told == pytest.approx(hours, rel=1e-3)  # of four digits
    known, after = lines("H200"), json.loads(said("H200", "--json"))["time"]
    assert known[0] == (
        "time of a step, at 50% of the compute peak (measured with XL/2 of 128 images, eager, NVIDIA H200, 2026-11-28), 90% of "
        "memory bandwidth (measured, NVIDIA H200, 2026-11-29), assumed 80% of link bandwidth, 90% of communication overlapped:"
    )
    place = "measured with XL/2 of 128 images, compiled, NVIDIA H200, 2026-11-28"
    assert f"at 60% of the compute peak ({place}), 90%" in lines("H200", "--compile.enable", "true")[0]
    assert [line.partition(";")[0].rpartition("(")[2] for line in known[4:]] == ["link and overlap assumed)"] * 2
    assert 50 * after["compute"] == pytest.approx(45 * before["compute"])
    assert 90 * after["optimizer"] == pytest.approx(80 * before["optimizer"])
    float8 = (*FLOAT8, "--gns.enable", "false")
    of_float8 = json.loads(said("H200", *float8, "--json"))["time"]
    assert 57 * of_float8["compute"] == pytest.approx(50 * after["compute"])
    place = "measured with XL/2 of 64 images, compiled, float8, NVIDIA H200, 2026-11-27"
    assert f"at 57% of the compute peak ({place}), 90%" in lines("H200", *float8)[0]
    plain, of_float8 = (json.loads(said("MI300X", *words, "--json"))["time"] for words in ((), float8))
    assert of_float8 == plain and lines("MI300X")[1:] == lines("MI300X", *float8)[1:]
    assert "assumed 45% of the compute peak (float8 counts as bfloat16: no measured" in lines("MI300X", *float8)[0]
    assert "at 90% of memory bandwidth (measured, NVIDIA H200, 2026-11-29), assumed 50%" in lines("H200", "--compute", "0.5")[0]
    assert "assumed 45% of the compute peak, 80% of link" in lines("H200", dtype="float32")[0]


class Reached(Exception):
    """The estimate of memory, which takes a minute for a large network."""


def estimated(monkeypatch, name, *words):
    """Network and place of the data that the command estimates."""
    def reach(config, *rest):
        raise Reached(config)

    monkeypatch.setattr(estimate, "estimate_memory", reach)
    with pytest.raises(Reached) as found:
        estimate.main([str(ROOT / "train_configs" / name), "--world-size", "1", "--device", "H100", *words])
    (config,) = found.value.args
    return model_on_meta(config)


@pytest.mark.parametrize("name", PRESETS)
def test_every_shipped_configuration_is_estimated_without_its_data(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    model = estimated(monkeypatch, name)
    assert model.num_parameters() == COUNTS.get(name, model.num_parameters())
    has_data = name.startswith("digits")
    said = capsys.readouterr().err
    assert ("not here; " in said and " x ".join(map(str, model.image_shape)) in said) == (not has_data)
    side = next((int(side) for side in ("512", "256", "64") if side in name), None)
    if side and "img64" not in name:
        of_others = 16 if name.startswith("imagenet256/") else 8
        downscale = 1 if "jit" in name else {"imagenet256/sit_b2_repa.toml": 8}.get(name, of_others)
        assert model.image_shape[1:] == (side // downscale, side // downscale)


def test_pictures_that_are_here_count_and_a_mistaken_key_is_refused(monkeypatch, tmp_path, capsys, caplog):
    pictures = str(write_pictures(tmp_path / "pictures"))
    words = ["--data.path", pictures, "--data.trigger_word", "sks", "--data.resolutions", "[64, 128]"]
    monkeypatch.chdir(tmp_path)
    say_once.cache_clear()
    assert estimated(monkeypatch, "flux_schnell_lora.toml", *words).image_shape == (16, 16, 16)
    said = capsys.readouterr().err
    assert "FLUX.1-schnell/vae: not here; 16 x 16 x 16 and 256 tokens of text are assumed for every image, so that FLOPs" in said
    assert "pixels are trained on" not in caplog.text
    given = [str(ROOT / "train_configs" / "flux_schnell_lora.toml"), "--world-size", "1", "--device", "H100", "--data.pth", "x"]
    assert estimate.main(given) == 2 and "did you mean" in capsys.readouterr().err
