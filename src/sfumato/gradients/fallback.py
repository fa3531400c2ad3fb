"""Per-unit gradients of any other module: its forward pass again, differentiated per unit by torch.func."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from sfumato.errors import ModelError
from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.piece import Materialised, Piece
from sfumato.gradients.random_operations import RandomOperations
from sfumato.gradients.segments import Group
from sfumato.gradients.stochastic import Replay
from sfumato.gradients.swapping import parameter_of, swapped


def fallback_rule(call: Call) -> list[Strategy]:
    """Any module, of one layer or many, whose inputs and outputs have one entry per row."""
    work = 3.0 * sum(g.numel() for g in call.gradients if g is not None)
    return [Strategy("vmap", work, lambda: _pieces(call))]


def _pieces(call: Call) -> dict[str, Piece]:
    rows = len(next(g for g in call.gradients if g is not None))
    gradients_by_name: dict[str, list[Tensor]] = {name: [] for name in sorted(call.names)}

    def axis(key: int | str, value: Any) -> int | None:
        """0 for an argument with one entry per row, None for one that all rows share."""
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
        return 0 if has_rows and key not in call.shared else None

    dims = (
        tuple(axis(key, value) for key, value in enumerate(call.args)),
        {key: axis(key, value) for key, value in call.kwargs.items()},
        tuple(None if g is None else 0 for g in call.gradients),
    )
    for group in call.segments.groups:

        def split(value: Any, dim: int | None, group: Group = group) -> Any:
            return value if dim is None else group.split(value)

        args = tuple(split(value, dim) for value, dim in zip(call.args, dims[0], strict=True))
        kwargs = {name: split(value, dims[1][name]) for name, value in call.kwargs.items()}
        gradients = tuple(split(g, dim) for g, dim in zip(call.gradients, dims[2], strict=True))
        operands = (args, kwargs, gradients)
        try:
            with sdpa_kernel(SDPBackend.MATH), _replaying(call, group):  # fused kernels have no batching rule
                draws = "different" if call.draws else "error"
                result = vmap(partial(_gradient, call, by_autograd=False), in_dims=dims, randomness=draws)(
                    *operands
                )
        except (RuntimeError, ValueError):  # not every operation has a batching rule; one by one always works
            result = _one_by_one(call, group, dims, operands)
        for name, value in result.items():
            gradients_by_name[name].append(value)
    return {name: Materialised(torch.cat(values)) for name, values in gradients_by_name.items()}


def _gradient(
    call: Call, args: tuple, kwargs: dict, gradients: tuple, *, by_autograd: bool
) -> dict[str, Tensor]:
    """The gradient of one unit's rows for the call's parameters, by vjp or by plain autograd."""
    module = call.module
    constants = {id(value): value.detach() for value in module.parameters()}
    trained = {name: parameter_of(module, name) for name in sorted(call.names)}
    leaves, tree = tree_flatten((args, kwargs))
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def outputs(parameters: dict[str, Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        replaced = {id(trained[name]): value for name, value in parameters.items()}
        for i, value in zip(floats, inputs, strict=True):
            leaves[i] = value
        args, kwargs = tree_unflatten(leaves, tree)
        with swapped(module, constants | replaced):
            return output_tensors(module(*args, **kwargs))

    # The inputs' gradient is asked for because PyTorch's group norm crashes in channels last without it.
    start = {name: value.detach() for name, value in trained.items()}
    inputs = [leaves[i].detach() for i in floats]
    if not by_autograd:
        values, pull, *_ = vjp(outputs, start, inputs)
        return pull(
            tuple(torch.zeros_like(v) if g is None else g for v, g in zip(values, gradients, strict=True))
        )[0]
    with torch.enable_grad():
        wanted = [value.requires_grad_() for value in (*start.values(), *inputs)]
        pairs = zip(outputs(start, [value.clone() for value in inputs]), gradients, strict=True)
        seen = [(value, g) for value, g in pairs if g is not None and value.requires_grad]
        results = torch.autograd.grad([v for v, _ in seen], wanted, [g for _, g in seen], allow_unused=True)
    return {
        name: torch.zeros_like(value) if g is None else g
        for (name, value), g in zip(start.items(), results, strict=False)
    }


@contextmanager
def _replaying(call: Call, group: Group, unit: int | None = None) -> Iterator[None]:
    """The module's random numbers as they were in the forward pass, or an error."""
    if not call.draws:
        yield
        return
    replay = Replay(call.draws, group, unit)
    with RandomOperations(replay.uniform):
        yield
    if replay.values:
        raise RuntimeError("fewer draws than in the forward pass")


def _one_by_one(call: Call, group: Group, dims: tuple, operands: tuple) -> dict[str, Tensor]:
    args_dims, kwargs_dims, gradient_dims = dims
    args, kwargs, gradients = operands

    def pick(value: Any, dim: int | None, unit: int) -> Any:
        return value if dim is None else value[unit]

    unit_gradients = []
    for unit in range(group.units.stop - group.units.start):
        unit_operands = (
            tuple(pick(v, d, unit) for v, d in zip(args, args_dims, strict=True)),
            {name: pick(v, kwargs_dims[name], unit) for name, v in kwargs.items()},
            tuple(pick(g, d, unit) for g, d in zip(gradients, gradient_dims, strict=True)),
        )
        try:
            with _replaying(call, group, unit):
                unit_gradients.append(_gradient(call, *unit_operands, by_autograd=True))
        except RuntimeError as error:
            raise ModelError(
                "no-unit-gradient",
                f"{call.path or 'the model'} ({type(call.module).__name__}) has no gradient rule of its own, "
                f"and its forward pass cannot be repeated for one unit: {str(error).splitlines()[0]}",
                why="Its parameters' gradients could not be told apart by unit.",
                fix="Move the parameter into a layer of its own, or freeze it.",
            ) from error
    return {name: torch.stack([gradient[name] for gradient in unit_gradients]) for name in unit_gradients[0]}


def output_tensors(output: Any) -> tuple[Tensor, ...]:
    """The differentiable tensors in a module's output, in order."""
    if isinstance(output, Tensor):
        return (output,) if output.is_floating_point() else ()
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, list | tuple):
        return tuple(tensor for value in output for tensor in output_tensors(value))
    return ()
