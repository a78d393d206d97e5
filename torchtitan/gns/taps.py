"""Tapped layers: they measure the gradients of single samples while they compute the gradient of the batch.

A tap stands behind a layer's output y. It returns y unchanged and takes an extra input of zeros on which nothing
depends, a probe. In backward it returns the gradient of y unchanged, and the measurement as the "gradient" of the
probe. So the measurement is an ordinary tensor of the autograd graph: it is compiled with the block, recomputed with it
under activation checkpointing, and no hook and no graph break is needed. Probes are shared between layers whose
measurements are summed: autograd adds them.

For a sample i, a layer's input A_i and the gradient D_i of its output, both [T, channels] (T are all axes between the sample's
and the channels'), the gradient of the weight is D_i^T A_i, and with a bias D_i^T [A_i, 1]. Measured are, in every geometry g
(a factor row_o col_i on the gradient's elements; the first geometry has factor 1):

    vector    T = 1: inner products of all pairs of samples, (D D^T) * (A A^T + 1)
    whole     the gradients themselves, summed by timestep bin, and their squared norms
    sketch    L^T D_i^T [A_i, 1] R, L and R random signs over the roots of their m and k columns, summed by bin: inner
              products of sketches are unbiased for those of the gradients. Over tokens, squared norms are those of
              D_i^T [A_i, 1] R, unbiased too, so that L^T is multiplied once per bin instead of once per sample; and it
              folds the rows onto FOLDED_ROWS sums (see Fold) instead of multiplying all by signs

All in units of the gradient given to backward, in float32. Inputs are read as they are, in bfloat16 where the run computes in it:
products are accumulated in float32, and what is multiplied by factors, and all products of a sketch but the last, are rounded to
that dtype.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from torchtitan.models.layers import RMSNorm, TokenBias, TokenGain, at_least_float32, normed

OFF, FREE, MEASURED = 0, 1, 2

# Rows of a sketch over tokens. More hardly lessen the error, and cost nothing but their sums over the ranks.
FOLDED_ROWS = 256

# A host multiplies samples on one side as many at a time as stay in its cache: elements.
_IN_CACHE = 2**20


@dataclass
class TapSwitch:
    """Switch shared by all taps of a model.

    Attributes:
        mode: OFF (layers are ordinary), FREE (measurements of negligible cost), MEASURED (sketches too).
        one_hot: timestep bin of each sample of the microbatch, in the dtype of compute [B, K].
    """

    mode: int
    one_hot: Tensor


@dataclass
class Fold:
    """Random fold of a layer's n rows onto FOLDED_ROWS sums: block after block of rows, each rotated by a random number of
    places, is added to them with random signs.

    Two rows meet with a probability of 1 / FOLDED_ROWS at most, and those of one block never, so that inner products are
    unbiased, and vary no more than with as many columns of independent signs for every row.

    Attributes:
        places: row in every place, int64 [blocks FOLDED_ROWS]; any row where there is none.
        signs: 1 or -1, 0 in places without a row.

    Source: count sketches, Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002.
    """

    places: Tensor
    signs: Tensor


def _cast_by_autocast(x: Tensor) -> Tensor:
    """Cast x as autocast would inside a linear, so that the layer and its tap keep one tensor instead of two."""
    kind = x.device.type
    if x.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _outside_autocast(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Backward outside of autocast: a compiler traces it under the forward's, which would round to bfloat16."""

    @functools.wraps(backward)
    def outside(ctx: Any, dy: Tensor) -> Any:
        if not torch.is_autocast_enabled(dy.device.type):
            return backward(ctx, dy)
        with torch.autocast(dy.device.type, enabled=False):
            return backward(ctx, dy)

    return outside


def _full_product(left: Tensor, right: Tensor) -> Tensor:
    """Product of matrices, or batches [N, ., .] of them, of one dtype, summed and returned in float32 at least."""
    if left.device.type == "cpu" or left.dtype not in (torch.bfloat16, torch.float16):
        return at_least_float32(left) @ at_least_float32(right)
    if left.ndim == 2:
        return _full_product(left[None], right[None])[0]
    return torch.bmm(left, right, out_dtype=torch.float32)  # which a CPU does not have


def _own_products(x: Tensor, factors: Tensor) -> Tensor:
    """Inner products [G, B, B] of the rows of x [B, n] times factors [G, n], each scaled row rounded to the dtype of x."""
    scaled = torch.mul(x, factors[:, None], out=x.new_empty(len(factors), *x.shape))  # on a device one kernel, that rounds once
    return _full_product(scaled, scaled.mT)


def _outer_by_bin(left: Tensor, right: Tensor, one_hot: Tensor, geometries: int) -> Tensor:
    """Sketches of rank-one gradients, from their sides [B, G m] and [B, G k], summed by bin, [G, K, m k]."""
    left, right = (at_least_float32(side).unflatten(-1, (geometries, -1)) for side in (left, right))
    of_bins = (one_hot[:, :, None, None] * left[:, None]).permute(2, 1, 3, 0).flatten(1, 2)  # [G, K m, B]
    return (of_bins @ right.transpose(0, 1)).view(geometries, one_hot.shape[1], -1)


class Tap(Function):
    """Base of taps: `apply(y, norms, sums, facts, *tensors)` is y; norms and sums are the probes that `backward` measures into,
    facts and tensors what else it reads.
    """

    @staticmethod
    def forward(ctx, y, norms, sums, facts, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.facts, ctx.others = facts, (None,) * (1 + len(tensors))  # which have no gradient
        return y.view_as(y)


class VectorTap(Tap):
    """Tap of layers with one vector per sample: y [B, out], x [B, in]."""

    @staticmethod
    @_outside_autocast
    def backward(ctx, dy):
        x, one_hot, rows, columns, left, right = ctx.saved_tensors
        has_bias, measured = ctx.facts
        inputs = _own_products(x, columns[:, :-1])
        if has_bias:
            inputs = inputs + columns[:, -1:, None].square()
        gram = _own_products(dy, rows) * inputs  # [G, B, B]
        found = None
        if measured:
            a_right = _full_product(x, right[:-1].to(x.dtype))
            if has_bias:
                a_right = a_right + right[-1]
            found = _outer_by_bin(_full_product(dy, left.to(dy.dtype)), a_right, one_hot, len(rows))
        return dy, gram, found, *ctx.others


class EmbeddingTap(Tap):
    """Tap of a table of vectors: y [B, D] is row ids [B] of it; its rows are the sketch's left side."""

    @staticmethod
    @_outside_autocast
    def backward(ctx, dy):
        ids, one_hot, rows, columns, left, right = ctx.saved_tensors
        d = at_least_float32(dy)
        scaled = d * columns[:, None, :-1] * rows[:, ids, None]  # [G, B, D]
        gram = (scaled @ scaled.mT) * (ids[:, None] == ids)
        found = None
        if ctx.facts:  # measured
            found = _outer_by_bin(left[ids], d @ right[:-1].to(d.dtype), one_hot, len(rows))
        return dy, gram, found, *ctx.others


class SketchTap(Tap):
    """Tap of layers over tokens: y [B, ..., out], and a_right [B, T, G k], [A_i, 1] R of the layer's input."""

    @staticmethod
    @_outside_autocast
    def backward(ctx, dy):
        a_right, one_hot, rows, places, signs = ctx.saved_tensors
        d, most = over_tokens(dy), len(dy)
        if d.device.type == "cpu":
            most = max(1, _IN_CACHE // (a_right.shape[2] * d.shape[2]))
        squares: list[Tensor] = []
        of_bins = d.new_zeros(())
        for some_right, some_d, some_hot in zip(a_right.split(most), d.split(most), one_hot.split(most), strict=True):
            one_sided = (some_right.mT @ some_d).unflatten(1, (len(rows), -1))  # D_i^T [A_i, 1] R, [B, G, k, out]
            if len(rows) > 1:
                one_sided[:, 1:].mul_(rows[1:, None])
            squares.append(torch.linalg.vector_norm(one_sided.flatten(2), dim=2, dtype=rows.dtype).square())  # [B, G]
            summed = _full_product(some_hot.T.to(one_sided.dtype), one_sided.flatten(1))  # [K, G k out]
            of_bins = summed if len(squares) == 1 else of_bins.add_(summed)
        folded = folded_rows(of_bins.view(-1, d.shape[2]), places, signs)  # [K G k, m]
        # In the layout of the probe: compiled, the sum writes it so; autograd would copy the sketch after it.
        folded = folded.view(one_hot.shape[1], len(rows), -1).transpose(0, 1).contiguous()  # [G, K, k m]
        return dy, torch.cat(squares).T, folded, *ctx.others


def over_tokens(x: Tensor) -> Tensor:
    """View [B, ..., channels] as [B, T, channels]."""
    return x.reshape(len(x), -1, x.shape[-1])


def folded_rows(values: Tensor, places: Tensor, signs: Tensor) -> Tensor:
    """Fold values [n, out], see Fold, [n, FOLDED_ROWS]."""
    return (values.index_select(1, places) * signs).unflatten(1, (-1, FOLDED_ROWS)).sum(1)


class SmallTap(Tap):
    """Tap of narrow layers over tokens (single-sample gradients fit into memory): y [B, ..., out], x [B, ..., in]."""

    @staticmethod
    @_outside_autocast
    def backward(ctx, dy):
        x, one_hot, rows, columns = ctx.saved_tensors
        d = over_tokens(dy)
        gradient = _full_product(d.mT, over_tokens(x).to(dy.dtype))  # [B, out, in]
        bias = torch.zeros_like(gradient[..., :1])
        if ctx.facts:  # has a bias
            bias = d.mT.sum(2, keepdim=True, dtype=gradient.dtype)
        gradient = torch.cat((gradient, bias), dim=2)  # [B, out, in + 1]
        return dy, *_of_whole(gradient, one_hot, rows, columns), *ctx.others


class ElementTap(Tap):
    """Tap of elements that are added to an input, or multiply it or its norm: y [B, ...], and x as y, or None of a sum.

    norm(x) is computed again in the backward instead of being kept: the norm keeps x anyway.
    """

    @staticmethod
    @_outside_autocast
    def backward(ctx, dy):
        x, one_hot, rows, columns = ctx.saved_tensors
        shape, rms, eps = ctx.facts
        if rms is not None:
            x = normed(x, None, eps, rms)
        products = at_least_float32(dy) if x is None else at_least_float32(dy) * x
        of_sample = shape[1:] if len(shape) == products.ndim else shape  # [1, ...] otherwise: broadcast over the rest
        ones = [1] * (products.ndim - 1 - len(of_sample))
        gradient = products.sum_to_size(len(dy), *ones, *of_sample).reshape(len(dy), shape[0], -1)
        gradient = gradient if len(shape) == 1 else F.pad(gradient, (0, 1))
        return dy, *_of_whole(gradient, one_hot, rows, columns), *ctx.others


def _of_whole(gradient: Tensor, one_hot: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms [G, B] and sums by bin [K, rows, columns] of gradients [B, rows, columns]; the last column is the bias's,
    except that of one column.
    """
    factors = (rows[:, :, None] * columns[:, None]).flatten(1)  # [G, rows columns]
    flat = gradient.flatten(1)
    squares = factors.square() @ flat.square().T  # [G, B]
    return squares, (one_hot.T.to(flat.dtype) @ flat).view(-1, *gradient.shape[1:])


class TappedLinear(nn.Linear):
    """Linear with a tap behind it, where the switch is at least at the mode `measures`.

    `GradientTaps` gives it, and all other tapped layers, the tensors that their taps need, on the device of compute, each under
    its name. The factors of all geometries on the gradient, float32, are written in place before a step: `rows` [G, out]; of a
    table of vectors one per vector, of a gain one per channel, of other elements one per place of their first dimension; and
    `columns` [G, in + 1], the last the bias's; of a gain, and of elements of one dimension, [G, 1]. `left` [out, G m] and
    `right` [in + 1, G k] (projections times these factors; over tokens there is a `fold` instead of `left`) are in the dtype
    of compute. The probes, float32, require a gradient: `sums` [G, K, m k] where sketches are taken.
    """

    measures = FREE

    def __init__(self, linear: nn.Linear, switch: TapSwitch) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.switch = switch

    def forward(self, x: Tensor) -> Tensor:
        if self.switch.mode < self.measures:
            return F.linear(x, self.weight, self.bias)
        x = _cast_by_autocast(x)
        return self.tapped(F.linear(x, self.weight, self.bias), x)

    def tapped(self, y: Tensor, x: Tensor) -> Tensor:
        """Output y of the input x, behind the tap."""
        raise NotImplementedError


class VectorLinear(TappedLinear):
    """Linear with a VectorTap. `gram`: probe [G, B, B]."""

    def tapped(self, y: Tensor, x: Tensor) -> Tensor:
        facts = self.bias is not None, self.switch.mode == MEASURED
        tensors = x, self.switch.one_hot, self.rows, self.columns, self.left, self.right
        return VectorTap.apply(y, self.gram, self.sums, facts, *tensors)


class SketchedLinear(TappedLinear):
    """Linear with a SketchTap. `squares`: probe [G, B]."""

    measures = MEASURED
    fold: Fold
    right: Tensor

    def tapped(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():  # [A_i, 1] R now and not in backward, since the layer has its input in the cache now
            right, tokens = self.right.to(x.dtype), x.flatten(0, -2)
            projected = tokens @ right[:-1] if self.bias is None else torch.addmm(right[-1], tokens, right[:-1])
            projected = projected.unflatten(0, (len(x), -1))  # [B, T, G k]
        tensors = projected, self.switch.one_hot, self.rows, self.fold.places, self.fold.signs
        return SketchTap.apply(y, self.squares, self.sums, None, *tensors)


class SmallLinear(TappedLinear):
    """Linear with a SmallTap. `squares`: probe [G, B]; `sums`: probe [K, out, in + 1]."""

    def tapped(self, y: Tensor, x: Tensor) -> Tensor:
        has_bias, tensors = self.bias is not None, (x, self.switch.one_hot, self.rows, self.columns)
        return SmallTap.apply(y, self.squares, self.sums, has_bias, *tensors)


class TappedEmbedding(nn.Embedding):
    """Table of vectors with an EmbeddingTap. `gram`: probe [G, B, B]."""

    def __init__(self, table: nn.Embedding, switch: TapSwitch) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, device="meta")
        self.weight = table.weight
        self.switch = switch

    def forward(self, ids: Tensor) -> Tensor:
        y = F.embedding(ids, self.weight)
        if self.switch.mode == OFF:
            return y
        tensors = ids, self.switch.one_hot, self.rows, self.columns, self.left, self.right
        return EmbeddingTap.apply(y, self.gram, self.sums, self.switch.mode == MEASURED, *tensors)


class TappedNorm(nn.Module):
    """Norm with a learned gain and an ElementTap. `squares`: probe [G, B]; `sums`: probe [K, channels, 1]."""

    def __init__(self, norm: nn.LayerNorm | RMSNorm, switch: TapSwitch) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, norm.weight)
        self.switch = switch
        self.eps = norm.eps
        self.rms = isinstance(norm, RMSNorm)

    def forward(self, x: Tensor) -> Tensor:
        y = normed(x, self.weight, self.eps, self.rms)
        if self.switch.mode != MEASURED:
            return y
        facts, tensors = (self.weight.shape, self.rms, self.eps), (x, self.switch.one_hot, self.rows, self.columns)
        return ElementTap.apply(y, self.squares, self.sums, facts, *tensors)


class TappedElements(nn.Module):
    """TokenBias or TokenGain with an ElementTap. `squares`: probe [G, B]; `sums`: probe [K, rows, columns]."""

    def __init__(self, layer: TokenBias | TokenGain, switch: TapSwitch) -> None:
        super().__init__()
        self.weight, self.switch, self.multiplies = layer.weight, switch, isinstance(layer, TokenGain)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        y = x * weight if self.multiplies else x + weight
        if self.switch.mode != MEASURED:
            return y
        tensors = x if self.multiplies else None, self.switch.one_hot, self.rows, self.columns
        return ElementTap.apply(y, self.squares, self.sums, (weight.shape, None, 0.0), *tensors)
