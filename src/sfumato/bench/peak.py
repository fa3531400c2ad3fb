"""What the machine could do at most: matrix products, against which other work is told as a share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

SIZE = 1536  # of the square matrices: large enough that a product runs at full speed, small enough to repeat


class Product:
    """A matrix product in one precision. Time it several times; the machine can do what the best one did."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.square = torch.randn(SIZE, SIZE).to(dtype)

    def __call__(self) -> torch.Tensor:
        return self.square @ self.square

    @staticmethod
    def speed(seconds: float) -> float:
        """Floating-point operations per second of a product that took so long."""
        return 2.0 * SIZE**3 / seconds


def operations(step: Callable[[], object]) -> int:
    """Floating-point operations of a step: its matrix products and convolutions.

    Count those of plain training for every way to train: what a way does beyond them is no merit.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()
