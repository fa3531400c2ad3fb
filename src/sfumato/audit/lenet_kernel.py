"""The compiled convolutions of many LeNets (lenet.c), built with the package where a C compiler was found."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

KEPT = 8168  # floats that a row leaves for its backward pass, as lenet.c has it


@cache
def compiled() -> ctypes.CDLL | None:
    """The library, or None: PyTorch then does the same more slowly."""
    places = [Path(__file__).with_name(f"_lenet{suffix}") for suffix in EXTENSION_SUFFIXES]
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        return None
    try:
        library = ctypes.CDLL(str(place))
        library.lenet_kept.argtypes, library.lenet_kept.restype = [], c_int32
        if library.lenet_kept() != KEPT:
            return None
        library.lenet_forward.argtypes = [c_int64, *[c_void_p] * 9]
        library.lenet_backward.argtypes = [c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 7]
        library.lenet_forward.restype = library.lenet_backward.restype = None
    except (OSError, AttributeError):  # built elsewhere, or from an older source
        return None
    return library


class Convolutions:
    """Both convolutions of each row's model, with tanh and pooling; what ``backward`` needs is kept.

    ``images`` (., 28, 28); ``image_of`` and ``model_of`` say for each row which image and which model it has.
    """

    def __init__(
        self,
        weights: tuple[Tensor, Tensor, Tensor, Tensor],
        images: Tensor,
        image_of: Tensor,
        model_of: Tensor,
    ) -> None:
        weight1, bias1, weight2, bias2 = weights
        models = len(weight1)
        shapes = {"weight1": (models, 6, 1, 5, 5), "bias1": (models, 6), "weight2": (models, 16, 6, 5, 5)}
        given = {"weight1": weight1, "bias1": bias1, "weight2": weight2}
        _check_shapes(given | {"bias2": bias2}, shapes | {"bias2": (models, 16)})
        _check_shapes(
            {"images": images, "model_of": model_of},
            {"images": (len(images), 28, 28), "model_of": image_of.shape},
        )
        for index, limit in ((image_of, len(images)), (model_of, models)):
            if len(index) and not 0 <= int(index.min()) <= int(index.max()) < limit:
                raise ValueError(f"a row asks for number {int(index.max())} of {limit}")
        self.images, self.image_of, self.model_of = (
            images.float().contiguous(),
            image_of,
            model_of.contiguous(),
        )
        by_tap = weight2.permute(0, 3, 4, 2, 1).reshape(models, 5, 30, 16).contiguous()
        self.turned = pad(by_tap.transpose(2, 3), (0, 2)).contiguous()
        self.kept = torch.empty(len(image_of), KEPT)
        self.features = torch.empty(len(image_of), 400)
        passed = (self.images, self.image_of, self.model_of, weight1.contiguous(), bias1.contiguous(), by_tap)
        _call("lenet_forward", len(image_of), *passed, bias2.contiguous(), self.kept, self.features)

    def backward(self, gradient: Tensor, rows_of_unit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From the gradient of ``features`` to those of each unit's weights: (units, values) each."""
        rows = len(self.features)
        _check_shapes({"gradient": gradient}, {"gradient": (rows, 400)})
        units = rows // rows_of_unit
        weight1, bias1 = torch.zeros(units, 150), torch.zeros(units, 6)
        weight2, bias2 = torch.zeros(units, 2400), torch.zeros(units, 16)
        passed = (self.images, self.image_of, self.model_of, rows_of_unit, self.turned, self.kept)
        results = weight1, bias1, weight2, bias2
        _call("lenet_backward", units * rows_of_unit, *passed, gradient.contiguous(), *results)
        return results


def _call(name: str, *arguments: Tensor | int) -> None:
    passed = (each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
    getattr(compiled(), name)(*passed)


def _check_shapes(given: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, value in given.items():
        if tuple(value.shape) != tuple(wanted[name]):
            raise ValueError(f"{name} is {tuple(value.shape)}, not {tuple(wanted[name])}")
