"""Scores of a classifier: accuracy, per class, top-5, confusion."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.data import ImageSet, normalise
from sfumato.features.cache import OnProgress, features_of
from sfumato.gradients.modes import evaluation_mode
from sfumato.models.fixed_features import FixedFeatures


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

    def as_dict(self) -> dict[str, object]:
        """JSON values; a loss beyond all numbers becomes None."""
        return {**asdict(self), "loss": self.loss if math.isfinite(self.loss) else None}


@torch.inference_mode()
def predict_logits(
    model: nn.Module,
    images: Tensor,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int = 256,
) -> Tensor:
    """Logits (N, classes) of uint8 images, on the CPU; the model is in evaluation mode meanwhile."""
    device = next(model.parameters()).device
    with evaluation_mode(model):
        parts = [
            model(normalise(images[start : start + batch_size].to(device), mean, std)).float().cpu()
            for start in range(0, len(images), batch_size)
        ]
    return torch.cat(parts)


def evaluate(
    model: nn.Module,
    data: ImageSet,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int = 256,
    on_progress: OnProgress | None = None,
) -> Scores:
    """All scores of ``model`` on ``data``.

    Fixed features are taken from their cache, or computed into it, which is reported to ``on_progress``.
    """
    if isinstance(model, FixedFeatures):
        rows = features_of(model.extractor, data.images, on_progress=on_progress)
        logits = predict_rows(model, rows)
    else:
        logits = predict_logits(model, data.images, mean=mean, std=std, batch_size=batch_size)
    return scores(logits, data.labels, data.classes)


@torch.inference_mode()
def predict_rows(model: FixedFeatures, rows: Tensor, *, batch_size: int = 1024) -> Tensor:
    """Logits (N, classes) of rows of features, on the CPU."""
    device = model.centre.device
    return torch.cat([model(part.to(device)).float().cpu() for part in rows.split(batch_size)])


def scores(logits: Tensor, labels: Tensor, classes: tuple[str, ...]) -> Scores:
    """Scores from logits (N, classes) and true labels (N,)."""
    num_classes = logits.shape[1]
    predicted = logits.argmax(1)
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
        auc=_area_under_curve(logits[:, 1] - logits[:, 0], labels) if num_classes == 2 else None,
        per_class={
            name: recalls[index].item() if present[index] else None for index, name in enumerate(classes)
        },
        confusion=confusion.tolist(),
    )


def _area_under_curve(margin: Tensor, labels: Tensor) -> float | None:
    """Chance that a random image of class 1 scores above one of class 0; ties count half."""
    positives, negatives = int(labels.sum()), int((1 - labels).sum())
    if not positives or not negatives:
        return None
    _, position, counts = torch.unique(margin, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts.double() - 1) / 2)[position]  # equal margins share their mean rank
    total = ranks[labels == 1].sum().item()
    return (total - positives * (positives + 1) / 2) / (positives * negatives)
