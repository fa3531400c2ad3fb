"""add_scale_norm: a norm after every residual addition of anybody's model, or a refusal."""

from __future__ import annotations

import pytest
import torch
from private_step import assert_private_step_is_exact
from torch import Tensor, nn
from torch.nn import functional as F
from users_models import ConvNextLike, MobileNetLike, VitLike

import sfumato
from sfumato.errors import ModelError
from sfumato.models import add_scale_norm

# PyTorch has no batching rule for attention on the CPU; the fallback is exact, only slower.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("resnet9", {"width": 8, "groups": 4}, 16),
        ("wrn_16_4", {"width": 1, "groups": 8}, 16),
        ("resnet18", {"width": 8, "groups": 4}, 64),
        ("resnet50", {"width": 8, "groups": 4}, 64),
        ("efficientnet_b0", {"width": 0.25}, 64),
        ("smoothnet_residual", {"width": 8, "depth": 2}, 16),
    ],
)
def test_on_the_zoo_it_gives_what_the_scale_form_is(name: str, options: dict[str, object], size: int) -> None:
    """The same weights in the same places give the same scores as the family's own scale_ form."""
    torch.manual_seed(0)
    plain = sfumato.create_model(name, num_classes=5, **options)
    mine = sfumato.create_model(f"scale_{name}", num_classes=5, **options)
    x = torch.randn(2, 3, size, size)
    groups = {"groups": options.get("groups", 8)}
    found, changes = add_scale_norm(plain, x, **groups)
    norms = [module for key, module in mine.named_modules() if "scale_norm" in key.rpartition(".")[-1]]
    assert len(changes) == len([norm for norm in norms if isinstance(norm, nn.GroupNorm)])
    mine.load_state_dict(
        {k: v for k, v in found.state_dict().items() if "scale_norm_" not in k}, strict=False
    )
    with torch.no_grad():
        torch.testing.assert_close(found(x), mine(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found(x), plain(x), atol=1e-3)


def test_what_it_gives_takes_exact_private_steps() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    for model, additions in ((ConvNextLike(), 2), (VitLike(), 3)):
        scaled, changes = add_scale_norm(model, x, groups=4)
        assert len(changes) == additions
        assert_private_step_is_exact(scaled, x)


def test_tokens_get_a_layer_norm_and_positions_are_no_residual() -> None:
    scaled, changes = add_scale_norm(VitLike(), torch.randn(2, 3, 8, 8))
    norms = [scaled.get_submodule(change.layer) for change in changes]
    assert all(isinstance(norm, nn.LayerNorm) for norm in norms)
    # The fourth and last sum goes straight into the model's own norm.
    assert [change.note for change in changes] == ["in blocks.0", "in blocks.0", "in blocks.1"]


def test_the_sums_have_deviation_one_afterwards() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 32, 32)
    scaled, changes = add_scale_norm(MobileNetLike(), x, groups=4)
    assert len(changes) == 2
    seen: list[tuple[Tensor, Tensor]] = []
    for change in changes:
        layer = scaled.get_submodule(change.layer)
        layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    scaled(x)
    for before, after in seen:
        assert after.std().item() == pytest.approx(1, abs=0.02)
        assert before.std().item() != pytest.approx(1, abs=0.02)


def test_sums_that_are_normalised_already_are_left_alone() -> None:
    model = sfumato.create_model("scale_resnet9", num_classes=3, width=8)
    with pytest.raises(ModelError, match="additions-not-found"):
        add_scale_norm(model, torch.randn(2, 3, 16, 16))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def branch(self, x: Tensor) -> Tensor:
        return self.conv(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.branch(x)
        h += x
        return h


class ThreeTerms(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.branch(x)).add(torch.relu(x))


class DataDependent(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) if x.sum() > 0 else x


class ModeDependent(Block):
    def branch(self, x: Tensor) -> Tensor:
        return F.dropout(self.conv(x), 0.5, training=self.training)


class DropPath(nn.Module):
    """Stochastic depth as timm has it: by example, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.bernoulli(torch.full((x.shape[0], 1, 1, 1), 0.5))


class StochasticDepth(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop_path = DropPath()

    def branch(self, x: Tensor) -> Tensor:
        return self.drop_path(self.conv(x))


@pytest.mark.parametrize("kind", [Block, InPlace, ThreeTerms, StochasticDepth])
def test_additions_are_found_however_they_are_written(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = kind().eval()
    scaled, changes = add_scale_norm(model, x, groups=2)
    assert len(changes) == 1
    with torch.no_grad():
        torch.testing.assert_close(scaled(x), F.group_norm(model(x), 2))
        assert not torch.allclose(scaled(x), model(x), atol=1e-3)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (DataDependent(), "cannot be traced"),
        (ModeDependent(), "another way in training"),
        (nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), "no residual addition"),
        (nn.TransformerEncoderLayer(4, 2, batch_first=True), "cannot be traced"),
        (sfumato.create_model("densenet121", num_classes=3, in_channels=4, growth=4), "no residual addition"),
    ],
    ids=["data", "mode", "plain", "transformer", "dense"],
)
def test_it_refuses_where_the_additions_are_out_of_sight(model: nn.Module, reason: str) -> None:
    x = torch.randn(2, 4, 4) if isinstance(model, nn.TransformerEncoderLayer) else torch.randn(2, 4, 32, 32)
    with pytest.raises(ModelError, match=reason):
        add_scale_norm(model, x)


def test_the_original_is_left_as_it_was() -> None:
    model = Block().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    scaled, _ = add_scale_norm(model, torch.randn(2, 4, 6, 6))
    assert scaled.training
    assert set(model.state_dict()) == set(state)
    assert scaled.conv is not model.conv
