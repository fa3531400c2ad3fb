"""From a model's outputs to probabilities and a class.

A model trained where 74 % are ill says "ill" too often where half are. By Bayes' rule its log-odds are moved
by log(prevalence where it is used / prevalence that it was trained with), class by class: ``logit_shift``.
Nothing here looks at an image: what goes in is declared, or was released with noise that ε counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import ConfigError

Shares = tuple[float, ...]
MOST_WEIGHT = 1000.0  # of one class against another in the loss


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What ``release/config.json`` holds of it. Without values: the class of the largest output."""

    shift: Shares | None = None  # added to the logits
    temperature: float = 1.0  # the logits are divided by it
    threshold: float = 0.5  # of two classes: the positive one from this probability on
    positive: int = 1
    thresholds: Shares | None = None  # of several findings: each is called from its own on; None: one half

    def correct(self, logits: Tensor) -> Tensor:
        """Logits (N, classes) whose softmax is the probability of each class."""
        if self.shift is not None:
            logits = logits + torch.tensor(self.shift, dtype=logits.dtype, device=logits.device)
        return logits if self.temperature == 1 else logits / self.temperature

    def choose(self, corrected: Tensor) -> Tensor:
        """The class of each row of corrected logits."""
        if corrected.shape[1] != 2 or self.threshold == 0.5:
            return corrected.argmax(1)
        called = corrected.double().softmax(1)[:, self.positive] >= self.threshold
        return torch.where(called, self.positive, 1 - self.positive)

    def found(self, corrected: Tensor) -> Tensor:
        """Which findings each row of corrected logits (N, findings) is called, as booleans."""
        chances = corrected.double().sigmoid()
        cuts = (0.5,) * chances.shape[1] if self.thresholds is None else self.thresholds
        return chances >= torch.tensor(cuts, dtype=torch.float64, device=chances.device)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "shift": None if self.shift is None else list(self.shift),
            "temperature": self.temperature,
            "threshold": self.threshold,
            "positive": self.positive,
            **({} if self.thresholds is None else {"thresholds": list(self.thresholds)}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None, *, num_classes: int) -> Decision:
        """What ``as_dict`` wrote, its types checked before; ValueError if it does not fit the classes."""
        if values is None:  # a release of an earlier version
            return cls(positive=min(1, num_classes - 1))
        shift = values["shift"]
        if shift is not None and len(shift) != num_classes:
            raise ValueError(f"decision.shift has {len(shift)} values for {num_classes} classes")
        cuts = values.get("thresholds")
        if cuts is not None and len(cuts) != num_classes:
            raise ValueError(f"decision.thresholds has {len(cuts)} values for {num_classes} findings")
        if not 0 <= values["positive"] < num_classes:
            raise ValueError(
                f"decision.positive is {values['positive']}, and there are {num_classes} classes"
            )
        lists = {"shift": shift, "thresholds": cuts}
        return cls(**{**values, **{name: None if v is None else tuple(v) for name, v in lists.items()}})


def shares_of_findings(
    declared: float | Sequence[float] | None, *, num_findings: int, setting: str = "data.prevalence"
) -> Shares | None:
    """How frequent each finding is, declared for each; they need not sum to anything."""
    if declared is None:
        return None
    shares = [declared] if isinstance(declared, int | float) else list(declared)
    if len(shares) != num_findings or not all(0 < share < 1 for share in shares):
        raise ConfigError(
            "bad-prevalence",
            f"{setting} = {declared} for {num_findings} findings.",
            why="It has one share between 0 and 1 for each finding, in their order.",
            fix="Give a list such as [0.1, 0.02], or leave it out.",
        )
    return tuple(float(share) for share in shares)


def weighted_shares(shares: Shares, positive_weights: Sequence[float]) -> Shares:
    """The frequencies that a training sees which counts units with a finding so many times."""
    weights = list(positive_weights) or [1.0]
    weights = weights * len(shares) if len(weights) == 1 else weights
    return tuple(w * share / (w * share + 1 - share) for w, share in zip(weights, shares, strict=True))


def thresholds_of_findings(wanted: float | Sequence[float] | str, *, num_findings: int) -> Shares | None:
    """The thresholds as declared, one number for all findings or a list; None: they are chosen later."""
    if isinstance(wanted, str):
        return None
    cuts = [wanted] * num_findings if isinstance(wanted, int | float) else list(wanted)
    if len(cuts) != num_findings or not all(0 < cut < 1 for cut in cuts):
        raise ConfigError(
            "bad-thresholds",
            f"decision.threshold = {wanted} for {num_findings} findings.",
            why="It is one number for all findings, or one between 0 and 1 for each in their order.",
            fix="Give such a list, or leave it out.",
        )
    return tuple(float(cut) for cut in cuts)


def positive_class(name: str | None, classes: Sequence[str]) -> int:
    """The number of the class that is looked for: by its name, else the second."""
    if name is None:
        return 1
    if name not in classes or len(classes) != 2:
        raise ConfigError(
            "unknown-positive",
            f"decision.positive is {name!r}, and the classes are {', '.join(classes)}.",
            why="It names the one of two classes that is looked for.",
            fix="Give one of the two names, or leave it out.",
        )
    return list(classes).index(name)


def shares_of_classes(
    declared: float | Sequence[float] | None, *, setting: str, num_classes: int, positive: int
) -> Shares | None:
    """A declared prevalence as one share per class, which sum to 1; of two classes one number will do."""
    if declared is None:
        return None
    shares = [float(declared)] if isinstance(declared, int | float) else [float(value) for value in declared]
    if len(shares) == 1 and num_classes == 2:
        shares.insert(1 - positive, 1 - shares[0])
    # asked so that a share that is no number is refused too
    sound = all(share > 0 for share in shares) and abs(sum(shares) - 1) <= 0.01
    if len(shares) != num_classes or not sound:
        raise ConfigError(
            "bad-prevalence",
            f"{setting} = {declared} for {num_classes} classes.",
            why="It has one share above 0 for each class, in their order, and they sum to 1.",
            fix="For two classes give the share of the positive one, such as 0.26; for more a list.",
        )
    return tuple(share / sum(shares) for share in shares)


def weights_of_classes(
    wanted: str | Sequence[float] | None, prior: Shares | None, *, num_classes: int
) -> Shares | None:
    """Weights of the classes in the loss, 1 on average over the training units where these are known.

    They are public, or follow from released counts, and scale a unit's loss before its gradient is clipped:
    what one unit can do to a step stays as accounted. "balanced" needs the ``prior``; None without it.
    Rare classes get at most MOST_WEIGHT times the weight of others; a list that asks for more is refused.
    """
    if wanted is None or (wanted == "balanced" and prior is None):
        return None
    if wanted == "balanced":
        assert prior is not None
        weights = [1 / (num_classes * share) for share in prior]
        # a released prior is paid for by now: a nearly empty class may not stop the run at every resume
        weights = [min(weight, MOST_WEIGHT * min(weights)) for weight in weights]
    else:
        weights = [float(weight) for weight in wanted]
    if len(weights) != num_classes or min(weights) <= 0 or max(weights) > MOST_WEIGHT * min(weights):
        raise ConfigError(
            "bad-class-weights",
            f"training.class_weights = {wanted} for {num_classes} classes.",
            why=f"It has one number above 0 for each class, none more than {MOST_WEIGHT:g} times another.",
            fix="Give such a list, or balanced; nearly empty classes are better joined or left out.",
        )
    mean = 1.0 if prior is None else sum(w * share for w, share in zip(weights, prior, strict=True))
    return tuple(weight / mean for weight in weights)


def logit_shift(prior: Shares | None, weights: Shares | None, at_use: Shares | None) -> Shares | None:
    """log(prevalence at use / prevalence that the training saw), up to a constant; None: nothing is known.

    The training saw each class as often as it occurs times its weight in the loss. ``at_use`` None: every
    class alike.
    """
    if prior is None:
        return None
    seen = prior if weights is None else [w * share for w, share in zip(weights, prior, strict=True)]
    wanted = [1 / len(prior)] * len(prior) if at_use is None else at_use
    shift = [math.log(use / trained) for use, trained in zip(wanted, seen, strict=True)]
    middle = sum(shift) / len(shift)
    return tuple(value - middle for value in shift)
