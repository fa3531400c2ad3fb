"""The score of a trial: how many units the model gets right, with noise where the units are private."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from sfumato.accounting import SampledGaussian
from sfumato.data import ImageSet
from sfumato.noise import add_noise
from sfumato.privacy.search import Search
from sfumato.randomness import RandomSource, SeededSource
from sfumato.release.release import ReleasedModel
from sfumato.training.evaluation import logits_of
from sfumato.training.inputs import Units
from sfumato.training.private_counts import exact_counts

PURPOSE = "score of a trial"


def right_units(released: ReleasedModel, images: ImageSet, units: Units) -> float:
    """How many units are classified rightly, a unit of several images by its share: sensitive.

    Guarantee: one unit moves the result by at most 1, whatever its images are.
    """
    config, decision = released.config, released.decision
    logits = logits_of(released.model, images.images, mean=tuple(config["mean"]), std=tuple(config["std"]))
    right = decision.choose(decision.correct(logits)) == images.labels
    return float(exact_counts(right.long(), 2, units)[1])


def score_source(key: bytes, weights: Path) -> RandomSource:
    """Where the noise of a model's score comes from: a function of the search's secret and the model.

    Guarantee: the same model gets the same noise, also in a copy of the search's folder, so that no number of
    scores averages it away; of another model it is independent. Who has not ``key`` can foretell neither.
    """
    model = hashlib.sha256(weights.read_bytes()).digest()
    return SeededSource(int.from_bytes(hashlib.sha256(key + model).digest()))


def noisy_score(
    right: float, num_units: int, *, search: Search, noise_multiplier: float, source: RandomSource
) -> float:
    """The share of ``num_units`` that is right, with noise.

    Guarantee: refused unless the search counts a release with this noise. The noise has standard deviation
    ``noise_multiplier`` in units, and is drawn from ``source``.
    """
    search.check_score(SampledGaussian(noise_multiplier=noise_multiplier))
    total = {"right": torch.tensor([right], dtype=torch.float64)}
    noisy = add_noise(total, stddev=noise_multiplier, source=source, step=0, purpose=PURPOSE)
    return float(noisy["right"][0]) / num_units
