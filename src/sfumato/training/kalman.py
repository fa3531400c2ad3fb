"""A Kalman filter over noisy gradients.

Zhang, Bu, Balle, Hong, Razaviyayn & Mirrokni 2025, DiSK: differentially private optimizer with simplified
Kalman filter for noise reduction, https://arxiv.org/abs/2410.03883.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

GRADIENT, MOVE = "kalman_gradient", "kalman_move"  # keys in the optimizer's memory


class KalmanFilter:
    """DiSK with gain κ: what an optimizer gets is g̃_t = (1 - κ) g̃_{t-1} + κ g_t, the first g_0 itself.

    The paper's g_t is the noisy mean of clipped per-unit gradients, each of them
    c ∇f(x_t + γ d) + (1 - c) ∇f(x_t) with d = x_t - x_{t-1} and c = (1 - κ) / (κ γ): the second point tells
    how the gradient has changed since g̃_{t-1}. Here γ = (1 - κ) / κ, so that c = 1 and a unit's gradient is
    taken at one point only; to first order in d every γ gives the same.

    Guarantee: a unit enters a step by one gradient at one public point, clipped once; the sum keeps its
    sensitivity. Two points clipped apart would not: |c| + |1 - c| exceeds 1 where γ is smaller.
    The filter itself sees weights and noisy gradients, which are private already.

    Its memory is kept with the optimizer's, and so saved and restored with it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, gain: float) -> None:
        self.optimizer, self.gain = optimizer, gain

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """The weights at x_t + γ (x_t - x_{t-1}), for computing the sum; afterwards x_t to the last bit."""
        held = []
        try:
            with torch.no_grad():
                for parameter in self._parameters():
                    move = self.optimizer.state.get(parameter, {}).get(MOVE)
                    if move is not None:
                        held.append((parameter, parameter.detach().clone()))
                        parameter.add_(move, alpha=(1 - self.gain) / self.gain)
            yield
        finally:
            with torch.no_grad():
                for parameter, weights in held:
                    parameter.copy_(weights)

    @torch.no_grad()
    def step(self) -> None:
        """One step of the optimizer on the filtered gradients."""
        before = []
        for parameter in self._parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            earlier = self.optimizer.state.get(parameter, {}).get(GRADIENT)
            filtered = gradient.clone() if earlier is None else earlier.lerp(gradient, self.gain)
            parameter.grad = filtered.clone()  # some optimizers write into it
            before.append((parameter, filtered, parameter.detach().clone()))
        self.optimizer.step()
        # Only now: an optimizer begins its memory of a parameter where there is none.
        for parameter, filtered, weights in before:
            self.optimizer.state[parameter] |= {GRADIENT: filtered, MOVE: parameter - weights}

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
