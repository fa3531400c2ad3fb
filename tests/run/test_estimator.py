"""scikit-learn habits: an estimator among others, and no fit that spends unseen."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn.base import clone
from sklearn.exceptions import FitFailedWarning, NotFittedError
from sklearn.model_selection import cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

import sfumato
from sfumato.errors import DataError, PrivacyError
from sfumato.ledger.ledger import Ledger
from sfumato.run import prepare as preparing
from small_runs import small_set

QUICK = {
    "model.options": {"width": 4, "groups": 2},
    "data.image_size": None,
    "training.num_steps": 2,
    "training.learning_rate": 1.0,
    "privacy.sampling": "full",
}
# The others fit rows of random features, which are no images, or fit twice, which spends twice; what they ask
# for (labels in predictions, unfitted estimators, wrong shapes) is asked below, of images.
SENSIBLE = (
    "check_estimator_cloneable",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_estimator_repr",
    "check_no_attributes_set_in_init",
    "check_mixin_order",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setattr(preparing, "check_model", lambda *_, **__: [])  # takes seconds; tested elsewhere


def estimator(**changes: object) -> sfumato.PrivateImageClassifier:
    given = {"epsilon": 8.0, "recipe": "default/folder", "delta": 1e-3, "settings": QUICK}
    return sfumato.PrivateImageClassifier(**{**given, **changes})


def shades(count: int = 48, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    data = small_set(count, seed=seed)
    return data.images[:, 0].numpy(), np.array(data.classes)[data.labels.numpy()]


def num_runs(tmp_path: Path, name: str = "array") -> int:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        return len(ledger.records_named(name))


@pytest.mark.parametrize("name", SENSIBLE)
def test_the_checks_of_scikit_learn_that_make_sense_for_images_pass(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(estimator_checks, name)("PrivateImageClassifier", sfumato.PrivateImageClassifier())


def test_a_fit_is_an_entry_in_the_ledger_and_says_what_it_guarantees(tmp_path: Path) -> None:
    X, y = shades()
    fitted = estimator(out=tmp_path / "run", name="ward 7").fit(X, y, groups=np.arange(len(y)) // 2)
    assert num_runs(tmp_path, "ward 7") == 1
    assert fitted.privacy_["unit"] == "patient"
    assert fitted.privacy_["num_examples"] == 24
    assert 7 < fitted.privacy_["epsilon"] <= 8
    assert fitted.classes_.tolist() == ["bright", "dark", "middle"]
    shares = fitted.predict_proba(X)
    assert np.allclose(shares.sum(1), 1)
    assert (fitted.predict(X) == fitted.classes_[shares.argmax(1)]).all()
    assert (tmp_path / "run" / "release" / "privacy.json").is_file()


def test_a_second_fit_on_some_of_the_images_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    X, y = shades()
    first = estimator(random_state=None).fit(X, y)
    with pytest.raises(PrivacyError, match="repeated-fits"):
        clone(first).fit(X[:30], y[:30])
    for pixels, limits in ((X, (10, 200)), (X / 255, (0.1, 0.9)), (X.astype(float), (0, 300))):
        with pytest.raises(
            PrivacyError, match="repeated-fits"
        ):  # rendered otherwise, they are the same images
            clone(first).set_params(pixel_range=limits).fit(pixels, y)
    assert num_runs(tmp_path) == 1
    assert not first.privacy_["uncounted_search"]
    estimator().fit(*shades(seed=9))  # other images
    clone(first).set_params(allow_repeated_fits=True).fit(X[:30], y[:30])
    assert num_runs(tmp_path) == 3


def test_cross_validation_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    X, y = shades()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitFailedWarning)
        with pytest.raises(ValueError, match="repeated-fits"):
            cross_val_score(estimator(), X, y, cv=2)
    assert num_runs(tmp_path) == 0
    more = {"params": {"groups": np.arange(len(y)) // 2}, "return_estimator": True}
    found = cross_validate(estimator(allow_repeated_fits=True), X, y, cv=2, **more)
    assert np.isfinite(found["test_score"]).all()
    for fitted in found["estimator"]:  # who takes the best of them learns that ε leaves the choice out
        assert fitted.privacy_["uncounted_search"]
        assert fitted.privacy_["unit"] == "patient"
        assert "does NOT count that search" in fitted.privacy_["statement"]
    assert num_runs(tmp_path) == 2  # each of them counted


def test_it_works_in_a_pipeline_on_rows_of_pixels(tmp_path: Path) -> None:
    X, y = shades()
    rows = X.reshape(len(X), -1).astype(float)
    last = estimator(image_shape=(8, 8), classes=["dark", "middle", "bright"])
    fitted = make_pipeline(FunctionTransformer(lambda pixels: pixels / 255), last).fit(rows, y)
    assert fitted.predict(rows).shape == y.shape
    assert last.classes_.tolist() == ["dark", "middle", "bright"]
    assert 0 <= fitted.score(rows, y) <= 1


def test_bad_input_is_refused_with_a_code_and_nothing_is_spent(tmp_path: Path) -> None:
    X, y = shades()
    for wrong, labels, settings in (
        (X[:, :5], y, {}),
        (X.reshape(len(X), -1), y, {}),
        (X * 1.0, y, {}),  # floats up to 255 are no shares
        (X, y[:-1], {}),
        (X, y, {"classes": ["dark", "bright"]}),
        (X, np.full(len(X), "dark"), {}),
    ):
        with pytest.raises(DataError):
            estimator(**settings).fit(wrong, labels)
    with pytest.raises(DataError):
        estimator().fit(X, y, groups=["one"])
    with pytest.raises(NotFittedError):
        estimator().predict(X)
    assert num_runs(tmp_path) == 0
