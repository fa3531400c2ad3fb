"""The gradient engine beside plain training and its peers: interleaved rounds in one process.

Machines are noisy, so nothing here is an absolute claim: every figure is a ratio of medians of runs that took
turns, on the same images and the same model.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from sfumato.bench.peak import Product, operations
from sfumato.errors import ConfigError
from sfumato.gradients import Choices, clip_factors, clipped_sum
from sfumato.gradients.memory import keep_freed_memory
from sfumato.models import create_model

CLIP_NORM = 1.0
PEERS = ("plain", "bfloat16", "opacus", "vmap")
Step = Callable[[], object]


def bench_gradients(
    model_name: str,
    *,
    views: int = 1,
    batch_size: int | None = None,
    image_size: int = 32,
    against: tuple[str, ...] = ("plain",),
    rounds: int = 7,
    seed: int = 0,
) -> dict[str, Any]:
    """Time and memory of one clipped sum over ``batch_size`` units of ``views`` rows each, and of its peers.

    Plain training is the same forward and backward pass over the same rows, in its faster memory format. The
    peers form the same clipped sum: one clip per unit, after the mean over its views.
    """
    keep_freed_memory()
    torch.manual_seed(seed)
    units = batch_size or max(1, 64 // views)
    rows = torch.randn(units * views, 3, image_size, image_size)
    targets = torch.randint(10, (units,)).repeat_interleave(views)
    steps = _steps(model_name, rows, targets, views, against)
    formats = ("plain", "plain, contiguous")
    seconds = _interleaved(steps, rounds)
    best = min(formats, key=seconds.__getitem__)
    memory = {name: _peak_bytes(step) for name, step in steps.items()}
    plain, images = seconds[best], len(rows)
    names = (*against, "plain_bfloat16") if "bfloat16" in against else against
    shown = {"sfumato": "sfumato", "plain": best, **{name: name for name in names if name != "plain"}}
    speeds = {name: Product.speed(seconds[name]) for name in ("product", "product_bfloat16") if name in steps}
    speed_of = {name: speeds["product_bfloat16" if "bfloat16" in name else "product"] for name in shown}
    needed = operations(steps[best])
    result: dict[str, Any] = {
        "model": model_name,
        "views": views,
        "batch_size": units,
        "images": images,
        "image_size": image_size,
        "rounds": rounds,
        "plain_memory_format": "contiguous" if best == formats[1] else "channels last",
        "milliseconds_per_image": {name: 1e3 * seconds[key] / images for name, key in shown.items()},
        "peak_mebibytes": {
            name: None if (peak := memory[key]) is None else peak / 2**20 for name, key in shown.items()
        },
        "matmul_gflops": speeds["product"] / 1e9,
        "share_of_peak": {name: needed / seconds[key] / speed_of[name] for name, key in shown.items()},
        "ratio": seconds["sfumato"] / plain,
        "memory_ratio": _ratio(memory["sfumato"], memory[best]),
    }
    for name in shown:
        if name not in ("sfumato", "plain"):
            result[f"{name}_ratio"] = seconds[name] / plain
    if "bfloat16" in against:
        result["matmul_gflops_in_bfloat16"] = speeds["product_bfloat16"] / 1e9
        result["ratio_in_bfloat16"] = seconds["bfloat16"] / seconds["plain_bfloat16"]
        result["memory_ratio_in_bfloat16"] = _ratio(memory["bfloat16"], memory["plain_bfloat16"])
    return result | surroundings()


def _ratio(first: int | None, second: int | None) -> float | None:
    return None if first is None or not second else first / second


def _steps(name: str, rows: Tensor, targets: Tensor, views: int, against: tuple[str, ...]) -> dict[str, Step]:
    unknown = set(against) - set(PEERS)
    if unknown:
        raise ConfigError(
            "unknown-peer",
            f"{min(unknown)!r} cannot be measured against.",
            fix=f"Choose among {', '.join(PEERS)}.",
        )
    last = torch.channels_last
    model, contiguous = create_model(name, num_classes=10), create_model(name, num_classes=10)
    model.to(memory_format=last)  # type: ignore[call-overload]
    images, choices = rows.to(memory_format=last), Choices()
    unit_index = torch.arange(len(rows) // views).repeat_interleave(views) if views > 1 else None
    steps: dict[str, Step] = {
        "sfumato": lambda: clipped_sum(
            model, images, targets, clip_norm=CLIP_NORM, unit_index=unit_index,
            microbatch_size=len(images), choices=choices,
        ),
        "plain": lambda: _plain(model, images, targets),
        "plain, contiguous": lambda: _plain(contiguous, rows, targets),
    }  # fmt: skip
    steps["product"] = Product()
    if "bfloat16" in against:
        low = Choices()
        steps["bfloat16"] = _in_bfloat16(
            lambda: clipped_sum(
                model, images, targets, clip_norm=CLIP_NORM, unit_index=unit_index,
                microbatch_size=len(images), choices=low,
            )
        )  # fmt: skip
        steps["product_bfloat16"] = Product(torch.bfloat16)
        steps["plain_bfloat16"] = _in_bfloat16(lambda: _plain(model, images, targets))
    if "opacus" in against:
        steps["opacus"] = _opacus(create_model(name, num_classes=10), rows, targets, views)
    if "vmap" in against:
        steps["vmap"] = lambda: _vmapped(contiguous, rows, targets, views)
    return steps


def _in_bfloat16(step: Step) -> Step:
    """The step under autocast, as ``performance.precision = "bfloat16"`` runs it."""

    def run() -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step()

    return run


def _plain(model: nn.Module, images: Tensor, targets: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    cross_entropy(model(images), targets).backward()
    model.zero_grad(set_to_none=True)


def _clip_and_sum(gradients: list[Tensor]) -> list[Tensor]:
    """The clipped sum of materialised unit gradients, as every peer forms it."""
    squares = torch.stack([gradient.flatten(1).square().sum(dim=1) for gradient in gradients]).sum(dim=0)
    factors = clip_factors(squares.sqrt(), CLIP_NORM)
    return [torch.einsum("u,u...->...", factors, gradient) for gradient in gradients]


def _opacus(model: nn.Module, images: Tensor, targets: Tensor, views: int) -> Step:
    try:
        from opacus import GradSampleModule
    except ImportError as error:
        raise ConfigError(
            "missing-extra",
            "opacus is not installed.",
            fix='Install the extra: pip install "sfumato[bench]".',
        ) from error
    wrapped = GradSampleModule(model, loss_reduction="mean")

    def step() -> list[Tensor]:
        wrapped.zero_grad(set_to_none=True)
        cross_entropy(wrapped(images), targets).backward()
        each = [parameter.grad_sample for parameter in wrapped.parameters()]
        result = _clip_and_sum([gradient.unflatten(0, (-1, views)).mean(dim=1) for gradient in each])
        wrapped.zero_grad(set_to_none=True)
        for parameter in wrapped.parameters():
            parameter.grad_sample = None
        return result

    return step


def _vmapped(model: nn.Module, images: Tensor, targets: Tensor, views: int) -> list[Tensor]:
    state = {name: value.detach() for name, value in model.named_parameters()}

    def unit_loss(parameters: dict[str, Tensor], rows: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, parameters, (rows,)), labels)

    per_unit = vmap(grad_and_value(unit_loss), in_dims=(None, 0, 0))
    gradients, _ = per_unit(state, images.unflatten(0, (-1, views)), targets.unflatten(0, (-1, views)))
    return _clip_and_sum(list(gradients.values()))


def _interleaved(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns, but the best of the machine's products; without a first round.

    One thread is timed by the processor's clock, which other programs do not lengthen.
    """
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    for counted in range(-1, rounds):
        for name, step in steps.items():
            began = now()
            step()
            if counted >= 0:
                times[name].append(now() - began)
    return {
        name: min(values) if isinstance(steps[name], Product) else statistics.median(values)
        for name, values in times.items()
    }


def _peak_bytes(step: Step) -> int | None:
    """Resident memory that one step adds at its peak; None where the system does not report it."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL(None).malloc_trim(0)
        reset.write_text("5")  # forget the peak so far
        before = _status_bytes(status, "VmRSS")
        step()
        return max(1, _status_bytes(status, "VmHWM") - before)
    except (OSError, AttributeError):
        return None


def _status_bytes(status: Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def save_ratio_chart(results: list[dict[str, Any]], picture: Path) -> None:
    """Bars of time against plain training, for each model and number of views, ours and the peers'."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{result['model']}\n{result['batch_size']} x {result['views']}" for result in results]
    names = {"sfumato": "ratio", "opacus": "opacus_ratio", "vmap": "vmap_ratio"}
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.3 * len(results), 3.6), layout="constrained")
    width = 0.8 / len(names)
    for index, (name, key) in enumerate(names.items()):
        places = [i for i, result in enumerate(results) if key in result]
        if places:
            heights = [results[i][key] for i in places]
            bars = axes.bar([i + (index - 1) * width for i in places], heights, width * 0.92, label=name)
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("time, plain training = 1")
    axes.set_xlabel("model, units x views")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=140)
    pyplot.close(figure)


def surroundings() -> dict[str, Any]:
    """Date, versions and machine, for a figure that is kept."""
    from sfumato import __version__

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "sfumato": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }
