"""A caller's own clipping function is held to the sensitivity that it states, and sees one unit at a time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from comparison import Forced
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oracles import distance
from sfumato.errors import PrivacyError
from sfumato.gradients import CLIPPINGS, FlatClipping, clipped_sum
from sfumato.gradients.clipping import total_norms

Squares = Mapping[str, Tensor]


class Own:
    """Right, but for the margin that it does not leave."""

    def sensitivity(self, clip_norm: float) -> float:
        return clip_norm

    def factors(self, squared_norms: Squares, clip_norm: float, margin: float) -> dict[str, Tensor]:
        return dict.fromkeys(squared_norms, (clip_norm / total_norms(squared_norms)).clamp(max=1))


class Median(Own):
    """Clips to the median of the units that it is asked for."""

    def factors(self, squared_norms: Squares, clip_norm: float, margin: float) -> dict[str, Tensor]:
        norms = total_norms(squared_norms)
        bound = min(clip_norm, float(norms.median()))
        return dict.fromkeys(squared_norms, (bound / norms).clamp(max=1))


class Largest(Own):
    """Clips to a share that depends on the largest norm it has ever seen."""

    largest = 0.0

    def factors(self, squared_norms: Squares, clip_norm: float, margin: float) -> dict[str, Tensor]:
        norms = total_norms(squared_norms)
        self.largest = max(self.largest, float(norms.max()))
        return dict.fromkeys(squared_norms, (clip_norm / norms / max(1.0, self.largest)).clamp(max=1))


class Unclipped(Own):
    def factors(self, squared_norms: Squares, clip_norm: float, margin: float) -> dict[str, Tensor]:
        return {name: torch.ones_like(value) for name, value in squared_norms.items()}


class Understated(Own):
    def sensitivity(self, clip_norm: float) -> float:
        return 0.01 * clip_norm


class EachParameter(Own):
    """Forgets to divide the bound among the parameters."""

    def factors(self, squared_norms: Squares, clip_norm: float, margin: float) -> dict[str, Tensor]:
        return {name: (clip_norm / value.sqrt()).clamp(max=1) for name, value in squared_norms.items()}


class Negative(Own):
    def factors(self, squared_norms: Squares, clip_norm: float, margin: float) -> dict[str, Tensor]:
        return {name: -value for name, value in super().factors(squared_norms, clip_norm, margin).items()}


class NotANumber(Own):
    def factors(self, squared_norms: Squares, clip_norm: float, margin: float) -> dict[str, Tensor]:
        return {name: torch.full_like(value, torch.nan) for name, value in squared_norms.items()}


def batch() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Linear(20, 2)
    nn.init.zeros_(model.weight)
    inputs = torch.ones(41, 20)
    inputs[:20] *= 0.001
    inputs[21:] *= 10
    return model, inputs, torch.zeros(41, dtype=torch.long)


@pytest.mark.parametrize("wrong", [Unclipped(), Understated(), EachParameter(), Negative(), NotANumber()])
def test_factors_beyond_the_stated_sensitivity_are_refused(wrong: Own) -> None:
    model, inputs, targets = batch()
    with pytest.raises(PrivacyError, match="clipping-exceeds-sensitivity"):
        clipped_sum(model, inputs, targets, clip_norm=1.0, clipping=wrong)


@pytest.mark.parametrize("own", [Own(), Median(), Largest()], ids=["own", "median", "largest"])
def test_one_unit_moves_the_sum_of_an_own_function_by_its_sensitivity_at_most(own: Own) -> None:
    model, inputs, targets = batch()
    whole = clipped_sum(model, inputs, targets, clip_norm=1.0, clipping=own)
    for left_out in (0, 20, 40):
        kept = torch.arange(41) != left_out
        part = clipped_sum(model, inputs[kept], targets[kept], clip_norm=1.0, clipping=own)
        moved = sum((whole.gradients[k] - part.gradients[k]).square().sum() for k in whole.gradients).sqrt()
        assert moved <= whole.sensitivity


def test_a_right_function_of_ones_own_gives_the_usual_sum() -> None:
    model, inputs, targets = batch()
    own = clipped_sum(model, inputs, targets, clip_norm=1.0, clipping=Own())
    flat = clipped_sum(model, inputs, targets, clip_norm=1.0, clipping=FlatClipping())
    assert distance(own.gradients, flat.gradients) < 1e-6


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per-layer"])
@pytest.mark.parametrize("strategy", ["product", "outer"])
def test_inputs_near_the_largest_number_add_no_more_than_the_clip_norm(clipping: str, strategy: str) -> None:
    """Beside them a factor times the output gradient is subnormal, and was rounded up."""
    for clip_norm in (1.0, 1e-3, 1e-5, 1e-6, 1e-8):
        for num_classes, scale in ((2, 1e38), (10, 3e38), (100, 1e38)):
            model = nn.Linear(4096, num_classes, bias=False)
            nn.init.zeros_(model.weight)
            total = clipped_sum(
                model,
                torch.full((1, 4096), scale),
                torch.zeros(1, dtype=torch.long),
                clip_norm=clip_norm,
                clipping=CLIPPINGS[clipping],
                choices=Forced(wanted=strategy),
                loss=lambda outputs, labels: 1e-20 * cross_entropy(outputs, labels),
            )
            assert total.gradients["weight"].norm() <= clip_norm


def test_huge_images_add_no_more_than_the_clip_norm_by_the_gram_strategy() -> None:
    model = nn.Sequential(nn.Conv2d(20, 8, 3, padding=1), nn.Flatten(), nn.Linear(72, 3, bias=False))
    choices = Forced(wanted="gram")
    # a small gain behind the layer, so that its output stays finite
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
        model[2].weight.mul_(1e-37)
    for clip_norm in (1e-4, 1e-6, 1e-8):
        total = clipped_sum(
            model, torch.full((1, 20, 3, 3), 1e36), torch.zeros(1, dtype=torch.long), clip_norm=clip_norm,
            choices=choices,
        )  # fmt: skip
        assert sum(value.square().sum() for value in total.gradients.values()).sqrt() <= clip_norm
    assert "gram" in choices.offered
