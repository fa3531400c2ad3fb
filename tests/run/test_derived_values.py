"""No single unit decides anything that is published: whatever it is, all but the weights stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data import DataSplits
from sfumato.data.readers import folder as folder_reader
from sfumato.errors import DataError, PrivacyError
from sfumato.ledger.receipt import plan_values
from sfumato.recipes.recipe import Recipe, recipe_to_toml, with_settings
from sfumato.run import prepare as preparing
from sfumato.run import resolve as resolving
from sfumato.run.filing import History
from sfumato.run.prepare import Prepared, prepare
from sfumato.run.publish import model_config, stated_privacy
from sfumato.run.session import train

CLASSES = ("normal", "pneumonia")
NUM_UNITS = 24


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setattr(
        preparing, "check_model", lambda *_, **__: []
    )  # takes seconds, and sees no private image


@pytest.fixture
def folder(tmp_path) -> Path:
    """Grey images of 16 pixels, two of each of 12 patients, whose names end with their number."""
    random = np.random.default_rng(0)
    for number in range(NUM_UNITS):
        place = tmp_path / "scans" / "train" / CLASSES[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (16, 16), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"P{number // 2}_{number}.png")
    return tmp_path / "scans"


def recipe_for(folder: Path, **changes: object) -> Recipe:
    settings = {
        "data.name": str(folder),
        "model.name": "scale_resnet9",
        "model.options": {"width": 4, "groups": 2},
        "privacy.noise_multiplier": 1.0,  # a budget would be searched for, for seconds
        "privacy.sampling": "full",  # and this one is accounted in closed form
        "training.num_epochs": 1.0,
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return with_settings(Recipe(), settings)


def history_of(prepared: Prepared) -> History:
    """What a ledger knows of the data's content must not be published either."""
    return History(run_id="0", named=(), related=(), fingerprint=prepared.splits.train.fingerprint)


def published(recipe: Recipe) -> dict[str, object]:
    """All that a run on this data would publish or write beside it, but for the weights."""
    prepared = prepare(recipe)
    return {
        "config": model_config(prepared, prepared.decision),
        "privacy": stated_privacy(prepared, num_steps=prepared.num_steps, history=history_of(prepared)),
        "plan": plan_values(prepared.plan),
        "recipe": recipe_to_toml(prepared.recipe),
        "resolved": prepared.resolved.document(),
        "rows": prepared.max_rows,
    }


def save(pixels: np.ndarray, place: Path, name: str = "P0_0.png") -> None:
    Image.fromarray(pixels).save(place / name)


def pixels(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 255, shape, dtype=dtype)


# Each takes the place of an ordinary image of the class "normal".
ODD: dict[str, Callable[[Path], None]] = {
    "colour, 20 pixels": lambda place: save(pixels(20, 20, 3), place),
    "transparent": lambda place: save(pixels(16, 16, 4), place),
    "grey with transparency": lambda place: Image.new("LA", (16, 16), (9, 100)).save(place / "P0_0.png"),
    "16 bit": lambda place: save(pixels(16, 16, dtype=np.uint16), place),
    "one bit": lambda place: Image.new("1", (16, 16)).save(place / "P0_0.png"),
    "palette": lambda place: Image.new("P", (16, 16)).save(place / "P0_0.png"),
    "one pixel": lambda place: save(pixels(1, 1), place),
    "huge": lambda place: save(pixels(3000, 2), place),
    "all white": lambda place: save(np.full((16, 16), 255, np.uint8), place),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_image_in_the_place_of_another_changes_nothing_that_is_published(folder, odd):
    recipe = recipe_for(folder)
    before = published(recipe)
    ODD[odd](folder / "train" / "normal")
    assert published(recipe) == before


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_image_more_changes_the_number_of_units_and_what_follows_from_it_alone(folder, odd):
    recipe = recipe_for(folder)
    place = folder / "train" / "normal"
    save(pixels(16, 16), place, "P9_99.png")
    ordinary = published(recipe)
    (place / "P9_99.png").unlink()
    without = published(recipe)
    place_it = folder / "train" / "normal" / "more"
    place_it.mkdir()
    ODD[odd](place_it)
    assert published(recipe) == ordinary
    assert ordinary["config"] == without["config"]
    assert ordinary["privacy"]["num_examples"] == without["privacy"]["num_examples"] + 1 == NUM_UNITS + 1


def test_a_patient_with_many_images_changes_nothing_that_is_published(folder):
    recipe = recipe_for(folder, data__patient_from=r"(P\d+)_", privacy__unit="patient")
    before = published(recipe)
    for number in range(40):
        save(pixels(16 + number, 16), folder / "train" / "normal", f"P3_{100 + number}.png")
    assert published(recipe) == before
    assert published(with_settings(recipe, {"privacy.max_images_per_patient": 5})) != before  # a setting may


def test_a_class_of_a_single_unit_is_refused_or_declared_beforehand(folder):
    (folder / "train" / "covid").mkdir()
    save(pixels(16, 16), folder / "train" / "covid", "P12_24.png")
    with pytest.raises(PrivacyError) as caught:
        published(recipe_for(folder))
    assert caught.value.code == "void-guarantee"
    assert "single image" in caught.value.what
    with pytest.raises(DataError, match="label-out-of-range"):
        published(recipe_for(folder, data__classes=CLASSES))
    declared = recipe_for(folder, data__classes=("normal", "covid", "pneumonia"))
    with_it = published(declared)
    (folder / "train" / "covid" / "P12_24.png").rename(folder / "train" / "normal" / "P12_24.png")
    assert published(declared) == with_it  # the class stands, whoever has it
    assert with_it["config"]["classes"] == ["normal", "covid", "pneumonia"]


def test_fixed_features_follow_the_settings_and_the_number_of_units_alone(folder, monkeypatch):
    monkeypatch.setattr("sfumato.run.first_network.fit_extractor", lambda *_, **__: None)
    monkeypatch.setattr(preparing, "feature_views", lambda *_, **__: None)
    changes = {"model__name": "scatter", "model__options": {}}
    changes |= {"training__num_epochs": None, "features__num_images": 50}
    changes |= {"privacy__noise_multiplier": None, "privacy__epsilon": 8.0}
    recipe = recipe_for(folder, **changes)
    before = published(recipe)
    assert "image_size = 64" in before["recipe"]
    ODD["colour, 20 pixels"](folder / "train" / "normal")
    assert published(recipe) == before


def test_a_whole_run_writes_the_same_files_but_for_weights_and_what_is_sensitive(
    folder, tmp_path, monkeypatch
):
    def files(out: Path) -> dict[str, object]:
        smaller = {"data__image_size": 16, "training__num_epochs": 0.25, "privacy__sampling": "poisson"}
        monkeypatch.setenv(
            "SFUMATO_LEDGER", str(out.with_suffix(".sqlite"))
        )  # neither run comes after the other
        train(recipe_for(folder, **smaller), out=out)
        found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        public = [path for path in found if not path.startswith("state/") and path.endswith((".json", ".md"))]
        run_id = json.loads((out / "release/privacy.json").read_text())["filing"]["run_id"]  # a random number
        texts = {path: (out / path).read_text().replace(run_id, "RUN") for path in public}
        environment = json.loads(texts.pop("environment.json"))
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for varying in (
            "seconds",
            "total_seconds",
            "num_threads",
        ):  # by the clock and how busy the machine is
            del environment[varying]
        return {"found": found, "texts": texts, "environment": environment, "metrics": lines}

    before = files(tmp_path / "a")
    ODD["colour, 20 pixels"](folder / "train" / "normal")
    assert files(tmp_path / "b") == before
    assert "release/config.json" in before["texts"]


def sizes_of_the_images(monkeypatch) -> None:
    """The dependence that was there: the size and colour that all files share, else a default."""
    original = folder_reader.load_folder

    def load_folder(place: Path, **options: object) -> DataSplits:
        headers = folder_reader.read_headers(sorted(place.rglob("*.png")))
        sizes = {(header.width, header.height) for header in headers}
        options["image_size"] = next(iter(sizes))[0] if len(sizes) == 1 else 64
        options["channels"] = 1 if all(header.grey for header in headers) else 3
        return original(place, **options)

    monkeypatch.setattr("sfumato.data.loading.load_folder", load_folder)


def rows_of_the_longest(monkeypatch) -> None:
    """A performance setting that follows the patient with the most images."""
    monkeypatch.setattr(preparing, "fitting_rows", lambda _, train, *__: int(train.images.shape[0]))


def mean_of_the_images(monkeypatch) -> None:
    """Normalisation constants out of the private images."""

    def own(_network: object, images: object, _beginning: object) -> tuple[tuple[float], tuple[float]]:
        return (float(images.images.float().mean() / 255),), (0.25,)

    monkeypatch.setattr(resolving, "normalisation", own)


@pytest.mark.parametrize(
    ("plant", "odd"),
    [
        (sizes_of_the_images, "colour, 20 pixels"),
        (sizes_of_the_images, "one pixel"),
        (mean_of_the_images, "all white"),
    ],
)
def test_the_comparison_finds_a_planted_dependence(folder, monkeypatch, plant, odd):
    plant(monkeypatch)
    recipe = recipe_for(folder)
    before = published(recipe)
    ODD[odd](folder / "train" / "normal")
    assert published(recipe) != before


def test_the_comparison_finds_rows_that_follow_the_longest_patient(folder, monkeypatch):
    rows_of_the_longest(monkeypatch)
    recipe = recipe_for(folder, data__patient_from=r"(P\d+)_", privacy__unit="patient")
    before = published(recipe)
    save(pixels(16, 16), folder / "train" / "normal", "P3_100.png")
    assert published(recipe) != before


def test_the_holdout_moves_nobody_else(folder):
    """Whether a unit is set aside depends on that unit alone."""
    recipe = recipe_for(folder, data__holdout=0.3)
    before = prepare(recipe).splits
    save(pixels(40, 40, 3), folder / "train" / "normal", "P9_99.png")
    after = prepare(recipe).splits
    for part in ("train", "val"):
        old, new = getattr(before, part).content_ids, getattr(after, part).content_ids
        assert torch.isin(old, new).all()
    assert len(after.train) + len(after.val) == NUM_UNITS + 1
