"""Shapes as types: ``Float64[Tensor, "units"]`` is a float64 tensor with one number for each unit.

They are read by people and checked in the tests, which install jaxtyping's import hook (tests/conftest.py).
Where nobody has imported jaxtyping, which is no dependency of the package, they mean a tensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Float, Float64, Int64, Shaped
else:

    class _AnyShape:
        def __class_getitem__(cls, described: tuple[type, str]) -> type:
            return described[0]

    Float = Float64 = Int64 = Shaped = _AnyShape

__all__ = ["Float", "Float64", "Int64", "Shaped"]
