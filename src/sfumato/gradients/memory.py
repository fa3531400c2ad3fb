"""How many rows fit in memory: a performance question that cannot change epsilon."""

from __future__ import annotations

import ctypes

import psutil
import torch
from torch import Tensor, nn

from sfumato.gradients.modes import evaluation_mode


def free_memory(device: torch.device) -> int:
    """Bytes that can still be used on ``device``, respecting the container's limit on a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    for limit_file, used_file in _CONTAINER_FILES:
        try:
            with open(limit_file) as limit, open(used_file) as used:
                free = min(free, int(limit.read()) - int(used.read()))
        except (OSError, ValueError):  # no such controller, or "max": no limit
            continue
    return max(free, 0)


_CACHE_BYTES = 64 * 2**20
_CONTAINER_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def rows_in_memory(bytes_per_row: int, free_bytes: int, *, on_accelerator: bool) -> int:
    """Rows of a microbatch: what fits a quarter of the free memory, and no more than pays.

    On a CPU 64 rows of CIFAR size keep every core busy and more would only leave the caches; of small images
    it takes as many as fill the same space.
    """
    needed = max(1, bytes_per_row)
    ceiling = 1024 if on_accelerator else max(64, min(1024, _CACHE_BYTES // needed))
    return max(1, min(ceiling, free_bytes // 4 // needed))


@torch.no_grad()
def bytes_per_row(model: nn.Module, example: Tensor) -> int:
    """Memory that one row needs while its clipped gradient is computed, estimated from one forward pass."""
    outputs = 0

    def count(_module: nn.Module, _inputs: object, output: object) -> None:
        nonlocal outputs
        if isinstance(output, Tensor):
            outputs += output.numel() * output.element_size()

    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [module.register_forward_hook(count) for module in leaves]
    try:
        with evaluation_mode(model):
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    # Every activation is kept, its gradient passes by, and a layer's work buffers are about as large again.
    return 3 * outputs // len(example)


def keep_freed_memory() -> None:
    """Let the C library keep large freed blocks for the next tensor instead of handing them back at once.

    Every activation of a convolutional net is a block of megabytes; getting each from the kernel anew, page
    by page, costs more than a tenth of a training step on a CPU. Without glibc this does nothing.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 2**31 - 1)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):
        return


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
