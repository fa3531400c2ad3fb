"""What a model is made of: layers, shapes, parameters, multiply-adds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sfumato.gradients.modes import evaluation_mode
from sfumato.layers import WSConv2d

_PRODUCTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, WSConv2d)


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One call of one layer, for one image."""

    name: str
    kind: str
    output_shape: tuple[int, ...]
    num_parameters: int
    multiply_adds: int


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """A model at one input size. Multiply-adds are those of convolutions and linear layers, per image."""

    input_shape: tuple[int, ...]
    layers: tuple[LayerSummary, ...]
    num_parameters: int
    multiply_adds: int


def summarise(model: nn.Module, input_shape: tuple[int, ...]) -> ModelSummary:
    """Run the model once on zeros of ``input_shape`` (channels, height, width) and note every layer.

    A model on the "meta" device is summarised without memory or arithmetic.
    """
    rows: list[LayerSummary] = []
    counted: set[nn.Parameter] = set()  # a layer called twice has its parameters once

    def note(name: str, module: nn.Module, output: object) -> None:
        parameters = [p for p in module.parameters(recurse=False) if p not in counted]
        counted.update(parameters)
        shape = tuple(output.shape[1:]) if isinstance(output, Tensor) else ()
        products = 0
        if isinstance(module, _PRODUCTS) and isinstance(output, Tensor):
            products = output[0].numel() * module.weight[0].numel()
        rows.append(
            LayerSummary(
                name=name,
                kind=type(module).__name__,
                output_shape=shape,
                num_parameters=sum(p.numel() for p in parameters),
                multiply_adds=products,
            )
        )

    handles = [
        module.register_forward_hook(lambda m, _, output, name=name: note(name, m, output))
        for name, module in model.named_modules()
        if not isinstance(module, nn.Identity)
        and (not list(module.children()) or list(module.parameters(recurse=False)))
    ]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad(), evaluation_mode(model):
            model(torch.zeros(1, *input_shape, device=device))
    finally:
        for handle in handles:
            handle.remove()
    return ModelSummary(
        input_shape=tuple(input_shape),
        layers=tuple(rows),
        num_parameters=sum(p.numel() for p in model.parameters()),
        multiply_adds=sum(row.multiply_adds for row in rows),
    )
