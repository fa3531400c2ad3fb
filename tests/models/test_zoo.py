"""Every model of the zoo: its count, one private step, no example dependence, a round trip of its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_step import assert_private_step_is_exact, changes_with_another_example
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sfumato
from sfumato.models import VARIANTS, Classifier, find_variant, list_models, summarise
from sfumato.models.sizes import SIZES

# The smallest options that keep every kind of layer of the family, and a size that leaves 2 x 2 pixels.
SMALLEST: dict[str, tuple[dict[str, object], int]] = {
    "ResNet9": ({"width": 4, "groups": 2}, 16),
    "WideResNet": ({"width": 1, "depth": 10, "groups": 4}, 8),
    "SmoothNet": ({"width": 4, "depth": 2, "groups": 2}, 8),
    "ResNet": ({"width": 4, "depths": (1, 2, 1, 1), "groups": 2}, 64),
    "DenseNet": ({"growth": 8, "depths": (2, 1, 1, 1), "groups": 2}, 64),
    "EfficientNet": ({"width": 0.25}, 64),
    "EfficientNetLite": ({"width": 0.25}, 64),
    "NfResNet": ({"width": 8, "depths": (1, 2, 1, 1), "groups": 2}, 64),
    "NfNet": ({"widths": (16, 16, 32, 32), "depths": (1, 2, 1, 1), "group_size": 4, "groups": 2}, 64),
    "LeNet": ({}, 28),
}


def smallest(name: str, *, in_channels: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    options, size = SMALLEST[find_variant(name).build.__name__]
    model = sfumato.create_model(name, num_classes=3, in_channels=in_channels, **options)
    return model, torch.randn(4, in_channels, size, size)


def count(name: str, *, num_classes: int, **options: object) -> int:
    with torch.device("meta"):
        model = sfumato.create_model(name, num_classes=num_classes, **options)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet9", {}, 2_447_946),
        ("scale_resnet9", {}, 2_448_714),
        ("wrn_16_4", {}, 2_753_818),
        ("wrn_16_4", {"skip": "bare"}, 2_752_506),
        ("wrn_40_4", {}, 8_961_306),
        ("wrn_28_10", {}, 36_500_378),
        ("smoothnet", {}, 3_391_853),
    ],
)
def test_counts_are_those_of_the_papers_to_the_last_parameter(
    name: str, options: dict[str, object], expected: int
) -> None:
    assert count(name, num_classes=10, **options) == expected
    assert count(name, num_classes=11, **options) != expected


@pytest.mark.parametrize(
    ("name", "num_classes", "millions"),
    [
        ("resnet18", 10, 11.2),
        ("resnet34", 10, 21.3),
        ("resnet50", 1000, 25.6),
        ("densenet121", 10, 7.0),
        ("efficientnet_b0", 10, 4.0),
        ("efficientnet_lite0", 1000, 4.65),
        ("efficientnet_lite1", 1000, 5.4),
        ("efficientnet_lite2", 1000, 6.1),
        ("nf_resnet50", 1000, 25.6),
        ("nfnet_f0", 1000, 71.5),
        ("nfnet_f3", 1000, 254.9),
    ],
)
def test_counts_are_the_published_ones_to_one_percent(name: str, num_classes: int, millions: float) -> None:
    assert count(name, num_classes=num_classes) == pytest.approx(1e6 * millions, rel=0.01)


def test_lenet_has_the_count_of_1998() -> None:
    assert count("lenet", num_classes=10, in_channels=1) == 61_706


@pytest.mark.parametrize("name", list_models())
def test_the_table_of_sizes_is_what_counting_gives(name: str) -> None:
    variant = VARIANTS[name]
    with torch.device("meta"):
        model = variant.build(num_classes=variant.num_classes, **variant.settings)
    summary = summarise(model, (3, variant.input_size, variant.input_size))
    assert SIZES[name] == (summary.num_parameters, summary.multiply_adds)


def test_scale_forms_have_a_norm_more_for_every_addition() -> None:
    """Two numbers per channel of each residual block's output, and nothing else."""
    extra = {
        "resnet9": 2 * (128 + 256),
        "wrn_16_4": 2 * 2 * (64 + 128 + 256),
        "resnet18": 2 * 2 * (64 + 128 + 256 + 512),
        "resnet50": 2 * (3 * 256 + 4 * 512 + 6 * 1024 + 3 * 2048),
        "nf_resnet50": 2 * (3 * 256 + 4 * 512 + 6 * 1024 + 3 * 2048),
        "nfnet_f0": 2 * (256 + 2 * 512 + 6 * 1536 + 3 * 1536),
        "efficientnet_b0": 2 * (24 + 40 + 2 * 80 + 2 * 112 + 3 * 192),
        "smoothnet_residual": 2 * 5 * (64 + 128),
    }
    for name, parameters in extra.items():
        classes = VARIANTS[name].num_classes
        found = count(f"scale_{name}", num_classes=classes) - count(name, num_classes=classes)
        assert found == parameters, name


@pytest.mark.parametrize("name", list_models())
def test_one_private_step_is_exact(name: str) -> None:
    assert_private_step_is_exact(*smallest(name))


@pytest.mark.parametrize("name", list_models())
def test_no_example_sees_another(name: str) -> None:
    model, inputs = smallest(name)
    assert not changes_with_another_example(model.double().train(), inputs.double())


def test_batch_norm_would_be_seen_to_mix_examples() -> None:
    options, size = SMALLEST["ResNet9"]
    model = sfumato.create_model("resnet9", num_classes=3, norm="batch", **options)
    assert changes_with_another_example(model.train(), torch.randn(4, 3, size, size))


@pytest.mark.parametrize("name", list_models())
def test_weights_survive_a_trip_through_safetensors(name: str, tmp_path: Path) -> None:
    model, inputs = smallest(name, in_channels=1)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.manual_seed(1)
    options, _ = SMALLEST[find_variant(name).build.__name__]
    other = sfumato.create_model(name, num_classes=3, in_channels=1, **options)
    with torch.no_grad():
        before = other(inputs)
        other.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(model(inputs), other(inputs))
        assert not torch.equal(model(inputs), before)


@pytest.mark.parametrize("name", list_models())
def test_scores_are_the_head_applied_to_the_features(name: str) -> None:
    model, inputs = smallest(name)
    assert isinstance(model, Classifier)
    with torch.no_grad():
        features = model.features(inputs)
        assert features.shape == (4, model.head.in_features)
        assert torch.equal(model(inputs), model.head(features))
        assert model(inputs).shape == (4, 3)
