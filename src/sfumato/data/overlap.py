"""Images and patients that occur twice: inside a set, or in two sets that should be apart."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.data.images import DataSplits, ImageSet


def duplicate_images(images: ImageSet) -> Tensor:
    """Indices of images whose pixels already occurred at a smaller index.

    Under an image-level guarantee a picture that occurs m times is protected m times less.
    """
    order = torch.argsort(images.known_ids, stable=True)
    ids = images.known_ids[order]
    repeated = torch.zeros(len(ids), dtype=torch.bool)
    repeated[1:] = ids[1:] == ids[:-1]
    return torch.sort(order[repeated]).values


def shared_images(first: ImageSet, second: ImageSet) -> Tensor:
    """Indices into ``first`` of the images whose pixels also occur in ``second``."""
    return torch.nonzero(torch.isin(first.known_ids, second.known_ids)).flatten()


def shared_patients(splits: DataSplits) -> list[str]:
    """Patients of the training images who also occur in validation or test (names are sensitive)."""
    if splits.train.patients is None:
        return []
    columns = [part.patients for part in (splits.val, splits.test) if part is not None]
    others = [column for column in columns if column is not None]
    if not others:
        return []
    train = torch.unique(splits.train.patients)
    shared = train[torch.isin(train, torch.cat(others))].tolist()
    names = splits.patient_names
    return [names[number] if names is not None else str(number) for number in shared]
