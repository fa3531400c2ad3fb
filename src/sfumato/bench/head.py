"""How fast the head's clipped sums are, beside what this machine's memory and arithmetic allow."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sfumato.training.head import SoftmaxRegression


def bench_head(
    *,
    num_examples: int = 1_000_000,
    num_features: int = 2048,
    num_classes: int = 1000,
    batch_size: int = 262_144,
    rounds: int = 3,
) -> dict[str, float | str]:
    """Seconds of one clipped sum over a batch as in tables 21-22 of De et al. 2022, and the two limits.

    ``share_of_limit`` is the time that reading the batch once at the measured bandwidth, or its two matrix
    products at the measured speed, would take at least, over the time that was taken; ``limited_by`` says
    which of the two takes longer. Medians of interleaved rounds.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.empty(num_examples, num_features)
    for piece in rows.split(65_536):
        piece.normal_(generator=generator).mul_(num_features**-0.5)
    targets = torch.randint(num_classes, (num_examples,), generator=generator)
    sums = SoftmaxRegression(rows, targets, num_classes=num_classes)
    weight, bias = torch.randn(num_classes, num_features) * 0.1, torch.zeros(num_classes)
    indices = torch.randperm(num_examples, generator=generator)[:batch_size].sort().values
    square = torch.randn(2048, 2048)
    steps, products, reads = [], [], []
    for _ in range(rounds):
        steps.append(_seconds(lambda: sums(weight, bias, clip_norm=1.0, indices=indices)))
        products.append(_seconds(lambda: square @ square))
        reads.append(_seconds(lambda: rows[:batch_size].sum()))
    step, product, read = (sorted(times)[rounds // 2] for times in (steps, products, reads))
    flops = 4.0 * batch_size * num_features * num_classes  # two products
    matmul_speed, bandwidth = 2.0 * 2048**3 / product, 4.0 * batch_size * num_features / read
    arithmetic, memory = flops / matmul_speed, 4.0 * batch_size * num_features / bandwidth
    return {
        "seconds_per_step": step,
        "gflops": flops / step / 1e9,
        "matmul_gflops": matmul_speed / 1e9,
        "gb_per_second": 4.0 * batch_size * num_features / step / 1e9,
        "bandwidth_gb_per_second": bandwidth / 1e9,
        "limited_by": "matrix products" if arithmetic > memory else "memory bandwidth",
        "share_of_limit": max(arithmetic, memory) / step,
    }


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
