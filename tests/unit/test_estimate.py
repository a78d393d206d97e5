"""The estimate of a run against numbers known from elsewhere."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.launcher import ROOT
from torchtitan.config.job import load_config
from torchtitan.estimate import memory
from torchtitan.estimate.devices import Device
from torchtitan.estimate.live_storages import ACTIVATIONS, GRADIENTS, PARAMETERS, LiveStorages
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan.estimate.report import as_text, fits
from torchtitan.estimate.roofline import (
    Efficiency,
    communication_bytes,
    estimate_step_time,
    recomputed_share,
    training_flops_per_image,
)
from torchtitan.estimate.simulation import simulate_step
from torchtitan.state.resume import materialise_state
from torchtitan.training.optimizer import build_optimizer, optimizer_tensors
from torchtitan_dit.commands import estimate

SEVEN_B = [
    "--model.flavor", "TorchDiTan-7B", "--data.name", "synthetic", "--data.shape", "[16, 64, 64]",
    "--data.num_classes", "1000", "--training.local_batch_size", "1", "--training.mixed_precision_param", "bfloat16",
]  # fmt: skip


def config_of(*words: str, ranks: int = 1, flavor: str = "debug"):
    return load_config(["--model.flavor", flavor, "--training.local_batch_size", "8", *words], ranks)


def test_storages_of_a_small_network_are_those_counted_by_hand():
    with FakeTensorMode(), LiveStorages() as live:
        weight = torch.empty(10, 10, requires_grad=True)
        live.hold([weight], PARAMETERS)
        live.open_window("forward")
        x = torch.empty(5, 10)
        loss = (x @ weight).exp().view(-1).sum()  # kept: x, exp's output, the sum; x @ weight is let go
        assert live.now() == {PARAMETERS: 400, ACTIVATIONS: 200 + 200 + 4}
        live.open_window("backward")
        loss.backward()
        live.hold([weight.grad], GRADIENTS)
        del loss
        assert live.now() == {PARAMETERS: 400, ACTIVATIONS: 200, GRADIENTS: 400}
    assert live.windows["forward"].total() == 400 + 3 * 200  # exp's input and output at once
    # At the product that makes the weight's gradient: x, the gradient of x @ weight, exp's output or not, the loss.
    assert 400 + 200 + 200 + 400 <= live.windows["backward"].total() <= 400 + 3 * 200 + 400 + 8


@pytest.mark.parametrize("words", [(), ("--lora.enable", "true")])
def test_peaks_are_those_of_a_recount_after_every_operation(words, monkeypatch):
    """Storages of gathered parameters are included; FSDP2 resizes them without a dispatched operation."""
    config, resized = config_of("--model.num_layers", "2", *words, ranks=2), set()
    found = simulate_step(config, 2).windows

    def recounted(live):
        sums = Counter()
        for known in live._live.values():
            sums[known.category] += known.reference().nbytes()
        resized.add(sums.total() != sum(known.nbytes for known in live._live.values()))
        return +sums

    monkeypatch.setattr(LiveStorages, "now", recounted)
    assert simulate_step(config, 2).windows == found and resized == {False, True}


def test_a_batch_that_grows_needs_the_memory_of_one_that_accumulates():
    one, grows, accumulates = (
        estimate_memory(config_of("--model.num_layers", "1", *words), 1).total
        for words in ((), ("--training.double_batch_after", "[1000]"), ("--training.global_batch_size", "16"))
    )
    assert grows == accumulates > one


def test_two_shallow_models_give_the_peak_of_a_deep_one_exactly(monkeypatch):
    depths = []

    def simulate(config, ranks, on_gpu):
        depths.append(config.model.depth)
        return simulate_step(config, ranks, on_gpu)

    monkeypatch.setattr(memory, "simulate_step", simulate)
    for words, ranks in (
        (["--activation_checkpoint.mode", "full", "--activation_checkpoint.every", "2", "--model.num_layers", "10"], 4),
        (["--training.global_batch_size", "32", "--parallelism.data_parallel_replicate_degree", "2"], 2),
    ):
        config = config_of("--model.num_layers", "6", *words, ranks=ranks)
        whole = simulate_step(config, ranks)
        depths.clear()
        found = estimate_memory(config, ranks)
        assert len(depths) == 2 and max(depths) < config.model.depth
        assert found.total == whole.held["optimizer"] + whole.held["ema"] + max(
            peak.total() for peak in whole.windows.values()
        )
        assert found.all_gradients == whole.held[GRADIENTS]


def test_blocks_that_return_several_tensors_have_windows_of_their_own():
    """Image and text of Flux's double blocks, of which less is kept where the blocks are computed again."""
    words = [
        "--model.name=flux", "--model.flavor=debug", "--data.name=synthetic", "--data.text_length=5", "--data.text_dim=32",
        "--data.pooled_dim=24", "--training.local_batch_size=8",
    ]  # fmt: skip
    step = simulate_step(load_config(words, 1), 1)
    assert {window[1:] for window in step.windows} >= {(phase, n) for phase in ("forward", "backward") for n in range(4)}
    kept = [step.windows[0, "backward", block][ACTIVATIONS] for block in range(4)]
    assert kept == sorted(kept)  # a block's activations are let go once its backward is done
    full = load_config([*words, "--activation_checkpoint.mode=full"], 1)
    assert estimate_memory(full, 1).activations < 0.5 * estimate_memory(load_config(words, 1), 1).activations


def test_a_forward_without_gradients_keeps_nothing_in_the_blocks():
    found = {}
    for name in ("denoising", "consistency"):
        found[name] = estimate_memory(config_of("--objective.name", name, "--model.num_layers", "4"), 1)
    assert found["consistency"].all_gradients == found["denoising"].all_gradients
    assert found["consistency"].activations == pytest.approx(found["denoising"].activations, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_shards_are_rows_rounded_up(ranks):
    config = config_of(ranks=ranks)
    model = model_on_meta(config)
    tables = sum(buffer.nbytes for buffer in model.buffers())
    rows = sum(4 * math.ceil(p.shape[0] / ranks) * (p.numel() // p.shape[0]) for p in model.parameters())
    found = estimate_memory(config, ranks)
    assert found.parameters == rows + tables
    assert found.all_gradients == found.ema == rows
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert found.start_up == (4 * model.num_parameters() if ranks == 1 else rows + largest)


def test_a_sharded_base_starts_as_its_shards_and_the_adapters_whole():
    config = config_of("--lora.enable", "true", "--lora.base_dtype", "bfloat16", ranks=64)
    parameters = dict(model_on_meta(config).named_parameters())
    adapters = sum(parameters.pop(name).nbytes for name in list(parameters) if ".adapters." in name)
    rows = sum(2 * math.ceil(p.shape[0] / 64) * (p.numel() // p.shape[0]) for p in parameters.values())
    found = estimate_memory(config, 64).start_up
    assert found == rows + max(adapters, *(p.nbytes for p in parameters.values()))


def test_ddp_adds_the_gradients_that_are_not_there_yet():
    alone = estimate_memory(config_of(), 1)
    copies = estimate_memory(config_of("--parallelism.data_parallel_replicate_degree", "2", ranks=2), 2)
    assert alone.gradients < 0.1 * alone.all_gradients
    assert copies.gradients == copies.all_gradients == alone.all_gradients
    # With all gradients there all the time, the peak may lie at another operation: where activations alone are highest.
    assert alone.total - alone.gradients <= copies.total - copies.all_gradients <= alone.total


def test_reduced_shards_are_gradients():
    step = simulate_step(config_of(ranks=2), 2)
    assert step.windows[0, "backward", 0][GRADIENTS] > 0.5 * step.held[GRADIENTS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_gradients_that_accumulate_before_they_are_reduced_are_gradients(dtype):
    words = "--training.mixed_precision_param", dtype, "--training.global_batch_size"
    config = config_of(*words, "32", ranks=2)
    once, twice = estimate_memory(config_of(*words, "16", ranks=2), 2), estimate_memory(config, 2)
    offloads = estimate_memory(replace(config, training=replace(config.training, enable_cpu_offload=True)), 2)
    whole = 4 * model_on_meta(config_of()).num_parameters()
    assert twice.gradients - once.gradients == whole
    # New gradients of one block, until they are reduced, are temporaries of a backward that has none to add them to.
    assert 0 <= once.activations - twice.activations < whole / config.model.num_layers
    assert twice.all_gradients == once.all_gradients and once.gradients < 0.1 * whole
    assert offloads.gradients == whole  # on the device: only the shards are not


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_optimizer_bytes_are_those_of_the_real_state(name):
    config = config_of("--optimizer.name", name)
    model = model_on_meta(config).to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(parameters, config.optimizer, model.blocks())
    materialise_state(optimizer, config.optimizer.lr)
    state = optimizer_tensors(optimizer, parameters).values()
    assert estimate_memory(config, 1).optimizer == sum(tensor.nbytes for tensor in state)


def test_a_forward_without_backward_is_a_third_of_a_training_s_operations():
    flops = {name: config_of("--objective.name", name) for name in ("denoising", "consistency")}
    flops = {name: training_flops_per_image(config, model_on_meta(config)) for name, config in flops.items()}
    assert 3 * flops["consistency"] == 4 * flops["denoising"]


def test_checkpointing_keeps_less():
    kept = [
        estimate_memory(config_of("--model.num_layers", "6", "--activation_checkpoint.mode", mode), 1).activations
        for mode in ("none", "selective", "full")
    ]
    assert kept[0] > 1.2 * kept[1] > 2 * kept[2]


def test_recomputed_products_are_a_share_of_the_forward():
    def share(*words: str) -> float:
        config = config_of("--model.num_layers", "5", *words)
        return recomputed_share(config, model_on_meta(config))

    mode = "--activation_checkpoint.mode"
    assert share() == share(mode, "selective") == share(mode, "memory_budget", "--compile.enable", "true") == 0
    assert share(mode, "full") == pytest.approx(1 / 3)
    # Of four forwards' worth of training, one of which has no gradient, one is made again.
    assert share(mode, "full", "--objective.name", "consistency") == pytest.approx(1 / 4)
    assert share(mode, "full", "--activation_checkpoint.every", "2") == pytest.approx(3 / 5 / 3)


def test_a_memory_budget_is_told_as_a_range():
    config = config_of("--activation_checkpoint.mode", "memory_budget", "--compile.enable", "true")
    found, model = estimate_memory(config, 1), model_on_meta(config)
    none = estimate_memory(config_of(), 1)
    full = estimate_memory(config_of("--activation_checkpoint.mode", "full"), 1)
    assert (found.total, found.least) == (none.total, full.total) and none.least is None
    between = Device("CPU", (found.total + found.least) / 2 / 0.9 / 2**30, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert (fits(found, between), fits(none, between), fits(full, between)) == (None, False, True)
    time = estimate_step_time(config, model, found, between, Efficiency())
    text = as_text(config, model, found, time, between, Efficiency())
    assert "memory_budget = 0.5 is not known before compiling" in text and "(every block recomputed)" in text
    assert "known once the blocks are compiled" in text and "up to a third more compute" in text


def test_bytes_sent_are_those_of_ring_collectives():
    fsdp = config_of("--training.mixed_precision_param", "bfloat16", ranks=4)
    assert communication_bytes(fsdp, 1000) == {"shard": 0.75 * 1000 * (2 + 2 + 4), "replicate": 0.0}
    ddp = config_of("--parallelism.data_parallel_replicate_degree", "4", ranks=4)
    assert communication_bytes(ddp, 1000) == {"shard": 0.0, "replicate": 2 * 0.75 * 4000}
    hsdp = config_of("--parallelism.data_parallel_replicate_degree", "2", "--training.global_batch_size", "64", ranks=4)
    assert communication_bytes(hsdp, 1000) == {"shard": 0.5 * 1000 * (2 * 2 * 4 + 4), "replicate": 2 * 0.5 * 2000}


def test_a_ramp_takes_the_hours_of_its_steps_and_the_batch_reached_is_not_that_of_all():
    """Images are the same, so that only what a step costs whatever its batch becomes less: gradients and optimizer."""
    device = Device("slow links", 80.0, 1e-3, 1e-3, 1e-3, 1e-4, 1e-4)
    words = ("--parallelism.data_parallel_replicate_degree", "2", "--training.steps", "10")

    def time_of(*more):
        config = config_of(*words, *more, ranks=2)
        return estimate_step_time(config, model_on_meta(config), estimate_memory(config, 2), device, Efficiency())

    constant, doubled = time_of(), time_of("--training.global_batch_size", "32")
    ramp = time_of("--training.double_batch_after", "[64]")  # 4 steps of 16 images, 3 of 32
    assert ramp.hours == pytest.approx((4 * constant.step + 3 * doubled.step) / 3600)
    assert (ramp.step, ramp.mfu, ramp.images_per_second) == (constant.step, constant.mfu, constant.images_per_second)
    assert ramp.device_hours == 2 * ramp.hours and ramp.hours < 0.9 * constant.hours


def test_command_estimates_seven_billion_parameters(tmp_path, capsys):
    path = tmp_path / "seven_b.toml"
    path.write_text("")
    assert estimate.main([str(path), "--world-size", "64", "--device", "h200", "--json", *SEVEN_B]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_parameters"] == 7_128_547_904
    assert found["flops_per_image"] == pytest.approx(3.118e13, rel=1e-3)
    memory = found["memory"]
    assert memory["total"] == sum(
        memory[part] for part in ("parameters", "gradients", "optimizer", "ema", "activations", "communication")
    )
    assert memory["optimizer"] == pytest.approx(8 * found["num_parameters"] / 64, rel=2e-3)
    time = found["time"]
    assert time["images_per_second"] == pytest.approx(64 / time["step"])
    assert time["device_hours"] == pytest.approx(64 * time["hours"])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--device", "H2"], "'H2' is none of H200, H100"),
        (["--device", "H2", "--tflops", "9"], "and another GPU needs --memory, --memory-bandwidth, --node-bandwidth"),
        (["--device", "CPU", "--memory", "8"], "needs --tflops, --memory-bandwidth, --node-bandwidth\n"),
        (["--device", "CPU", "--world-size", "16"], "--node-bandwidth, --network-bandwidth\n"),
        (["--device", "CPU", "--memory", "8", "--world-size", "1"], "needs --tflops, --memory-bandwidth\n"),
        (["--device", "H200", "--model.flavour", "debug"], "did you mean"),
        (["--device", "4090", "--memory", "12", "--tflops", "9"], "--tflops is for other devices; 4090 has its own"),
    ],
)
def test_bad_words_are_refused_in_one_line(words, message, capsys):
    try:
        code = estimate.main([str(ROOT / "train_configs" / "digits.toml"), "--world-size", "2", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
