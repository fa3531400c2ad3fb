"""How fast steps are on images that lie on a disk, beside the same steps on the same images in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

from sfumato.data import ImageSet, load_data, normalisation_for
from sfumato.data.pixels import are_large
from sfumato.gradients import Choices
from sfumato.gradients.memory import keep_freed_memory
from sfumato.models import create_model
from sfumato.randomness import SeededSource
from sfumato.sampling import PoissonSampling
from sfumato.training.gradient_sums import EngineSum
from sfumato.training.inputs import Units, Views


def bench_data(
    data: str | Path,
    *,
    model: str = "lenet",
    image_size: int | None = None,
    views: int = 1,
    batch_size: int = 256,
    microbatch_size: int = 64,
    rounds: int = 7,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float | int | str | bool]:
    """Time of a clipped sum over a Poisson batch of the whole set, and over another one copied into memory.

    Every round draws new batches and takes them in turn, each first in every other round, so that none was
    read before. Given are medians over the rounds of times per image and of their ratios: by the clock,
    and by processor time, which other programs do not change.
    """
    keep_freed_memory()
    train = load_data(data, image_size=image_size, on_progress=on_progress).train
    network = create_model(model, num_classes=len(train.classes), in_channels=train.images.shape[1])
    mean, std = normalisation_for(train.name, train.images.shape[1])
    inputs = Views(mean=mean, std=std, count=views, padding=4, flip=True)
    source, choices = SeededSource(0), Choices(deterministic=True)
    sampling = PoissonSampling(sampling_rate=min(1.0, batch_size / len(train)), num_steps=1)
    taken: dict[str, list[tuple[float, float]]] = {"disk": [], "memory": [], "reading": []}
    for step in range(rounds + 1):
        indices, copied, read = (sampling.batch(len(train), source, 3 * step + k) for k in range(3))
        held = in_memory(train, copied)
        on_disk = _sum_over(network, train, inputs, source, microbatch_size, choices)
        on_copy = _sum_over(network, held, inputs, source, microbatch_size, choices)
        ways: list[tuple[str, Callable[[], object], int]] = [
            ("disk", partial(on_disk, indices, step), len(indices)),
            ("memory", partial(on_copy, torch.arange(len(held)), step), len(held)),
            ("reading", partial(train.images.__getitem__, read), len(read)),
        ]
        for name, work, count in ways if step % 2 else ways[::-1]:
            taken[name].append(_seconds_per_image(work, count))
    disk, memory, reading = (taken[name][1:] for name in ("disk", "memory", "reading"))  # after a warm-up
    pairs = list(zip(memory, disk, strict=True))
    return {
        "num_examples": len(train),
        "image_size": train.images.shape[-1],
        "gibibytes": train.images.shape.numel() / 2**30,
        "memory_mapped": are_large(train.images.shape),
        "model": model,
        "batch_size": batch_size,
        "views": views,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "images_per_second_from_disk": 1 / median(clock for clock, _ in disk),
        "images_per_second_in_memory": 1 / median(clock for clock, _ in memory),
        "images_per_second_reading_alone": 1 / median(clock for clock, _ in reading),
        "speed_by_the_clock": median(copy[0] / mapped[0] for copy, mapped in pairs),
        "speed_by_processor_time": median(copy[1] / mapped[1] for copy, mapped in pairs),
    }


def in_memory(images: ImageSet, indices: torch.Tensor) -> ImageSet:
    """A copy of these images alone, in memory."""
    return replace(
        images,
        images=images.images[indices].clone(),
        labels=images.labels[indices],
        patients=None,
        content_ids=images.known_ids[indices],
        fingerprint="",
    )


def _sum_over(
    network: nn.Module, images: ImageSet, inputs: Views, source: SeededSource, max_rows: int, choices: Choices
) -> EngineSum:
    return EngineSum(
        model=network,
        units=Units.images(images),
        inputs=inputs,
        clip_norm=1.0,
        source=source,
        max_rows=max_rows,
        choices=choices,
    )


def _seconds_per_image(work: Callable[[], object], count: int) -> tuple[float, float]:
    """By the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - clock) / max(1, count), (time.process_time() - processor) / max(1, count)
