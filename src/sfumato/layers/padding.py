"""TensorFlow's "SAME" padding as a layer, for weights that were trained with it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.layers.convolution import same_padding


class SamePad2d(nn.Module):
    """Zeros around an image so that a convolution of this kernel and stride keeps ``ceil(size / stride)``."""

    def __init__(self, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, stride

    def forward(self, x: Tensor) -> Tensor:
        top, bottom = same_padding(x.shape[-2], kernel=self.kernel_size, stride=self.stride)
        left, right = same_padding(x.shape[-1], kernel=self.kernel_size, stride=self.stride)
        return F.pad(x, (left, right, top, bottom))

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}"


def same_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    stride: int = 1,
    groups: int = 1,
    bias: bool = False,
) -> list[nn.Module]:
    """The layers of a convolution, padded "SAME": a padding layer only where it is uneven."""
    even = stride == 1 or kernel_size == 1
    padding = kernel_size // 2 if even else 0
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias)
    return [conv] if even else [SamePad2d(kernel_size, stride), conv]
