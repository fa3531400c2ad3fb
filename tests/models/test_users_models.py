"""Models that users bring: ConvNeXt-, ViT- and MobileNet-like ones take exact private steps."""

from __future__ import annotations

import pytest
import torch
from private_step import assert_private_step_is_exact, changes_with_another_example
from torch import nn
from users_models import (
    ConvNextLike,
    FoldedVit,
    MobileNetLike,
    TiedNet,
    TorchAttention,
    VectorNorm,
    VitLike,
)

import sfumato

# PyTorch has no batching rule for attention on the CPU; the fallback is exact, only slower.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.mark.parametrize(
    "build",
    [
        ConvNextLike,
        VitLike,
        lambda: VitLike(attention=TorchAttention),
        lambda: sfumato.make_private_ready(MobileNetLike())[0],
        lambda: sfumato.make_private_ready(TiedNet())[0],
        FoldedVit,
        lambda: sfumato.make_private_ready(VectorNorm())[0],
    ],
    ids=["ConvNeXt", "ViT", "ViT-MultiheadAttention", "MobileNet", "tied", "MobileViT", "vectors"],
)
def test_users_models_take_exact_private_steps(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs = build(), torch.randn(4, 3, 8, 8)
    assert_private_step_is_exact(model, inputs)
    assert not changes_with_another_example(model, inputs.double())


@pytest.mark.parametrize("trained", ["head", "norm"])
def test_a_part_of_a_model_can_be_trained(trained: str) -> None:
    torch.manual_seed(0)
    model = VitLike()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    assert_private_step_is_exact(model, torch.randn(4, 3, 8, 8))


@pytest.mark.parametrize(
    "build",
    [
        ConvNextLike,
        VitLike,
        lambda: VitLike(attention=TorchAttention),
        lambda: sfumato.make_private_ready(MobileNetLike())[0],
        FoldedVit,
        lambda: sfumato.make_private_ready(VectorNorm())[0],
    ],
    ids=["ConvNeXt", "ViT", "ViT-MultiheadAttention", "MobileNet", "MobileViT", "vectors"],
)
def test_users_models_are_not_refused_without_need(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert sfumato.doctor.check_model(build(), torch.randn(2, 3, 8, 8)) == []
    with pytest.raises(sfumato.PrivacyError, match="mixes-examples"):
        sfumato.doctor.check_model(MobileNetLike(), torch.randn(2, 3, 8, 8))
