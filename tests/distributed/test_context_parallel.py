"""Tokens of an image divided between processes: loss and gradient norm are those of one process, at every step."""

import itertools
import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tests.configurations import load, problems
from tests.distributed.cases import AS_TRACED, make_trainer, remove, shared_folder
from tests.launcher import run_on_ranks
from torchtitan.distributed import context_parallel
from torchtitan.distributed.degrees import Degrees
from torchtitan.estimate.roofline import exchanged_bytes
from torchtitan.training.metrics import METRICS_FILE

STEPS = 4
PEAK_TFLOPS = 0.5
ROUNDED = 8 * 2.0**-53  # of two products of a few numbers, at most eight operations in all, each rounded
BASE = ("--gns.enable", "false", "--model.num_layers", "2", "--lr_scheduler.warmup_steps", "1")
DEGREE = "--parallelism.context_parallel_degree"
PLAIN = ("--model.position", "sincos", "--model.mlp", "gelu", "--model.qk_norm", "false")


def case(degree: int, replicas: int = 1, shards: int = 1, accumulation: int = 1, overrides: tuple = (), backend: str = "eager"):
    return {
        "steps": STEPS, "replicas": replicas, "shards": shards, "accumulation": accumulation, "backend": backend,
        "overrides": (*BASE, DEGREE, str(degree), *overrides), "context": degree,
    }  # fmt: skip


MODELS = {"plain": PLAIN, "rotary": (), "magnitude-preserving": ("--model.magnitude_preserving", "true")}
COMPILED = ("--compile.enable", "true", "--activation_checkpoint.mode", "full")
ON_TWO = {
    "compiled, recomputed": ("plain", case(2, overrides=(*PLAIN, *COMPILED), backend=AS_TRACED)),
    "accumulated": ("rotary", case(2, accumulation=2)),
    "magnitude-preserving": ("magnitude-preserving", case(2, overrides=MODELS["magnitude-preserving"])),
}
ON_FOUR = {
    "over two, DDP": ("plain", case(2, replicas=2, overrides=PLAIN)),
    "over two, FSDP, recomputed": ("rotary", case(2, shards=2, overrides=("--activation_checkpoint.mode", "selective"))),
    "over four": ("plain", case(4, overrides=PLAIN)),
}  # fmt: skip


@pytest.fixture(scope="module")
def references() -> dict[str, list[list[float]]]:
    cases = {name: case(1, overrides=overrides) for name, overrides in MODELS.items()}
    return run_on_ranks("tests.distributed.cases:train_all", 1, {"cases": cases})[0]


@pytest.mark.parametrize("ranks, cases", [(2, ON_TWO), (4, ON_FOUR)])
def test_loss_and_grad_norm_equal_one_process(ranks, cases, references):
    settings = {name: settings for name, (_, settings) in cases.items()}
    curves = run_on_ranks("tests.distributed.cases:train_all", ranks, {"cases": settings})[0]
    differences = {}
    for name, (model, _) in cases.items():
        pairs = list(zip(itertools.chain(*curves[name]), itertools.chain(*references[model]), strict=True))
        assert len(pairs) == 2 * STEPS
        differences[name] = max(abs(value - wanted) / abs(wanted) for value, wanted in pairs)
    assert max(differences.values()) <= 1e-5, differences


def continued(folder: str, steps: int, degree: int, shards: int) -> None:
    """Train a run to a step, from its last checkpoint on, with the held-out loss on the way."""
    overrides = (
        *BASE, DEGREE, str(degree), "--checkpoint.enable", "true", "--validation.enable", "true",
        "--validation.interval", "2", "--validation.num_images", "24",
    )  # fmt: skip
    trainer = make_trainer(
        folder, "run", steps=10, replicas=1, shards=shards, accumulation=1, overrides=overrides, context=degree
    )
    trainer.config.training.steps = steps
    assert trainer.train() == 0
    trainer.close()


def test_a_run_changes_its_layout_and_evaluates_whole_images(tmp_path):
    numbers = {}
    for name, parts in {"straight": [(4, 1, 1)], "changing": [(2, 2, 1), (4, 1, 1)]}.items():
        folder = tmp_path / name
        folder.mkdir()
        for steps, degree, shards in parts:
            arguments = {"folder": str(folder), "steps": steps, "degree": degree, "shards": shards}
            run_on_ranks("tests.distributed.test_context_parallel:continued", degree * shards, arguments)
        points = [json.loads(line) for line in (folder / "run" / METRICS_FILE).read_text().splitlines()]
        wanted = ("loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/loss", "n_images_seen")
        numbers[name] = [(point["step"], key, point[key]) for point in points for key in wanted if key in point]
    straight, changing = numbers["straight"], numbers["changing"]
    assert [entry[:2] for entry in changing] == [entry[:2] for entry in straight]
    assert sum(key == "grad_norm" for _, key, _ in straight) == 4
    assert sum("validation" in key for _, key, _ in straight) == 2
    for (step, key, found), (_, _, wanted) in zip(changing, straight, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5), (step, key)


def exchanged() -> list[float]:
    """Bytes that blocks exchange in a forward of one microbatch, and the estimate of forward and backward."""
    folder, sent = shared_folder(), []
    overrides = (*BASE, DEGREE, "2")
    trainer = make_trainer(folder, "run", steps=6, replicas=1, shards=1, accumulation=1, overrides=overrides, context=2)
    original = context_parallel.all_to_all_single_autograd

    def counting(parts, *args):
        sent.append(parts.nbytes / 2)  # half stays
        return original(parts, *args)

    with patch.object(context_parallel, "all_to_all_single_autograd", counting):
        trainer.train_step()
    trainer.close()
    remove(folder)
    return [sum(sent[:-1]), exchanged_bytes(trainer.config, trainer.state.model)]  # the last gathers the output


def test_the_estimate_has_the_bytes_of_the_exchange():
    forward, estimated = run_on_ranks("tests.distributed.test_context_parallel:exchanged", 2)[0]
    assert 0 < 2 * forward == estimated


def attention_flops(query, key, value, *_, **__) -> int:
    return sdpa_flop_count(query, key, value)


def attention_backward_flops(_, query, key, value, *__, **___) -> int:
    return 2 * sdpa_flop_count(query, key, value)  # without the scores that the kernel computes again


CPU_ATTENTION = {  # which torch's counter leaves out
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def counted_and_logged(degree: int) -> list:
    """FLOPs of a step of this process as torch counts them, those of an image, and the points that the run logs."""
    folder = shared_folder()
    overrides = (*BASE, *PLAIN, DEGREE, str(degree), "--metrics.peak_tflops", str(PEAK_TFLOPS))
    trainer = make_trainer(folder, "run", steps=3, replicas=1, shards=1, accumulation=1, overrides=overrides, context=degree)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        trainer.train_step()
    assert trainer.train() == 0
    trainer.close()
    points = [json.loads(line) for line in (Path(folder) / "run" / METRICS_FILE).read_text().splitlines()]
    remove(folder)
    return [counter.get_total_flops(), trainer.state.flops_per_image, points]


def test_logged_flops_count_the_share_of_each_process_once():
    """Each process has its tokens' FLOPs, which sum to those of one process, and all of timestep and class, which count once."""
    function, images, dim, sinusoids, layers = "tests.distributed.test_context_parallel:counted_and_logged", 16, 64, 256, 2
    ((whole, flops_per_image, _),) = run_on_ranks(function, 1, {"degree": 1})
    ranks = run_on_ranks(function, 2, {"degree": 2})
    # Neither the pixels [16, 4] of an image's patches nor the sinusoids have a gradient.
    assert whole == images * (flops_per_image - 2 * (16 * 4 * dim + sinusoids * dim))
    of_condition = 2 * 2 * sinusoids * dim + 3 * 2 * (dim**2 + layers * 6 * dim**2 + 2 * dim**2)
    assert ranks[0][0] == ranks[1][0] == (whole + images * of_condition) / 2
    for _, of_image, points in ranks:
        assert of_image == flops_per_image and points
        for point in points:
            of_device = flops_per_image * point["throughput(img/s)"] / 2 / 1e12
            assert point["tflops"] == pytest.approx(of_device, rel=ROUNDED)
            assert point["mfu(%)"] == pytest.approx(100 * of_device / PEAK_TFLOPS, rel=ROUNDED)
            assert point["throughput(tps)"] == pytest.approx(16 * point["throughput(img/s)"], rel=ROUNDED)


@pytest.mark.parametrize(("degrees", "words"), [
    ((2, 1, 2), "DDP x 2, context parallel x 2"),
    ((2, 4, 2), "HSDP 2 x 4, context parallel x 2"),
    ((2, 2, 1), "HSDP 2 x 2"), ((1, 4, 2), "FSDP x 4, context parallel x 2"),
    ((1, 1, 2), "context parallel x 2"), ((1, 1, 1), "one process"),
])  # fmt: skip
def test_the_numbers_of_a_layout_in_words_multiply_to_its_processes(degrees, words):
    assert Degrees(*degrees).describe() == words


SPLIT = "[gns]\nenable = false\n[parallelism]\ncontext_parallel_degree = 2\n"


@pytest.mark.parametrize(
    "toml, arguments, processes, part",
    [
        (SPLIT, ["--model.name", "edm2"], 2, "model.name = edm2 does not divide its tokens"),
        (SPLIT, ["--gns.enable", "true"], 2, "so neither per-sample nor per-rank gradients exist"),
        (SPLIT, ["--objective.timesteps.name", "time_warping"], 2, "learn from would count once per process"),
        (SPLIT, [], 3, "2 does not divide the 3 processes of this run"),
    ],
)
def test_what_cannot_be_divided_is_refused(toml, arguments, processes, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = problems(toml, ["--model.flavor", "debug", *arguments] if "edm2" not in arguments else arguments, processes)
    assert sum(part in line for line in found) == 1, found


def test_an_adaptive_solver_is_refused_where_there_are_shards_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model.flavor", "debug", "--sampling.solver.name", "dopri5"]
    assert load(SPLIT, words, 2).parallelism.data_parallel_shard_degree == 1
    (found,) = problems(SPLIT, words, 4)
    assert "dopri5 evaluates the network as often as the images need" in found


def test_a_batch_counts_the_processes_with_images_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(SPLIT + "[training]\nlocal_batch_size = 4", world_size=8)
    assert config.training.global_batch_size == 16
    assert (config.parallelism.data_ranks, config.parallelism.processes) == (4, 8)
    assert config.parallelism.data_parallel_shard_degree == 4
