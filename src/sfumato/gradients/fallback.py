"""Per-unit gradients of any other module: its forward pass again, differentiated per unit by torch.func."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from sfumato.errors import ModelError
from sfumato.gradients.call import Call, Strategy
from sfumato.gradients.piece import Materialised, Piece

STOCHASTIC = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def fallback_rule(call: Call) -> list[Strategy]:
    """Any module, of one layer or many, whose inputs and outputs have one entry per row."""
    for name, module in call.module.named_modules():
        if isinstance(module, STOCHASTIC) and module.training and module.p > 0:
            raise ModelError(
                "random-forward",
                f"{call.path} ({type(call.module).__name__}) has no gradient rule of its own and contains "
                f"dropout ({name}).",
                why="Its forward pass would have to be repeated with the very same random choices.",
                fix="Set the dropout to 0, or move the parameter into a layer of its own.",
            )
    return [
        Strategy("vmap", 3.0 * sum(g.numel() for g in call.gradients if g is not None), lambda: _pieces(call))
    ]


def _pieces(call: Call) -> dict[str, Piece]:
    state = dict(call.module.named_parameters()) | dict(call.module.named_buffers())
    constants = {name: value.detach() for name, value in state.items()}
    trained = {name: constants.pop(name) for name in sorted(call.names)}
    rows = len(next(g for g in call.gradients if g is not None))
    found: dict[str, list[Tensor]] = {name: [] for name in trained}

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

        def split(value: Any, dim: int | None, group=group) -> Any:
            return value if dim is None else group.split(value)

        args = tuple(split(value, dim) for value, dim in zip(call.args, dims[0], strict=True))
        kwargs = {name: split(value, dims[1][name]) for name, value in call.kwargs.items()}
        gradients = tuple(split(g, dim) for g, dim in zip(call.gradients, dims[2], strict=True))

        def unit_gradient(args, kwargs, gradients):
            def outputs(parameters):
                return output_tensors(functional_call(call.module, {**constants, **parameters}, args, kwargs))

            values, pull = vjp(outputs, trained)
            return pull(
                tuple(torch.zeros_like(v) if g is None else g for v, g in zip(values, gradients, strict=True))
            )[0]

        try:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule
                result = vmap(unit_gradient, in_dims=dims, randomness="error")(args, kwargs, gradients)
        except RuntimeError:  # not every operation has a batching rule; one unit after another always works
            result = _one_by_one(unit_gradient, dims, (args, kwargs, gradients))
        for name, value in result.items():
            found[name].append(value)
    return {name: Materialised(torch.cat(values)) for name, values in found.items()}


def _one_by_one(unit_gradient, dims, operands) -> dict[str, Tensor]:
    args_dims, kwargs_dims, gradient_dims = dims
    args, kwargs, gradients = operands
    units = next(len(g) for g in gradients if g is not None)

    def pick(value: Any, dim: int | None, unit: int) -> Any:
        return value if dim is None else value[unit]

    each = [
        unit_gradient(
            tuple(pick(v, d, unit) for v, d in zip(args, args_dims, strict=True)),
            {name: pick(v, kwargs_dims[name], unit) for name, v in kwargs.items()},
            tuple(pick(g, d, unit) for g, d in zip(gradients, gradient_dims, strict=True)),
        )
        for unit in range(units)
    ]
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def output_tensors(output: Any) -> tuple[Tensor, ...]:
    """The differentiable tensors in a module's output, in order."""
    if isinstance(output, Tensor):
        return (output,) if output.is_floating_point() else ()
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, list | tuple):
        return tuple(tensor for value in output for tensor in output_tensors(value))
    return ()
