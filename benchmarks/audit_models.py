"""Models per second of ``sfumato audit paper``, beside training the same models one by one with ``fit``.

    python benchmarks/audit_models.py [--workers 2] [--rounds 5]

Both take turns in one process on the same 100 images of MNIST's shape, 50 updates at batch size 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from sfumato.audit.many_models import train_many
from sfumato.audit.paper_settings import PROBLEMS
from sfumato.data import ImageSet
from sfumato.data.readers.decode import num_threads
from sfumato.gradients.memory import keep_freed_memory
from sfumato.models import create_model
from sfumato.privacy import Plan
from sfumato.randomness import SecureSource
from sfumato.training import fit
from sfumato.training.averaging import WeightAverage
from sfumato.training.gradient_sums import EngineSum
from sfumato.training.inputs import Units, Views

STACK = PROBLEMS[100].models_at_once
VIEWS = Views(mean=(0.1307,), std=(0.3081,))


def one_by_one(plan: Plan, data: ImageSet) -> None:
    model, source = create_model("lenet", num_classes=10, in_channels=1), SecureSource()
    sums = EngineSum(
        model=model, units=Units.images(data), inputs=VIEWS, clip_norm=1.0, source=source, max_rows=1000
    )
    steps = fit(
        model,
        sums,
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        learning_rate=lambda step: 0.1,
        average=WeightAverage(decay=0.0, weights={}),
        source=source,
        spend=lambda step: None,
    )
    for _ in steps:
        pass


def many(plan: Plan, data: ImageSet) -> None:
    model = create_model("lenet", num_classes=10, in_channels=1)
    train_many(model, plan, data, VIEWS, num_models=STACK, learning_rate=0.1, source=SecureSource())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    images = torch.randint(0, 256, (100, 1, 28, 28)).to(torch.uint8)
    data = ImageSet(images, torch.arange(100) % 10, tuple("0123456789"), name="digits")
    plan = Plan(num_examples=100, batch_size=64, num_steps=50, noise_multiplier=3.1, delta=0.01)
    torch.set_num_threads(1)
    keep_freed_memory()
    alone, stacked, alone_cpu, stacked_cpu = [], [], [], []
    with ThreadPoolExecutor(options.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        one_by_one(plan, data)
        for _ in range(options.rounds):
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(3):
                one_by_one(plan, data)
            alone.append((time.perf_counter() - began) / 3)
            alone_cpu.append((time.process_time() - cpu) / 3)
            began, cpu = time.perf_counter(), time.process_time()
            for future in [pool.submit(many, plan, data) for _ in range(2 * options.workers)]:
                future.result()
            trained = STACK * 2 * options.workers
            stacked.append((time.perf_counter() - began) / trained)
            stacked_cpu.append((time.process_time() - cpu) / trained)
    result = {
        "workers": options.workers,
        "models_per_second": 1 / statistics.median(stacked),
        "one_by_one_models_per_second": 1 / statistics.median(alone),
        "ratio": statistics.median(alone) / statistics.median(stacked),
        "ratio_of_cpu_time": statistics.median(alone_cpu) / statistics.median(stacked_cpu),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
