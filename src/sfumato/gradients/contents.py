"""What a model holds, in one walk: PyTorch's own generators, one inside another, take as long as a layer."""

from __future__ import annotations

from torch import Tensor, nn


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """As ``model.named_modules()``."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((path, module))
        prefix = f"{path}." if path else ""
        children = [(prefix + name, child) for name, child in module._modules.items() if child is not None]
        waiting.extend(reversed(children))
    return found


def parameters_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """As ``model.named_parameters()``."""
    return _tensors(model, "_parameters")


def buffers_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """As ``model.named_buffers()``."""
    return _tensors(model, "_buffers")


def _tensors(model: nn.Module, kind: str) -> list[tuple[str, Tensor]]:
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules_of(model):
        for name, value in getattr(module, kind).items():
            if value is not None and id(value) not in found:
                found[id(value)] = (f"{path}.{name}" if path else name, value)
    return list(found.values())
