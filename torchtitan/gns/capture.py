"""Capture of per-bin sums of single-sample gradients from the ordinary backward of mixed microbatches.

Every parameter belongs to one part of the model, and every part has its own measurement:

    modulation  linears inside the blocks that see one vector per sample (adaLN): every step, exact within a microbatch
    embedding   the other layers that see one vector per sample: every step, exact within a microbatch
    patch       the narrow projections into and out of the token stream: every step, exact
    token       linears over tokens, by sketches, and gains and learned elements, exact: on measured steps

On a measured step the sums over the samples of all ranks and microbatches are known for every part: exactly for patch
and gains, through sketches for token, and for the first two through sketches for pairs from different microbatches and
exactly for pairs of the same one. Between measured steps only pairs of the same microbatch count.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.distributed.mesh import Layout
from torchtitan.gns import taps
from torchtitan.gns.config import cannot_measure
from torchtitan.gns.coverage import check_applications, check_parameters, unseen_gradient
from torchtitan.gns.projections import AdamFactors, Projections
from torchtitan.gns.step_sums import GEOMETRIES, PARTS, StepSums
from torchtitan.gns.taps import FOLDED_ROWS, FREE, MEASURED, OFF, TapSwitch
from torchtitan.models.base import DiffusionModel
from torchtitan.models.converters import convert
from torchtitan.models.layers import LayerNorm, RMSNorm, TokenBias, TokenGain

_VECTOR_PARTS = PARTS[:2]
_PATCH, _TOKEN = PARTS.index("patch"), PARTS.index("token")

# Gradients of single samples of a narrow layer are kept whole up to this size; above, they are sketched.
_WHOLE_GRADIENT_SIZE = 2**17


class GradientTaps:
    """Taps on every layer of a model, and the sums of one step that they collect."""

    def __init__(
        self,
        model: DiffusionModel,
        *,
        bin_edges: Tensor,
        local_batch_size: int,
        sketch_size: int,
        seed: int,
        adam: bool,
        device: torch.device,
        compute_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Replace the model's layers by tapped ones, before the model is wrapped.

        Args:
            bin_edges: inner edges in t, rising, [K - 1]; bin k holds edges[k - 1] < t <= edges[k].
            sketch_size: k, columns of a sketch over tokens.
            compute_dtype: dtype of the layers' inputs. Parameters in float64 are measured in float64 instead.
            reduce_dtype: dtype of the sum of gradients over ranks.

        Raises:
            CannotMeasure: a parameter belongs to no layer that can be tapped.
        """
        self.num_bins = len(bin_edges) + 1
        self.geometries = GEOMETRIES if adam else GEOMETRIES[:1]
        self._edges = bin_edges.to(device, torch.float32)
        self._batch, self._seed, self._device = local_batch_size, seed, device
        self._sketch_size = sketch_size
        self._dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        # What products in the dtype of compute read is kept in it, and not cast by every layer.
        self._compute_dtype = self._dtype if self._dtype == torch.float64 else compute_dtype
        self._coarsest = torch.bfloat16 if torch.bfloat16 in (self._compute_dtype, reduce_dtype) else self._compute_dtype
        self._switch = TapSwitch(OFF, torch.zeros(local_batch_size, self.num_bins, device=device, dtype=self._compute_dtype))
        kinds = _tapped_layers(model)
        check_parameters(model, kinds)
        self._layers: dict[str, Any] = convert(
            model, lambda name, module: kinds[name][1](module, self._switch) if name in kinds else None
        )
        self._parts = {name: kinds[name][0] for name in self._layers}
        self._attach_probes()
        self._arrange_layers()
        whole = (len(PARTS), len(self.geometries), self.num_bins, self.num_bins)
        self._shapes = (whole[3:], whole[3:], whole[2:], whole[:3], whole, whole)  # of the sums of a step
        self._measured = False
        self._samples, self._compared = 0, Counter[int]()

    def attach(self, layout: Layout, multiples: Mapping[nn.Parameter, float]) -> None:
        """Attach to the wrapped model's parameters, with their learning rates as multiples of the run's, for Adam's geometry."""
        if self._factors:
            self._factors.attach(layout, multiples)

    # ------------------------------------------------------------------ a step, in the order of calls

    def begin_step(self, step: int, measured: bool, optimizer_state: dict[Tensor, dict], beta2: float, layout: Layout) -> None:
        """Prepare the projections of a measured step; collective when the parameters are sharded.

        Args:
            step: the step's number, of which the projections are a function.
            optimizer_state: parameter -> its state after the previous step.
        """
        self._measured, self._step = measured, _StepBuffer(self._shapes, self._device)
        if not measured:
            return
        self._flat.zero_()
        if self._factors:
            self._factors.write(optimizer_state, beta2, layout)
        self._projections.draw(step)

    def begin_microbatch(self, t: Tensor) -> None:
        """Switch the taps on for samples at times t [B]; their places in the batch are those of t."""
        bins = torch.bucketize(t, self._edges)
        self._switch.one_hot.zero_().scatter_(1, bins[:, None], 1.0)
        self._switch.mode = MEASURED if self._measured else FREE

    def end_microbatch(self, samples_per_rank: int, loss: Tensor) -> None:
        """Collect the backward's measurements and switch taps off; the loss is a mean of samples_per_rank."""
        self._switch.mode, self._samples = OFF, samples_per_rank
        one_hot, scale, step = self._switch.one_hot.to(self._dtype), float(samples_per_rank), self._step
        in_float64 = one_hot.to(torch.float64)
        counts = in_float64.sum(0)
        step.count += counts
        step.square_losses += loss.detach().to(torch.float64).square() @ in_float64
        step.pairs += _pairs(counts)
        modulation, embedding, patch, token = map(_read, self._probes.values())
        grams = torch.stack((modulation, embedding)).mul_(scale**2)  # [2, G, B, B]
        squares = torch.stack((patch, token)).mul_(scale**2)  # [2, G, B]
        squares = torch.cat((grams.diagonal(dim1=2, dim2=3), squares)) @ one_hot
        step.squares += squares.to(torch.float64)
        products = (one_hot.T @ (grams @ one_hot)).to(torch.float64)  # [2, G, K, K]
        step.products[: len(_VECTOR_PARTS)] += products
        of_patch = self._read_whole("patch", scale)
        step.products[_PATCH] += self._whole_products("patch", of_patch)
        if not self._measured:
            return
        self._whole_sums["patch"] += of_patch
        self._whole_sums["token"] += self._read_whole("token", scale)
        if not self._sketches:
            return
        sketches = torch.stack([*map(_read, self._sketches)]).mul_(scale)  # [L, G, K, m k]
        self._sketch_sums += sketches
        # Pairs of one microbatch are known exactly: these replace their sketches.
        step.corrections[: len(_VECTOR_PARTS)] += products
        for index, part in enumerate(_VECTOR_PARTS):
            step.corrections[index] -= _inner_products(sketches[self._places[part]]).sum(0)

    def end_step(self, gradients_on: Layout | None = None) -> StepSums:
        """Reduce the sums over all ranks, the same on every rank, and reset; collective.

        Args:
            gradients_on: where the layers have the reduced gradients of the step, with which the first measured step of every
                batch size is compared, and the second, fourth, eighth and so on; None: they have none.

        Raises:
            CannotMeasure: the taps did not see all of them; on every rank.
        """
        step, self._measured, measured = self._step, False, self._measured
        parallel = dist.is_initialized() and dist.get_world_size() > 1
        if parallel:
            dist.all_reduce(step.flat if measured else step.flat[: step.reduced])
        sums = StepSums(*step.sums)
        step.products[_TOKEN] = torch.nan
        if not measured:
            step.squares[_TOKEN] = torch.nan
            return sums
        if parallel:
            dist.all_reduce(self._flat)
        if gradients_on is not None:
            self._compare(gradients_on)
        of_layers = _inner_products(self._sketch_sums)  # [L, G, K, K]
        sketched = [of_layers[self._places[part]].sum(0) + self._whole_products(part, self._whole_sums[part]) for part in PARTS]
        return replace(sums, all_pairs=_pairs(step.count), sketched=torch.stack(sketched), corrections=step.corrections)

    def tensors(self) -> dict[str, Tensor]:
        """Adam's factors of every layer by name, the tensors themselves: of the last measured step, used until the next."""
        if len(self.geometries) == 1:
            return {}
        return {
            f"{name}.{side}": getattr(layer, side)[-1] for name, layer in self._layers.items() for side in ("rows", "columns")
        }

    # ------------------------------------------------------------------ inside

    def _compare(self, layout: Layout) -> None:
        """Compare the sums with the reduced gradients, ever more rarely: many are nearly 0 at first, and another batch size is
        another graph.
        """
        self._compared[self._samples] += 1
        count = self._compared[self._samples]
        if count & (count - 1):
            return
        layers: dict[str, Any] = {}
        of_whole: list[Tensor] = []
        for part in PARTS:
            layers |= self._sketched[part]
        for part in PARTS:
            layers |= self._whole[part]
            of_whole += self._whole_sums[part].split([layer.sums[0].numel() for layer in self._whole[part].values()], dim=1)
        found = unseen_gradient(layers, [*self._sketch_sums[:, 0], *of_whole], self._step.count.sum(), layout, self._coarsest)
        if found:
            raise cannot_measure(
                f"{found[0]}.weight or its bias is used outside of its layer's forward, so {found[1]:.0%} of its gradient is not"
                " measured", "call the layer"
            )  # fmt: skip

    def _attach_probes(self) -> None:
        """Give every tapped layer its probes, and factors of 1 in the plain geometry."""
        geometries, bins, batch = len(self.geometries), self.num_bins, self._batch

        def probe(*shape: int) -> Tensor:
            return torch.zeros(shape, device=self._device, dtype=self._dtype, requires_grad=True)

        shapes = (geometries, batch, batch), (geometries, batch, batch), (geometries, batch), (geometries, batch)
        self._probes = {part: probe(*shape) for part, shape in zip(PARTS, shapes, strict=True)}
        self._sketched: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        self._whole: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        for name, layer in self._layers.items():
            part = self._parts[name]
            rows, columns = layer.weight.shape[0], layer.weight[0].numel() + 1 if layer.weight.ndim > 1 else 1
            for side, count in (("rows", rows), ("columns", columns)):
                factors = torch.zeros(geometries, count, device=self._device, dtype=self._dtype)
                factors[0] = 1.0
                setattr(layer, side, factors)
            if isinstance(layer, taps.SmallLinear | taps.TappedNorm | taps.TappedElements):
                layer.sums = probe(bins, rows, columns)
                self._whole[part][name] = layer
            else:
                layer.sums = probe(geometries, bins, FOLDED_ROWS * self._sketch_size)
                self._sketched[part][name] = layer
            vector = isinstance(layer, taps.VectorLinear | taps.TappedEmbedding)
            setattr(layer, "gram" if vector else "squares", self._probes[part])

    def _arrange_layers(self) -> None:
        """Lay out what all layers have in common tensors, so that they are computed at once: sketched layers first."""
        layers = [layer for part in PARTS for layer in self._sketched[part].values()]
        self._sketches = [layer.sums for layer in layers]
        ends = list(itertools.accumulate(len(self._sketched[part]) for part in PARTS))
        self._places = {
            part: slice(end - len(self._sketched[part]), end) for part, end in zip(PARTS, ends, strict=True)
        }
        of_whole = [layer for part in PARTS for layer in self._whole[part].values()]
        self._factors = AdamFactors([*layers, *of_whole]) if len(self.geometries) > 1 else None
        self._projections = Projections(
            layers, self._sketch_size, len(self.geometries), self._seed, self._factors, self._compute_dtype
        )
        shapes: list[tuple[int, ...]] = [(len(layers), len(self.geometries), self.num_bins, FOLDED_ROWS * self._sketch_size)]
        shapes += [(self.num_bins, sum(layer.sums[0].numel() for layer in self._whole[part].values())) for part in PARTS]
        sizes = [math.prod(shape) for shape in shapes]
        # What is summed over the ranks on a measured step.
        self._flat = torch.zeros(sum(sizes), device=self._device, dtype=self._dtype)
        self._sketch_sums, *whole = (part.view(shape) for part, shape in zip(self._flat.split(sizes), shapes, strict=True))
        self._whole_sums = dict(zip(PARTS, whole, strict=True))

    def _read_whole(self, part: str, scale: float) -> Tensor:
        """Read this microbatch's sums for layers with whole gradients in a part, [K, elements]."""
        if not self._whole[part]:
            return self._whole_sums[part]
        return torch.cat([_read(layer.sums).flatten(1) for layer in self._whole[part].values()], dim=1).mul_(scale)

    def _whole_products(self, part: str, sums: Tensor) -> Tensor:
        """Inner products [G, K, K] of sums [K, elements] of gradients kept whole."""
        if not self._whole[part]:
            return torch.zeros_like(self._step.products[0])
        layers = self._whole[part].values()
        factors = torch.cat([(layer.rows[..., None] * layer.columns[:, None]).flatten(1) for layer in layers], dim=1)
        return _inner_products(sums * factors[:, None])


class _StepBuffer:
    """Sums of a step, as in StepSums, all in one vector: those reduced over the ranks on every step first, then on measured ones.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        sizes = list(map(math.prod, shapes))
        self.reduced = sum(sizes[:-1])
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        *self.sums, self.corrections = map(Tensor.view, self.flat.split(sizes), shapes)
        self.count, self.square_losses, self.pairs, self.squares, self.products = self.sums


def _pairs(counts: Tensor) -> Tensor:
    """Ordered pairs of different samples of counts [K], [K, K]."""
    return torch.outer(counts, counts) - torch.diag(counts)


def _inner_products(sums: Tensor) -> Tensor:
    """[..., K, elements] -> [..., K, K], float64."""
    return (sums @ sums.mT).to(torch.float64)


def _read(probe: Tensor) -> Tensor:
    """Read what a probe received, once; zeros where no layer measured into it."""
    found, probe.grad = probe.grad, None
    return torch.zeros_like(probe) if found is None else found


def check_measurable(model: DiffusionModel) -> None:
    """Check that taps can measure a model on the meta device. Raises CannotMeasure."""
    kinds = _tapped_layers(model)
    check_parameters(model, kinds)
    check_applications(model, {name: kind for name, (_, kind) in kinds.items()})


def _tapped_layers(model: DiffusionModel) -> dict[str, tuple[str, type[nn.Module]]]:
    """Name of every layer with parameters -> part of the model and kind of tap."""
    in_blocks = {module for block in model.blocks() for module in block.modules()}
    roles = model.linear_roles()
    found: dict[str, tuple[str, type[nn.Module]]] = {}
    for name, module in model.named_modules():
        # A class derived from these may compute something else.
        if type(module) is nn.Linear and roles[name] == "vector":
            found[name] = ("modulation" if module in in_blocks else "embedding", taps.VectorLinear)
        elif type(module) is nn.Linear:
            whole = roles[name] == "small" and module.weight.numel() <= _WHOLE_GRADIENT_SIZE
            found[name] = ("patch", taps.SmallLinear) if whole else ("token", taps.SketchedLinear)
        elif type(module) is nn.Embedding:
            found[name] = ("embedding", taps.TappedEmbedding)
        elif type(module) in (LayerNorm, RMSNorm) and module.weight is not None:
            found[name] = ("token", taps.TappedNorm)
        elif type(module) in (TokenBias, TokenGain):
            found[name] = ("token", taps.TappedElements)
    return found
