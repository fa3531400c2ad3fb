"""A whole private step, part by part, beside a plain PyTorch training step with the same augmentation.

The private step is ``training.fit`` itself, with a plan, a secure source and a ledger in a temporary folder;
a stopwatch stands between its parts. The plain one is what one writes without privacy: a batch, views of it,
forward and backward pass, an optimizer.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.bench.gradients import surroundings
from sfumato.bench.peak import Product, operations
from sfumato.bench.stopwatch import (
    PARTS,
    Seconds,
    Stopwatch,
    WatchedAverage,
    WatchedInputs,
    WatchedPixels,
    WatchedSum,
    watched_spending,
)
from sfumato.data import ImageSet, augment, load_data, normalisation_for, normalise
from sfumato.data.readers.decode import decode_files
from sfumato.gradients import Choices
from sfumato.gradients.memory import keep_freed_memory
from sfumato.ledger.ledger import Ledger
from sfumato.models import create_model
from sfumato.privacy.plan import Plan
from sfumato.randomness import SecureSource
from sfumato.training.averaging import WeightAverage
from sfumato.training.gradient_sums import EngineSum
from sfumato.training.inputs import Units, Views
from sfumato.training.loop import StepRecord, fit

PADDING, RATE, DECAY = 4, 0.1, 0.999
GENERATED_BYTES = 160_000_000  # of generated images: 50,000 of 32 px in colour
DECODED = 64  # files, to tell what decoding costs
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both ways train on."""

    train: ImageSet
    views: Views
    batch_size: int
    max_rows: int
    bfloat16: bool

    @property
    def images_at_once(self) -> int:
        return max(1, self.max_rows // self.views.rows_per_image)


def bench_step(
    model: str = "wrn_16_4",
    *,
    data: str | Path | None = None,
    image_size: int | None = None,
    batch_size: int = 256,
    views: int = 1,
    microbatch_size: int = 64,
    bfloat16: bool = False,
    rounds: int = 5,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Time of whole steps, private and plain, taking turns; and what the private one consists of.

    Every private step draws a Poisson batch of ``batch_size`` expected images from all of ``data`` (generated
    ones if there is none) and writes to the ledger; the plain one takes ``batch_size`` images. Times are per
    image, so that neither gains by a smaller batch. ``ratio`` is the median over the rounds of processor
    times, plain PyTorch in the memory format that was the faster for it. ``share_of_peak`` is what plain
    training needs of matrix products and convolutions, over what the machine's products in the same
    precision could have done in that time. ``microbatch_size`` counts rows, in both ways.
    """
    keep_freed_memory()
    if data is None:
        train = _generated(image_size or 32)
    else:
        train = load_data(data, image_size=image_size, on_progress=on_progress).train
    mean, std = normalisation_for(train.name, train.images.shape[1])
    work = Work(
        train=train,
        views=Views(mean=mean, std=std, count=views, padding=PADDING, flip=True),
        batch_size=min(batch_size, len(train)),
        max_rows=microbatch_size,
        bfloat16=bfloat16,
    )
    network = create_model(model, num_classes=len(train.classes), in_channels=train.images.shape[1])
    private, plain, products, flops = _measured(network, work, rounds)
    best = min(plain, key=lambda name: median(each.processor for each in plain[name]))
    return {
        "model": model,
        "data": "generated" if data is None else str(data),
        "num_examples": len(train),
        "image_size": train.images.shape[-1],
        "batch_size": work.batch_size,
        "views": views,
        "microbatch_size": microbatch_size,
        "precision": "bfloat16" if bfloat16 else "float32",
        "rounds": rounds,
        "plain_memory_format": best,
        **_compared(private, plain[best]),
        **_merits([_total(parts) for parts in private], plain[best], products, flops),
        "decoding_milliseconds": _decoding_milliseconds(train),
        **surroundings(),
    }


Parts = dict[str, Seconds]  # of one step, per image


def _measured(
    network: nn.Module, work: Work, rounds: int
) -> tuple[list[Parts], dict[str, list[Seconds]], list[Seconds], float]:
    """Private steps by their parts, plain ones by memory format, products, and operations of an image."""
    plain = {name: Plain(network, work, layout) for name, layout in FORMATS.items()}
    product, watch = Product(torch.bfloat16 if work.bfloat16 else torch.float32), Stopwatch()
    private: list[Parts] = []
    taken: dict[str, list[Seconds]] = {name: [] for name in (*plain, "product")}
    with _private_steps(network, work, rounds + 1, watch) as steps:
        for _ in range(rounds + 1):
            watch.take()
            next(steps)
            count = max(1, watch.images)
            private.append({name: spent.over(count) for name, spent in watch.take().items()})
            for name, step in plain.items():
                taken[name].append(_seconds(step).over(work.batch_size))
            taken["product"].append(min((_seconds(product) for _ in range(3)), key=lambda s: s.processor))
    private = private[1:]  # the first ones choose strategies and fill caches
    taken = {name: each[1:] for name, each in taken.items()}
    rows = plain["contiguous"].rows(torch.arange(min(work.images_at_once, len(work.train))))
    flops = operations(lambda: plain["contiguous"].passes(*rows)) * work.views.rows_per_image / len(rows[0])
    products = taken.pop("product")
    return private, taken, products, flops


@contextmanager
def _private_steps(
    network: nn.Module, work: Work, num_steps: int, watch: Stopwatch
) -> Iterator[Iterator[StepRecord]]:
    """Steps of ``fit``; their ledger is in a temporary folder."""
    plan = Plan(
        num_examples=len(work.train),
        batch_size=work.batch_size,
        num_steps=num_steps,  # so few that each of them is written to the ledger
        noise_multiplier=5.0,
        delta=0.1 / len(work.train),
    )
    source = SecureSource()
    sums = EngineSum(
        model=network,
        units=Units.images(replace(work.train, images=WatchedPixels(work.train.images, watch))),
        inputs=WatchedInputs(work.views, watch),
        clip_norm=plan.clip_norm,
        source=source,
        max_rows=work.max_rows,
        choices=Choices(),
        in_bfloat16=work.bfloat16,
    )
    _choose_strategies(sums)
    with tempfile.TemporaryDirectory(prefix="sfumato-bench-") as folder:
        state = Path(folder, "state")
        state.mkdir()
        with Ledger.open(Path(folder, "ledger.sqlite")) as ledger:
            fingerprint = work.train.fingerprint or "generated"
            account = ledger.begin(fingerprint=fingerprint, name="bench", plan=plan, folder=state)
            watch.turn("sampling")
            yield fit(
                network,
                WatchedSum(sums, watch),
                plan,
                optimizer=torch.optim.SGD(network.parameters(), lr=RATE),
                learning_rate=lambda _: RATE,
                average=WatchedAverage.of(WeightAverage.start(network, decay=DECAY), watch),
                source=source,
                spend=watched_spending(account.spend, watch),
            )


def _choose_strategies(sums: EngineSum) -> None:
    """Let the engine time its strategies for all sizes that the end of a Poisson batch can have.

    A training does so once in hundreds of steps; in the few that are measured here it would count too much.
    """
    at_once = max(1, sums.max_rows // sums.inputs.rows_per_image)
    for exponent in range(at_once.bit_length()):
        sums(torch.arange(min(2**exponent, sums.num_units)), 0)
    sums(torch.arange(min(at_once, sums.num_units)), 0)


class Plain:
    """Ordinary training, as one writes it: shuffled batches, the same views, SGD, and no guarantee."""

    def __init__(self, network: nn.Module, work: Work, layout: torch.memory_format) -> None:
        network = copy.deepcopy(network).to(memory_format=layout)  # type: ignore[call-overload]
        self.network, self.work, self.layout = network.train(), work, layout
        self.optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self) -> None:
        """One step on a batch, as many images at a time as the private one."""
        work = self.work
        batch = torch.randint(len(work.train), (work.batch_size,), generator=self.generator)
        self.optimizer.zero_grad(set_to_none=True)
        for some in batch.split(work.images_at_once):
            self.passes(*self.rows(some))
        self.optimizer.step()

    def rows(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Views of these images, and their labels."""
        work, views = self.work, self.work.views
        pixels = normalise(work.train.images[images], views.mean, views.std)
        rows = augment(
            pixels, views=views.count, padding=views.padding, flip=views.flip, generator=self.generator
        )
        labels = work.train.labels[images].repeat_interleave(views.rows_per_image, dim=0)
        return rows.contiguous(memory_format=self.layout), labels

    def passes(self, rows: Tensor, labels: Tensor) -> None:
        """Forward and backward; gradients add up over the batch."""
        share = len(rows) / (self.work.batch_size * self.work.views.rows_per_image)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.work.bfloat16):
            loss = cross_entropy(self.network(rows), labels) * share
        loss.backward()


def _compared(private: Sequence[Parts], plain: Sequence[Seconds]) -> dict[str, Any]:
    """Milliseconds per image, of each part too, and the ratios with their range over the rounds."""
    wholes = [_total(parts) for parts in private]
    ratios = [a.processor / b.processor for a, b in zip(wholes, plain, strict=True)]
    by_clock = [a.clock / b.clock for a, b in zip(wholes, plain, strict=True)]
    parts = {name: [each.get(name, Seconds()) for each in private] for name in PARTS}
    return {
        "milliseconds_per_image": {
            "private": 1e3 * median(each.processor for each in wholes),
            "plain": 1e3 * median(each.processor for each in plain),
        },
        "milliseconds_by_the_clock": {
            "private": 1e3 * median(each.clock for each in wholes),
            "plain": 1e3 * median(each.clock for each in plain),
        },
        "parts": {name: 1e3 * median(each.processor for each in taken) for name, taken in parts.items()},
        "parts_by_the_clock": {
            name: 1e3 * median(each.clock for each in taken) for name, taken in parts.items()
        },
        "ratio": median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "ratio_by_the_clock": median(by_clock),
    }


def _merits(
    private: Sequence[Seconds], plain: Sequence[Seconds], products: Sequence[Seconds], flops: float
) -> dict[str, Any]:
    """The speed of the machine's products, and what share of it each way to train has reached."""
    speed = Product.speed(min(each.processor for each in products))
    ways = {"private": private, "plain": plain}
    return {
        "gflop_per_image": flops / 1e9,
        "matmul_gflops": speed / 1e9,  # of one core where threads share the work, as processor time counts it
        "share_of_peak": {
            name: flops / median(each.processor for each in taken) / speed for name, taken in ways.items()
        },
    }


def _total(parts: Parts) -> Seconds:
    return sum(parts.values(), Seconds())


def _generated(image_size: int) -> ImageSet:
    """Random pixels: what they show does not change how long a step takes."""
    count = max(1000, min(50_000, GENERATED_BYTES // (3 * image_size**2)))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(
        0, 256, (count, 3, image_size, image_size), generator=generator, dtype=torch.uint8
    )  # fmt: skip
    classes = tuple(f"class {number}" for number in range(10))
    return ImageSet(pixels, torch.arange(count) % 10, classes, None, "generated")


def _decoding_milliseconds(train: ImageSet) -> float:
    """Processor time of decoding one PNG file of this size; ``train`` does so once, before its steps."""
    images = train.images[torch.arange(min(DECODED, len(train)))]
    with tempfile.TemporaryDirectory(prefix="sfumato-bench-") as folder:
        paths = []
        for number, image in enumerate(images):
            paths.append(Path(folder, f"{number}.png"))
            pixels = image.permute(1, 2, 0).numpy() if len(image) == 3 else image[0].numpy()
            Image.fromarray(pixels).save(paths[-1])
        chunks = decode_files(paths, image_size=images.shape[-1], channels=images.shape[1], fit="crop")
        spent = _seconds(lambda: list(chunks))
    return 1e3 * spent.processor / len(images)


def _seconds(function: Callable[[], object]) -> Seconds:
    began = Seconds.now()
    function()
    return Seconds.now() - began
