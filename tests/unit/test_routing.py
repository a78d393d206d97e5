"""Blocks with a part of the tokens against masked attention over all of them, counted products, and what is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.test_dit import on_meta
from torchtitan.conditions import Classes
from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.estimate.memory import estimate_memory
from torchtitan.models import MODELS
from torchtitan.models.dit.config import DiTConfig, RoutingConfig, SprintConfig, TreadConfig
from torchtitan.models.dit.model import DiT
from torchtitan.models.dit.routing import TreadDiT, kept_tokens
from torchtitan.sampling.guides import open_guide
from torchtitan.sampling.set_settings import _guide
from torchtitan.weights.trained_model import WeightsError

SHAPE, BATCH, SEED = (2, 8, 12), 6, 3  # 24 tokens
PLAIN = DiTConfig(
    dim=32, num_layers=5, num_heads=2, mlp_hidden_dim=40, position="sincos_rotary", value_residual=True, intermediate_head=4
)
TREAD = TreadConfig(name="tread", first_block=2, last_block=4)
SPRINT = SprintConfig(name="sprint", first_block=2, last_block=4, path_drop=0.5)


def build(routing: RoutingConfig, device: str = "cpu") -> DiT:
    with torch.device(device):
        model = MODELS["dit"].build(replace(PLAIN, routing=routing), SHAPE, Classes(3)).double()
    torch.manual_seed(0)
    for parameter in model.parameters() if device == "cpu" else ():
        nn.init.normal_(parameter, std=0.2)
    model.init_buffers()
    return model


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, *SHAPE, dtype=torch.float64), 1000 * torch.rand(BATCH).double(), torch.arange(BATCH) % 4


def twin(model: DiT) -> DiT:
    """Plain network with the same weights."""
    plain = build(RoutingConfig(name="none"))
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in plain.state_dict()})
    return plain


def masked(model: TreadDiT, plain: DiT, kept: Tensor, dropped_path: Tensor, monkeypatch) -> None:
    """Route the plain network by other means: all tokens pass the blocks, in which only those kept are keys."""
    attention, seen, before = F.scaled_dot_product_attention, kept[:, None, None, :], []
    first, last = plain.layers[1], plain.layers[3]

    def switch(on: bool) -> None:
        mask = {"attn_mask": seen} if on else {}
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **keys: attention(*args, **keys, **mask))

    def enter(module: nn.Module, arguments: tuple) -> None:
        before.append(arguments[0])
        switch(on=True)

    def leave(module: nn.Module, arguments: tuple, x: Tensor) -> Tensor:
        switch(on=False)
        if model.config.routing.name == "tread":
            return torch.where(kept[..., None], x, before[0])
        x = torch.where((kept & ~dropped_path[:, None])[..., None], x, model.mask_token.weight)
        return torch.cat((before[0], x), dim=-1) @ model.fusion.weight.T + model.fusion.bias

    first.register_forward_pre_hook(enter)
    last.register_forward_hook(leave)


@pytest.mark.parametrize("routing", [TREAD, SPRINT], ids=["tread", "sprint"])
def test_routed_blocks_are_those_in_which_other_tokens_are_no_keys(routing, monkeypatch):
    """Positions, first values, the head behind the blocks, and gradients, which skip the blocks where tokens do."""
    model, (x, t, condition) = build(routing), inputs()
    model.draw_dropout(SEED, torch.arange(BATCH))
    kept = torch.zeros(BATCH, 24, dtype=torch.bool).scatter(1, model._kept, True)
    assert (kept.sum(1) == (12 if routing is TREAD else 6)).all()
    dropped_path = getattr(model, "_path_dropped", torch.zeros(BATCH, dtype=torch.bool))
    plain = twin(model)
    masked(model, plain, kept, dropped_path, monkeypatch)
    found, weights = [], torch.randn(BATCH, 4, *SHAPE[1:], dtype=torch.float64)
    for network in (plain, model):
        here = x.clone().requires_grad_()
        output = network(here, t, condition)
        (output * weights).sum().backward()
        found.append([output, here.grad, *(network.get_parameter(name).grad for name, _ in plain.named_parameters())])
    assert found[0][0].std() > 0.1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)


def test_all_tokens_kept_is_the_plain_network_bit_for_bit():
    model, arguments = build(replace(TREAD, keep=1.0)), inputs()
    plain = twin(model)
    model.draw_dropout(SEED, torch.arange(BATCH))
    for network in (model, plain):
        network(*arguments).square().mean().backward()
    assert torch.equal(model(*arguments), plain(*arguments))
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name


@torch.no_grad()
@pytest.mark.parametrize("label_dropout", [0.1, 0.0])
def test_the_path_drop_guide_is_the_network_with_mask_tokens_alone_and_the_null_condition_if_trained(label_dropout):
    model, (x, t, condition) = build(SPRINT), inputs()
    model.draw_dropout(SEED, torch.arange(BATCH))
    model._kept, model._path_dropped = None, torch.ones(BATCH, dtype=torch.bool)
    wanted = model(x, t, torch.full_like(condition, 3) if label_dropout else condition)  # in training
    config = JobConfig()
    config.model.label_dropout = label_dropout
    sampled = SimpleNamespace(config=config, model=model.eval(), objective=None)
    opened = open_guide("path_drop", Path("run"), None, sampled, 2.0, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(opened.guide.network(x, t, condition), wanted) and opened.model is None
    assert not torch.equal(model(x, t, condition), wanted)
    assert counter.get_total_flops() < 0.6 * 2 * BATCH * model.forward_macs_per_image(SHAPE)
    assert _guide(opened) == {"label": "path_drop"}
    sampled.model = twin(model)
    with pytest.raises(WeightsError, match=r"--guide path_drop: the model has no path to drop \(train with"):
        open_guide("path_drop", Path("run"), None, sampled, 2.0, torch.device("cpu"))


@torch.no_grad()
def test_the_path_drop_guide_of_tread_is_the_network_of_the_other_blocks():
    model, arguments = build(TREAD).eval(), inputs()
    plain, whole = twin(model).eval(), model(*arguments)
    for number in (2, 3, 4):
        plain.layers[number - 1].forward = lambda x, *others: x
    assert torch.equal(model.without_path(*arguments), plain(*arguments))
    assert torch.equal(model(*arguments), whole) and not torch.equal(plain(*arguments), whole)


@torch.no_grad()
def test_evaluation_and_the_finish_have_all_tokens():
    arguments = inputs()
    for routing in (TREAD, SPRINT):
        model = build(replace(routing, finish_steps=2))
        evaluated = model.eval()(*arguments)
        model.train().draw_dropout(SEED, torch.arange(BATCH), steps_left=3)
        assert not torch.equal(model(*arguments), evaluated) and torch.equal(model.eval()(*arguments), evaluated)
        model.train().draw_dropout(SEED, torch.arange(BATCH), steps_left=2)
        dropped = getattr(model, "_path_dropped", torch.zeros(BATCH, dtype=torch.bool))
        same = [torch.equal(*pair) for pair in zip(model(*arguments), evaluated, strict=True)]
        assert same == (~dropped).tolist() and any(same)
    plain = twin(model := build(TREAD))
    assert torch.equal(model.eval()(*arguments), plain(*arguments)) and model.state_dict().keys() == plain.state_dict().keys()
    model.train().draw_dropout(SEED, torch.arange(2))
    with pytest.raises(ValueError, match=r"tokens are drawn for 2 images \(draw_dropout\), the batch has 6"):
        model(*arguments)


def test_kept_tokens_are_a_function_of_seed_sample_and_attempt_and_all_places_are_alike():
    model, samples = build(TREAD), torch.arange(4000)

    def kept(numbers: Tensor, *words: int) -> Tensor:
        model.draw_dropout(*(words[:1] or (SEED,)), numbers, *words[1:])
        return model._kept

    whole, chosen = kept(samples), torch.tensor([17, 3, 3999])
    assert torch.equal(kept(chosen), whole[chosen]) and (whole.diff(dim=1) > 0).all()
    assert not torch.equal(kept(chosen, SEED, 1), whole[chosen]) and not torch.equal(kept(chosen, SEED + 1), whole[chosen])
    one_hot = F.one_hot(whole, 24).sum(1).double()  # [4000, 24]
    # Half of the samples, and of pairs 12 * 11 / (24 * 23), within five standard deviations.
    pairs = (one_hot.T @ one_hot) / len(samples)
    wanted = torch.full((24, 24), 12 * 11 / (24 * 23)).fill_diagonal_(0.5)
    assert ((pairs - wanted).abs() < 5 * (wanted * (1 - wanted) / len(samples)).sqrt()).all()


def test_the_share_is_rounded_to_a_number_of_tokens():
    assert [kept_tokens(keep, 10) for keep in (1.0, 0.76, 0.7, 0.5, 0.01)] == [10, 8, 7, 5, 1]
    assert [kept_tokens(0.5, count) for count in (49, 9)] == [25, 5]


@pytest.mark.parametrize("routing", [TREAD, SPRINT, replace(TREAD, keep=0.25)], ids=["tread", "sprint", "tread of fewer"])
def test_products_are_those_that_pytorch_counts(routing):
    model = build(replace(routing, finish_steps=10), "meta")
    condition = torch.zeros(2, dtype=torch.int64, device="meta")
    for routed in (False, True):
        if routed:
            model.draw_dropout(SEED, torch.arange(2, device="meta"))
        with FlopCounterMode(display=False) as forward:
            output = model(torch.empty(2, *SHAPE, device="meta"), torch.empty(2, device="meta"), condition)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        macs = model.training_macs_per_image(SHAPE) if routed else model.forward_macs_per_image(SHAPE)
        assert forward.get_total_flops() == 4 * macs
    training = (forward.get_total_flops() + backward.get_total_flops()) / 2
    assert model.flops_per_image(SHAPE) == pytest.approx(training, rel=0.01)
    mean = (30 * model.flops_per_image(SHAPE) + 10 * 6 * model.forward_macs_per_image(SHAPE)) / 40
    assert model.flops_per_image(SHAPE, steps=40) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize(
    ("flavor", "routing", "published"),
    [
        ("DiT-B/2", TreadConfig(name="tread"), 0.701), ("DiT-XL/2", TreadConfig(name="tread"), 0.582),
        ("DiT-B/2", SprintConfig(name="sprint"), 0.507), ("DiT-XL/2", SprintConfig(name="sprint"), 0.357),
    ],
)  # fmt: skip
def test_by_default_the_blocks_are_the_papers_and_take_their_share_of_products(flavor, routing, published):
    """Two blocks before; behind three (TREAD's 2..8 and 2..24, from 0) or two; a block has 12 D^2 products a token."""
    model, shape = on_meta(flavor, (4, 32, 32), routing=routing), (4, 32, 32)
    dim, depth = model.config.dim, model.config.num_layers
    assert model.config.routed_blocks == range(3, depth - (2 if routing.name == "tread" else 1))
    blocks = depth * (12 * dim**2 * 256 + 2 * 256**2 * dim)
    fusion = 256 * 2 * dim**2 if routing.name == "sprint" else 0
    saved = model.forward_macs_per_image(shape) - model.training_macs_per_image(shape)
    assert (blocks + fusion - saved) / blocks == pytest.approx(published, abs=5e-4)


def test_memory_is_that_of_the_kept_tokens_unless_the_run_has_a_finish():
    base = "--model.flavor debug --data.name synthetic --data.shape [3,32,32] --training.local_batch_size 8"
    routed = f"{base} --model.routing.name tread --model.routing.first_block 1 --model.routing.last_block 3"
    cases = (base, f"{routed} --model.routing.keep 0.25", f"{routed} --model.routing.finish_steps 1")
    plain, kept, finished = (estimate_memory(load_config(words.split(), 1), 1).total for words in cases)
    assert kept < 0.5 * plain and finished == plain


ROUTED = "--model.routing.name tread --model.routing.first_block 2 --model.routing.last_block 2"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--model.routing.name tread", "model.routing.last_block: 0 is no block from model.routing.first_block = 3 to"),
        (f"{ROUTED} --model.routing.last_block 4", "last_block: 4 is no block from model.routing.first_block = 2 to"),
        (f"{ROUTED} --model.routing.keep 0", "model.routing.keep: must be above 0 and at most 1, is 0.0"),
        (f"{ROUTED} --model.routing.keep 1.5", "model.routing.keep: must be above 0 and at most 1, is 1.5"),
        (f"{ROUTED} --model.class_tokens 4", "model.routing.name: tread is for a network without model.class_tokens"),
        (f"{ROUTED} --model.wide_dim 96 --model.wide_heads 4", "routing.name: tread is for a network without model.wide_dim"),
        (f"{ROUTED} --model.value_residual true --model.routing.first_block 1", "routing.first_block: all tokens need values"),
        (f"{ROUTED} --model.routing.last_block 3 --model.intermediate_head 2 --objective.intermediate_share 0.5",
         "model.intermediate_head: 2 is a block with a part of the tokens, by model.routing (set it below 2, or to 3"),
        (f"{ROUTED} --alignment.teacher digits --alignment.block 2", "alignment.block: block 2 sees a part of the tokens"),
        (f"{ROUTED} --lora.enable true", "model.routing.name: is for weights that train, and lora trains"),
        ("--model.routing.keep 0.5", "keep: unknown key (it is a key of model.routing.name = tread or sprint)"),
    ],
)  # fmt: skip
def test_what_cannot_be_routed_is_refused_in_one_line(arguments, line):
    with pytest.raises(ConfigError) as error:
        load_config(["--model.flavor", "debug", *arguments.split()], 1)
    (problem,) = error.value.problems
    assert line in problem


def test_networks_without_blocks_and_processes_that_divide_the_tokens_do_not_route():
    for words, ranks, line in (
        ("--model.name edm2 --model.routing.name tread", 1, "routing.name: unknown key (it is a key of model.name = dit)"),
        (f"--model.flavor debug {ROUTED} --parallelism.context_parallel_degree 2", 2,
         "parallelism.context_parallel_degree: model.routing drops some tokens of each image"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            load_config(words.split(), ranks)
        (problem,) = error.value.problems
        assert line in problem
