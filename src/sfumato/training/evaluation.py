"""Scores of a classifier: accuracy, per class, top-5, confusion."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.data import ImageSet, normalise
from sfumato.data.pixels import Pixels, are_large, rows_at_once
from sfumato.features.cache import OnProgress, features_of
from sfumato.gradients.modes import evaluation_mode
from sfumato.models.fixed_features import FixedFeatures
from sfumato.training.decision import Decision
from sfumato.training.finding_scores import FindingScores, finding_scores
from sfumato.training.metrics import Floats, area_under_roc
from sfumato.training.prefetch import made_ahead

ARGMAX = Decision()  # the class of the largest output
_PIXELS_AT_ONCE = 16 * 2**20  # of one batch: 256 images of 146 px; a network keeps many times as much


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What ``evaluate --json`` prints. Shares are between 0 and 1."""

    accuracy: float
    num_examples: int
    loss: float
    top5_accuracy: float | None  # None with five classes or fewer
    balanced_accuracy: float  # mean over the classes that occur: a majority guess does not look good
    auc: float | None  # area under the ROC curve, two classes only
    per_class: dict[str, float | None]  # None for a class without images
    confusion: list[list[int]]  # [true class][predicted class]

    task: str = "single-label"

    def as_dict(self) -> dict[str, object]:
        """JSON values; a loss beyond all numbers becomes None."""
        return {**asdict(self), "loss": self.loss if math.isfinite(self.loss) else None}


AnyScores = Scores | FindingScores


@torch.inference_mode()
def predict_logits(
    model: nn.Module,
    images: Pixels,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int = 256,
) -> Tensor:
    """Logits (N, classes) of uint8 images, on the CPU; the model is in evaluation mode meanwhile.

    At most ``batch_size`` images at once, and of large ones so few that they fill 16 MiB.
    """
    device = next(model.parameters()).device
    size = min(batch_size, rows_at_once(images.shape, _PIXELS_AT_ONCE))
    pixels = (images[start : start + size] for start in range(0, len(images), size))
    with evaluation_mode(model):
        parts = [
            model(normalise(part.to(device), mean, std)).float().cpu()
            for part in (made_ahead(pixels) if are_large(images.shape) else pixels)
        ]
    return torch.cat(parts)


def evaluate(
    model: nn.Module,
    data: ImageSet,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    decision: Decision = ARGMAX,
    batch_size: int = 256,
    on_progress: OnProgress | None = None,
    intervals: bool = True,
) -> AnyScores:
    """All scores of ``model`` on ``data``; ``decision`` makes classes of its outputs.

    ``intervals`` are those of several findings per image.

    Fixed features are taken from their cache, or computed into it, which is reported to ``on_progress``.
    """
    logits = logits_of(model, data.images, mean=mean, std=std, batch_size=batch_size, on_progress=on_progress)
    return score(logits, data, decision=decision, intervals=intervals)


def score(
    logits: Tensor, data: ImageSet, *, decision: Decision = ARGMAX, intervals: bool = True
) -> AnyScores:
    """The scores of logits (N, classes), before the ``decision``, on ``data``."""
    if data.multi_label:
        return finding_scores(
            logits,
            data.labels,
            data.classes,
            decision=decision,
            groups=data.patients,
            intervals=intervals,
        )
    return scores(logits, data.labels, data.classes, decision=decision)


def logits_of(
    model: nn.Module,
    images: Pixels,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int = 256,
    on_progress: OnProgress | None = None,
) -> Tensor:
    """Logits (N, classes) as the model gives them, before any decision."""
    if isinstance(model, FixedFeatures):
        return predict_rows(model, features_of(model.extractor, images, on_progress=on_progress))
    return predict_logits(model, images, mean=mean, std=std, batch_size=batch_size)


@torch.inference_mode()
def predict_rows(model: FixedFeatures, rows: Tensor, *, batch_size: int = 1024) -> Tensor:
    """Logits (N, classes) of rows of features, on the CPU."""
    device = model.centre.device
    return torch.cat([model(part.to(device)).float().cpu() for part in rows.split(batch_size)])


def scores(
    logits: Tensor, labels: Tensor, classes: tuple[str, ...], *, decision: Decision = ARGMAX
) -> Scores:
    """Scores from logits (N, classes), before the ``decision``, and true labels (N,)."""
    num_classes = logits.shape[1]
    logits = decision.correct(logits)
    predicted = decision.choose(logits)
    confusion = torch.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    confusion = confusion.reshape(num_classes, num_classes)
    totals = confusion.sum(1)
    recalls = confusion.diagonal().double() / totals
    present = totals > 0
    top5 = None
    if num_classes > 5:
        top5 = (logits.topk(5, 1).indices == labels[:, None]).any(1).double().mean().item()
    return Scores(
        accuracy=(predicted == labels).double().mean().item(),
        num_examples=len(labels),
        loss=cross_entropy(logits.double(), labels).item(),
        top5_accuracy=top5,
        balanced_accuracy=recalls[present].mean().item(),
        auc=_defined(area_under_roc((labels == 1).numpy(), _margins(logits))) if num_classes == 2 else None,
        per_class={
            name: recalls[index].item() if present[index] else None for index, name in enumerate(classes)
        },
        confusion=confusion.tolist(),
    )


def _margins(logits: Tensor) -> Floats:
    """Of two classes: how far the second is above the first."""
    return (logits[:, 1] - logits[:, 0]).double().numpy()


def _defined(value: Floats) -> float | None:
    return None if math.isnan(value) else float(value)
