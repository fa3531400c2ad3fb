"""Whether the engine's clipped sum on the very model is that of plain autograd, unit by unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.doctor.crash import no_crash
from sfumato.doctor.probing import STRICT, Tolerance, outputs_of, probed, rows_like
from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients import Choices, ClippedSum, clipped_sum
from sfumato.gradients.call import Strategy
from sfumato.gradients.piece import Piece

Loss = Callable[..., Tensor]
NUM_ROWS = 3  # of the comparison between batches
# (rows in another order, some left out; their units): what a unit adds may depend on neither
_BATCHES = (((2, 0, 1), (1, 0, 1)), ((2, 1), (0, 1)))


def check_engine(
    model: nn.Module,
    inputs: Tensor,
    *,
    loss: Loss | None = None,
    targets: Tensor | None = None,
    sum_function: Callable[..., ClippedSum] = clipped_sum,
) -> None:
    """Raise ``ModelError`` if the engine's norms and sums on this model are not those of plain autograd.

    ``loss`` and ``targets`` are of the kind that training has; there may be fewer targets than inputs.

    Guarantee: every strategy of every layer is compared, since training chooses among them by timing; each
    parameter by itself, relative to its own gradient; and every layer at least twice, since what the engine
    remembers of a model after the first time must be right too.
    """
    with probed(model), no_crash(model, inputs):
        still(model, inputs)
        reference = RowGradients.of(model, inputs, loss, targets)
        number, most, choices = 0, 1, NumberedStrategy()
        while number < most:
            choices.number = number
            total = reference.engine(model, sum_function, choices=choices)
            reference.compare(total, STRICT)
            number, most = number + 1, choices.most
        if number == 1:
            reference.compare(reference.engine(model, sum_function, choices=choices), STRICT)


def check_unit_gradients(
    model: nn.Module,
    inputs: Tensor,
    *,
    tolerance: Tolerance = STRICT,
    loss: Loss | None = None,
    targets: Tensor | None = None,
) -> None:
    """Raise ``PrivacyError`` if what a unit adds to the sum depends on its place or on other units.

    Guarantee: the bound itself. The engine's sums over rows in another order, with units of several rows
    and with units left out are compared with each row's gradient in the whole batch. A backward pass that
    mixes rows is found here, even where the outputs do not tell. ``model`` is in the modes of training.
    """
    choices = Choices(deterministic=True)
    with no_crash(model, inputs):
        still(model, inputs)
        reference = RowGradients.of(model, _of_lengths(rows_like(inputs, NUM_ROWS)), loss, targets)
        for order, units in _BATCHES:
            part = reference.batch(order, units)
            total = part.engine(model, clipped_sum, choices=choices)
            try:
                part.compare(total, tolerance)
            except ModelError as error:
                raise PrivacyError(
                    "mixes-examples",
                    f"the gradient of an example changes with its place or with the others: {error.what}",
                    why="Clipping one example then no longer bounds its influence.",
                    fix="Look for a backward pass of the model's own, or for a layer used in several places.",
                ) from error


def _of_lengths(rows: Tensor) -> Tensor:
    """Rows that are filled to different lengths, in no order: a model may sort them by that."""
    least = 0 if rows.is_floating_point() else rows.min().item()
    for row, share in zip(rows, (0.6, 1.0, 0.8), strict=True):
        values = torch.arange(row.numel(), device=rows.device).view(row.shape)
        row[values >= max(1, round(share * row.numel()))] = least
    return rows


@dataclass
class NumberedStrategy(Choices):
    """Takes each layer's strategy of one number, so that every one is checked that timing may choose."""

    number: int = 0
    most: int = 1  # the largest number of strategies of any layer met

    def pieces(self, key: Hashable, strategies: list[Strategy]) -> dict[str, Piece]:
        self.most = max(self.most, len(strategies))
        return strategies[self.number % len(strategies)].pieces()


@dataclass(frozen=True)
class RowGradients:
    """Rows with their gradients by autograd, and the units to which they belong."""

    inputs: Tensor
    targets: Tensor
    loss: Loss
    rows: list[dict[str, Tensor]]
    units: tuple[int, ...]
    clip_norm: float
    grouped: bool = False

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Tensor, loss: Loss | None, targets: Tensor | None = None
    ) -> RowGradients:
        outputs, _ = outputs_of(model, inputs)
        if loss is None:
            loss = cross_entropy if outputs.ndim == 2 and outputs.shape[1] > 1 else _squared
        places = torch.arange(len(inputs), device=inputs.device)
        if targets is None:
            targets = places % (outputs.shape[1] if outputs.ndim > 1 else 2)
        else:
            targets = targets[places % len(targets)]
            targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        rows = row_gradients(model, inputs, targets, loss)
        largest = max(_norm(row) for row in rows)
        units = tuple(range(len(inputs)))
        return cls(inputs, targets, loss, rows, units, 0.7 * largest if largest > 0 else 1.0)

    def batch(self, order: tuple[int, ...], units: tuple[int, ...]) -> RowGradients:
        """Some of the rows in this order, with the unit of each."""
        index = torch.tensor(order, device=self.inputs.device)
        rows = [self.rows[i] for i in order]
        inputs, targets = self.inputs[index], self.targets[index]
        return RowGradients(inputs, targets, self.loss, rows, units, self.clip_norm, grouped=True)

    def engine(
        self, model: nn.Module, sum_function: Callable[..., ClippedSum], *, choices: Choices
    ) -> ClippedSum:
        index = torch.tensor(self.units, device=self.inputs.device)
        more = {"unit_index": index} if self.grouped else {}
        return sum_function(
            model,
            self.inputs,
            self.targets,
            clip_norm=self.clip_norm,
            loss=self.loss,
            choices=choices,
            **more,
        )

    def compare(self, total: ClippedSum, tolerance: Tolerance) -> None:
        """Raise unless ``total`` is the clipped sum of these units' gradients, with their norms."""
        missing = set(self.rows[0]) - set(total.gradients)
        if missing:
            raise _disagrees(f"parameter {min(missing)} is missing from the sum")
        unit_gradients = [self._unit(unit) for unit in range(max(self.units) + 1)]
        norms = [_norm(unit_gradient) for unit_gradient in unit_gradients]
        limit = tolerance.gradients
        for i, norm in enumerate(norms):
            if not abs(total.norms[i].item() - norm) <= limit * norm + 1e-9:
                raise _disagrees(f"unit {i} has norm {total.norms[i].item():.6g}, by autograd {norm:.6g}")
        factors = [min(1.0, self.clip_norm / max(norm, 1e-30)) for norm in norms]
        for name, gradient in total.gradients.items():
            parts = [
                factor * unit_gradient[name]
                for factor, unit_gradient in zip(factors, unit_gradients, strict=True)
            ]
            error = (gradient.double() - sum(parts)).norm().item()
            # Relative to the parameter's own gradient; a floor for those whose gradient is rounding only.
            floor = max(1e-9, 100 * torch.finfo(self.rows[0][name].dtype).eps) * self.clip_norm
            gradient_norm = sum(part.norm().item() for part in parts)
            if not error <= limit * gradient_norm + floor:
                raise _disagrees(
                    f"the sum of {name} is off by {error:.3g}, its gradient being {gradient_norm:.3g}"
                )

    def _unit(self, unit: int) -> dict[str, Tensor]:
        rows_of_unit = [row for row, owner in zip(self.rows, self.units, strict=True) if owner == unit]
        return {
            name: torch.stack([row[name].double() for row in rows_of_unit]).sum(dim=0) / len(rows_of_unit)
            for name in rows_of_unit[0]
        }


def row_gradients(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> list[dict[str, Tensor]]:
    """Each row's gradients, all from one forward pass.

    A pass per row would round differently, and where a ReLU then falls on the other side of zero the
    gradient jumps by up to a hundredth: no fault of the engine, which takes all rows at once too.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    rows = []
    # PyTorch's group norm crashes in channels last if its scale is trained and its input wants no gradient.
    image = [inputs.detach().requires_grad_()] if inputs.is_floating_point() else []
    with torch.enable_grad():
        outputs = model(*(image or [inputs]))
        for i in range(len(inputs)):
            value = loss(outputs[i : i + 1], targets[i : i + 1])
            gradients = torch.autograd.grad(
                value, [*trained.values(), *image], allow_unused=True, retain_graph=i + 1 < len(inputs)
            )
            rows.append(
                {
                    name: torch.zeros_like(parameter) if gradient is None else gradient
                    for (name, parameter), gradient in zip(trained.items(), gradients, strict=False)
                }
            )
    return rows


def still(model: nn.Module, inputs: Tensor) -> None:
    """Put what draws random numbers into evaluation mode, and nothing else: two passes must be equal.

    A model that draws in evaluation mode too cannot be compared, and is refused.
    """
    drawing: list[str] = []
    for _ in range(2):
        _, drawing = outputs_of(model, rows_like(inputs, 2))
        for name in drawing:
            model.get_submodule(name).training = False
        if not drawing:
            return
    _, drawing = outputs_of(model.eval(), rows_like(inputs, 2))
    if drawing:
        raise ModelError(
            "random-in-evaluation",
            f"{drawing[0] or 'the model'} draws random numbers in evaluation mode too.",
            why="Its gradients cannot be compared with autograd's, since no two passes are equal.",
            fix="Let it draw in training mode only: if self.training.",
        )


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """For outputs that are no class scores: any loss that has a gradient everywhere will do."""
    return (outputs - 1.5 - targets.reshape(-1, *[1] * (outputs.ndim - 1))).square().sum()


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(value.double().square().sum().item() for value in gradients.values()))


def _disagrees(what: str) -> ModelError:
    return ModelError(
        "engine-disagrees",
        f"{what}.",
        why="The engine's gradients on this model are not autograd's, so its clip bounds nothing.",
        fix="Report the model; until then wrap the layer concerned in a module of its own.",
    )
