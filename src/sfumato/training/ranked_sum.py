"""The sum of a step over ranks: each computes its share of the units, the first rank adds them up.

The first rank draws the batch, and the keys of what units draw for themselves; it alone adds noise, spends
and updates, after this sum. The others see numbers of units, weights and keys. How many there are changes the
order of additions, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.errors import PrivacyError
from sfumato.gradients import ClippedSum
from sfumato.randomness import RandomSource
from sfumato.training.gradient_sums import GradientSum
from sfumato.training.ranks import Ranks, cut_evenly, stretch

PURPOSES = ("augmentation", "model")  # of the draws that belong to units
_KEY_BYTES = 32
_HEADER = 3  # ranks that failed, ranks that were asked to stop, and the sum of the ranks' sensitivities


class StepKeys:
    """A source that gives the keys of one step, as the first rank drew them, and nothing else.

    Guarantee: no rank draws anything of its own for a private step.
    """

    releasable = False  # as good as the source they come from, which is asked

    def __init__(self) -> None:
        self._step, self._keys = -1, dict[str, bytes]()

    def hold(self, step: int, keys: Mapping[str, str]) -> None:
        """The keys of ``step`` from now on, in hexadecimal digits."""
        self._step, self._keys = step, {purpose: bytes.fromhex(key) for purpose, key in keys.items()}

    def random_bytes(self, count: int, *, purpose: str, step: int) -> np.ndarray:
        if step != self._step or count != _KEY_BYTES or purpose not in self._keys:
            raise AssertionError(f"{count} bytes for {purpose} in step {step} were not drawn for all ranks")
        return np.frombuffer(self._keys[purpose], dtype=np.uint8).copy()

    def torch_generator(self, *, purpose: str, step: int, device: str = "cpu") -> torch.Generator:
        raise AssertionError("a private step draws from no generator of torch")


@dataclass(frozen=True, kw_only=True)
class RankedSum:
    """Sums of the whole batch, on the first rank; ``own`` gives those of a share, with draws from ``keys``.

    Guarantee: every unit of a step is in the share of exactly one rank, which is checked in every step, so
    that one unit moves the sum of the shares by no more than ``own`` lets it move one of them.
    """

    ranks: Ranks
    own: GradientSum
    keys: StepKeys
    model: nn.Module
    source: RandomSource
    unit_sizes: Tensor  # (units,): rows that a unit brings into a step; shares have about the same

    @property
    def num_units(self) -> int:
        return self.own.num_units

    def __call__(self, indices: Tensor, step: int) -> ClippedSum:
        """The order to all ranks, and their sum."""
        drawn = {
            purpose: self.source.random_bytes(_KEY_BYTES, purpose=purpose, step=step).tobytes().hex()
            for purpose in PURPOSES
        }
        cuts = cut_evenly(self.unit_sizes[indices], self.ranks.size)
        with self.ranks.order("sum", step=step, cuts=cuts, keys=drawn):
            self.ranks.broadcast(indices)
            self.ranks.broadcast_tensors(trained_of(self.model))
            answer, total, error = self._answer(indices, step, cuts=cuts, keys=drawn)
            answer = self.ranks.add_up(answer)
        if error is not None:
            raise error
        return self._checked(answer, total, len(indices))

    def take_part(self, *, step: int, cuts: list[int], keys: Mapping[str, str]) -> Exception | None:
        """What the other ranks do on that order; returns what went wrong, which the first rank knows too."""
        indices = self.ranks.broadcast(torch.empty(cuts[-1], dtype=torch.int64)).cpu()
        self.ranks.broadcast_tensors(trained_of(self.model))
        answer, _, error = self._answer(indices, step, cuts=cuts, keys=keys)
        self.ranks.add_up(answer)
        return error

    def _answer(
        self, indices: Tensor, step: int, *, cuts: list[int], keys: Mapping[str, str]
    ) -> tuple[Tensor, ClippedSum | None, Exception | None]:
        """This rank's part of everything that is added up, in float64; all zeros but one if it failed."""
        trained, count = trained_of(self.model), len(indices)
        size = sum(value.numel() for value in trained.values())
        answer = torch.zeros(_HEADER + size + 3 * count, dtype=torch.float64)
        answer[1] = float(self.ranks.stop_wanted())
        share = stretch(cuts, self.ranks.number)
        try:
            self.keys.hold(step, keys)
            total = self.own(indices[share], step)
            answer[2] = total.sensitivity
            answer[_HEADER : _HEADER + size] = torch.cat(
                [total.gradients[name].detach().reshape(-1).double().cpu() for name in trained]
            )
            # each unit has its own place, to which its rank alone adds: taken, norm, loss
            taken, norms, losses = answer[_HEADER + size :].view(3, count)
            taken[share], norms[share], losses[share] = 1.0, total.norms.double(), total.losses.double()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            answer.zero_()
            answer[0] = 1.0
            return answer, None, error
        return answer, total, None

    def _checked(self, answer: Tensor, own: ClippedSum | None, count: int) -> ClippedSum:
        """The sum over all ranks; refuses one that is not of every unit once, at the same sensitivity."""
        failed, stopping, sensitivities = answer[:_HEADER].tolist()
        if failed or own is None:
            self._ask_why()
        self.ranks.others_want_stop = bool(stopping)
        trained = trained_of(self.model)
        sizes = [value.numel() for value in trained.values()]
        taken, norms, losses = answer[_HEADER + sum(sizes) :].view(3, count)
        assert own is not None  # else there was no answer to check
        expected = own.sensitivity * self.ranks.size
        if not bool((taken == 1).all()) or not math.isclose(sensitivities, expected, rel_tol=1e-12):
            raise PrivacyError(
                "ranks-differ",
                "the ranks' shares are not every unit of the step once, clipped alike.",
                why="A unit that counts twice moves the sum twice as far as the noise was made for.",
                fix="Run the same version of sfumato on all ranks.",
            )
        parts = answer[_HEADER : _HEADER + sum(sizes)].split(sizes)
        gradients = {
            name: part.reshape(value.shape).to(value.device)
            for (name, value), part in zip(trained.items(), parts, strict=True)
        }
        return replace(own, gradients=gradients, norms=norms, losses=losses)

    def _ask_why(self) -> None:
        """Raises what a rank says of its failure."""
        with self.ranks.order("explain"):
            self.ranks.agree()


def trained_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
