"""Names for torchvision's compiled operators where its library cannot be loaded.

A wheel that was built for CUDA does not find its libraries beside a torch for the CPU, and importing it then
ends at the first operator that is not there. Networks need none of them: their names are enough.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

_KEPT = []  # a library of operators lives as long as its object


def declare() -> None:
    """Make ``import torchvision`` possible; nothing if it is, or if torchvision is not installed."""
    found = find_spec("torchvision")
    if found is None or found.origin is None or _KEPT:
        return
    folder = Path(found.origin).parent
    try:
        for library in folder.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        text = (folder / "_meta_registrations.py").read_text()
        names = {*re.findall(r'register_meta\("(\w+)"\)', text), *re.findall(r"torchvision::(\w+)", text)}
        _KEPT.append(torch.library.Library("torchvision", "DEF"))
        for name in sorted(names):
            _KEPT[0].define(f"{name}(Tensor x) -> Tensor")
