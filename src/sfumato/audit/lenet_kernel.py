"""The compiled convolutions of many LeNets (lenet.c), built with the package where a C compiler was found."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int64
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from sfumato.gradients.kernels import library
from sfumato.gradients.kernels.library import Floats, Integers, Kernels

VERSION = 2  # of lenet.c: an older library would be called with arguments it does not know
KEPT = 8168  # floats that a row leaves for its backward pass, as lenet.c has it
SIGNATURES = {  # after the path; both return a status
    "lenet_forward": (Floats, Integers, Integers, *[Floats] * 6),
    "lenet_backward": (Floats, Integers, Integers, c_int64, *[Floats] * 7),
}


@cache
def available() -> dict[str, Kernels]:
    """The functions by every path that the build and the processor have."""
    return library.open_kernels(Path(__file__).with_name("_lenet"), "lenet", VERSION, SIGNATURES)


def compiled() -> Kernels | None:
    """By the path of the engine's kernels, which SFUMATO_KERNELS can name; None: PyTorch does the same."""
    engine = library.compiled()
    return None if engine is None else available().get(engine.path)


class Convolutions:
    """Both convolutions of each row's model, with tanh and pooling; what ``backward`` needs is kept.

    ``images`` (., 28, 28); ``image_of`` and ``model_of`` say for each row which image and which model it has.
    Raises ``ValueError`` where shapes do not fit, or a row asks for an image or a model that is not there.
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
        self.images = images.float().contiguous()
        self.image_of, self.model_of = image_of.contiguous(), model_of.contiguous()
        by_tap = weight2.permute(0, 3, 4, 2, 1).reshape(models, 5, 30, 16).contiguous()
        self.turned = pad(by_tap.transpose(2, 3), (0, 2)).contiguous()
        self.kept = torch.empty(len(image_of), KEPT)
        self.features = torch.empty(len(image_of), 400)
        passed = (self.images, self.image_of, self.model_of, weight1.contiguous(), bias1.contiguous(), by_tap)
        _call("lenet_forward", *passed, bias2.contiguous(), self.kept, self.features)

    def backward(self, gradient: Tensor, rows_of_unit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From the gradient of ``features`` to those of each unit's weights: (units, values) each.

        The rows of a unit follow each other; ``ValueError`` where they do not come out even.
        """
        rows = len(self.features)
        _check_shapes({"gradient": gradient}, {"gradient": (rows, 400)})
        units = rows // max(1, rows_of_unit)
        weight1, bias1 = torch.zeros(units, 150), torch.zeros(units, 6)
        weight2, bias2 = torch.zeros(units, 2400), torch.zeros(units, 16)
        passed = (self.images, self.image_of, self.model_of, rows_of_unit, self.turned, self.kept)
        results = weight1, bias1, weight2, bias2
        _call("lenet_backward", *passed, gradient.contiguous(), *results)
        return results


def _call(name: str, *arguments: Tensor | int) -> None:
    kernels = compiled()
    assert kernels is not None  # else products over windows are used
    kernels.call(name, *arguments)


def _check_shapes(given: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, value in given.items():
        if tuple(value.shape) != tuple(wanted[name]):
            raise ValueError(f"{name} is {tuple(value.shape)}, not {tuple(wanted[name])}")
