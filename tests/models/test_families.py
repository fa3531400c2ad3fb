"""What each family promises beyond its count: layout against a reference, signal at the start, options."""

from __future__ import annotations

import pytest
import torch
from private_step import assert_private_step_is_exact
from torch import Tensor, nn
from torch.nn import functional as F

import sfumato
from sfumato.errors import ConfigError, ModelError
from sfumato.layers import Scale, WSConv2d


def outputs_of(model: nn.Module, names: list[str], x: Tensor) -> list[Tensor]:
    seen: dict[str, Tensor] = {}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.detach()}))
    with torch.no_grad():
        model(x)
    return [seen[name] for name in names]


def test_scale_norm_returns_the_activations_to_mean_0_and_deviation_1() -> None:
    """Klause et al., figure 2: their sums without it had mean 0.72 and deviation 0.76."""
    torch.manual_seed(0)
    x = torch.randn(16, 3, 32, 32)
    names = ["scale_norm1", "scale_norm2"]
    for values in outputs_of(sfumato.create_model("scale_resnet9", num_classes=10), names, x):
        assert abs(values.mean().item()) < 0.02
        assert values.std().item() == pytest.approx(1, abs=0.02)
    for values in outputs_of(sfumato.create_model("resnet9", num_classes=10), names, x):
        assert values.mean().item() > 0.4


@pytest.mark.parametrize(("groups", "expected"), [(1, 1), (16, 16), (32, 32), (64, 64), (256, 256)])
def test_the_groups_of_resnet9_are_an_option(groups: int, expected: int) -> None:
    model = sfumato.create_model("resnet9", num_classes=10, groups=groups)
    counts = [module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert counts[-1] == expected
    assert counts[0] == min(expected, 64)


def test_the_order_of_resnet9_is_an_option() -> None:
    kinds = {}
    for order in ("norm-act", "act-norm"):
        model = sfumato.create_model("resnet9", num_classes=10, order=order)
        kinds[order] = [type(layer) for layer in model.stem[0]]
    assert kinds["norm-act"] == [nn.Conv2d, nn.GroupNorm, nn.Mish]
    assert kinds["act-norm"] == [nn.Conv2d, nn.Mish, nn.GroupNorm]


def wide_resnet_by_hand(
    state: dict[str, Tensor], x: Tensor, *, depth: int, groups: int, skips_norm_first: bool = False
) -> Tensor:
    """De et al.'s net from its description, on the bare tensors; with TAN's order of the skips if asked."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        w = state[f"{name}.weight"]
        flat = w.flatten(1)
        centred = flat - flat.mean(1, keepdim=True)
        unit = (centred / centred.norm(dim=1, keepdim=True)).reshape(w.shape)
        before, after = (0, 1) if stride == 2 and w.shape[-1] == 3 else 2 * (w.shape[-1] // 2,)
        padded = F.pad(x, (before, after, before, after))
        return F.conv2d(padded, unit * state[f"{name}.gain"], state[f"{name}.bias"], stride)

    def pre(name: str, x: Tensor) -> Tensor:
        return F.group_norm(F.relu(x), groups, state[f"{name}.weight"], state[f"{name}.bias"])

    def skip(block: str, x: Tensor, stride: int) -> Tensor:
        if not skips_norm_first:
            return conv(f"{block}.skip.2", pre(f"{block}.skip.1", x), stride)
        norm = F.group_norm(x, groups, state[f"{block}.skip.0.weight"], state[f"{block}.skip.0.bias"])
        return conv(f"{block}.skip.2", F.relu(norm), stride)

    x = conv("stem", x)
    per_stage = (depth - 4) // 6
    for index in range(3 * per_stage):
        first = index % per_stage == 0
        stride = 2 if first and index > 0 else 1
        block = f"blocks.{index}"
        h = conv(f"{block}.branch.2", pre(f"{block}.branch.1", x), stride)
        h = conv(f"{block}.branch.5", pre(f"{block}.branch.4", h))
        x = h + (skip(block, x, stride) if first else x)
    return pre("last.1", x).mean(dim=(2, 3)) @ state["head.weight"].T + state["head.bias"]


def test_the_wide_resnet_computes_what_the_paper_describes() -> None:
    torch.manual_seed(0)
    model = sfumato.create_model("wrn_16_2", num_classes=5).double()
    with torch.no_grad():
        for parameter in model.parameters():  # gains and biases away from 1 and 0
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
        expected = wide_resnet_by_hand(model.state_dict(), x, depth=16, groups=16)
        torch.testing.assert_close(model(x), expected)
        wrong = wide_resnet_by_hand(model.state_dict(), x, depth=16, groups=8)
        assert not torch.allclose(model(x), wrong, atol=1e-3)


def test_the_wide_resnet_with_the_skips_of_tan_computes_what_its_authors_describe() -> None:
    torch.manual_seed(0)
    model = sfumato.create_model("wrn_16_2", num_classes=3, skip_order="norm-act").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        expected = wide_resnet_by_hand(model.state_dict(), x, depth=16, groups=16, skips_norm_first=True)
        torch.testing.assert_close(model(x), expected)
        plain = sfumato.create_model("wrn_16_2", num_classes=3).double()
        weights = [value.clone() for value in model.parameters()]
        for parameter, value in zip(plain.parameters(), weights, strict=True):
            parameter.copy_(value)  # the same number of weights, in another order
        assert not torch.allclose(plain(x), expected, atol=1e-3)
    assert_private_step_is_exact(model, torch.randn(6, 3, 16, 16))


def test_an_order_for_skips_that_have_no_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither norm nor activation") as caught:
        sfumato.create_model("wrn_16_1", num_classes=3, groups=4, skip="bare", skip_order="norm-act")
    assert caught.value.code == "bad-model-option"


def test_the_skips_of_a_wide_resnet_have_an_order_of_their_own() -> None:
    model = sfumato.create_model("wrn_16_4", num_classes=10, skip_order="norm-act")
    assert [type(layer) for layer in model.blocks[0].skip] == [nn.GroupNorm, nn.ReLU, WSConv2d]
    assert [type(layer) for layer in model.blocks[0].branch][:3] == [nn.ReLU, nn.GroupNorm, WSConv2d]
    assert isinstance(model.blocks[1].skip, nn.Identity)


@pytest.mark.parametrize("norm", ["none", "group"])
def test_a_wide_resnet_without_weight_standardisation_is_plain(norm: str) -> None:
    """The first rows of De et al.'s table 2: no gains, and without norm no scales and shifts either."""
    torch.manual_seed(0)
    options = {"norm": norm, "groups": 4}
    plain = sfumato.create_model("wrn_10_1", num_classes=3, weight_standardisation=False, **options)
    full = sfumato.create_model("wrn_10_1", num_classes=3, **options)
    assert not any(isinstance(module, WSConv2d) for module in plain.modules())
    gains = sum(module.gain.numel() for module in full.modules() if isinstance(module, WSConv2d))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (full, plain)]
    assert sizes[0] - sizes[1] == gains > 0
    x = torch.randn(4, 3, 8, 8)
    assert plain(x).shape == full(x).shape
    assert_private_step_is_exact(plain, x)


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "efficientnet_b0"])
def test_the_weights_of_the_compared_nets_can_be_xaviers(name: str) -> None:
    small = {"resnet18": {"width": 8}, "densenet121": {"growth": 4}, "efficientnet_b0": {"width": 0.25}}[name]
    for scheme, expected in (("xavier", True), ("torch", False)):
        torch.manual_seed(0)
        model = sfumato.create_model(name, num_classes=3, initialisation=scheme, **small)
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        largest = max(convolutions, key=lambda module: module.weight.numel())
        fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(largest.weight)
        wanted = 2 / (fan_in + fan_out)
        assert (abs(largest.weight.var().item() / wanted - 1) < 0.1) is expected


def test_smoothnet_keeps_only_the_last_block_of_its_second_stage() -> None:
    model = sfumato.create_model("smoothnet", num_classes=10)
    x = torch.randn(1, 3, 32, 32)
    first, second = outputs_of(model, ["trunk.0", "trunk.3"], x)
    assert first.shape == (1, 323, 32, 32)
    assert second.shape == (1, 128, 16, 16)


@pytest.mark.parametrize("connection", ["dense", "residual", "none"])
@pytest.mark.parametrize("pooling", ["max", "average", "none"])
@pytest.mark.parametrize("norm", ["group", "layer", "instance", "none"])
def test_the_component_study_can_build_all_its_nets(connection: str, pooling: str, norm: str) -> None:
    settings = {"connection": connection, "pooling": pooling, "norm": norm, "activation": "relu"}
    model = sfumato.create_model("smoothnet", num_classes=3, width=4, depth=3, **settings)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 3)
    kinds = {type(module) for module in model.modules()}
    assert (nn.MaxPool2d in kinds) == (pooling == "max")
    assert (nn.GroupNorm in kinds) == (norm != "none")


def test_scale_norm_is_refused_where_nothing_is_added() -> None:
    with pytest.raises(ConfigError, match="no-addition"):
        sfumato.create_model("smoothnet", num_classes=3, scale_norm=True)
    with pytest.raises(ConfigError, match="bad-model-option"):
        sfumato.create_model("smoothnet", num_classes=3, depth=0)


def test_normalizer_free_nets_have_the_deviation_they_expect() -> None:
    """It starts at 1 in every stage and grows to √(1 + i·α²) over i blocks, without any norm layer."""
    torch.manual_seed(0)
    model = sfumato.create_model("nf_resnet50", num_classes=10, width=32)
    x = torch.randn(4, 3, 64, 64)
    blocks = [f"blocks.{index}" for index in range(len(model.blocks))]
    found = [values.std().item() for values in outputs_of(model, blocks, x)]
    expected = [(1 + 0.04 * (i + 1)) ** 0.5 for depth in (3, 4, 6, 3) for i in range(depth)]
    assert found == pytest.approx(expected, abs=0.1)
    unscaled = sfumato.create_model("nf_resnet50", num_classes=10, width=32)
    for block in unscaled.blocks:
        block.activation.factor = 1.0  # ReLU as it is
    assert [v.std().item() for v in outputs_of(unscaled, blocks, x)] != pytest.approx(expected, abs=0.1)


def test_skip_init_starts_at_one_and_is_an_option() -> None:
    model = sfumato.create_model("nf_resnet50", num_classes=10, width=8)
    assert {layer.scale.item() for layer in model.modules() if isinstance(layer, Scale)} == {1.0}
    quiet = sfumato.create_model("nf_resnet50", num_classes=10, width=8, skip_init=0.0)
    assert {layer.scale.item() for layer in quiet.modules() if isinstance(layer, Scale)} == {0.0}


def test_lenet_says_when_an_image_is_too_small() -> None:
    model = sfumato.create_model("lenet", num_classes=10, in_channels=1)
    assert model(torch.zeros(1, 1, 12, 12)).shape == (1, 10)
    with pytest.raises(ModelError, match="image-too-small"):
        model(torch.zeros(1, 1, 11, 11))


@pytest.mark.parametrize("name", ["resnet9", "wrn_16_4", "smoothnet"])
@pytest.mark.parametrize("size", [8, 28, 45])
def test_images_of_other_sizes_and_grey_ones_are_welcome(name: str, size: int) -> None:
    small = {"resnet9": {"width": 4}, "wrn_16_4": {"width": 1}, "smoothnet": {"width": 4, "depth": 2}}
    model = sfumato.create_model(name, num_classes=7, in_channels=1, **small[name])
    assert model(torch.randn(2, 1, size, size)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_the_cifar_stem_keeps_the_resolution(name: str) -> None:
    x = torch.randn(1, 3, 32, 32)
    for stem, size in (("cifar", 32), ("imagenet", 8)):
        model = sfumato.create_model(name, num_classes=10, stem=stem)
        (values,) = outputs_of(model, ["stem"], x)
        assert values.shape[-1] == size
