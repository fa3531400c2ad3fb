"""Ranges as people write them: read exactly, or refused with a code."""

from __future__ import annotations

import pytest

from sfumato.errors import SfumatoError
from sfumato.recipes.recipe import load_recipe
from sfumato.tune.ranges import SPACES, parse_range, parse_ranges
from small_runs import small_recipe


@pytest.mark.parametrize(
    ("text", "kind", "ends"),
    [
        ("training.learning_rate=log:0.1:10", "log", (0.1, 10.0)),
        ("training.num_epochs=lin:1:3.5", "lin", (1.0, 3.5)),
        ("training.num_steps=int:50:200", "int", (50, 200)),
        ("training.learning_rate=log:1:8:4", "choices", (1.0, 2.0, 4.0, 8.0)),
        ("training.num_steps=lin:250:1000:4", "choices", (250, 500, 750, 1000)),
        ("model.options.groups=1,16,32", "choices", (1, 16, 32)),
        ("training.optimizer=SGD,NAdam", "choices", ("SGD", "NAdam")),
        ("augmentation.flip=true,false", "choices", (True, False)),
    ],
)
def test_a_range_is_what_it_says(text: str, kind: str, ends: tuple[object, ...]) -> None:
    found = parse_range(text)
    assert (found.kind, found.ends) == (kind, ends)
    assert [type(value) for value in found.ends] == [type(value) for value in ends]
    found.distribution()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("training.learning_rate", "bad-range"),
        ("learning_rate=log:1:2", "bad-range"),
        ("training.learning_rate=log:0:2", "bad-range"),
        ("training.learning_rate=log:2:1", "bad-range"),
        ("training.learning_rate=log:1:inf", "bad-range"),
        ("training.learning_rate=log:1", "bad-range"),
        ("training.learning_rate=log:1:2:1", "bad-range"),
        ("training.num_steps=int:1.5:9", "bad-range"),
        ("training.learning_rate=3", "bad-range"),
        ("training.learning_rat=log:1:2", "unknown-key"),
        ("training.num_steps=log:1.5:9", "bad-value"),
        ("training.num_steps=0,5", "bad-value"),
        ("training.optimizer=SGD,5", "bad-value"),
        ("privacy.epsilon=lin:1:2", "not-tunable"),
        ("privacy.noise_multiplier=lin:1:2", "not-tunable"),
        ("privacy.delta=log:1e-6:1e-5", "not-tunable"),
        ("data.holdout=lin:0.1:0.2", "not-tunable"),
        ("training.seed=int:1:9", "not-tunable"),
        ("features.mean_noise_multiplier=lin:1:9", "not-tunable"),
    ],
)
def test_what_is_no_range_of_a_setting_is_refused(text: str, code: str) -> None:
    with pytest.raises(SfumatoError) as refused:
        parse_ranges([text], [], small_recipe())
    assert refused.value.code == code


def test_nothing_to_search_over_is_refused_and_so_are_steps_beside_epochs() -> None:
    with pytest.raises(SfumatoError, match="nothing-to-tune"):
        parse_ranges([], [], small_recipe())
    both = ["training.num_steps=int:1:9", "training.num_epochs=lin:1:9"]
    with pytest.raises(SfumatoError, match="steps-and-epochs"):
        parse_ranges(both, [], small_recipe())


@pytest.mark.parametrize(
    ("space", "recipe"),
    [
        ("de2022", "de2022/cifar10-wrn16-4-eps8"),
        ("scalenorm2022", "scalenorm2022/cifar10-resnet9-scale-eps7.42"),
        ("smoothnets2022", "de2022/cifar10-wrn16-4-eps8"),
    ],
)
def test_the_papers_ranges_fit_recipes_and_ones_own_replace_them(space: str, recipe: str) -> None:
    from sfumato.recipes.recipe import list_recipes

    name = recipe if recipe in list_recipes() else "de2022/cifar10-wrn16-4-eps8"
    ranges = parse_ranges([], [space], load_recipe(name))
    assert [f"{one.key}={one.text}" for one in ranges] == list(SPACES[space])
    own = f"{ranges[0].key}=1,2"
    assert parse_ranges([own], [space], load_recipe(name))[0].choices == (1, 2)
