"""scikit-learn habits: ``PrivateImageClassifier(epsilon=3).fit(X, y, groups=patients)``.

Every ``fit`` is a private training and an entry in the ledger. scikit-learn's searches fit many times over,
which spends many times over: they are refused unless ``allow_repeated_fits=True`` says that this is meant.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import torch

from sfumato.data import DataSplits, ImageSet
from sfumato.data.counting import Counted
from sfumato.data.fingerprint import raw_ids
from sfumato.data.images import Unit
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.ledger.ledger import Ledger
from sfumato.ledger.links import one_spelling
from sfumato.recipes.recipe import Recipe, load_recipe, with_settings
from sfumato.release.release import ReleasedModel, load
from sfumato.run.advice import advise, facts_of
from sfumato.run.session import train

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.validation import check_is_fitted
except ModuleNotFoundError as missing:
    raise ConfigError(
        "sklearn-not-installed",
        "PrivateImageClassifier is an estimator of scikit-learn, which is missing.",
        fix="pip install 'sfumato[sklearn]'",
    ) from missing

_SEARCHES = "sklearn.model_selection"


class PrivateImageClassifier(ClassifierMixin, BaseEstimator):
    """An image classifier trained under differential privacy, as a scikit-learn estimator.

    ``X`` are images, (n, H, W) or (n, H, W, channels): whole numbers from 0 to 255, or floats from 0 to 1; or
    rows of pixels, (n, features), with ``image_shape``. ``pixel_range`` is another range, a public constant:
    values outside are clipped to it. ``groups`` says whose image each one is, and makes the patient the unit.
    ``classes`` declares the labels; without them those of ``y`` are taken to be public, as the names of a
    folder are, and a class of a single unit is refused. ``recipe`` None lets ``sfumato advise`` choose;
    ``settings`` are those of ``--set``. ``random_state`` makes a fit reproducible, and therefore not
    releasable. ``out`` keeps the run's folder. ``name`` is what
    the ledger and the release call the data.

    Guarantee: as ``sfumato.train``. A fit on images of which the ledger holds private runs is refused, and
    so is a fit by one of scikit-learn's searches, unless ``allow_repeated_fits`` is true; the statement of a
    model fitted by a search says that ε leaves the search out. Images are known by ``X`` as it is given,
    before ``pixel_range``. Another image of a patient in an earlier fit is not refused; caps and totals of
    the ledger count it by its name in ``groups``.
    """

    def __init__(
        self,
        epsilon: float = 3.0,
        *,
        recipe: str | None = None,
        delta: float | None = None,
        classes: Sequence[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        image_shape: tuple[int, ...] | None = None,
        pixel_range: tuple[float, float] | None = None,
        random_state: int | None = None,
        allow_repeated_fits: bool = False,
        out: str | Path | None = None,
        name: str = "array",
    ) -> None:
        self.epsilon = epsilon
        self.recipe = recipe
        self.delta = delta
        self.classes = classes
        self.settings = settings
        self.image_shape = image_shape
        self.pixel_range = pixel_range
        self.random_state = random_state
        self.allow_repeated_fits = allow_repeated_fits
        self.out = out
        self.name = name

    def fit(self, X: Any, y: Any, groups: Any = None) -> PrivateImageClassifier:
        """Train privately; an entry in the ledger."""
        if not self.allow_repeated_fits and _called_by_search():
            raise _repeated("scikit-learn fits this estimator several times on overlapping images")
        images, content_ids = self._images(X), raw_ids(self._pixels(X))
        classes, labels = self._labels(y, len(images))
        names, patients = _numbered(groups, len(images))
        data = ImageSet(
            images, labels, tuple(map(str, classes.tolist())), patients, self.name, "", content_ids
        )
        splits = DataSplits(data, patient_names=names, classes_are_declared=self.classes is not None)
        with Ledger.open() as ledger:
            if not self.allow_repeated_fits:
                _check_first(ledger, data)
            with TemporaryDirectory() as temporary:
                place = Path(temporary) / "run" if self.out is None else Path(self.out)
                result = train(self._recipe(data), out=place, data=splits, ledger=ledger)
                self.model_: ReleasedModel = load(place)
        self.privacy_ = result.privacy
        self.classes_ = classes
        if np.ndim(X) == 2:
            self.n_features_in_ = np.shape(X)[1]
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (n, classes), in the order of ``classes_``."""
        check_is_fitted(self)
        return self.model_.logits(self._images(X)).softmax(1).double().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The classes, by the released threshold where there is one."""
        check_is_fitted(self)
        logits = self.model_.logits(self._images(X))
        return self.classes_[self.model_.decision.choose(logits).numpy()]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = self.image_shape is not None
        tags.input_tags.three_d_array = True
        tags.non_deterministic = True
        return tags

    def _recipe(self, data: ImageSet) -> Recipe:
        unit: Unit = "image" if data.patients is None else "patient"
        given = {
            "data.name": data.name,
            "privacy.epsilon": self.epsilon,
            "privacy.noise_multiplier": None,
            "privacy.unit": unit,
            **({} if self.delta is None else {"privacy.delta": self.delta}),
            **({} if self.random_state is None else {"training.seed": int(self.random_state)}),
            **(self.settings or {}),
        }
        if _called_by_search() and given.get("privacy.tuning_runs") is None:
            given["privacy.uncounted_search"] = True  # its scores choose among fits, and ε is of this one
        if self.recipe is not None:
            return with_settings(load_recipe(self.recipe), given)
        counted = Counted(num_units=data.num_units(unit), num_classes=len(data.classes))
        facts = facts_of(counted, unit=unit, epsilon=self.epsilon, minutes=None)
        advice = advise(facts)
        changes = advice.settings
        if "data.prevalence" in given:
            changes.pop("data.class_counts", None)
        return with_settings(load_recipe(advice.chosen.recipe), {**changes, **given})

    def _pixels(self, X: Any) -> np.ndarray:
        """(n, H, W, channels), with the values as they came."""
        pixels = np.asarray(X)
        if self.image_shape is not None and pixels.ndim == 2:
            pixels = pixels.reshape(len(pixels), *self.image_shape)
        if pixels.ndim == 3:
            pixels = pixels[..., None]
        square = pixels.ndim == 4 and pixels.shape[1] == pixels.shape[2] and pixels.shape[3] in (1, 3)
        if not square or pixels.dtype.kind not in "uif" or not len(pixels):
            raise DataError(
                "bad-array",
                f"X is {pixels.dtype} of shape {pixels.shape}.",
                why="Images are square: (n, side, side), or with 1 or 3 channels at the end.",
                fix="Resize them, or give image_shape for rows of pixels.",
            )
        return pixels

    def _images(self, X: Any) -> torch.Tensor:
        """uint8 (n, channels, H, W), whatever form the pixels came in."""
        pixels = self._pixels(X)
        low, high = self.pixel_range or ((0.0, 1.0) if pixels.dtype.kind == "f" else (0.0, 255.0))
        if self.pixel_range is None and not ((pixels >= low) & (pixels <= high)).all():
            raise DataError(
                "bad-array",
                f"X has values that are not between {low:g} and {high:g}.",
                why="How pixels are scaled may not depend on the images.",
                fix="Give pixel_range=(darkest, brightest): public constants, what is outside is clipped.",
            )
        scaled = (np.clip(np.nan_to_num(pixels, nan=low), low, high) - low) * (255 / (high - low))
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(scaled.round().astype(np.uint8), 3, 1)))

    def _labels(self, y: Any, count: int) -> tuple[np.ndarray, torch.Tensor]:
        given = np.asarray(y).ravel()
        if len(given) != count:
            raise DataError(
                "bad-array", f"there are {count} images and {len(given)} labels.", fix="Give one for each."
            )
        classes = np.unique(given) if self.classes is None else np.asarray(self.classes)
        order = np.argsort(classes, kind="stable")
        place = np.searchsorted(classes, given, sorter=order).clip(max=len(classes) - 1)
        labels = order[place]
        if len(classes) < 2 or not (classes[labels] == given).all():
            raise DataError(
                "other-classes",
                f"y does not hold the {len(classes)} classes that were declared, or only one.",
                fix="Declare every class once: classes=[…].",
            )
        return classes, torch.from_numpy(labels.astype(np.int64))


def _numbered(groups: Any, count: int) -> tuple[tuple[str, ...] | None, torch.Tensor | None]:
    """The patients' names, one spelling each, and the number of each image's; None without groups."""
    if groups is None:
        return None, None
    named = [one_spelling(str(name)) for name in np.asarray(groups).ravel().tolist()]
    if len(named) != count or not all(named):
        raise DataError(
            "bad-array", f"there are {count} images and {len(named)} groups.", fix="Give one for each."
        )
    names, numbers = np.unique(np.array(named), return_inverse=True)
    return tuple(names.tolist()), torch.from_numpy(numbers.astype(np.int64))


def _called_by_search() -> bool:
    """Whether cross-validation or a search of scikit-learn is calling, in this process."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_SEARCHES):
            return True
        frame = frame.f_back
    return False


def _check_first(ledger: Ledger, data: ImageSet) -> None:
    """Refuse images of which the ledger holds private runs."""
    shared = [known for known in ledger.datasets() if ledger.share_images(known, data.known_ids)]
    runs = {record.run_id for known in shared for record in ledger.records(known) if record.counted}
    if runs:
        raise _repeated(f"the ledger holds {len(runs)} private run(s) on some of these images")


def _repeated(what: str) -> PrivacyError:
    return PrivacyError(
        "repeated-fits",
        f"{what}.",
        why="Every fit spends ε of its own, and all of them add up for whoever is in several.",
        fix="Choose settings on public data; or PrivateImageClassifier(allow_repeated_fits=True).",
    )
