"""What tells one loss, clipping function, sampling scheme or optimizer of a caller's own from another.

A resumed run must bring the same ones, and a name is not enough: every lambda has the same, and so has a
function with other arguments bound to it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, types.EllipsisType, torch.dtype, torch.device)


def identity_of(value: object) -> str:
    """The component's name, and a checksum of what it is made of.

    Guarantee: components that differ in a bound argument, a default, a field, a variable of a closure, an
    attribute, a tensor or in their code have different identities. The same ones have the same identity in
    another process, of the same version of Python. Global variables that a function reads are not compared,
    nor is the code of what it calls.
    """
    digest = hashlib.sha256()
    for part in _parts(value, ()):
        digest.update(f"{len(part)}:".encode() + part)
    return f"{_name(value)} {digest.hexdigest()[:16]}"


def _name(value: object) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _parts(value: object, within: tuple[int, ...]) -> Iterator[bytes]:
    """Bytes that are equal for equal values, depth first; what contains itself is told by its depth."""
    if id(value) in within:
        yield f"contains itself {len(within) - within.index(id(value))} levels up".encode()
        return
    within = (*within, id(value))
    yield _name(value).encode()
    if isinstance(value, _PLAIN):
        yield repr(value).encode("utf-8", "backslashreplace")
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, types.CodeType):
        yield value.co_code
        names = (value.co_names, value.co_varnames, value.co_freevars)
        yield from _parts((value.co_consts, names), within)
    else:
        for item in _contents(value):
            yield from _parts(item, within)


def _contents(value: object) -> Iterator[object]:
    """What a container, a function or an object consists of, in an order that does not change."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield key
            yield value[key]
    elif isinstance(value, set | frozenset):
        yield from sorted(value, key=repr)
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from (cell.cell_contents for cell in value.__closure__ or ())
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, classmethod | staticmethod):
        yield value.__func__
    elif isinstance(value, type):
        if not _is_shipped(value):
            yield value.__bases__
            yield {name: part for name, part in vars(value).items() if _is_own(name, part)}
    elif not isinstance(value, types.BuiltinFunctionType):
        yield type(value)
        if dataclasses.is_dataclass(value):
            yield [getattr(value, field.name) for field in dataclasses.fields(value)]
        yield getattr(value, "__dict__", {})
        yield [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]


def _is_own(name: str, part: object) -> bool:
    """Whether it is a method or a value of the class, not what Python adds to every class."""
    kinds = (types.FunctionType, property, classmethod, staticmethod, *_PLAIN)
    return isinstance(part, kinds) and not (name.startswith("__") and name != "__call__")


def _is_shipped(kind: type) -> bool:
    """A class of a library, which its version tells apart."""
    return kind.__module__.partition(".")[0] in ("builtins", "sfumato", "torch", "numpy", "functools")
