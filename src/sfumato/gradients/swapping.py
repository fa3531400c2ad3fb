"""Other tensors in the place of a module's parameters, for one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from sfumato.gradients.contents import modules_of


@contextmanager
def swapped(model: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """``values`` by the id of the parameter whose place they take, under all names that it has.

    Guarantee: afterwards every parameter is where it was. (``torch.func.functional_call`` leaves a module
    that has two names with the other tensors in it.) The Python forward pass runs, not a compiled one.
    """
    places: list[tuple[dict[str, Any], str, Any]] = []
    for _, module in modules_of(model):
        for name, value in module._parameters.items():
            if id(value) in values:
                places.append((module._parameters, name, value))
        if module._compiled_call_impl is not None:
            places.append((vars(module), "_compiled_call_impl", module._compiled_call_impl))
        if isinstance(module, nn.RNNBase):  # holds its parameters in a list besides
            places.append((vars(module), "_flat_weights", module._flat_weights))
    try:
        for holder, name, value in places:
            if name == "_flat_weights":
                holder[name] = [values.get(id(one), one) for one in value]
            else:
                holder[name] = values.get(id(value)) if value is not None else None
        yield
    finally:
        for holder, name, value in places:
            holder[name] = value


def parameter_of(module: nn.Module, name: str) -> Tensor:
    """What is in a parameter's place now, whether it is a parameter or not."""
    path, _, last = name.rpartition(".")
    value = module.get_submodule(path)._parameters[last]
    assert value is not None  # it is a parameter that is trained
    return value
