"""PyTorch's random operations, each made out of uniform numbers that are given to it.

A ``RandomOperations`` mode replaces every operation that would take numbers from a generator, the global one
or a model's own: it takes them from its ``uniform`` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.errors import PrivacyError

# shape, whether in float64 rather than float32, device -> uniform in [0, 1)
Uniform = Callable[[tuple[int, ...], bool, torch.device], Tensor]


class RandomOperations(TorchDispatchMode):
    """While it is active, nothing in this thread draws from a generator."""

    def __init__(self, uniform: Uniform) -> None:
        super().__init__()
        self.uniform = uniform

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        replacement = REPLACEMENTS.get(str(func).removeprefix("aten."))
        if replacement is None:
            raise PrivacyError(
                "random-operation",
                f"the model uses {func}, whose random numbers cannot be drawn for each unit on its own.",
                why="From PyTorch's generator they would depend on a unit's place in the batch.",
                fix="Build it from torch.rand, randn or dropout, or put the layer into eval mode.",
            )
        kwargs.pop("generator", None)
        return replacement(self.uniform, *args, **kwargs)


def _draws_nothing(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation that may draw does not: attention without dropout, layers in eval mode."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if "dropout_p" in given or "scaled_dot_product" in str(func):
        return not given.get("dropout_p", 0.0)
    if str(func).startswith(("aten.rrelu_with_noise", "aten.native_dropout")):
        return given.get("train", given.get("training", False)) is False
    return any(isinstance(given.get(name), Tensor) and not given[name].numel() for name in ("self", "input"))


def _like(u: Uniform, x: Tensor) -> Tensor:
    return u(tuple(x.shape), x.dtype == torch.float64, x.device)


def _gaussian(u: Uniform, x: Tensor) -> Tensor:
    values = _like(u, x)
    # the middle of each interval: 0 would become minus infinity
    return torch.special.ndtri(values.double() + (2.0**-54 if values.dtype == torch.float64 else 2.0**-25))


def _whole(u: Uniform, x: Tensor, low: int, high: int) -> Tensor:
    values = u(tuple(x.shape), True, x.device)
    return (values * (high - low)).floor().to(torch.int64).clamp(max=high - low - 1) + low


def _empty(size: list[int], dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return torch.empty(size, dtype=dtype or torch.get_default_dtype(), device=device)


def _same(x: Tensor, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return torch.empty_like(x, dtype=dtype, device=device)


def _uniform_(u: Uniform, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return x.copy_(_below_one(_like(u, x), x.dtype) * (high - low) + low)


def _below_one(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded down: in half precision a number just below 1 would otherwise become 1."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return (values * 2.0**digits).floor() * 2.0**-digits


def _normal_(u: Uniform, x: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return x.copy_(_gaussian(u, x) * std + mean)


def _bernoulli_(u: Uniform, x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return x.copy_(_like(u, x) < p)


def _exponential_(u: Uniform, x: Tensor, rate: float = 1.0) -> Tensor:
    values = _like(u, x)
    return x.copy_(-torch.log1p(-values.double() - 2.0**-54) / rate)


def _geometric_(u: Uniform, x: Tensor, p: float) -> Tensor:
    return x.copy_((torch.log1p(-_like(u, x).double()) / math.log1p(-p)).floor() + 1)


def _normal(u: Uniform, mean: Any, std: Any = 1.0) -> Tensor:
    mean, std = torch.as_tensor(mean), torch.as_tensor(std)
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    owner = mean if mean.dim() else std
    return _normal_(u, torch.empty(shape, dtype=owner.dtype, device=owner.device), mean, std)


def _multinomial(u: Uniform, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    if not replacement:  # an exponential race: the first to arrive are drawn
        arrival = -torch.log1p(-_like(u, weights).double()) / weights
        return torch.where(weights > 0, arrival, math.inf).topk(count, dim=-1, largest=False).indices
    sums = weights.double().cumsum(dim=-1)
    values = u((*weights.shape[:-1], count), True, weights.device) * sums[..., -1:]
    return torch.searchsorted(sums, values, right=True).clamp(max=weights.shape[-1] - 1)


def _dropout(u: Uniform, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    mask = _like(u, x) >= p
    return x * mask * (1.0 / (1.0 - p) if p < 1 else 0.0), mask


def _rrelu(
    u: Uniform, x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any, **__: Any
) -> Tensor:
    noise.copy_(torch.where(x <= 0, _like(u, x) * (upper - lower) + lower, 1.0))
    return x * noise


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "rand.default": lambda u, size, **options: _uniform_(u, _empty(size, **options)),
    "rand_like.default": lambda u, x, **options: _uniform_(u, _same(x, **options)),
    "randn.default": lambda u, size, **options: _normal_(u, _empty(size, **options)),
    "randn_like.default": lambda u, x, **options: _normal_(u, _same(x, **options)),
    "randint.default": lambda u, high, size, **options: _integers(u, 0, high, size, **options),
    "randint.low": lambda u, low, high, size, **options: _integers(u, low, high, size, **options),
    "randint_like.default": lambda u, x, high, **options: _integers_like(u, x, 0, high, **options),
    "randint_like.low_dtype": lambda u, x, low, high, **options: _integers_like(u, x, low, high, **options),
    "randperm.default": lambda u, n, device=None, **_: u((n,), True, torch.device(device or "cpu")).argsort(),
    "uniform_.default": _uniform_,
    "normal_.default": _normal_,
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor": _normal,
    "exponential_.default": _exponential_,
    "geometric_.default": _geometric_,
    "random_.to": lambda u, x, to: x.copy_(_whole(u, x, 0, to)),
    "random_.from": lambda u, x, low, to: x.copy_(_whole(u, x, low, to)),
    "bernoulli_.float": _bernoulli_,
    "bernoulli_.Tensor": _bernoulli_,
    "bernoulli.p": lambda u, x, p: _bernoulli_(u, torch.empty_like(x), p),
    "bernoulli.default": lambda u, x: _bernoulli_(u, torch.empty_like(x), x),
    "multinomial.default": _multinomial,
    "native_dropout.default": _dropout,
    "rrelu_with_noise.default": _rrelu,
}
# an operation may name its generator in an overload of its own
REPLACEMENTS |= {
    "rand.generator": REPLACEMENTS["rand.default"],
    "randn.generator": REPLACEMENTS["randn.default"],
    "randint.generator": REPLACEMENTS["randint.default"],
    "randint.low_generator": REPLACEMENTS["randint.low"],
    "randperm.generator": REPLACEMENTS["randperm.default"],
    "rand_like.generator": REPLACEMENTS["rand_like.default"],
    "randn_like.generator": REPLACEMENTS["randn_like.default"],
    "randint_like.generator": REPLACEMENTS["randint_like.default"],
    "randint_like.low_generator_dtype": REPLACEMENTS["randint_like.low_dtype"],
}


def _integers(u: Uniform, low: int, high: int, size: list[int], dtype: Any = None, **options: Any) -> Tensor:
    result = _empty(size, dtype=dtype or torch.int64, **options)
    return result.copy_(_whole(u, result, low, high))


def _integers_like(u: Uniform, x: Tensor, low: int, high: int, **options: Any) -> Tensor:
    result = _same(x, **options)
    return result.copy_(_whole(u, result, low, high))
