"""Convolution with weight standardisation (Qiao et al. 2019), as De et al. 2022 use it.

Each filter is brought to mean zero and norm ``gain`` before it is applied:

    w_hat = gain * (w - mean(w)) / sqrt(max(var(w) * fan_in, eps))

The operation is part of the forward pass, so gradients flow through it to ``weight`` and ``gain``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.gradients.weight_standardisation import weight_standardised_rule
from sfumato.layers.initialisation import fan_in_normal_

Padding = tuple[int, int, int, int]  # left, right, top, bottom: the order of torch's F.pad


def same_padding(size: int, *, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Zeros before and after so that the output has ``ceil(size / stride)`` positions.

    The odd zero goes behind: at stride 2, kernel 3 and an even size the padding is (0, 1), not (1, 1).
    """
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    return total // 2, total - total // 2


class WSConv2d(nn.Module):
    """Convolution whose filters are standardised, with a learnable gain and bias per output channel.

    ``padding`` is "same", one number for all sides, or (left, right, top, bottom).
    """

    gradient_rule = staticmethod(weight_standardised_rule)
    keeps_output = True  # the rule may read <G, u> off the output
    pads_input = True  # uneven zeros are a copy of the input, which the rule can take instead

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: Literal["same"] | int | Padding = "same",
        dilation: int = 1,
        groups: int = 1,
        eps: float = 1e-4,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.dilation = kernel_size, stride, dilation
        self.groups, self.eps = groups, eps
        self.padding: Literal["same"] | Padding = (padding,) * 4 if isinstance(padding, int) else padding
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, kernel_size, kernel_size))
        self.gain = nn.Parameter(torch.empty(out_channels, 1, 1, 1))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of variance 1 / fan-in, gain 1, bias 0 (De et al., appendix C.1)."""
        fan_in_normal_(self.weight)
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def padding_for(self, height: int, width: int) -> Padding:
        """The zeros (left, right, top, bottom) put around an input of this size."""
        if self.padding != "same":
            return self.padding
        top, bottom = same_padding(
            height, kernel=self.kernel_size, stride=self.stride, dilation=self.dilation
        )
        left, right = same_padding(width, kernel=self.kernel_size, stride=self.stride, dilation=self.dilation)
        return left, right, top, bottom

    def standardised_weight(self) -> Tensor:
        """The filters that are applied: mean zero, norm ``gain`` (less where it was below sqrt(eps))."""
        centred = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        squares = centred.square().sum(dim=(1, 2, 3), keepdim=True)  # var * fan_in, faster than torch.var
        return centred * (self.gain * squares.clamp(min=self.eps).rsqrt())

    def forward(self, x: Tensor) -> Tensor:
        left, right, top, bottom = self.padding_for(x.shape[-2], x.shape[-1])
        if left == right and top == bottom:
            padding = (top, left)
        else:  # conv2d only pads evenly; the copy is needed at strided layers alone
            x, padding = F.pad(x, (left, right, top, bottom)), (0, 0)
        return F.conv2d(
            x, self.standardised_weight(), self.bias, self.stride, padding, self.dilation, self.groups
        )

    def extra_repr(self) -> str:
        grouped = f", groups={self.groups}" if self.groups > 1 else ""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding!r}{grouped}"
        )
