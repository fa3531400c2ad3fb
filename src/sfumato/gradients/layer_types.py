"""What the rules read of a layer: by structure, since a layer of a user's may bring one of our rules."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Weighted(Protocol):
    """A weight, and a bias if there is one."""

    weight: Tensor
    bias: Tensor | None


class Embedding(Protocol):
    """As ``nn.Embedding``."""

    weight: Tensor
    num_embeddings: int
    padding_idx: int | None


class Convolving(Protocol):
    """As ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``."""

    weight: Tensor
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str | tuple[int, ...]
    padding_mode: str
    groups: int


class WeightStandardised(Protocol):
    """As ``layers.WSConv2d``."""

    weight: Tensor
    gain: Tensor
    bias: Tensor
    kernel_size: int
    stride: int
    dilation: int
    groups: int
    eps: float

    def padding_for(self, height: int, width: int) -> tuple[int, int, int, int]: ...


class VarianceStandardised(Convolving, Protocol):
    """A convolution, and how its filters are standardised: see ``uses.Standardised``."""

    gain: Tensor | None
    bias: Tensor | None
    factor: float
    eps: float


class GroupNormalising(Protocol):
    """As ``nn.GroupNorm``."""

    weight: Tensor
    num_groups: int
    num_channels: int
    eps: float


class Normalising(Protocol):
    """Batch and instance norms; the statistics are there where they are tracked."""

    running_mean: Tensor
    running_var: Tensor
    track_running_stats: bool
    training: bool
    eps: float


class LayerNormalising(Protocol):
    """As ``nn.LayerNorm``."""

    weight: Tensor | None
    bias: Tensor | None
    normalized_shape: tuple[int, ...]
    eps: float


class Scaling(Protocol):
    """One learnt number and one constant."""

    scale: Tensor
    constant: float
