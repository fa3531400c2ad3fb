"""Names of the zoo: listing, suggestions, options."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.models import (
    VARIANTS,
    create_model,
    find_variant,
    list_feature_heads,
    list_models,
    weight_shapes,
)
from sfumato.models.options import LARGEST
from sfumato.models.sizes import SIZES


def test_wildcards_choose_among_all_names() -> None:
    assert list_models("wrn_*") == ["wrn_16_4", "wrn_28_10", "wrn_40_4"]
    assert list_models() == sorted(VARIANTS)
    assert list_models("nothing*") == []
    assert set(list_models("scale_*")) == {name for name in VARIANTS if name.startswith("scale_")}


def test_all_models_of_the_papers_are_there() -> None:
    wanted = (
        "resnet9 smoothnet resnet18 resnet34 resnet50 densenet121 efficientnet_b0 efficientnet_lite0 lenet"
    )
    wanted += " nf_resnet50 nf_resnet101 nf_resnet152 nf_resnet200 nfnet_f0 nfnet_f1 nfnet_f2 nfnet_f3"
    wanted += " scale_resnet9 scale_wrn_16_4 scale_resnet50 scale_nf_resnet50"
    assert set(wanted.split()) <= set(list_models())
    assert set(SIZES) == set(list_models())


def test_every_variant_says_where_it_comes_from_and_what_it_is() -> None:
    known = {"de2022", "scalenorm2022", "smoothnets2022"}
    for name, variant in VARIANTS.items():
        assert variant.summary, name
        assert set(variant.papers) <= known
        assert ("scalenorm2022" in variant.papers) or not name.startswith("scale_")


def test_the_table_in_the_docs_is_that_of_the_zoo() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    shown = {row[1].strip("`"): (row[2], row[3]) for row in rows if len(row) == 9}
    assert set(shown) == {name for name in list_models() if not name.startswith("scale_")}
    for name, (plain, scaled) in shown.items():
        assert plain == f"{SIZES[name][0]:,}"
        assert scaled == (f"{SIZES[f'scale_{name}'][0]:,}" if f"scale_{name}" in SIZES else "")


@pytest.mark.parametrize(
    ("wrong", "right"), [("wrn16_4", "wrn_16_4"), ("scale_resnet_9", "scale_resnet9"), ("lenet5", "lenet")]
)
def test_an_unknown_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown-model.*Did you mean {right}\?"):
        create_model(wrong, num_classes=10)


def test_a_model_that_cannot_fit_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(ConfigError, match="model-too-large"):
        create_model("resnet9", num_classes=10, width=2**16)
    with pytest.raises(ConfigError, match="model-too-large"):
        create_model("lenet", num_classes=10**12)


def test_sizing_a_model_draws_nothing() -> None:
    torch.manual_seed(0)
    first = create_model("resnet9", num_classes=3, width=8).state_dict()
    torch.manual_seed(0)
    plain = find_variant("resnet9").build(num_classes=3, in_channels=3, width=8).state_dict()
    assert all(torch.equal(first[name], value) for name, value in plain.items())
    other = find_variant("resnet9").build(num_classes=3, in_channels=3, width=8).state_dict()
    assert not all(torch.equal(first[name], value) for name, value in other.items())


def test_groups_that_were_asked_for_are_there_or_refused() -> None:
    with pytest.raises(ConfigError, match=r"bad-groups.*groups=3 does not divide the 64 channels"):
        create_model("resnet9", num_classes=10, groups=3)
    with pytest.raises(ConfigError, match="Use a divisor of 8"):
        create_model("resnet9", num_classes=10, width=8, groups=3)
    model = create_model("resnet9", num_classes=10, width=8, groups=4)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {4}
    create_model("resnet9", num_classes=10, groups=3, norm="layer")  # there the number is not used
    create_model("resnet9", num_classes=10, width=8)  # the default adapts to a width


def test_a_typo_in_an_option_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"unknown-model-option.*Did you mean groups\?"):
        create_model("resnet9", num_classes=10, group=16)
    with pytest.raises(ConfigError, match=r"bad-model-option.*Did you mean norm-act\?"):
        create_model("resnet9", num_classes=10, order="norm_act")


@pytest.mark.parametrize(
    ("name", "option", "wrong", "right"),
    [
        ("resnet9", "groups", "16", 16),
        ("resnet9", "groups", 0, 16),
        ("resnet9", "scale_norm", 1, True),
        ("resnet9", "norm", 3, "layer"),
        ("resnet18", "depths", [1, 1, 1], [1, 1, 1, 1]),
        ("resnet18", "depths", [1, 1, 1, 0], (1, 1, 1, 1)),
        ("nf_resnet50", "alpha", "0.2", 1),
    ],
)
def test_an_option_of_the_wrong_type_is_an_error(
    name: str, option: str, wrong: object, right: object
) -> None:
    with torch.device("meta"):
        with pytest.raises(ConfigError, match=f"bad-model-option.*{option}="):
            create_model(name, num_classes=10, **{option: wrong})
        create_model(name, num_classes=10, **{option: right})


@pytest.mark.parametrize("sizes", [{"num_classes": 0}, {"num_classes": 2, "in_channels": 0}])
def test_a_model_without_classes_or_channels_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="bad-model-size"):
        create_model("lenet", **sizes)


def test_wide_resnets_of_any_size_have_a_name() -> None:
    assert find_variant("wrn_22_2").settings == {"depth": 22, "width": 2}
    assert find_variant("scale_wrn_10_1").settings == {"depth": 10, "width": 1, "scale_norm": True}
    with pytest.raises(ConfigError, match="bad-wrn-size"):
        create_model("wrn_17_4", num_classes=10)


HOSTILE = {
    int: (0, 10**9, 10**30, 10**5000),
    float: (float("nan"), float("inf"), -1e300, 1e300, 10**400),
    tuple: ([10**9] * 4, [10**30] * 4, [1] * 10**6),
    str: ("x" * 10**6,),
}


def families() -> list[str]:
    """One name for each way of building a model."""
    names = [*VARIANTS, *list_feature_heads()]
    return list({find_variant(name).build: name for name in names}.values())


@pytest.mark.parametrize("name", families())
def test_no_option_of_any_family_takes_longer_than_a_moment_to_refuse(name: str) -> None:
    began = time.perf_counter()
    for option, default in find_variant(name).options().items():
        for value in () if isinstance(default, bool) else HOSTILE[type(default)]:
            with pytest.raises(ConfigError):
                weight_shapes(name, num_classes=10, **{option: value})
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("name", families())
def test_the_largest_options_that_pass_are_drafted_in_seconds(name: str) -> None:
    options = find_variant(name).options()
    largest = {key: limit for key, limit in LARGEST.items() if type(options.get(key)) is int}
    largest |= {"depths": [LARGEST["depths"]] * 4} if "depths" in options else {}
    largest |= {"depth": 10.0} if type(options.get("depth")) is float else {}
    largest |= {"pretrained": False} if "pretrained" in options else {}
    began = time.perf_counter()
    with contextlib.suppress(ConfigError):  # too large for the memory, or no such depth: refused in time
        weight_shapes(name, num_classes=10, **largest)
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize(
    "name", ["wrn_6000004_1", "scale_wrn_16_100000", "wrn_406_1", "wrn_16_0", "wrn_999999999_999999999"]
)
def test_a_wide_resnet_beyond_all_sizes_is_refused_before_it_is_drafted(name: str) -> None:
    began = time.perf_counter()
    for look_up in (find_variant, partial(create_model, num_classes=2)):
        with pytest.raises(ConfigError, match="bad-wrn-size"):
            look_up(name)
    with pytest.raises(ConfigError, match="unknown-model"):
        find_variant(f"wrn_16_{'9' * 10**6}")
    assert time.perf_counter() - began < 1
    assert find_variant("wrn_400_200").settings == {"depth": 400, "width": 200}  # the control: the largest


def test_the_shapes_of_a_draft_are_those_of_the_model() -> None:
    options = {"num_classes": 3, "in_channels": 1, "width": 8}
    model = create_model("resnet9", **options)
    assert weight_shapes("resnet9", **options) == {k: v.shape for k, v in model.state_dict().items()}
    assert weight_shapes("resnet9", **{**options, "width": 4}) != weight_shapes("resnet9", **options)


def test_options_show_what_the_name_stands_for() -> None:
    options = find_variant("scale_wrn_28_10").options()
    assert (options["depth"], options["width"], options["scale_norm"]) == (28, 10, True)
    assert find_variant("wrn_28_10").options()["scale_norm"] is False
