"""Models that break the bound, each with a way that a probe of the last row alone does not see."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(4 * 64, 3))


class Layer(nn.Module):
    """A function of the batch."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def by_row(factors: Tensor, x: Tensor) -> Tensor:
    return x * factors.to(x.dtype).view(-1, *[1] * (x.ndim - 1))


def sign_by_position(x: Tensor) -> Tensor:
    return by_row(1.0 - 2.0 * (torch.arange(len(x)) % 2), x)


def sorted_inside(x: Tensor) -> Tensor:
    return x[x.detach().flatten(1).sum(1).argsort()]


def capacity(x: Tensor) -> Tensor:
    """As an expert that takes six rows of a batch at most: those with the largest scores."""
    scores = x.detach().flatten(1).sum(1)
    taken = torch.zeros(len(x)).index_fill(0, scores.topk(min(6, len(x))).indices, 1.0)
    return by_row(0.2 + taken, x)


def neighbours(x: Tensor) -> Tensor:
    return torch.cat([x[1:] + x[:-1], x[-1:]])


def rolled(x: Tensor) -> Tensor:
    return x + 0.5 * x.roll(2, dims=0)


FORWARD_MIXERS = {
    "sign by position": sign_by_position,
    "sorted": sorted_inside,
    "capacity": capacity,
    "minus the first": lambda x: x - x[:1],
    "running sum": lambda x: x.cumsum(0),
    "neighbours": neighbours,
    "batch size": lambda x: x * len(x),
    "rolled by two": rolled,
}


class _Backward(torch.autograd.Function):
    """The identity, with a backward pass of one's own."""

    @staticmethod
    def forward(ctx, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


BACKWARD_MIXERS = {
    "mean": lambda g: g + g.mean(0, keepdim=True),
    "sign by position": sign_by_position,
    "batch size": lambda g: g * len(g),
}


def backward(change: Callable[[Tensor], Tensor]) -> nn.Module:
    return Layer(lambda x: _Backward.apply(x, change))


class OddCalls(nn.Module):
    """Turns the sign at every second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else -x


class LastMean(nn.Module):
    """Adds the mean of the batch before, kept where no state dict shows it."""

    mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        result, self.mean = x + self.mean, x.detach().mean()
        return result


class Bank(nn.Module):
    """Keeps a row of every image it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x.detach().mean((2, 3))])
        return x


class Renormed(nn.Module):
    """Changes its own weights by what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.scale
        self.scale.data.add_(x.detach().mean() * 1e-3)
        return result


class Words(nn.Module):
    """A bag of words; ``max_norm`` shortens the rows of the table that are asked for."""

    def __init__(self, kind: type[nn.Module], *, max_norm: float | None, trained: bool = True) -> None:
        super().__init__()
        self.table = kind(10, 8, max_norm=max_norm)
        self.table.weight.requires_grad_(trained)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        return self.head(rows.mean(1) if rows.ndim == 3 else rows)


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, 0.3, training=self.training)


class DropPath(nn.Module):
    """Stochastic depth: each row is kept or left out as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return by_row(torch.rand(len(x)).add(0.8).floor() / 0.8, x)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


class AlwaysNoisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)
