"""Functions in which parameters meet the rows: those with a rule, and those that take a copy for each row.

Each entry of ``FUNCTIONS`` returns what the function returns, or None where this use is not understood.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfumato.gradients.convolution import convolution_rule
from sfumato.gradients.linear import linear_rule
from sfumato.gradients.normalisation import (
    group_norm_pass,
    group_norm_rule,
    layer_norm_pass,
    layer_norm_rule,
)
from sfumato.gradients.uses import Standardised, Watch, Watched, multiple_of, standardised_of
from sfumato.gradients.weight_standardisation import variance_standardised_rule

Function = Callable[..., Tensor | None]


def _linear(watch: Watch, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return watch.meet(
        "linear",
        linear_rule,
        input,
        {"weight": weight, "bias": bias},
        lambda given: func(input, **given),
        lambda given: SimpleNamespace(**given),
    )


def _product(watch: Watch, _func: Any, first: Any, second: Any) -> Tensor | None:
    """x @ w for a matrix w."""
    if not isinstance(second, Watched) or isinstance(first, Watched) or second.dim() != 2 or first.dim() < 2:
        return None
    return _linear(watch, F.linear, first, watch.derived(torch.t, second))


def _layer_norm(
    watch: Watch,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor | None:
    if input.dim() <= len(normalized_shape):
        return None
    settings = {"normalized_shape": tuple(normalized_shape), "eps": eps}
    return watch.meet(
        "layer_norm",
        layer_norm_rule,
        input,
        {"weight": weight, "bias": bias},
        lambda given: func(input, normalized_shape, eps=eps, **given),
        lambda given: SimpleNamespace(**settings, **given),
        layer_norm_pass,
    )


def _group_norm(
    watch: Watch,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor | None:
    settings = {"num_groups": num_groups, "num_channels": input.shape[1], "eps": eps}
    return watch.meet(
        "group_norm",
        group_norm_rule,
        input,
        {"weight": weight, "bias": bias},
        lambda given: func(input, num_groups, eps=eps, **given),
        lambda given: SimpleNamespace(**settings, **given),
        group_norm_pass if isinstance(weight, Tensor) else None,
    )


def _rms_norm(
    watch: Watch,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
) -> Tensor | None:
    if isinstance(input, Watched) or not isinstance(weight, Watched) or input.dtype != weight.dtype:
        return None
    return _pointwise(watch, torch.mul, func(input, normalized_shape, None, eps), weight)


def _convolution(
    watch: Watch,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    space = weight.dim() - 2
    if input.dim() != weight.dim():
        return None

    def each(value: Any) -> Any:
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * space if len(values) == 1 else values

    settings = {
        "kernel_size": tuple(weight.shape[2:]),
        "stride": each(stride),
        "dilation": each(dilation),
        "padding": padding if isinstance(padding, str) else each(padding),
        "padding_mode": "zeros",
        "groups": groups,
    }
    filters = standardised_of(weight)
    if filters is not None and filters.weight.shape == weight.shape:
        applied = weight.detach()
        return watch.meet(
            "standardised convolution",
            variance_standardised_rule,
            input,
            {"weight": filters.weight, "gain": filters.gain, "bias": bias},
            lambda given: func(input, applied, given["bias"], stride, padding, dilation, groups),
            lambda given: SimpleNamespace(
                **settings, **given, factor=filters.factor, eps=filters.eps, keeps_output=True
            ),
        )
    return watch.meet(
        "convolution",
        convolution_rule,
        input,
        {"weight": weight, "bias": bias},
        lambda given: func(input, stride=stride, padding=padding, dilation=dilation, groups=groups, **given),
        lambda given: SimpleNamespace(**settings, **given),
    )


def _gain(weight: Tensor | None) -> tuple[Tensor, float] | None:
    frozen = weight is not None and not isinstance(weight, Watched)
    return (weight, 1.0) if frozen and weight is not None else multiple_of(weight)


def _standardised(
    watch: Watch,
    func: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Tensor | None = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor | None:
    """Filters as channels of a batch norm over themselves: weight standardisation as timm writes it."""
    origin, gain = multiple_of(input), _gain(weight)
    told = running_mean is None and running_var is None and bias is None and training
    if origin is None or origin[1] != 1 or not told or (weight is not None and gain is None):
        return None
    filters = origin[0]
    if filters.dim() < 3 or tuple(input.shape) != (1, len(filters), filters[0].numel()):
        return None
    names = filters.made_of | (weight.made_of if isinstance(weight, Watched) else frozenset())
    result = watch.made(func(input, None, None, weight, None, True, momentum, eps), names)
    result.standardised = Standardised(
        filters, None if gain is None else gain[0], 1.0 if gain is None else gain[1], eps
    )
    return result


def _pointwise(watch: Watch, func: Any, *args: Any, **options: Any) -> Tensor | None:
    """A value beside rows, of which each entry of the result sees one of each."""
    values = [value for value in args if isinstance(value, Tensor)]
    if len(values) != 2 or sum(isinstance(value, Watched) for value in values) != 1:
        return None
    value, rows = values if isinstance(values[0], Watched) else reversed(values)
    assert isinstance(value, Watched)  # one of the two is
    if rows.dim() == 0 or (func.__name__ in IN_PLACE and args[0] is value):
        return None
    copies = watch.copies(func.__name__, value, len(rows), rows.dim())
    if copies is None:
        return None
    return func(*(copies if each is value else each for each in args), **options)


def _expanded(watch: Watch, func: Any, value: Any, *sizes: Any, **options: Any) -> Tensor | None:
    """A value that the model repeats for each row itself."""
    if not isinstance(value, Watched):
        return None
    result = func(value, *sizes, **options)
    broad = tuple(result.shape[1:])
    if result.dim() == 0 or (result.dim() == value.dim() and len(value) != 1):
        return None
    inner = tuple(value.shape[1:]) if result.dim() == value.dim() else tuple(value.shape)
    if func.__name__ == "repeat" and inner != broad:
        return None
    one = watch.derived(lambda each: each.expand(1, *broad), value)
    return watch.copies(func.__name__, one, len(result), result.dim())


def _attention(
    watch: Watch,
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *rest: Any,
    **options: Any,
) -> Tensor | None:
    """A bias of the attention, such as one for relative positions."""
    if not isinstance(attn_mask, Watched) or any(isinstance(each, Watched) for each in (query, key, value)):
        return None
    copies = watch.copies("attention", attn_mask, len(query), query.dim())
    return None if copies is None else func(query, key, value, copies, *rest, **options)


IN_PLACE = ("add_", "__iadd__", "sub_", "__isub__")
_POINTWISE = (
    *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "subtract"),
    *("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "__rtruediv__", "true_divide"),
    *IN_PLACE,
)
FUNCTIONS: dict[str, Function] = {
    "linear": _linear,
    "matmul": _product,
    "__matmul__": _product,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "rms_norm": _rms_norm,
    "batch_norm": _standardised,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "repeat"), _expanded),
    "scaled_dot_product_attention": _attention,
}
