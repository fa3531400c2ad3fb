"""The operands of a convolution and its library call: what all strategies share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from sfumato.gradients.call import Call
from sfumato.gradients.layer_types import Convolving, Weighted
from sfumato.gradients.piece import working_dtype
from sfumato.gradients.segments import Segments


@dataclass(frozen=True)
class Geometry:
    """Where a convolution looks: one entry per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # zeros put before and after the input
    after: tuple[int, ...]
    groups: int

    @property
    def even(self) -> bool:
        """The same padding on both sides, as the library's calls take it."""
        return self.before == self.after

    @property
    def sizes(self) -> tuple[int, ...]:
        """As the compiled sums take them."""
        return (*self.kernel, *self.stride, *self.dilation, *self.before)

    def with_groups(self, groups: int) -> Geometry:
        return replace(self, groups=groups)

    def unpadded(self) -> Geometry:
        nothing = (0,) * len(self.kernel)
        return Geometry(self.kernel, self.stride, self.dilation, nothing, nothing, self.groups)


@dataclass(frozen=True)
class Convolution:
    """The operands of one convolution: rows of inputs, output gradients, and the weight's shape.

    Under autocast they are rounded to bfloat16, and so is each unit's gradient that is formed of them. Norms
    and sums are both of those gradients as they were rounded, in float32 or better, so that the bound holds
    as it does in float32.
    """

    inputs: Tensor  # (rows, in_channels, *space)
    gradients: Tensor  # (rows, out_channels, *out_space)
    weight: Tensor
    geometry: Geometry
    segments: Segments

    @property
    def is_low(self) -> bool:
        return self.inputs.dtype == torch.bfloat16

    def widened(self) -> Convolution:
        """The same operands in float32 where they are in bfloat16."""
        if not self.is_low:
            return self
        return replace(
            self,
            inputs=self.inputs.float(),
            gradients=self.gradients.float(),
            weight=self.weight.float(),
        )

    @property
    def held_bytes(self) -> int:
        """What a sum that is formed later has to keep."""
        return self.inputs.nbytes + self.gradients.nbytes

    @property
    def multiply_adds(self) -> float:
        """Of one weight gradient over all rows."""
        return self.gradients.numel() * self.weight[0].numel()


def geometry_of(module: Convolving, space: tuple[int, ...]) -> Geometry:
    """Geometry of an ``nn.Conv*d`` for an input of this size."""
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        before = tuple(value // 2 for value in total)
        after = tuple(value - value // 2 for value in total)
    elif isinstance(module.padding, str):  # "valid"
        before = after = (0,) * len(space)
    else:
        before = after = tuple(module.padding)
    return Geometry(module.kernel_size, module.stride, module.dilation, before, after, module.groups)


def operands(call: Call, geometry: Geometry, padding_mode: str = "zeros") -> Convolution:
    """The call as a convolution over rows; borders that are not zeros are made part of the input."""
    inputs, gradients = call.input, call.gradient
    if padding_mode != "zeros":
        inputs, geometry = pad(inputs, geometry, padding_mode), geometry.unpadded()
    weight = cast(Weighted, call.module).weight
    dtype = working_dtype(torch.promote_types(weight.dtype, gradients.dtype))
    if weight.dtype == torch.float32 and gradients.dtype == torch.bfloat16:  # under autocast
        dtype = torch.bfloat16
    return Convolution(
        inputs.to(dtype), gradients.to(dtype), weight.detach().to(dtype), geometry, call.segments
    )


def pad(inputs: Tensor, geometry: Geometry, mode: str = "constant") -> Tensor:
    """The inputs with their borders, for what cannot pad by itself."""
    if not any(geometry.before) and not any(geometry.after):
        return inputs
    pairs = zip(reversed(geometry.before), reversed(geometry.after), strict=True)
    return F.pad(inputs, [value for pair in pairs for value in pair], mode=mode)


def weight_gradient(inputs: Tensor, gradients: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The library's weight gradient, summed over all rows."""
    if not geometry.even:
        inputs, geometry = pad(inputs, geometry), geometry.unpadded()
    no_shift = [0] * len(geometry.kernel)
    return torch.ops.aten.convolution_backward(
        gradients,
        inputs,
        weight,
        None,
        geometry.stride,
        geometry.before,
        geometry.dilation,
        False,
        no_shift,
        geometry.groups,
        [False, True, False],
    )[1]
