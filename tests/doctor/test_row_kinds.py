"""Mixing that happens for some values only: each kind of row is met among its like and among others."""

from __future__ import annotations

import pytest
import torch
from hostile_models import Layer
from torch import Tensor, nn

from sfumato.doctor import check_model
from sfumato.errors import PrivacyError

IMAGES = torch.randn(4, 1, 8, 8)


def flat(x: Tensor) -> Tensor:
    return x.flatten(1).std(1) == 0


BY_VALUE = {
    "a negative value": lambda x: (x + 1) / 2 if (x < 0).any() else x,
    "a value above 1": lambda x: x / 255 if (x > 1).any() else x,
    "the largest value": lambda x: x / 255 if x.max() > 1 else x,
    "positive, and a value above 1": lambda x: x / 255 if x.max() > 1 and x.min() >= 0 else x,
    "little contrast": lambda x: x if x.std() > 0.05 else x * 10,
    "a constant row": lambda x: x - x.mean(0, keepdim=True) if flat(x).any() else x,
    "all rows constant": lambda x: x + 1 if flat(x).all() else x,
    "few values": lambda x: x * (1 + (torch.unique(x).numel() < 3)) + (torch.unique(x).numel() < 3),
    "a row of zeros": lambda x: x * 2 if (x.flatten(1) == 0).all(1).any() else x,
    "whole levels": lambda x: x / 255 if (x.round() == x).all() else x,
    "whole levels over 255": lambda x: x * 2 if ((x * 255).round() == x * 255).all() else x,
    "all positive": lambda x: x.log1p() if (x >= 0).all() else x,
    "all negative": lambda x: -x if (x <= 0).all() else x,
    "an infinite value": lambda x: x.clamp(-1, 1) if x.isinf().any() else x,
    "a huge value": lambda x: x / 1e3 if x.abs().max() > 1e5 else x,
    "a padded row": lambda x: x * 2 if (x[..., -1, -1] == 0).any() else x,
    "equal rows": lambda x: x * 2 if (x == x[:1]).all() and len(x) > 1 else x,
}


@pytest.mark.parametrize("name", BY_VALUE)
def test_mixing_for_some_values_only_is_refused(name: str) -> None:
    model = nn.Sequential(Layer(BY_VALUE[name]), nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(model, IMAGES)


def test_the_same_conditions_on_each_row_alone_pass() -> None:
    def each(x: Tensor) -> Tensor:
        largest = x.flatten(1).amax(1)[:, None, None, None]
        return torch.where(largest > 1, x / 255, x).nan_to_num().clamp(-1e3, 1e3)

    assert check_model(nn.Sequential(Layer(each), nn.Flatten(), nn.Linear(64, 10)), IMAGES) == []


def test_a_model_that_refuses_some_values_itself_passes() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.abs().max() > 1e5:
            raise ValueError("no such image")
        return x

    assert check_model(nn.Sequential(Layer(picky), nn.Flatten(), nn.Linear(64, 10)), IMAGES) == []


def test_tokens_stay_in_their_range() -> None:
    class Bag(nn.Module):
        def __init__(self, *, mixes: bool) -> None:
            super().__init__()
            self.mixes, self.table, self.head = mixes, nn.Embedding(10, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            filled = (x == 0).all(1).any() if self.mixes else False
            return self.head(self.table(x).mean(1) * (2.0 if filled else 1.0))

    tokens = torch.arange(40).view(4, 10) % 10
    assert check_model(Bag(mixes=False), tokens) == []
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(Bag(mixes=True), tokens)
