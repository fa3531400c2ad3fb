"""Random draws made equal: every row gets the same values, whatever its place and the other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.doctor.operations import Operations


class EqualDraws(Operations):
    """Replaces each draw, also those from generators of the model's own, with values that all rows share.

    Guarantee: the k-th draw of a pass gives a row the same values in every batch, so that two passes differ
    in a row only if the model mixes rows. A draw is constant along its first dimension, and along the second
    where that holds the rows; one whose arguments have a row each is made row by row.
    """

    def __init__(self, model: nn.Module, num_rows: int) -> None:
        super().__init__()
        self.model, self.num_rows, self.num_draws = model, num_rows, 0
        self.drawing: list[str] = []  # names of the modules that draw, in the order in which they do
        self._running: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[EqualDraws]:
        """Active inside, and informed which module runs."""
        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entered(name)))
            handles.append(module.register_forward_hook(self._left))
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _entered(self, name: str) -> Callable[..., None]:
        return lambda *_: self._running.append(name)

    def _left(self, *_: object) -> None:
        self._running.pop()

    def see(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return operation(*args, **kwargs)
        before = torch.get_rng_state()
        torch.manual_seed(1 + self.num_draws)
        seeded = torch.get_rng_state()
        kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
        result = self._draw(operation, args, kwargs)
        if not torch.equal(seeded, torch.get_rng_state()):  # some may draw, but do not: attention, dropout 0
            self.num_draws += 1
            self.drawing.append(self._running[-1] if self._running else "")
        torch.set_rng_state(before)
        return result

    def _draw(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
        in_place = operation._schema.is_mutable
        if in_place and first is not None and not others:  # x.bernoulli_(0.5), x.normal_()
            return first.copy_(operation(self._one(first).clone(), *args[1:], **kwargs))
        if not in_place and first is not None and first.ndim and len(first) == self.num_rows:
            return self._row_by_row(operation, args, kwargs)
        if first is None:  # rand(size), randn(size), randint(high, size)
            sizes = [index for index, value in enumerate(args) if isinstance(value, list | tuple)]
            if sizes and args[sizes[0]] and 0 not in args[sizes[0]]:
                shape, small = args[sizes[0]], list(args)
                small[sizes[0]] = self._one_row(shape)
                return operation(*small, **kwargs).expand(shape).clone()
        return operation(*args, **kwargs)

    def _one_row(self, shape: Sequence[int]) -> list[int]:
        """The shape with 1 where rows may be."""
        row_shape = [1, *shape[1:]]
        if len(shape) > 1 and shape[0] % self.num_rows and not shape[1] % self.num_rows:
            row_shape[1] = 1
        return row_shape

    def _one(self, value: Tensor) -> Tensor:
        if not value.numel() or not value.ndim:
            return value
        return value[tuple(slice(0, length) for length in self._one_row(value.shape))]

    def _row_by_row(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """What the draw would give to each row alone: its arguments (rates, weights) may differ by row."""
        seeded, results = torch.get_rng_state(), []

        def pick(value: Any, row: int) -> Any:
            has_rows = isinstance(value, Tensor) and value.ndim and len(value) == self.num_rows
            return value[row : row + 1] if has_rows else value

        for row in range(self.num_rows):
            torch.set_rng_state(seeded)
            row_kwargs = {name: pick(value, row) for name, value in kwargs.items()}
            results.append(operation(*(pick(value, row) for value in args), **row_kwargs))
        if isinstance(results[0], Tensor):
            return torch.cat(results)
        return type(results[0])(
            torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]
            for parts in zip(*results, strict=True)
        )
