"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """All layers in evaluation mode inside; each in its own mode again afterwards.

    Guarantee: a batch norm that was frozen by ``eval()`` inside a model in training mode stays frozen. To
    set the whole model to one mode, as ``model.train()`` does, would let it mix the examples of a batch.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
