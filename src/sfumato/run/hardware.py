"""A plan past this machine: time, memory and cost of a run on devices that are described by public figures.

Time is the work that was counted, over the operations that a device reaches; how far that holds is stated in
docs/scale.md. Nothing is measured here, and nothing but public facts is used.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from dataclasses import dataclass
from importlib import resources

import msgspec
import numpy as np

from sfumato.errors import ConfigError, did_you_mean
from sfumato.gradients.memory import rows_in_memory
from sfumato.run.workload import Workload

NOISE_SECONDS = 9e-9  # of one coordinate on one core, measured: AES and Box-Muller in float64
SUM_BYTES = 8  # of a coordinate in the sum over ranks
_HOP_SECONDS = 10e-6  # of one message of a ring


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of hardware.toml."""

    title: str
    teraflops: float
    memory_gib: float
    link_gb: float
    network_gb: float
    per_host: int
    dollars: float
    efficiency: float
    basis: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """So many devices of one kind."""

    name: str
    device: Device
    count: int

    @property
    def flops_per_second(self) -> float:
        """Of one device in a private step."""
        return self.device.teraflops * 1e12 * self.device.efficiency

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def seconds_to_reduce(self, num_values: int) -> float:
        """Of a ring all-reduce of so many float64: each goes round twice, in as many parts as devices."""
        if self.count == 1:
            return 0.0
        speed = self.device.link_gb if self.count <= self.device.per_host else self.device.network_gb
        passes = 2 * (self.count - 1)
        return passes / self.count * num_values * SUM_BYTES / (speed * 1e9) + passes * _HOP_SECONDS


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What a run takes on the devices."""

    hardware: str
    seconds: float
    seconds_per_step: float
    efficiency: float  # of all devices together, beside one of them without others to wait for
    memory_gib: float  # of one device
    fits: bool
    device_hours: float
    dollars: float  # by a declared price
    basis: str


@functools.cache
def devices() -> dict[str, Device]:
    """By their names."""
    text = (resources.files("sfumato") / "run" / "hardware.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Device])


def parse_hardware(text: str) -> Hardware:
    """``8xA100``, ``RTX8000`` for one of them, ``cpu:2`` for two cores."""
    found = re.fullmatch(r"(?:(\d{1,6})x)?([A-Za-z]\w*)(?::(\d{1,6}))?", text.strip())
    names = {name.lower(): name for name in devices()}
    if found is None or found[2].lower() not in names or (found[1] and found[3]):
        name = found[2] if found else text
        raise ConfigError(
            "unknown-hardware",
            f"hardware {text!r} is not known. {did_you_mean(name, list(devices()))}".rstrip(),
            why=f"Known are {', '.join(devices())}; their figures stand in run/hardware.toml.",
            fix="Give a number and a name such as 8xA100, or cpu:2 for two cores.",
        )
    count = int(found[1] or found[3] or 1)
    if not count:
        raise ConfigError("unknown-hardware", f"{text!r} has no devices.", fix="Give at least one: 1xA100.")
    name = names[found[2].lower()]
    return Hardware(name=name, device=devices()[name], count=count)


def project(workload: Workload, hardware: Hardware, *, dollars_per_hour: float | None = None) -> Projection:
    """Time, memory and cost of a run whose batches are shared out evenly over the devices."""
    alone = _seconds_per_step(workload, hardware, devices=1) * workload.num_steps
    step = _seconds_per_step(workload, hardware, devices=hardware.count)
    once = workload.flops_once / hardware.flops_per_second
    seconds = step * workload.num_steps + once / hardware.count
    memory = _memory_bytes(workload, hardware)
    price = hardware.device.dollars if dollars_per_hour is None else dollars_per_hour
    hours = seconds * hardware.count / 3600
    return Projection(
        hardware=f"{hardware.count}x{hardware.name}",
        seconds=seconds,
        seconds_per_step=step,
        efficiency=(alone + once) / (seconds * hardware.count),
        memory_gib=memory / 2**30,
        fits=memory <= hardware.device.memory_gib * 2**30,
        device_hours=hours,
        dollars=hours * price,
        basis=hardware.device.basis,
    )


def _seconds_per_step(workload: Workload, hardware: Hardware, *, devices: int) -> float:
    share = math.ceil(workload.rows_per_step / devices)
    compute = share * workload.flops_per_row / hardware.flops_per_second
    serial = workload.num_noisy * NOISE_SECONDS  # drawn once, whoever else waits
    return compute + serial + (hardware.seconds_to_reduce(workload.num_trained) if devices > 1 else 0.0)


def _memory_bytes(workload: Workload, hardware: Hardware) -> int:
    whole = int(hardware.device.memory_gib * 2**30)
    rows = rows_in_memory(workload.row_bytes, whole, on_accelerator=not hardware.is_cpu)
    rows = min(rows, max(1, math.ceil(workload.rows_per_step / hardware.count)))
    processes = hardware.count if hardware.is_cpu else 1  # cores share one memory
    return (workload.model_bytes + rows * workload.row_bytes) * processes


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What keeps devices from going at the same pace."""

    jitter: float = 0.02  # standard deviation of the logarithm of a device's time in a step
    stall_chance: float = 1e-4  # of a device in a step
    stall_seconds: float = 1.0
    sharding: bool = True  # each device samples a shard of its own; else the batch is shared out evenly


def simulate(
    workload: Workload, hardware: Hardware, *, trouble: Trouble, num_steps: int = 500, seed: int = 0
) -> dict[str, float]:
    """Mean seconds of a step by what they are spent on, over so many simulated ones, and the efficiency."""
    random = np.random.default_rng(seed)
    count = hardware.count
    share = workload.rows_per_step / workload.rows_per_unit / count
    seconds_per_unit = workload.rows_per_unit * workload.flops_per_row / hardware.flops_per_second
    even, shape = share * seconds_per_unit, (num_steps, count)
    sampled = (random.poisson(share, shape) if trouble.sharding else np.full(shape, share)) * seconds_per_unit
    slowed = sampled * np.exp(random.normal(-(trouble.jitter**2) / 2, trouble.jitter, sampled.shape))
    slowed = slowed + trouble.stall_seconds * (random.random(sampled.shape) < trouble.stall_chance)
    noise = workload.num_noisy * NOISE_SECONDS
    reduction = hardware.seconds_to_reduce(workload.num_trained)
    step = float(slowed.max(1).mean()) + noise + reduction
    return {
        "devices": count,
        "compute": even,
        "imbalance": float(sampled.max(1).mean()) - even,
        "stragglers": float((slowed.max(1) - sampled.max(1)).mean()),
        "communication": reduction,
        "noise": noise,
        "seconds_per_step": step,
        "efficiency": even / step,
    }
