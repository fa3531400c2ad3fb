"""Units: what one guarantee protects, an image or a patient with all their images.

Sampling draws units; memory is filled by rows. This file turns the one into the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sfumato.data import ImageSet, crop_and_flip, mix_views, normalise
from sfumato.data.augmentation import check_mixing
from sfumato.data.distortion import Distortion, check_distortion, distort
from sfumato.data.pixels import Pixels, are_large
from sfumato.randomness import UnitRandomness
from sfumato.training.prefetch import made_ahead

# The draws of a unit: which of its images count, their views, mixtures of these, and distortions
CHOICE, VIEW, MIX, DISTORTION = 0, 1, 2, 3
_NOTHING = Distortion()


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Rows that are in memory together; all rows of a unit are in the same microbatch."""

    inputs: Tensor  # (rows, C, H, W), float
    targets: Tensor  # (rows,), or (rows, findings)
    unit_index: Tensor  # (rows,), 0 … num_units - 1
    num_units: int
    unit_ids: Tensor  # (num_units,), their numbers in the data set


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Some units of a step, whose rows fit together."""

    unit_ids: Tensor  # (units,), their numbers in the data set
    images: Tensor  # (images,), their numbers in the data set, a unit's one after the other
    sizes: Tensor  # (units,), how many images each has here
    numbers: Tensor  # (images,), counted from 0 within each unit


@dataclass(frozen=True, kw_only=True)
class Units:
    """The images of a set, grouped by unit.

    Guarantee: what a step computes for one unit depends on that unit's images alone.
    """

    data: ImageSet
    rows: Tensor  # image numbers, those of unit 0 first
    offsets: Tensor  # unit u owns rows[offsets[u] : offsets[u + 1]]
    max_images: int  # of one unit in one step

    @classmethod
    def images(cls, data: ImageSet) -> Units:
        """Every image is a unit."""
        return cls(data=data, rows=torch.arange(len(data)), offsets=torch.arange(len(data) + 1), max_images=1)

    @classmethod
    def patients(cls, data: ImageSet, *, max_images: int) -> Units:
        """Every patient is a unit; at most ``max_images`` of their images count in a step."""
        patient = data.unit_index("patient")
        counts = torch.bincount(patient)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        rows = torch.argsort(patient, stable=True)
        return cls(data=data, rows=rows, offsets=offsets, max_images=max_images)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def are_images(self) -> bool:
        """Whether unit u is image u: not so for patients, even if one image of each counts in a step."""
        return torch.equal(self.rows, torch.arange(len(self)))

    def checksum(self) -> str:
        """SHA-256 of which label each image has and which images are one unit, in any order of the files.

        The data's fingerprint says neither: relabelled and regrouped images are still the same people's.
        """
        columns = np.empty((3, len(self.data)), dtype="<i8")
        columns[0], columns[1] = self.data.known_ids.cpu().numpy(), _label_numbers(self.data)
        sizes = (self.offsets[1:] - self.offsets[:-1]).numpy()
        columns[2, self.rows.numpy()] = np.repeat(np.arange(len(self)), sizes)
        columns = columns[:, np.lexsort(columns[::-1])]
        _, first, unit = np.unique(columns[2], return_index=True, return_inverse=True)
        columns[2] = np.argsort(np.argsort(first))[unit]  # by first appearance: their own numbers say nothing
        return hashlib.sha256(b"sfumato units 1 " + columns.tobytes()).hexdigest()

    def choose(self, unit: int, randomness: UnitRandomness) -> Tensor:
        """The unit's images for this step: all, or a fresh random choice of ``max_images``."""
        images_of_unit = self.rows[int(self.offsets[unit]) : int(self.offsets[unit + 1])]
        if len(images_of_unit) <= self.max_images:
            return images_of_unit
        words = randomness.words(np.array([unit]), np.array([0]), len(images_of_unit), stream=CHOICE)[0]
        return images_of_unit[torch.from_numpy(np.argsort(words)[: self.max_images])]

    def pack(
        self, indices: Tensor, *, max_rows: int, views: int, randomness: UnitRandomness
    ) -> Iterator[Packed]:
        """Units and their images, in groups of at most ``max_rows`` rows but at least one unit.

        What a group takes, in time and memory, does not depend on how many units the step has.
        """
        counts = self.offsets[indices + 1] - self.offsets[indices]
        ends = counts.clamp(max=self.max_images).cumsum(0)
        first = held = 0
        while first < len(indices):
            last = int(torch.searchsorted(ends, held + max_rows // views, right=True))
            group = slice(first, max(last, first + 1))
            yield self._packed(indices[group], counts[group], randomness)
            first, held = group.stop, int(ends[group.stop - 1])

    def _packed(self, unit_ids: Tensor, counts: Tensor, randomness: UnitRandomness) -> Packed:
        sizes = counts.clamp(max=self.max_images)
        starts = sizes.cumsum(0) - sizes
        numbers = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
        images = self.rows[self.offsets[unit_ids].repeat_interleave(sizes) + numbers]
        for place in (counts > self.max_images).nonzero()[:, 0].tolist():  # of them a choice counts
            first, size = int(starts[place]), int(sizes[place])
            images[first : first + size] = self.choose(int(unit_ids[place]), randomness)
        return Packed(unit_ids=unit_ids, images=images, sizes=sizes, numbers=numbers)


def _label_numbers(data: ImageSet) -> np.ndarray:
    """A number for each image's label; for a row of findings a checksum of the row."""
    labels = data.labels.cpu().numpy()
    if not data.multi_label:
        return labels
    rows = np.packbits(labels.astype(bool), axis=1)
    digests = b"".join(hashlib.sha256(row.tobytes()).digest()[:8] for row in rows)
    return np.frombuffer(digests, dtype="<i8")


def _with_pixels(packed: Iterator[Packed], images: Pixels) -> Iterator[tuple[Packed, Tensor]]:
    """Each group with its images; those of a set that is memory-mapped are read ahead of their use."""
    read = ((group, images[group.images]) for group in packed)
    return made_ahead(read) if are_large(images.shape) else read


class Inputs(Protocol):
    """How the units of a step become rows for the model."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Public constants that pixels are normalised with."""

    @property
    def std(self) -> tuple[float, ...]:
        """Public constants that pixels are normalised with."""

    @property
    def rows_per_image(self) -> int:
        """Rows that each image of a unit becomes."""

    def microbatches(
        self,
        units: Units,
        indices: Tensor,
        *,
        max_rows: int,
        randomness: UnitRandomness,
        device: torch.device,
    ) -> Iterator[Microbatch]:
        """Rows of the units in ``indices``, a unit's always together.

        Guarantee: a unit's rows do not depend on its place among ``indices`` or on the others.
        """


@dataclass(frozen=True, kw_only=True)
class Views:
    """How images become inputs: normalised with public constants, then ``count`` random views of each.

    ``mixed`` further rows are mixtures of two views of the same image, see ``mix_views``.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    count: int = 0  # 0: the image as it is
    padding: int = 0
    flip: bool = False
    mixed: int = 0  # needs two views or more
    alpha: float = 0.2
    distortion: Distortion = _NOTHING  # of each view

    def __post_init__(self) -> None:
        check_mixing(views=self.count, mixed=self.mixed, alpha=self.alpha)
        check_distortion(self.distortion, views=self.count)

    @property
    def rows_per_image(self) -> int:
        return max(1, self.count) + self.mixed

    def microbatches(
        self,
        units: Units,
        indices: Tensor,
        *,
        max_rows: int,
        randomness: UnitRandomness,
        device: torch.device,
    ) -> Iterator[Microbatch]:
        """Inputs for the units in ``indices``, never more than ``max_rows`` in memory (one unit at least).

        Guarantee: a unit's images and views do not depend on its place among ``indices`` or on the others.
        """
        multiplicity = self.rows_per_image
        packed = units.pack(indices, max_rows=max_rows, views=multiplicity, randomness=randomness)
        for group, pixels in _with_pixels(packed, units.data.images):
            owners = group.unit_ids.repeat_interleave(group.sizes).numpy()
            inputs = self._drawn(pixels.to(device), owners, group.numbers.numpy(), randomness)
            num_units = len(group.unit_ids)
            unit_index = torch.arange(num_units).repeat_interleave(group.sizes * multiplicity)
            if inputs.dim() == 4:  # the faster format for convolutions; weights keep theirs
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield Microbatch(
                inputs=inputs,
                targets=units.data.labels[group.images].repeat_interleave(multiplicity, dim=0).to(device),
                unit_index=unit_index.to(device),
                num_units=num_units,
                unit_ids=group.unit_ids,
            )

    def _drawn(
        self, images: Tensor, owners: np.ndarray, numbers: np.ndarray, randomness: UnitRandomness
    ) -> Tensor:
        """The rows of each image, by the draws of its unit ``owners`` and its number within the unit."""

        def words(count: int, each: int, stream: int) -> Tensor:
            drawn = randomness.words(owners, numbers, each * count, stream=stream).astype(np.int64)
            return torch.from_numpy(drawn).view(len(drawn), count, each)

        if not self.count:
            return normalise(images, self.mean, self.std)
        places = words(self.count, 3, VIEW)
        if self.distortion:  # of each view its own
            each = self.distortion.num_words((images.shape[-2], images.shape[-1]))
            copies = images.repeat_interleave(self.count, dim=0).float() / 255
            images = 255 * distort(copies, words(self.count, each, DISTORTION).flatten(0, 1), self.distortion)
            places = places.flatten(0, 1)[:, None]
        inputs = normalise(images, self.mean, self.std)
        views = crop_and_flip(inputs, places, padding=self.padding, flip=self.flip)
        if not self.mixed:
            return views
        by_image = views.unflatten(0, (len(owners), self.count))
        return mix_views(by_image, words(self.mixed, 3, MIX), alpha=self.alpha).flatten(0, 1)
