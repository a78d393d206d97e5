"""Train steps on an imitated CUDA device: no mismatch of devices, and bounds on kernels, bytes, waits and memory.

The bounds are the present counts with a margin of a hundredth: a change that needs more raises one on purpose.
"""

import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import step_counts
from benchmarks.step_counts import CountedStep
from tests.counted_steps import counts_in_fork, shrunk, write_counts
from torchtitan.config.job import load_config
from torchtitan.estimate.cuda_autocast import FLOAT32, FLOAT32_RESULT, WIDEST, cuda_autocast
from torchtitan.estimate.fake_cuda import device
from torchtitan.estimate.fake_cuda.counter import Call, PhaseCounts
from torchtitan.estimate.memory import estimate_memory

FLUX = [
    "--job.config_file", "train_configs/flux_schnell_256.toml", "--model.flavor", "debug", "--data.name", "synthetic",
    "--data.shape", "[16, 32, 32]", "--data.text_length", "16", "--data.text_dim", "32", "--data.pooled_dim", "24",
    "--training.local_batch_size", "8", "--training.global_batch_size", "8",
]  # fmt: skip
NOISE = shrunk("dit_xl2_256", "--gns.enable", "true", "--gns.num_bins", "4")
RMS_NORMS = shrunk(
    "dit_xl2_256", "--model.flavor", "TorchDiTan-L", "--model.learned_variance", "false", "--sampling.enable", "false"
)
BLOCKS = 2
# name -> words, ranks, number of the step, whether blocks and objective are compiled
CASES = {
    "dit_xl2_256": (shrunk("dit_xl2_256"), 1, 9, False),
    "compiled": (shrunk("dit_xl2_256"), 1, 9, True),
    "sit_xl2_256": (shrunk("sit_xl2_256"), 1, 9, False),
    "sharded": (shrunk("dit_xl2_256"), 8, 9, False),
    "sharded, RMS norms": (RMS_NORMS, 8, 9, False),
    "recomputed": ([*RMS_NORMS, "--activation_checkpoint.mode", "full"], 8, 9, False),
    "noise": (NOISE, 1, 16, False),
    "noise, compiled": (NOISE, 1, 16, True),
    "flux_schnell_256": (FLUX, 1, 9, False),
}
# Kernels outside the blocks for a microbatch of any size: draws, objective, embedders, last layer, and their backward.
KERNELS_OUTSIDE = {"dit_xl2_256": 485, "sit_xl2_256": 284, "sharded": 471, "sharded, RMS norms": 288, "flux_schnell_256": 296}
KERNELS_OUTSIDE_COMPILED = 91
MEGABYTES_OF_A_BLOCK = {"dit_xl2_256": 1204, "sharded": 1168, "sharded, RMS norms": 1466}  # forward and backward, 8 images
MEGABYTES_OF_A_COMPILED_BLOCK = 1099
PEAK_MEGABYTES = {"dit_xl2_256": 1199, "sharded": 449, "sharded, RMS norms": 415, "recomputed": 353}
# Of a measured step: of the monitor's own, and outside the blocks with the taps.
KERNELS_OF_NOISE, KERNELS_OUTSIDE_WITH_NOISE = 235, 562
KERNELS_OF_COMPILED_NOISE = {"blocks": 44, "backward blocks": 113}  # of both blocks


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    return counts_in_fork(write_counts, (CASES,), tmp_path_factory.mktemp("counts") / "counts.json")


OUTSIDE = ("draws", "objective", "model", "backward")


def outside(phases):
    return sum(phases[name]["operations"] for name in OUTSIDE)


@pytest.mark.parametrize("name", KERNELS_OUTSIDE)
def test_the_host_never_waits_for_the_device_in_a_step(counts, name):
    step = counts[name]["step"]
    assert (step["synchronising_copies"], step["waits"]) == (0, {})
    # The batch goes there without waiting, and the guard's verdict comes back a step late.
    assert step["copies_to_device"] == counts[name]["batch"]["copies_to_device"] and step["copies_to_host"] == 1


@pytest.mark.parametrize("name", KERNELS_OUTSIDE)
def test_kernels_outside_the_blocks(counts, name):
    assert outside(counts[name]) <= KERNELS_OUTSIDE[name]


@pytest.mark.parametrize("name", MEGABYTES_OF_A_BLOCK)
def test_bytes_moved_by_a_block(counts, name):
    moved = counts[name]["blocks"]["bytes_moved"] + counts[name]["backward blocks"]["bytes_moved"]
    assert moved / BLOCKS / 1e6 <= MEGABYTES_OF_A_BLOCK[name]


@pytest.mark.parametrize("name", PEAK_MEGABYTES)
def test_peak_memory_is_bounded_and_as_estimated(counts, name):
    peak = counts[name]["step"]["peak_bytes"]
    assert peak <= 1e6 * PEAK_MEGABYTES[name]
    words, ranks, *_ = CASES[name]
    estimated = estimate_memory(load_config(words, ranks), ranks, on_gpu=True).total
    assert abs(estimated / peak - 1) < 0.03


def test_recomputed_blocks_are_computed_once_more(counts):
    once, again = counts["sharded, RMS norms"], counts["recomputed"]
    assert again["blocks"]["flops"] == once["blocks"]["flops"]
    products = [sum(phases["blocks"]["flops"].values()) for phases in (once, again)]
    backward = [sum(phases["backward blocks"]["flops"].values()) for phases in (once, again)]
    assert backward[1] == backward[0] + products[0]
    # The same kernels, of attention and norms too; the last product of a block is not needed again.
    assert again["backward blocks"]["operations"] <= once["backward blocks"]["operations"] + once["blocks"]["operations"]
    assert again["step"]["peak_bytes"] < once["step"]["peak_bytes"]


def test_compiled_blocks_multiply_as_eager_ones_and_move_less(counts):
    eager, compiled = counts["dit_xl2_256"], counts["compiled"]
    for name in ("blocks", "backward blocks"):
        assert compiled[name]["flops"] == eager[name]["flops"]
        assert compiled[name]["bytes_moved"] < eager[name]["bytes_moved"]
    moved = sum(compiled[name]["bytes_moved"] for name in ("blocks", "backward blocks"))
    tokens = 8 * 256 * 1152 * 2  # bytes of a block's input in bfloat16
    # By hand, a block keeps its input, both modulated inputs of products, q, k, v, attention's output, both outputs that gates
    # multiply, and the MLP's hidden layer, four times as wide, before and after GELU: 17 of them.
    assert compiled["blocks"]["kept_bytes"] / BLOCKS < 17.5 * tokens
    assert moved / BLOCKS < MEGABYTES_OF_A_COMPILED_BLOCK * 1e6
    others = [name for name in eager if name not in (*OUTSIDE, "blocks", "backward blocks", "step", "derived")]
    assert {name: eager[name] for name in others} == {name: compiled[name] for name in others}


def test_compiled_blocks_measure_noise_by_the_same_products(counts):
    eager, compiled = counts["noise"], counts["noise, compiled"]
    blocks = ("blocks", "backward blocks")

    # A projection may be computed in backward instead of being kept.
    of_eager, of_compiled, without = (
        sum(sum(phases[name]["flops"].values()) for name in blocks) for phases in (eager, compiled, counts["compiled"])
    )
    assert of_eager == of_compiled > without
    for name in blocks:
        assert compiled[name]["operations"] <= KERNELS_OF_COMPILED_NOISE[name] < eager[name]["operations"]
        assert counts["compiled"][name]["bytes_moved"] < compiled[name]["bytes_moved"] < eager[name]["bytes_moved"]
    assert compiled["gns"] == eager["gns"] and compiled["model"] == eager["model"]


def test_compiled_draws_and_objective_are_few_kernels(counts):
    eager, compiled = counts["dit_xl2_256"], counts["compiled"]
    assert outside(compiled) <= KERNELS_OUTSIDE_COMPILED
    # Of each a kernel on either side of what stays alone: index tables' search, the sums of an image, the label drop.
    assert compiled["draws"]["operations"] + compiled["objective"]["operations"] <= 9
    assert compiled["model"] == eager["model"]
    for name in OUTSIDE:
        assert compiled[name]["flops"] == eager[name]["flops"]
        assert compiled[name]["bytes_moved"] <= eager[name]["bytes_moved"]


def test_a_measured_step_of_gradient_noise(counts):
    noise, step = counts["noise"]["gns"], counts["noise"]["step"]
    assert noise["operations"] <= KERNELS_OF_NOISE
    assert (step["synchronising_copies"], step["waits"]) == (0, {})
    assert outside(counts["noise"]) <= KERNELS_OUTSIDE_WITH_NOISE


def test_rows_of_another_commit_are_not_mixed_into_a_section(monkeypatch, tmp_path):
    results = tmp_path / "step_counts.json"
    results.write_text(json.dumps({"present": {"commit": "0123abc", "rows": {"a": {}}}}))
    before = results.read_text()
    monkeypatch.setattr(step_counts, "RESULTS", results)
    with pytest.raises(SystemExit, match="section 'present' are of commit 0123abc, not of"):
        step_counts.main(["--section", "present", "--rows", "7B"])
    assert results.read_text() == before


def test_flops_are_those_of_the_model_and_of_attention_computed_again(counts):
    """By hand: of XL/2's two blocks each token takes 2 x 12 d^2 multiply-accumulates; attention 2 T d, 5 products backward."""
    tokens, width, images = 256, 1152, 8
    linears = 3 * 2 * 12 * width**2 * tokens
    modulation = 3 * 2 * 6 * width**2
    attention = 2 * tokens**2 * width * (2 + 5)
    of_blocks = sum(sum(counts["dit_xl2_256"][name]["flops"].values()) for name in ("blocks", "backward blocks"))
    assert of_blocks == images * BLOCKS * (linears + modulation + attention)


def test_without_a_compiler_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    with pytest.raises(device.NoFakeCuda, match=r"^no C\+\+ compiler \(c\+\+ or g\+\+\)"):
        device.require_guard()


def autocast_dtype(operation, *inputs):
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        return operation(*(torch.empty(4, 4, dtype=dtype) for dtype in inputs)).dtype


def test_cpu_tensors_are_autocast_as_cuda_does_inside_the_context_alone():
    half, whole = torch.bfloat16, torch.float32
    norm, add = torch.nn.LayerNorm(4, elementwise_affine=False), torch.addcmul
    assert autocast_dtype(norm, half) == half
    with cuda_autocast():
        assert autocast_dtype(norm, half) == autocast_dtype(torch.exp, half) == autocast_dtype(torch.sum, half) == whole
        assert autocast_dtype(add, half, half, whole) == whole and autocast_dtype(add, half, half, half) == half
        assert autocast_dtype(torch.mm, whole, whole) == half and autocast_dtype(torch.nn.functional.silu, half) == half
    assert autocast_dtype(norm, half) == half and autocast_dtype(torch.exp, half) == half


def test_the_policy_is_that_of_the_installed_torch():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    for macro, names in (("FP32", FLOAT32), ("FP32_SET_OPT_DTYPE", FLOAT32_RESULT), ("PROMOTE", WIDEST)):
        listed = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+.*\n)", text)
        if listed is None:
            pytest.skip(f"{header} lists the policy in another way")
        found = re.findall(r"_\((\w+)(?:, (\w+))?\)", listed[1])
        assert {".".join(filter(None, entry)) for entry in found} == set(names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.toml"], "nowhere.toml: no such file"),
        (["train_configs/digits.toml", "--model.flavour", "debug"], "unknown key (did you mean --model.flavor?)"),
        (["train_configs/digits.toml", "--images", "0"], "argument --images: must be at least 1, is 0"),
        (["train_configs/digits.toml", "--images", "x"], "argument --images: "),
        (["train_configs/digits.toml", "--ranks", "0"], "argument --ranks: must be at least 1, is 0"),
        (["train_configs/digits.toml", "--step", "1"], "argument --step: must be at least 2, is 1"),
        (["--rows", "no such row"], "--rows: 'no such row' is in no row's name"),
    ],
)
def test_bad_words_are_refused_in_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(step_counts, "fake_cuda", lambda counter: nullcontext())  # a configuration is refused inside of it
    monkeypatch.setattr(step_counts, "_fake_ranks", lambda ranks: nullcontext())
    try:
        code = step_counts.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_step_that_cannot_be_counted_is_refused_in_one_line(monkeypatch, capsys):
    def refused(*arguments):
        raise device.NoFakeCuda("there is a GPU")

    monkeypatch.setattr(step_counts, "count_step", refused)
    assert step_counts.main(["train_configs/digits.toml"]) == 2
    assert capsys.readouterr().err == "step_counts: there is a GPU\n"


def test_images_of_a_rank_are_those_of_one_microbatch_also_where_ranks_share_tokens():
    words = ["--model.flavor", "debug", "--data.name", "synthetic", "--gns.enable", "false", *step_counts.images_words(6)]
    for context, batch in ((1, 24), (2, 12), (4, 6)):
        config = load_config([*words, "--parallelism.context_parallel_degree", str(context)], 4)
        assert (config.training.local_batch_size, config.training.global_batch_size) == (6, batch)


def test_products_in_float8_take_the_time_of_their_peak():
    """Of 10 TFLOP, 8 are of linears and 5 of these in float8: twice the rate by the makers' peaks of an H200."""
    attention = Call("_scaled_dot_product_flash_attention", "bfloat16", 0, 2 * 10**12)
    calls = Counter({Call("mm", "bfloat16", 0, 8 * 10**12): 1, attention: 1})

    def seconds(float8_share):
        return step_counts.derived(CountedStep({"blocks": PhaseCounts(calls)}, 1, 10**13, float8_share))["device_seconds"]

    of_linears = 8e12 / step_counts.PRODUCTS["bfloat16"]
    assert seconds(0.0) - seconds(0.5) == pytest.approx(of_linears * 5 / 8 / 2, rel=1e-3)  # the peaks are 989.5 and 1,979
