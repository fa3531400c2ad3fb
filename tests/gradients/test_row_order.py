"""Row k of every layer is row k of the batch, and a row's loss is its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oracles import distance, reference
from sfumato.doctor import check_model
from sfumato.errors import PrivacyError
from sfumato.gradients import Choices, clipped_sum


class Ordered(nn.Module):
    """Puts its rows into an order before a layer, and back behind it: its outputs are those without."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.head = how, nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.how == "not at all":
            return self.head(torch.relu(self.first(x)))
        if self.how == "flipped":
            return self.head(torch.relu(self.first(x.flip(0))).flip(0))
        order = torch.argsort((x != 0).sum(1), descending=True, stable=True)
        back = torch.argsort(order)
        if self.how == "matrix":
            matrix = torch.eye(len(x))[order]
            return self.head(matrix.t() @ torch.relu(self.first(matrix @ x)))
        hidden = torch.relu(self.first(x[order]))
        if self.how == "gather":
            return self.head(hidden.gather(0, back[:, None].expand_as(hidden)))
        return self.head(hidden[back])


def filled(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of different lengths and sizes."""
    inputs = torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for place in range(rows):
        inputs[place].view(-1)[place + 1 :] = 0
        inputs[place] *= 30 if place % 2 else 0.01
    return inputs, torch.arange(rows) % 10


@pytest.mark.parametrize("how", ["index", "gather", "matrix"])
@pytest.mark.parametrize("rows", [5, 60])
def test_rows_in_an_order_by_their_values_are_refused_whenever_it_shows(how: str, rows: int) -> None:
    model, choices = Ordered(how), Choices()
    alike = torch.randn(rows, 1, 8, 8)  # all of one length: they stay where they are
    clipped_sum(model, alike, torch.arange(rows) % 10, clip_norm=1.0, choices=choices)
    with pytest.raises(PrivacyError, match="reorders-rows"):
        clipped_sum(model, *filled(rows), clip_norm=1.0, choices=choices)
    # a not-a-number spreads through a product with a matrix
    with pytest.raises(PrivacyError, match="mixes-examples" if how == "matrix" else "reorders-rows"):
        check_model(model, torch.randn(4, 1, 8, 8))


def test_rows_that_are_always_in_another_order_are_refused_at_once() -> None:
    with pytest.raises(PrivacyError, match="reorders-rows"):
        clipped_sum(Ordered("flipped"), *filled(6), clip_norm=1.0, choices=Choices())


def test_more_rows_than_there_are_powers_of_two_are_told_apart() -> None:
    class SwapsFarRows(Ordered):
        def forward(self, x: Tensor) -> Tensor:
            order = torch.arange(len(x))
            if len(x) > 64:
                order[[0, 64]] = order[[64, 0]]  # equal in the first digit
            return self.head(torch.relu(self.first(x.flatten(1)[order]))[order])

    inputs, targets = torch.randn(70, 1, 8, 8), torch.arange(70) % 10
    with pytest.raises(PrivacyError, match="reorders-rows"):
        clipped_sum(SwapsFarRows(""), inputs, targets, clip_norm=1.0, choices=Choices())


def test_rows_in_their_order_give_the_reference() -> None:
    model, (inputs, targets) = Ordered("not at all"), filled(20)
    expected = reference(model, inputs, targets)
    for _ in range(2):
        total = clipped_sum(model, inputs, targets, clip_norm=1.0)
        assert distance(total.gradients, expected.clipped_sum(1.0)) < 4e-5


class Counting(nn.Module):
    """Weighs the classes by how often they have come."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.count[targets] += 1
        return cross_entropy(outputs, targets, weight=self.count.sum() / self.count, reduction="sum")


class Largest(nn.Module):
    """Divides by the largest loss there has been."""

    most = 0.0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value = cross_entropy(outputs, targets)
        self.most = max(self.most, float(value.detach()))
        return value / max(self.most, 1e-3)


class Calls(nn.Module):
    """Grows with every call; vmap asks once for all rows."""

    calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * cross_entropy(outputs, targets)


@pytest.mark.parametrize("loss", [Counting, Largest, Calls])
def test_a_loss_that_remembers_is_refused(loss: type[nn.Module]) -> None:
    inputs, targets = torch.randn(12, 20), torch.arange(12) % 3
    inputs[0] *= 100
    with pytest.raises(PrivacyError, match="stateful-loss"):
        clipped_sum(nn.Linear(20, 3), inputs, targets, clip_norm=1.0, loss=loss())


def test_a_loss_that_begins_to_remember_later_is_refused() -> None:
    class Late(Calls):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            return max(1, self.calls - 20) * cross_entropy(outputs, targets)

    model, inputs, targets = nn.Linear(20, 3), torch.randn(12, 20), torch.arange(12) % 3
    loss = Late()
    clipped_sum(model, inputs, targets, clip_norm=1.0, loss=loss)
    loss.calls = 20
    with pytest.raises(PrivacyError, match="stateful-loss"):
        clipped_sum(model, inputs, targets, clip_norm=1.0, loss=loss)


def test_a_loss_that_looks_at_values_is_no_such_loss() -> None:
    def robust(outputs: Tensor, targets: Tensor) -> Tensor:
        value = cross_entropy(outputs, targets)
        return value if float(value.detach()) < 1 else value.sqrt()

    model, inputs, targets = nn.Linear(20, 3), torch.randn(12, 20), torch.arange(12) % 3
    expected = reference(model, inputs, targets, loss=robust)
    total = clipped_sum(model, inputs, targets, clip_norm=1.0, loss=robust)
    assert distance(total.gradients, expected.clipped_sum(1.0)) < 4e-5


class RemembersLarge(nn.Module):
    """Its state moves only at outputs that ordinary rows do not give."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 100.0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        self.largest = max(self.largest, float(outputs.detach().abs().max()))
        return nn.functional.cross_entropy(outputs, targets, reduction=reduction) * self.largest


def test_a_loss_that_remembers_only_what_is_rare_is_refused_at_ordinary_rows() -> None:
    torch.manual_seed(0)
    with pytest.raises(PrivacyError, match="stateful-loss"):
        clipped_sum(
            nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 3, clip_norm=1.0, loss=RemembersLarge()
        )
