"""Per-unit gradients of normalisation layers: sums over positions of g * x_hat (scale) and g (shift)."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from sfumato.errors import PrivacyError
from sfumato.gradients.call import BackwardPass, Call, Strategy
from sfumato.gradients.kernels import channel_sums, group_norm_backward, position_products
from sfumato.gradients.layer_types import GroupNormalising, LayerNormalising, Normalising, Scaling
from sfumato.gradients.piece import Materialised, Piece, working_dtype


def _pieces(call: Call, scale: Tensor, shift: Tensor) -> dict[str, Piece]:
    """Pieces from per-row gradients, for those of the two parameters that are trained."""
    per_row = {"weight": scale, "bias": shift}
    return {name: Materialised(call.segments.sum(per_row[name])) for name in call.names}


def _dtype(call: Call) -> torch.dtype:
    names = ("weight", "bias")
    dtypes = [
        getattr(call.module, name).dtype for name in names if getattr(call.module, name, None) is not None
    ]
    return working_dtype(dtypes[0])


def _channel_affine(call: Call, centre: Tensor, inverse: Tensor) -> dict[str, Piece]:
    """x_hat = (x - centre) * inverse with both (rows or 1, channels)."""
    g = call.gradient.to(_dtype(call))
    x = call.input.to(g.dtype)
    shift, products = channel_sums(g, x) if g.dim() > 2 else (g, g * x)
    return _pieces(call, (products - centre * shift) * inverse, shift)


def group_norm_rule(call: Call) -> list[Strategy]:
    """nn.GroupNorm."""
    module, x = cast(GroupNormalising, call.module), call.input

    def pieces() -> dict[str, Piece]:
        if call.state is None:
            variance, mean = torch.var_mean(
                x.reshape(len(x), module.num_groups, -1).to(_dtype(call)), dim=2, correction=0
            )
            inverse = (variance + module.eps).rsqrt()
        else:  # the forward pass has them
            mean, inverse = (value.view(len(x), module.num_groups).to(_dtype(call)) for value in call.state)
        spread = module.num_channels // module.num_groups
        return _channel_affine(
            call, mean.repeat_interleave(spread, dim=1), inverse.repeat_interleave(spread, dim=1)
        )

    return [Strategy("reduce", float(x.numel()), pieces)]


def group_norm_pass(call: Call) -> BackwardPass | None:
    """Both at once: what the input's gradient needs, the gradients of scale and shift are made of.

    Under autocast images are read in bfloat16 and everything is summed in float32.
    """
    module, x = cast(GroupNormalising, call.module), call.input
    if call.state is None or x.dim() < 3:
        return None
    dtype = module.weight.dtype
    low = x.dtype == torch.bfloat16 and dtype == torch.float32
    if not low and not x.dtype == dtype == call.state[0].dtype:
        return None

    def backward(gradient: Tensor) -> tuple[Tensor, dict[str, Piece]]:
        x, state = call.input, call.state  # from the call, which lets go of them before the graph would
        assert state is not None
        mean, inverse = (value.view(len(x), module.num_groups).to(dtype) for value in state)
        result, scale, shift = group_norm_backward(
            gradient.to(x.dtype), x, mean, inverse, module.weight.detach()
        )
        return result, _pieces(call, scale, shift)

    return backward


def instance_norm_rule(call: Call) -> list[Strategy]:
    """nn.InstanceNorm1d, 2d, 3d: statistics of each example, or public constants."""
    module, x = cast(Normalising, call.module), call.input
    if module.track_running_stats and module.training:
        raise PrivacyError(
            "private-statistics",
            f"{call.path} ({type(module).__name__}) stores running statistics of the training images.",
            why="They would leave with the model, and no noise covers them.",
            fix="Build it with track_running_stats=False, or put it into eval mode.",
        )

    def pieces() -> dict[str, Piece]:
        if module.track_running_stats:
            return _channel_affine(
                call, module.running_mean[None], (module.running_var[None] + module.eps).rsqrt()
            )
        variance, mean = torch.var_mean(x.flatten(2).to(_dtype(call)), dim=2, correction=0)
        return _channel_affine(call, mean, (variance + module.eps).rsqrt())

    return [Strategy("reduce", float(x.numel()), pieces)]


def batch_norm_rule(call: Call) -> list[Strategy]:
    """Batch norm with frozen statistics: a scale and a shift per channel."""
    module = cast(Normalising, call.module)

    def pieces() -> dict[str, Piece]:
        inverse = (module.running_var[None] + module.eps).rsqrt()
        return _channel_affine(call, module.running_mean[None], inverse)

    return [Strategy("reduce", float(call.input.numel()), pieces)]


def layer_norm_rule(call: Call) -> list[Strategy]:
    """nn.LayerNorm: parameters over the last dimensions, sums over all between them and the rows."""
    module, x = cast(LayerNormalising, call.module), call.input

    def pieces() -> dict[str, Piece]:
        dtype = _dtype(call)
        over = tuple(range(-len(module.normalized_shape), 0))
        variance, mean = torch.var_mean(x.to(dtype), dim=over, correction=0, keepdim=True)
        g = call.gradient.to(dtype)
        shape = (len(x), math.prod(x.shape[1 : x.dim() - len(over)]), *module.normalized_shape)
        scale = (g * (x.to(dtype) - mean) * (variance + module.eps).rsqrt()).reshape(shape).sum(dim=1)
        return _pieces(call, scale, g.reshape(shape).sum(dim=1))

    return [Strategy("reduce", 4.0 * x.numel(), pieces)]


def layer_norm_pass(call: Call) -> BackwardPass | None:
    """Both at once, unit by unit: the library's backward pass sums the gradients of scale and shift."""
    module, x = cast(LayerNormalising, call.module), call.input
    weight, bias = module.weight, module.bias
    if call.state is None or weight is None or not x.dtype == weight.dtype == call.state[0].dtype:
        return None
    if weight.dtype != working_dtype(weight.dtype) or (bias is not None and bias.dtype != weight.dtype):
        return None
    shape, weight = list(module.normalized_shape), weight.detach()
    # the library's backward pass wants some shift, whose values it does not read
    shift = torch.zeros_like(weight) if bias is None else bias.detach()

    def backward(gradient: Tensor) -> tuple[Tensor, dict[str, Piece]]:
        x, state = call.input, call.state  # from the call, which lets go of them before the graph would
        assert state is not None
        mean, inverse = state
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        sums: dict[str, list[Tensor]] = {"weight": [], "bias": []}
        for unit in call.segments.each():
            result[unit], *of_unit = torch.ops.aten.native_layer_norm_backward(
                gradient[unit], x[unit], shape, mean[unit], inverse[unit], weight, shift, [True] * 3
            )
            for kept, value in zip(sums.values(), of_unit, strict=True):
                kept.append(value)
        return result, {name: Materialised(torch.stack(sums[name])) for name in call.names}

    return backward


def scale_rule(call: Call) -> list[Strategy]:
    """A layer that multiplies by one learnt number and one constant."""
    module = cast(Scaling, call.module)

    def pieces() -> dict[str, Piece]:
        dtype = working_dtype(module.scale.dtype)
        values = [value.to(dtype).reshape(len(value), 1, -1) for value in (call.gradient, call.input)]
        products = position_products(*values).flatten() * module.constant
        return {"scale": Materialised(call.segments.sum(products))}

    return [Strategy("reduce", float(call.input.numel()), pieces)]
