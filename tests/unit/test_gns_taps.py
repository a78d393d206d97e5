"""What taps measure against one autograd call per sample."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.conditions import POOLED, TEXT, Classes, Embeddings, each_tensor
from torchtitan.distributed.compile import compile_blocks
from torchtitan.distributed.config import ActivationCheckpointConfig, ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import parallelize
from torchtitan.gns.capture import GradientTaps
from torchtitan.gns.config import GNSConfig
from torchtitan.gns.projections import Projections
from torchtitan.gns.step_sums import PARTS, StepSums
from torchtitan.gns.taps import FOLDED_ROWS, MEASURED, OFF, Fold, SketchedLinear, TapSwitch
from torchtitan.models import MODELS
from torchtitan.models.base import ModelConfig
from torchtitan.models.dit.config import DiTConfig, SprintConfig
from torchtitan.models.flux.config import FluxConfig

BATCH, BINS, CLASSES, SHAPE, BETA2, ADAM_STEPS = 10, 3, 4, (2, 8, 8), 0.9, 8
SMALL = {"dim": 32, "num_layers": 2, "num_heads": 2}
PAPER = DiTConfig(**SMALL, mlp_hidden_dim=48, learned_variance=True)
GAINS = DiTConfig(
    **SMALL, mlp="swiglu", mlp_hidden_dim=40, norm="rmsnorm", norm_affine=True, qk_norm=True, position="rotary"
)
LAYERNORM_GAINS = DiTConfig(**SMALL, mlp_hidden_dim=48, norm_affine=True, final_modulation=False)
OWN_EMBEDDINGS = DiTConfig(**SMALL, mlp_hidden_dim=48, embedding_per_block=True)
OPTIONS = DiTConfig(
    dim=32, num_layers=3, num_heads=2, mlp="swiglu_bias", mlp_hidden_dim=40, norm="rmsnorm", norm_affine=True, qk_norm=True,
    position="sincos_rotary", timestep_frequencies="fourier", patch_bottleneck=5, class_tokens=3, class_tokens_start=1,
    value_residual=True, intermediate_head=2, wide_dim=48, wide_heads=4,
)  # fmt: skip
ROUTED = DiTConfig(
    dim=32, num_layers=3, num_heads=2, mlp_hidden_dim=40, norm_affine=True, qk_norm=True, position="rotary", value_residual=True,
    routing=SprintConfig(name="sprint", first_block=2, last_block=2, path_drop=0.3),
)  # fmt: skip
FLUX = FluxConfig(
    dim=32, num_heads=2, num_double_layers=2, num_single_layers=1, mlp_hidden_dim=48, axes_dim=[4, 6, 6], text_dim=12,
    pooled_dim=10, guidance_embedding=True,
)  # fmt: skip
TEXT_TOKENS = 3
CONFIGS = {
    "paper": PAPER, "gains": GAINS, "layernorm gains": LAYERNORM_GAINS, "own embeddings": OWN_EMBEDDINGS, "options": OPTIONS,
    "routed": ROUTED, "flux": FLUX,
}  # fmt: skip
EDGES = torch.tensor([0.3, 0.6])


def one_process() -> Layout:
    return Layout(ParallelismConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=1))


class Problem:
    """A model with random weights, a batch with dropped conditions, and every sample's own gradient."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, shape: tuple[int, int, int] = SHAPE, seed: int = 0
    ) -> None:
        torch.manual_seed(0)
        kind = Classes(CLASSES)
        if isinstance(config, FluxConfig):
            kind = Embeddings({TEXT: torch.ones(TEXT_TOKENS, config.text_dim), POOLED: torch.ones(config.pooled_dim)})
        self.model = MODELS[config.name].build(config, shape, kind).to(dtype)
        self.model.init_weights()
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.2)
        torch.manual_seed(seed)
        out_channels = self.model.out_channels
        self.x, self.t = torch.randn(BATCH, *shape, dtype=dtype), torch.rand(BATCH)
        dropped = torch.arange(BATCH) % 3 == 0
        drawn = {"class": torch.randint(0, CLASSES, (BATCH,))}
        if isinstance(kind, Embeddings):
            drawn = {name: torch.randn(BATCH, *shape) for name, (shape, _) in kind.entries.items()}
        self.condition = kind.drop(kind.of(drawn), dropped)
        self.weight = torch.rand(BATCH, dtype=dtype)
        self.target = torch.randn(BATCH, out_channels, *shape[1:], dtype=dtype)
        self.one_hot = nn.functional.one_hot(torch.bucketize(self.t, EDGES), BINS).double()

    def loss(self, chosen: slice = slice(None), parameters: dict | None = None) -> torch.Tensor:
        condition = each_tensor(self.condition, lambda value: value[chosen])
        self.model.draw_dropout(0, torch.arange(BATCH)[chosen])
        arguments = (self.x[chosen], 1000 * self.t[chosen].to(self.x.dtype), condition)
        output = functional_call(self.model, parameters, arguments) if parameters else self.model(*arguments)
        return self.weight[chosen] * (output - self.target[chosen]).square().flatten(1).mean(1)

    def taps(self, adam: bool = True, batch: int = BATCH, size: int = 2, **keys: torch.dtype) -> GradientTaps:
        return GradientTaps(
            self.model, bin_edges=EDGES, local_batch_size=batch, sketch_size=size, seed=1, adam=adam,
            device=torch.device("cpu"), **keys,
        )

    def measure(self, taps: GradientTaps, step: int, measured: bool = True) -> StepSums:
        """Sums of a step of one microbatch."""
        taps.begin_step(step, measured, {}, BETA2, one_process())
        taps.begin_microbatch(self.t)
        self.loss().mean().backward()
        taps.end_microbatch(BATCH, torch.zeros(BATCH))
        return taps.end_step()

    def per_sample(self) -> dict[str, torch.Tensor]:
        """Name of a layer -> gradients of its weight with its bias as last column, float64 [B, out, in + 1]."""
        parameters = dict(self.model.named_parameters())
        found = {name: [] for name in parameters}
        for i in range(BATCH):
            for name, gradient in zip(
                parameters, torch.autograd.grad(self.loss(slice(i, i + 1)).sum(), list(parameters.values())), strict=True
            ):
                found[name].append(gradient.double())
        layers = {}
        for name in parameters:
            layer, _, kind = name.rpartition(".")
            if kind == "weight":
                weight = torch.stack(found[name])
                if weight.ndim == 2:
                    layers[layer] = weight[..., None]
                    continue
                bias = torch.stack(found[f"{layer}.bias"]) if f"{layer}.bias" in found else torch.zeros_like(weight[..., 0])
                layers[layer] = torch.cat((weight, bias[..., None]), dim=2)
        return layers


def adam_state(model: nn.Module) -> dict:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, BETA2))
    for _ in range(ADAM_STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer.state


def expected_factors(model: nn.Module, state: dict, name: str, rates: dict[nn.Parameter, float]) -> torch.Tensor:
    """Rate / sqrt(v) of a layer from row and column sums of v, written anew: float64 [out, in + 1] or [out, 1]."""
    module = model.get_submodule(name)
    v = state[module.weight]["exp_avg_sq"].double() / (1 - BETA2**ADAM_STEPS)
    rate = rates.get(module.weight, 1.0)
    if v.ndim == 1:
        return rate * v[:, None].rsqrt()
    bias = getattr(module, "bias", None)
    last = torch.zeros_like(v[:, 0]) if bias is None else state[bias]["exp_avg_sq"].double() / (1 - BETA2**ADAM_STEPS)
    v = torch.cat((v, last[:, None]), dim=1)
    factored = v.sum(1, keepdim=True) * v.sum(0, keepdim=True) / v.sum()
    factors = torch.where(factored > 0, factored, torch.inf).rsqrt()
    return torch.cat((rate * factors[:, :-1], rates.get(bias, 1.0) * factors[:, -1:]), dim=1)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [*((name, torch.float64, 1e-10) for name in CONFIGS), ("paper", torch.float32, 1e-5)], ids=str
)
def test_every_layer_measures_what_one_gradient_per_sample_gives(name, dtype, tolerance):
    config = CONFIGS[name]
    problem = Problem(config, dtype)
    per_sample, state = problem.per_sample(), adam_state(problem.model)
    taps, rates = problem.taps(), {}
    if dtype == torch.float64:
        rates = {parameter: 0.25 * (1 + number % 5) for number, parameter in enumerate(problem.model.parameters())}
    taps.attach(one_process(), rates)
    taps.begin_step(7, True, state, BETA2, one_process())
    taps.begin_microbatch(problem.t)
    problem.loss().mean().backward()
    sketch_sums = {name: layer.sums.grad.clone() for name, layer in taps._layers.items()}
    taps.end_microbatch(BATCH, torch.zeros(len(taps._switch.one_hot)))
    sums = taps.end_step()

    assert torch.equal(sums.count, problem.one_hot.sum(0))
    free = {part: [torch.zeros(2, BINS, dtype=torch.float64), torch.zeros(2, BINS, BINS, dtype=torch.float64)] for part in PARTS}
    for name, gradients in per_sample.items():
        layer, part = taps._layers[name], taps._parts[name]
        factors = [torch.ones_like(gradients[0]), expected_factors(problem.model, state, name, rates)]
        for index, factor in enumerate(factors):
            scaled = gradients * factor
            exact = scaled
            if layer.sums.ndim == 3 and layer.sums.shape[0] == 2:  # what the projections, themselves tested below, make of it
                one_sided = gradients @ layer.right.unflatten(1, (2, -1))[:, index].double()
                if part == "token":
                    left, one_sided = folding(layer.fold, len(layer.weight)), layer.rows[index][:, None] * one_sided
                    sketched = torch.einsum("or,bos->bsr", left, one_sided)
                else:
                    left = layer.left.unflatten(1, (2, -1))[:, index].double()
                    sketched = torch.einsum("or,bos->brs", left, one_sided)
                wanted = problem.one_hot.T @ sketched.flatten(1)
                assert close(sketch_sums[name][index] * BATCH, wanted, tolerance), name
                exact = sketched if part == "token" else scaled
                scaled = one_sided if part == "token" else scaled
            flat = exact.flatten(1)
            free[part][0][index] += problem.one_hot.T @ scaled.flatten(1).square().sum(1)
            free[part][1][index] += problem.one_hot.T @ (flat @ flat.T) @ problem.one_hot
    for index, part in enumerate(PARTS):
        assert close(sums.squares[index], free[part][0], tolerance), part
        # All pairs are of this one microbatch: what was sketched in the vector layers is replaced by what is exact.
        assert close(sums.all_products[index], free[part][1], tolerance), part
        if part != "token":
            assert close(sums.products[index], free[part][1], tolerance), part
    assert torch.equal(sums.all_pairs, sums.pairs)


def folding(fold: Fold, rows: int) -> torch.Tensor:
    """The matrix [rows, FOLDED_ROWS] that a fold of rows is the product with."""
    matrix, columns = torch.zeros(rows, FOLDED_ROWS, dtype=torch.float64), torch.arange(len(fold.places)) % FOLDED_ROWS
    return matrix.index_put_((fold.places, columns), fold.signs.double(), accumulate=True)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    return (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_sketches_are_unbiased_and_fresh_on_every_step():
    problem = Problem(PAPER, torch.float32)
    per_sample = problem.per_sample()
    taps, draws = problem.taps(adam=False), 300
    found = []
    for step in range(draws):
        sums = problem.measure(taps, step)
        found.append(torch.cat((sums.squares[3, 0], sums.all_products[3, 0].flatten())))
    flat = torch.cat([g.flatten(1) for name, g in per_sample.items() if taps._parts[name] == "token"], dim=1)
    squares = problem.one_hot.T @ flat.square().sum(1)
    products = problem.one_hot.T @ (flat @ flat.T) @ problem.one_hot
    found, wanted = torch.stack(found), torch.cat((squares, products.flatten()))
    error = (found.mean(0) - wanted) / (found.std(0) / draws**0.5)
    assert error.abs().max() < 3.5, error
    assert len(found[:, 0].unique()) == draws


def test_projections_are_signs_of_which_none_is_another_one():
    taps = Problem(PAPER, torch.float32).taps(adam=False, size=5)
    taps.begin_step(3, True, {}, BETA2, one_process())
    lines = []
    for part in PARTS:
        for name in taps._sketched[part]:
            layer = taps._layers[name]
            sides = [(layer.right, 5)] if part == "token" else [(layer.left, 16), (layer.right, FOLDED_ROWS * 5 // 16)]
            for projection, size in sides:
                assert projection.shape[1] == size
                torch.testing.assert_close(projection.abs(), torch.full_like(projection, size**-0.5), rtol=1e-6, atol=0)
            if part != "token":
                lines.append(layer.right.sign())
    signs = torch.cat(lines)
    assert len(signs.unique(dim=0)) == len(signs)
    # Independent columns: their inner products are sums of as many signs as there are lines.
    products = (signs.T @ signs - len(signs) * torch.eye(signs.shape[1])) / len(signs) ** 0.5
    assert products.abs().max() < 5.0 and signs.mean(0).abs().max() < 5.0 / len(signs) ** 0.5


def test_a_fold_adds_every_row_once_and_rows_meet_as_often_as_by_chance():
    """Rows of three blocks, the last of them not full: each meets one row of every full block, a uniformly drawn one."""
    torch.manual_seed(0)
    rows, draws = 2 * FOLDED_ROWS + 40, 400
    layer, _ = sketched_linear(rows, 6)
    projections = Projections([layer], 2, 1, 0, None, torch.float32)
    partners, signs = [], torch.zeros(rows, dtype=torch.float64)
    for step in range(draws):
        projections.draw(step)
        matrix = folding(layer.fold, rows)
        assert torch.equal(matrix.abs().sum(1), torch.ones(rows, dtype=torch.float64))
        met = matrix.abs() @ matrix.abs().T
        for block in met[:FOLDED_ROWS, :FOLDED_ROWS], met[2 * FOLDED_ROWS :, 2 * FOLDED_ROWS :]:
            assert torch.equal(block, torch.eye(len(block), dtype=torch.float64))
        across = met[:FOLDED_ROWS, 2 * FOLDED_ROWS :]
        assert torch.equal(across.sum(0), torch.ones(40, dtype=torch.float64))
        partners.append(across[:, 0].argmax())
        signs += matrix.sum(1)
    # Pearson's chi squared of uniform draws has mean n and variance 2 n, n degrees of freedom; within five deviations.
    expected, degrees = draws / FOLDED_ROWS, FOLDED_ROWS - 1
    counts = torch.stack(partners).bincount(minlength=FOLDED_ROWS)
    assert ((counts - expected).square() / expected).sum() - degrees == pytest.approx(0, abs=5 * (2 * degrees) ** 0.5)
    assert signs.abs().max() < 5.0 * draws**0.5


def test_gradients_are_bit_equal_with_and_without_taps():
    plain, tapped = Problem(GAINS, torch.float32), Problem(GAINS, torch.float32)
    plain.loss().mean().backward()
    taps = tapped.taps()
    for measured in (False, True):
        tapped.model.zero_grad()
        tapped.measure(taps, 0, measured)
        for (name, parameter), (other, found) in zip(
            plain.model.named_parameters(), tapped.model.named_parameters(), strict=True
        ):
            assert name == other and torch.equal(parameter.grad, found.grad), name


def test_microbatches_add_up_to_the_step():
    whole, parts = Problem(PAPER, torch.float64), Problem(PAPER, torch.float64)
    results = []
    for problem, batch in ((whole, BATCH), (parts, BATCH // 2)):
        taps = problem.taps(adam=False, batch=batch)
        taps.begin_step(3, True, {}, BETA2, one_process())
        for first in range(0, BATCH, batch):
            chosen = slice(first, first + batch)
            taps.begin_microbatch(problem.t[chosen])
            (problem.loss(chosen).sum() / BATCH).backward()
            taps.end_microbatch(BATCH, torch.zeros(len(taps._switch.one_hot)))
        results.append(taps.end_step())
    one, two = results
    assert torch.equal(one.count, two.count) and torch.equal(one.all_pairs, two.all_pairs)
    assert close(two.squares, one.squares, 1e-12)
    for part in ("patch", "token"):
        index = PARTS.index(part)
        assert close(two.all_products[index], one.all_products[index], 1e-12)
    # Within microbatches fewer pairs are known, and their number is told.
    assert two.pairs.sum() < one.pairs.sum() == two.all_pairs.sum()


def test_microbatches_of_several_shapes_add_up_to_the_step():
    problems = [Problem(FLUX, torch.float64, shape, seed) for seed, shape in enumerate((SHAPE, (2, 4, 12), (2, 6, 2)))]
    per_sample = [problem.per_sample() for problem in problems]
    model, taps = problems[0].model, problems[0].taps(adam=False)
    taps.begin_step(3, True, {}, BETA2, one_process())
    for problem in problems:
        taps.begin_microbatch(problem.t)
        problem.model = model  # its own has the same parameters
        (problem.loss().sum() / (3 * BATCH)).backward()
        taps.end_microbatch(3 * BATCH, torch.zeros(BATCH))
    of_step = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    sums = taps.end_step()
    one_hot = torch.cat([problem.one_hot for problem in problems])
    of_layers = {name: torch.cat([gradients[name] for gradients in per_sample]) for name in taps._layers}
    assert torch.equal(sums.count, one_hot.sum(0))
    for name, found in of_layers.items():
        mean = found.mean(0)
        whole = of_step[f"{name}.weight"]
        assert close(whole, mean[:, :-1] if whole.ndim == 2 else mean[:, 0], 1e-10), name
    for part in ("modulation", "embedding", "patch"):
        flat = torch.cat([of_layers[name].flatten(1) for name in taps._parts if taps._parts[name] == part], dim=1)
        assert close(sums.squares[PARTS.index(part), 0], one_hot.T @ flat.square().sum(1), 1e-10), part
        if part == "patch":  # whole gradients: pairs of different microbatches are exact too
            assert close(sums.all_products[PARTS.index(part), 0], one_hot.T @ (flat @ flat.T) @ one_hot, 1e-10)


def squares_and_products(prepare) -> torch.Tensor:
    problem = Problem(GAINS, torch.float32)
    taps = problem.taps()
    prepare(problem.model)
    sums = problem.measure(taps, 1)
    return torch.cat((sums.squares.flatten(), sums.all_products.flatten()))


@pytest.mark.parametrize("settings", [
    {"mode": "full"}, {"mode": "full", "every": 2}, {"mode": "selective"},
], ids=str)  # fmt: skip
def test_recomputed_blocks_measure_the_same(settings):
    recomputing = ActivationCheckpointConfig(**settings)
    found = squares_and_products(lambda model: parallelize(model, one_process(), checkpointing=recomputing))
    assert torch.equal(found, squares_and_products(lambda model: None))


def test_blocks_compiled_within_a_memory_budget_measure_the_same():
    torch.compiler.reset()
    found = squares_and_products(lambda model: compile_blocks(model.blocks(), 0.2, backend="aot_eager"))
    assert close(found, squares_and_products(lambda model: None), 1e-5)


def sketched_linear(outputs: int, inputs: int) -> tuple[SketchedLinear, TapSwitch]:
    """Layer of random weights with two columns in two geometries, switched on, for BATCH samples in BINS bins."""
    switch = TapSwitch(MEASURED, nn.functional.one_hot(torch.arange(BATCH) % BINS, BINS).float())
    layer = SketchedLinear(nn.Linear(inputs, outputs), switch)
    layer.rows = torch.cat((torch.ones(1, outputs), torch.rand(1, outputs)))
    layer.columns = torch.ones(2, inputs + 1)
    Projections([layer], 2, 2, 0, None, torch.float32).draw(0)
    layer.squares = torch.zeros(2, BATCH, requires_grad=True)
    layer.sums = torch.zeros(2, BINS, FOLDED_ROWS * 2, requires_grad=True)
    return layer, switch


def test_a_sketch_keeps_the_input_that_autocast_casts_once():
    torch.manual_seed(0)
    layer, switch = sketched_linear(24, 32)
    kept = {}

    def input_bytes(mode: int) -> int:
        storages = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() == BATCH * 5 * 32:
                storages[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no other takes its place
            return tensor

        switch.mode = mode
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
            kept[mode] = layer(torch.randn(BATCH, 5, 32))
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    assert input_bytes(MEASURED) == input_bytes(OFF) == 2 * BATCH * 5 * 32
    assert kept[MEASURED].dtype == kept[OFF].dtype == torch.bfloat16


def test_sketches_of_few_tokens_take_less_than_five_percent_of_the_layers_products():
    """A layer of the digits model, 128 images in 16 tokens: 6 products per weight and token train it."""
    images, tokens, inputs, outputs, bins = 128, 16, 192, 576, 10
    switch = TapSwitch(MEASURED, nn.functional.one_hot(torch.arange(images) % bins, bins).float())
    layer = SketchedLinear(nn.Linear(inputs, outputs), switch)
    layer.rows, layer.columns = torch.ones(2, outputs), torch.ones(2, inputs + 1)
    size = GNSConfig().sketch_size
    Projections([layer], size, 2, 0, None, torch.float32).draw(0)
    layer.squares = torch.zeros(2, images, requires_grad=True)
    layer.sums = torch.zeros(2, bins, FOLDED_ROWS * size, requires_grad=True)
    counts = {}
    for switch.mode in (MEASURED, OFF):
        with FlopCounterMode(display=False) as counter:
            layer(torch.zeros(images, tokens, inputs, requires_grad=True)).sum().backward()
        counts[switch.mode] = counter.get_total_flops()
    assert counts[OFF] == 6 * images * tokens * inputs * outputs
    assert 0 < counts[MEASURED] - counts[OFF] < 0.05 * counts[OFF]


def test_a_sketch_in_bfloat16_is_that_of_its_inputs_to_bfloat16s_rounding():
    """Four roundings, of the projections and of both products, each of up to 2^-8 of a term; over the terms they average out."""
    torch.manual_seed(0)
    layer, switch = sketched_linear(96, 64)
    x, dy = torch.randn(BATCH, 7, 64).bfloat16(), torch.randn(BATCH, 7, 96).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).backward(dy)
    extended = torch.cat((x.double(), torch.ones(BATCH, 7, 1, dtype=torch.float64)), dim=2)
    gradients = dy.double().mT @ extended  # [B, out, in + 1]
    one_sided = torch.einsum("boi,igs->gbos", gradients, layer.right.double().view(65, 2, 2))
    one_sided = one_sided * layer.rows.double()[:, None, :, None]
    squares = one_sided.square().sum((2, 3))
    sketches = torch.einsum("or,gbos->gbsr", folding(layer.fold, 96), one_sided).flatten(2)
    sums = switch.one_hot.double().T @ sketches
    for found, wanted in ((layer.squares.grad, squares), (layer.sums.grad, sums)):
        assert found.dtype == torch.float32 and close(found, wanted, 2**-7)
    assert not torch.equal(layer.sums.grad.double(), sums)  # it was computed in bfloat16


def test_taps_are_silent_outside_of_a_microbatch():
    problem = Problem(PAPER, torch.float32)
    taps = problem.taps()
    problem.loss(slice(0, 3)).mean().backward()  # another batch size: nothing is measured
    assert all(probe.grad is None for probe in taps._probes.values())
    taps.begin_step(1, True, {}, BETA2, one_process())
    assert not taps.end_step().count.any()
