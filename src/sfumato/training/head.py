"""A linear head on fixed features: softmax or logistic regression with clipping in closed form.

The gradient of one row is the outer product of p - y and (x, 1), so its norm is ‖p - y‖ · sqrt(‖x‖² + 1), and
the clipped sum is one matrix product. One pass over the rows per step, in pieces that stay in the cache,
whatever the batch: from a Poisson sample to the whole set. With few classes compiled code does the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from sfumato.features.workers import one_per_core
from sfumato.gradients import ClippedSum
from sfumato.gradients.kernels import head_sums, offers_head_sums
from sfumato.gradients.piece import UNITS_PER_CALL
from sfumato.noise import add_noise
from sfumato.randomness import RandomSource
from sfumato.training.losses import BinaryCrossEntropy

ROUNDING = 1e-6  # relative room for the rounding of one row's factor and product
ROWS_AT_ONCE = UNITS_PER_CALL  # added in float32, their sums in float64; compiled code has the same number
_MEAN_ROUNDING = 1e-9  # the same in float64, for rows of up to a million values
_LARGEST_NORM = 1e30  # of a row that counts, at a clip norm of 1 or more
_TOTAL_BYTES = 2 << 20  # of the float64 total that are added to together
_PIECE_BYTES = 4 << 20  # of features per piece: read from memory once, used twice


def private_mean(
    features: Tensor, *, noise_multiplier: float, source: RandomSource, unit_index: Tensor | None = None
) -> Tensor:
    """The mean over units of their mean row, released with Gaussian noise.

    Guarantee: rows are scaled down to norm 1 where they exceed it and non-finite rows count as zero, so that
    one unit moves the sum by at most 1; the noise has stddev ``noise_multiplier``. Account it as one Gaussian
    event. The divisor is the number of units, a public value.
    """
    size = piece_rows(features.shape[1])
    num_units = len(features) if unit_index is None else int(unit_index.max()) + 1
    # a little below 1 / rows, so that no rounding lets a unit's rows add up to more than 1
    shares = torch.full((len(features),), 1 - _MEAN_ROUNDING, dtype=torch.float64)
    if unit_index is not None:
        shares /= torch.bincount(unit_index)[unit_index]
    total = torch.zeros(features.shape[1], dtype=torch.float64)
    for start in range(0, len(features), size):
        rows = features[start : start + size].double()
        norms = torch.linalg.vector_norm(rows, dim=1)
        factors = torch.where(norms.isfinite(), shares[start : start + size] / norms.clamp_min(1.0), 0.0)
        total += factors @ torch.where(norms.isfinite()[:, None], rows, 0.0)
    noisy = add_noise({"mean": total}, stddev=noise_multiplier, source=source, step=0, purpose="mean")
    return (noisy["mean"] / num_units).float()


class LinearHead(ABC):
    """Clipped gradient sums of a linear head over fixed rows, each row a unit.

    What does not change from step to step is computed once.
    """

    has_compiled_form = False

    def __init__(self, rows: Tensor, targets: Tensor, *, num_classes: int) -> None:
        self.rows, self.targets, self.num_classes = rows, targets, num_classes
        self._squares = _squared_norms(rows) + 1.0
        self._rows_are_finite = bool(self._squares.isfinite().all())

    def __call__(
        self, weight: Tensor, bias: Tensor, *, clip_norm: float, indices: Tensor | None = None
    ) -> ClippedSum:
        """The sum over all rows, or over those in ``indices``, each clipped to ``clip_norm``.

        Guarantee: each row's factor times its norm is at most ``clip_norm``; norms in float64, factors
        rounded down; a row that is not finite, or longer than 1e30 times a ``clip_norm`` below 1, counts
        as zero. Adding up may move the sum by ROWS_AT_ONCE**2 * 2**-24 clip norms more, 1e-3, for each
        ROWS_AT_ONCE rows, if all of them are made for it, and by less than 1e-6 otherwise.
        """
        if weight.shape != (self.num_classes, self.rows.shape[1]) or bias.shape != (self.num_classes,):
            raise ValueError(f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} do not fit the rows")
        if not 0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm is {clip_norm}: it must be finite and above 0")
        indices = None if indices is None else indices.long()
        if indices is not None and len(indices) and int(indices.min()) < 0:
            raise IndexError("indices count from 0")
        count = len(self.rows) if indices is None else len(indices)
        norms, losses = torch.empty(count, dtype=torch.float64), torch.empty(count)

        def share(bounds: tuple[int, int]) -> tuple[Tensor, Tensor]:
            piece = slice(*bounds)
            chosen = piece if indices is None else indices[piece]
            return self._share(weight, bias, clip_norm, chosen, norms[piece], losses[piece])

        if count <= piece_rows(self.rows.shape[1]):
            totals = [share((0, count))]
        else:
            workers = torch.get_num_threads()
            cuts = [count * number // workers for number in range(workers + 1)]
            with one_per_core() as pool:
                totals = list(pool.map(share, pairwise(cuts)))
        total_weight, total_bias = (sum(parts) for parts in zip(*totals, strict=True))
        gradients = {"weight": total_weight, "bias": total_bias}
        return ClippedSum(gradients=gradients, norms=norms, losses=losses, sensitivity=clip_norm)

    def _share(
        self,
        weight: Tensor,
        bias: Tensor,
        clip_norm: float,
        chosen: slice | Tensor,
        norms: Tensor,
        losses: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The clipped sum over the chosen rows, piece by piece; fills in their norms and losses."""
        # Pieces are added up in float64: in float32 each row would be rounded to the sum of all before it.
        total_weight, total_bias = (
            torch.zeros(value.shape, dtype=torch.float64, device=value.device) for value in (weight, bias)
        )
        all_rows, targets, squares = self.rows, self.targets[chosen], self._squares[chosen]
        # Beyond it a factor times p - y would fall among float32's subnormal numbers, which are too coarse.
        longest = min(1.0, clip_norm) * _LARGEST_NORM
        squares = torch.where(squares <= longest**2, squares, math.inf)
        if isinstance(chosen, slice):
            all_rows = all_rows[chosen]
        if self.has_compiled_form and offers_head_sums(all_rows, weight, bias):
            indices = None if isinstance(chosen, slice) else chosen
            results = (norms, losses, total_weight, total_bias)
            bound = clip_norm * (1 - ROUNDING)
            head_sums(all_rows, indices, targets, squares, weight, bias, bound, results)
            return total_weight, total_bias
        size = piece_rows(self.rows.shape[1])
        buffer = self.rows.new_empty(size, self.rows.shape[1])  # fresh memory would cost more than the sum
        for start in range(0, len(targets), size):
            piece = slice(start, start + size)
            if isinstance(chosen, slice):
                given = all_rows[piece]
            else:
                numbers = chosen[piece]
                given = torch.index_select(all_rows, 0, numbers, out=buffer[: len(numbers)])
            logits = torch.addmm(bias, given, weight.T)
            residual, losses[piece] = self._residual(logits, targets[piece])
            norms[piece] = (residual.double().square().sum(1) * squares[piece]).sqrt()
            residual *= _factors(norms[piece], clip_norm).to(residual.dtype)[:, None]
            residual = _finite(residual)
            _add_products(total_weight, residual, given if self._rows_are_finite else _finite(given))
            total_bias += residual.double().sum(0)
        return total_weight, total_bias

    @abstractmethod
    def _residual(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The derivative of each row's loss by its logits, and the loss; ``logits`` may be written into."""


class SoftmaxRegression(LinearHead):
    """Each row has one class: ``targets`` (rows,) are its number. ``class_weights`` multiply a row's loss."""

    def __init__(
        self,
        rows: Tensor,
        targets: Tensor,
        *,
        num_classes: int,
        class_weights: tuple[float, ...] | None = None,
    ) -> None:
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < num_classes:
            raise ValueError(f"targets must be from 0 to {num_classes - 1}")
        super().__init__(rows, targets.long(), num_classes=num_classes)
        self._class_weights = None if class_weights is None else torch.tensor(class_weights)
        self.has_compiled_form = class_weights is None

    def _residual(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """p - y"""
        logs = F.log_softmax(logits, dim=1)
        true = targets[:, None]
        losses = -logs.gather(1, true)[:, 0]
        residual = logs.exp_()
        residual.scatter_add_(1, true, residual.new_full((1, 1), -1.0).expand(len(targets), 1))
        if self._class_weights is None:
            return residual, losses
        row_weights = self._class_weights[targets]  # before the norm: heavier rows have the same bound
        return residual * row_weights[:, None], losses * row_weights


class LogisticRegression(LinearHead):
    """Each row has any number of findings: ``targets`` (rows, findings) are 0 or 1."""

    def __init__(self, rows: Tensor, targets: Tensor, *, loss: BinaryCrossEntropy | None = None) -> None:
        if targets.ndim != 2 or not bool(((targets == 0) | (targets == 1)).all()):
            raise ValueError("targets must be a matrix of 0 and 1")
        super().__init__(rows, targets.to(rows.dtype), num_classes=targets.shape[1])
        self.loss = loss or BinaryCrossEntropy()

    def _residual(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss.residual(logits, targets), self.loss.of_rows(logits, targets)


def _add_products(total: Tensor, residual: Tensor, rows: Tensor) -> None:
    """``total`` += residual.T @ rows, in float32 over ROWS_AT_ONCE rows and in float64 beyond."""
    # A few classes at a time: their part of the total stays in the cache while all stretches are added to it.
    few = min(len(total), max(1, _TOTAL_BYTES // (8 * total.shape[1])))
    part = rows.new_empty(few, total.shape[1])
    for first in range(0, len(total), few):
        classes = slice(first, first + few)
        into = part[: len(total[classes])]
        for start in range(0, len(rows), ROWS_AT_ONCE):
            stretch = slice(start, start + ROWS_AT_ONCE)
            total[classes] += torch.mm(residual[stretch, classes].T, rows[stretch], out=into)


def piece_rows(num_features: int) -> int:
    """Rows that are read together."""
    return max(16, _PIECE_BYTES // (4 * num_features))


def _factors(norms: Tensor, clip_norm: float) -> Tensor:
    factors = (clip_norm * (1 - ROUNDING) / norms).clamp(max=1.0)
    return torch.where(norms.isfinite(), factors, 0.0)


def _finite(values: Tensor) -> Tensor:
    """Zeros for what is not finite: such rows have factor 0, and 0 · inf would not be 0."""
    return values if math.isfinite(values.sum().item()) else values.nan_to_num(0.0, 0.0, 0.0)


def _squared_norms(rows: Tensor) -> Tensor:
    size = piece_rows(rows.shape[1])
    # One result from the start: a small one kept between large ones that are freed would break up the memory.
    result = torch.empty(len(rows), dtype=torch.float64)
    for start in range(0, len(rows), size):
        torch.sum(rows[start : start + size].double().square_(), dim=1, out=result[start : start + size])
    return result
