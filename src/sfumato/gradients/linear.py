"""Per-unit gradients of linear layers and embeddings."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.layer_types import Embedding, Weighted
from sfumato.gradients.piece import (
    Deferred,
    Materialised,
    Piece,
    gram_norms,
    squared_norms,
    summed_by_parts,
    working_dtype,
    zero_where_dropped,
)


def linear_rule(call: Call) -> list[Strategy]:
    """nn.Linear over any number of positions.

    outer      one position per unit: |g x^T|^2 = |g|^2 |x|^2
    product    the unit's gradient itself
    gram       sum over positions s, t of <x_s, x_t> <g_s, g_t>
    """
    dtype = working_dtype(cast(Weighted, call.module).weight.dtype)
    x, g = call.input.to(dtype), call.gradient.to(dtype)
    positions = math.prod(x.shape[1:-1])
    x, g = x.reshape(len(x), positions, -1), g.reshape(len(g), positions, -1)
    segments = call.segments

    def bias() -> dict[str, Piece]:
        return {"bias": Materialised(segments.sum(g.sum(dim=1)))} if "bias" in call.names else {}

    def by_product() -> dict[str, Piece]:
        parts = [
            torch.bmm(group.split(g).flatten(1, 2).transpose(1, 2), group.split(x).flatten(1, 2))
            for group in segments.groups
        ]
        # not a copy where there is one part: it is as large as all units' gradients
        return {**bias(), "weight": Materialised(parts[0] if len(parts) == 1 else torch.cat(parts))}

    def form_sum(factors: Tensor) -> Tensor:
        return summed_by_parts(
            lambda xs, gs: gs.flatten(0, 1).t() @ xs.flatten(0, 1), x, g, segments, factors
        )

    def by_outer() -> dict[str, Piece]:
        # float64 before the product: a tiny g, squared, would vanish beside a huge x
        return {**bias(), "weight": Deferred(squared_norms(g.double()) * squared_norms(x.double()), form_sum)}

    def by_gram() -> dict[str, Piece]:
        norms = []
        for group in segments.groups:
            xs, gs = (group.split(value).flatten(1, 2).double() for value in (x, g))
            pairs = torch.bmm(xs, xs.transpose(1, 2)), torch.bmm(gs, gs.transpose(1, 2))
            norms.append(gram_norms(*pairs, dtype))
        return {**bias(), "weight": Deferred(torch.cat(norms), form_sum)}

    if "weight" not in call.names:
        return [Strategy("bias", 0.0, bias)]
    work = float(len(x) * positions * x.shape[2] * g.shape[2])
    strategies = [Strategy("product", 1.3 * work, by_product)]
    if positions == 1 and all(group.size == 1 for group in segments.groups):
        return [*strategies, Strategy("outer", work, by_outer)]
    pairs = sum(
        (group.size * positions) ** 2 * (group.units.stop - group.units.start) for group in segments.groups
    )
    gram = work + pairs * (x.shape[2] + g.shape[2])
    return [*strategies, Strategy("gram", gram, by_gram)] if gram < 2.5 * work else strategies


def embedding_rule(call: Call) -> list[Strategy]:
    """nn.Embedding: a unit's gradient is non-zero only in the rows that it looked up.

    Options that touch other examples or the weights are refused before (``suitability``).
    """
    module = cast(Embedding, call.module)
    dtype = working_dtype(module.weight.dtype)
    tokens = call.input.reshape(len(call.input), -1)
    g = call.gradient.to(dtype).reshape(*tokens.shape, -1)
    if module.padding_idx is not None:
        g = torch.where(tokens.eq(module.padding_idx)[..., None], 0, g)
    segments, entries = call.segments, module.num_embeddings

    def by_scatter() -> dict[str, Piece]:
        unit = segments.per_row(torch.arange(segments.num_units, device=g.device))
        flat = (unit[:, None] * entries + tokens).flatten()
        total = g.new_zeros(segments.num_units * entries, g.shape[2])
        total.index_add_(0, flat, g.flatten(0, 1))
        return {"weight": Materialised(total.view(segments.num_units, entries, -1))}

    def form_sum(factors: Tensor) -> Tensor:
        per_row = segments.per_row(factors)
        scaled = zero_where_dropped(g * per_row.to(g.dtype)[:, None, None], per_row)
        total = g.new_zeros(entries, g.shape[2], dtype=torch.float64)
        return total.index_add_(0, tokens.flatten(), scaled.flatten(0, 1).double())

    def by_gram() -> dict[str, Piece]:
        norms = []
        for group in segments.groups:
            ids, gs = group.split(tokens).flatten(1), group.split(g).flatten(1, 2).double()
            same = ids[:, :, None] == ids[:, None, :]
            norms.append(gram_norms(torch.bmm(gs, gs.transpose(1, 2)), same, dtype))
        return {"weight": Deferred(torch.cat(norms), form_sum)}

    pairs = sum(
        (group.size * tokens.shape[1]) ** 2 * (group.units.stop - group.units.start)
        for group in segments.groups
    )
    return [
        Strategy("scatter", float(segments.num_units * entries * g.shape[2]), by_scatter),
        Strategy("gram", float(pairs * g.shape[2]), by_gram),
    ]
