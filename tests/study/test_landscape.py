"""The loss on a plane: its middle, a corner by hand, and directions as long as the net's filters."""

from __future__ import annotations

import pytest
import torch
from test_activations import subject_of
from test_curvature import small_net
from torch import nn
from torch.nn.functional import cross_entropy

from sfumato.errors import ConfigError
from sfumato.study.landscape import draw_landscape, filter_normalised, landscape_result, measure_landscape


def test_the_middle_is_the_net_itself_and_a_corner_is_computed_by_hand() -> None:
    model = small_net()
    inputs = torch.randn(6, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    subject = subject_of(model, inputs)
    found = measure_landscape(subject, points=5, reach=0.5, seed=3)
    assert found.centre == pytest.approx(subject.loss())
    assert found.coordinates == pytest.approx([-0.5, -0.25, 0, 0.25, 0.5])

    generator = torch.Generator().manual_seed(3)
    first, second = filter_normalised(model, generator), filter_normalised(model, generator)
    moved = {name: value + 0.5 * first[name] - 0.5 * second[name] for name, value in model.named_parameters()}
    corner = cross_entropy(torch.func.functional_call(model, moved, (inputs,)), subject.labels).item()
    assert found.losses[-1][0] == pytest.approx(corner)
    assert found.losses[0][-1] != pytest.approx(corner)  # the control: the opposite corner


def test_filters_of_a_direction_are_as_long_as_the_nets_and_vectors_rest() -> None:
    model = small_net()
    direction = filter_normalised(model, torch.Generator().manual_seed(0))
    for name, value in model.named_parameters():
        if value.ndim > 1:
            lengths = direction[name].flatten(1).norm(dim=1)
            torch.testing.assert_close(lengths, value.detach().flatten(1).norm(dim=1))
        else:
            assert not direction[name].any()


def test_a_flat_loss_is_drawn_too_and_numbers_beyond_all_are_none(tmp_path) -> None:
    zero = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    nn.init.zeros_(zero[1].weight)
    nn.init.zeros_(zero[1].bias)
    flat = subject_of(zero, torch.randn(2, 1, 3, 3))
    broken = subject_of(small_net().float(), torch.full((2, 1, 3, 3), torch.inf))
    found = [(one, measure_landscape(one, points=3)) for one in (flat, broken)]
    assert found[0][1].losses[0][0] == pytest.approx(torch.tensor(3.0).log().item())
    assert found[1][1].centre is None
    assert landscape_result(found).rows[-1]["loss"] is None
    draw_landscape(found[:1]).savefig(tmp_path / "figure.png")


def test_a_grid_without_a_middle_is_refused() -> None:
    with pytest.raises(ConfigError, match="bad-grid"):
        measure_landscape(subject_of(small_net(), torch.zeros(1, 1, 3, 3).double()), points=4)
