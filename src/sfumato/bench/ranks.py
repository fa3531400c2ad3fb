"""How much faster a step is on several processes of one machine, each with one thread, than on one."""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Iterator
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from sfumato.data import ImageSet
from sfumato.models import create_model
from sfumato.privacy.plan import Plan
from sfumato.randomness import RandomSource, SecureSource
from sfumato.training.averaging import WeightAverage
from sfumato.training.gradient_sums import EngineSum, GradientSum
from sfumato.training.inputs import Units, Views
from sfumato.training.loop import StepRecord, fit
from sfumato.training.ranked_sum import RankedSum, StepKeys
from sfumato.training.ranks import STOP, Ranks

_TIMEOUT = timedelta(hours=1)


def bench_ranks(
    model: str = "wrn_16_4",
    *,
    processes: int = 2,
    batch_size: int = 1024,
    views: int = 1,
    image_size: int = 32,
    max_rows: int = 64,
    rounds: int = 3,
) -> dict[str, float | int | str]:
    """Seconds of whole private steps (sum, noise, update, average), alone and on ``processes``, in turn.

    Both take the same ``batch_size`` units of random images. ``exchange_seconds`` is what ranks take for a
    step without units: weights there and sums back. Medians of interleaved rounds after one of each. The
    processor time of this process tells what to expect of a machine that is not busy.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    settings = (model, batch_size, views, image_size, max_rows)
    started = multiprocessing.get_context("spawn")
    others = [
        started.Process(target=_help, args=(number, processes, store.port, settings), daemon=True)
        for number in range(1, processes)
    ]
    for process in others:
        process.start()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = _measure(
            Ranks(_group(store, 0, processes), size=processes, timeout=_TIMEOUT), settings, rounds
        )
    finally:
        torch.set_num_threads(threads)
        for process in others:
            process.join(timeout=10)
    (alone, alone_work), (together, together_work), (exchange, _) = (
        [median(values) for values in zip(*times[name], strict=True)] for name in times
    )
    ratios = [one[0] / many[0] for one, many in zip(times["alone"], times["together"], strict=True)]
    return {
        "model": model,
        "processes": processes,
        "batch_size": batch_size,
        "views": views,
        "rounds": rounds,
        "seconds_alone": alone,
        "seconds_together": together,
        "exchange_seconds": exchange,
        "processor_seconds_alone": alone_work,
        "processor_seconds_together": together_work,
        "speedup": alone / together,
        "least_speedup": min(ratios),
        "most_speedup": max(ratios),
        "torch": torch.__version__,
    }


def _measure(
    ranks: Ranks, settings: tuple[str, int, int, int, int], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and seconds of this process's processor, of every round."""
    source = SecureSource()
    network, sums = _ranked(ranks, settings, source)
    beside = copy.deepcopy(network)
    assert isinstance(sums.own, EngineSum)
    own = EngineSum(
        model=beside,
        units=sums.own.units,
        inputs=sums.own.inputs,
        clip_norm=1.0,
        source=source,
        max_rows=settings[-1],
    )
    steps = {"alone": _steps(beside, own, source), "together": _steps(network, sums, source)}
    times: dict[str, list[tuple[float, float]]] = {"alone": [], "together": [], "exchange": []}
    ranks.agree()  # all have built their network
    ranks.lead()
    for round_number in range(rounds + 1):
        for name, taken in times.items():
            began, worked = time.perf_counter(), time.process_time()
            if name == "exchange":
                sums(torch.zeros(0, dtype=torch.int64), round_number)
            else:
                next(steps[name])
            if round_number:  # the first one chooses strategies
                taken.append((time.perf_counter() - began, time.process_time() - worked))
    with ranks.order(STOP):
        pass
    ranks.close()
    return times


def _help(number: int, size: int, port: int, settings: tuple[str, int, int, int, int]) -> None:
    """What the other processes do."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    ranks = Ranks(_group(store, number, size), number=number, size=size, timeout=_TIMEOUT)
    _, sums = _ranked(ranks, settings, SecureSource())
    ranks.agree()
    ranks.lead()
    while True:
        order = ranks.next_order()
        if order.pop("do") == STOP:
            ranks.close()
            return
        sums.take_part(**order)


def _group(store: dist.Store, number: int, size: int) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.PrefixStore("bench", store), number, size, _TIMEOUT)


def _ranked(
    ranks: Ranks, settings: tuple[str, int, int, int, int], source: RandomSource
) -> tuple[nn.Module, RankedSum]:
    """A network and its sums over ranks, on random images that are the same everywhere."""
    name, batch_size, views, image_size, max_rows = settings
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, 3, image_size, image_size)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    classes = tuple(f"class {number}" for number in range(10))
    units = Units.images(ImageSet(pixels, torch.arange(batch_size) % 10, classes, None, "random"))
    inputs = Views(mean=(0.5,) * 3, std=(0.25,) * 3, count=views if views > 1 else 0, padding=4, flip=True)
    network, keys = create_model(name, num_classes=10, in_channels=3).train(), StepKeys()
    own = EngineSum(model=network, units=units, inputs=inputs, clip_norm=1.0, source=keys, max_rows=max_rows)
    sizes = torch.ones(batch_size)
    return network, RankedSum(ranks=ranks, own=own, keys=keys, model=network, source=source, unit_sizes=sizes)


def _steps(network: nn.Module, sums: GradientSum, source: RandomSource) -> Iterator[StepRecord]:
    plan = Plan(
        num_examples=sums.num_units,
        batch_size=sums.num_units,
        num_steps=10_000,
        noise_multiplier=10.0,
        delta=0.1 / sums.num_units,
        sampling="full",
    )
    return fit(
        network,
        sums,
        plan,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        learning_rate=lambda step: 0.1,
        average=WeightAverage.start(network, decay=0.999),
        source=source,
        spend=lambda step: None,
    )
