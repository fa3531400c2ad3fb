"""Normalisation by name, and ScaleNorm (Klause et al. 2022): a normalisation after a residual addition."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.errors import ConfigError, did_you_mean
from sfumato.gradients.normalisation import batch_norm_rule

Norm = Literal["group", "layer", "instance", "batch", "none"]


def suitable_groups(channels: int, groups: int) -> int:
    """The largest number of groups, at most ``groups``, that divides ``channels``."""
    return next(count for count in range(min(groups, channels), 0, -1) if channels % count == 0)


def make_norm(kind: Norm, channels: int, *, groups: int = 32) -> nn.Module:
    """A norm layer with learnable scale and shift over ``channels``.

    Guarantee: every kind but "batch" treats each example on its own. Batch norm mixes the examples of a
    batch, so it may be trained only without privacy, or stay frozen in eval mode.

    "layer" is one group over all channels and positions, "instance" one group per channel.
    Where ``groups`` does not divide ``channels`` the next smaller number that does is taken.
    """
    if kind not in get_args(Norm):
        known = get_args(Norm)
        raise ConfigError(
            "unknown-norm",
            f"{kind!r} is not a normalisation. {did_you_mean(str(kind), known)}".rstrip(),
            fix=f"Choose one of {', '.join(known)}.",
        )
    if groups < 1:
        raise ConfigError("bad-groups", f"groups must be at least 1, not {groups}.", fix="Try 16 or 32.")
    if kind == "none":
        return nn.Identity()
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    wanted = {"group": groups, "layer": 1, "instance": channels}[kind]
    return nn.GroupNorm(suitable_groups(channels, wanted), channels)


def make_scale_norm(enabled: bool, kind: Norm, channels: int, *, groups: int = 32) -> nn.Module:
    """ScaleNorm for the place right after a residual addition, or nothing where it is not ``enabled``.

    The two summands have different scales; normalising their sum gives the next layer mean 0 and
    deviation 1 again. It is an ordinary norm layer: what makes it ScaleNorm is where it stands.
    """
    return make_norm(kind, channels, groups=groups) if enabled else nn.Identity()


class FrozenBatchNorm(nn.Module):
    """Batch norm whose statistics are public constants, in training too; scale and shift can be learnt.

    Guarantee: no example sees another, and nothing of the training data is ever stored in it.
    For nets that come with public weights: in eval mode ``nn.BatchNorm2d`` computes the same, but one
    call of ``model.train()`` would make it mix examples again.
    """

    gradient_rule = staticmethod(batch_norm_rule)
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"
