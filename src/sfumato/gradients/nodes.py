"""Nodes of autograd's graph that a pass puts in: where gradients begin, and backward passes of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class _NormNode(Protocol):
    """What autograd keeps of a group or layer norm."""

    _saved_result1: Tensor
    _saved_result2: Tensor


class _ConvolutionNode(Protocol):
    """What autograd keeps of a convolution."""

    _saved_input: Tensor


class Start(torch.autograd.Function):
    """A layer's output as it is, where the gradients begin; its root gets none."""

    @staticmethod
    def forward(ctx: Any, _root: Tensor, layer: tuple[Tensor]) -> Tensor:
        return layer[0]  # in a tuple: to autograd the output is new, and may be written into

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class OnePass(torch.autograd.Function):
    """A layer's output as it is, with a backward pass of the layer's own."""

    @staticmethod
    def forward(ctx: Any, _inputs: Tensor, layer: tuple[Tensor, Callable[[Tensor], Tensor]]) -> Tensor:
        output, ctx.passed = layer
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.passed(gradient.detach()), None


def saved_statistics(output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and inverse deviation that a norm has just computed, where autograd keeps them."""
    node = output.grad_fn
    if type(node).__name__ not in ("NativeGroupNormBackward0", "NativeLayerNormBackward0"):
        return None
    saved = cast(_NormNode, node)
    return saved._saved_result1.detach(), saved._saved_result2.detach()


def padded_input(output: Tensor, inputs: Tensor) -> Tensor | None:
    """A convolution's input with zeros around it, where autograd keeps such a copy of ``inputs``."""
    node = output.grad_fn
    if type(node).__name__ != "ConvolutionBackward0":
        return None
    saved = cast(_ConvolutionNode, node)._saved_input
    return None if saved.shape == inputs.shape else saved.detach()
