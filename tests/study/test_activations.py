"""V_R, V_F and V_A on nets small enough to compute by hand."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import skew
from torch import Tensor, nn

import sfumato
from sfumato.errors import ModelError
from sfumato.study.activations import activations_result, draw_activations, measure_activations
from sfumato.study.subjects import Subject, load_subject


class Doubling(nn.Module):
    """x beside 2x, added; the order in which they are written must not matter."""

    def __init__(self, *, norm: bool, branch_first: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 1, bias=False)
        nn.init.constant_(self.convolution.weight, 2.0)
        self.norm = nn.GroupNorm(1, 1, affine=False) if norm else nn.Identity()
        self.branch_first = branch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.branch_first:
            return self.norm(self.convolution(x) + x).flatten(1)
        return self.norm(x + self.convolution(x)).flatten(1)


def subject_of(model: nn.Module, inputs: Tensor, **fields: object) -> Subject:
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    settings = {"name": "net", "data": "by hand", "split": "test", "sensitive": False, **fields}
    return Subject(model=model.eval(), inputs=inputs, labels=labels, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("branch_first", [False, True])
def test_the_paths_of_a_net_by_hand(branch_first: bool) -> None:
    inputs = torch.tensor([0.0, 1.0, 2.0, 9.0]).view(1, 1, 2, 2).repeat(3, 1, 1, 1)
    (block,) = measure_activations(
        subject_of(Doubling(norm=False, branch_first=branch_first), inputs), batch_size=2
    )
    deviation = 12.5**0.5  # of 0, 1, 2, 9
    for name, factor in (("V_R", 1), ("V_F", 2), ("V_A", 3)):
        value = block.values[name]
        assert (value.mean, value.deviation) == pytest.approx((3 * factor, deviation * factor))
        assert value.skewness == pytest.approx(skew([0, 1, 2, 9]))
        assert (value.num_values, value.positive, sum(value.counts)) == (12, 0.75, 12)
    assert block.output == "V_A"


def test_scale_norm_returns_the_sum_to_mean_zero_and_deviation_one() -> None:
    inputs = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(0)) + 2
    (block,) = measure_activations(subject_of(Doubling(norm=True), inputs))
    after = block.values[block.output]
    assert block.output == "V_A^S"
    assert (after.mean, after.deviation) == pytest.approx((0, 1), abs=1e-3)
    assert block.values["V_A"].mean > 6  # the control: before the norm it is far from that


def test_every_block_of_a_residual_net_is_found_and_drawn(tmp_path) -> None:
    measured = []
    for name in ("resnet9", "scale_resnet9", "wrn_10_1"):
        subject = load_subject(name, num_images=4, needs_labels=False)
        blocks = measure_activations(subject)
        assert len(blocks) == (3 if name == "wrn_10_1" else 2)
        measured.append((subject, blocks))
    rows = activations_result(measured).rows
    assert {row["activation"] for row in rows if row["net"] == "resnet9"} == {"V_R", "V_F", "V_A"}
    assert any(row["activation"] == "V_A^S" for row in rows if row["net"] == "scale_resnet9")
    draw_activations(measured).savefig(tmp_path / "figure.png")


def test_a_net_without_additions_is_refused() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    for model, rows in (
        (plain, torch.rand(2, 3, 8, 8)),
        (sfumato.create_model("lenet", num_classes=3), torch.rand(2, 3, 32, 32)),  # it cannot be traced
        (nn.Linear(5, 3), torch.rand(2, 5)),  # a head on features
    ):
        with pytest.raises(ModelError, match="no-residual-blocks"):
            measure_activations(subject_of(model, rows))
