"""Checks on the very model: rows are independent, and the engine's sum is autograd's."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sfumato.doctor.findings import Finding
from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients import Choices, ClippedSum, clipped_sum
from sfumato.gradients.call import Strategy
from sfumato.gradients.piece import Piece
from sfumato.training.finetuning import training_mode

_TOLERANCE = 1e-3  # relative; float32 sums of millions of values in another order differ by about 1e-5


def check_model(model: nn.Module, inputs: Tensor) -> list[Finding]:
    """Refuse a model for which clipping would not bound one unit's influence; returns what is worth knowing.

    ``inputs``: two rows or more of the right shape; noise will do, no private image is needed. The
    model is probed as it trains, frozen parts in evaluation mode, and left as it was.
    """
    if len(inputs) < 2:
        inputs = torch.cat([inputs, torch.randn_like(inputs)])
    with _undisturbed(model):
        check_independence(model, inputs)
        check_engine(model, inputs[:2])  # every strategy on each row: two are enough, and quick
    return _frozen_statistics(model)


def check_forward(model: nn.Module, shape: tuple[int, ...], *, num_classes: int | None = None) -> None:
    """Raise ``ModelError`` if the model cannot take images of this shape (channels, height, width), or does
    not give one score for each of ``num_classes`` classes."""
    device = next(model.parameters()).device
    try:
        with _undisturbed(model), torch.no_grad():
            scores = model.eval()(torch.zeros(1, *shape, device=device))
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            "wrong-image-shape",
            f"the model cannot take images of {' x '.join(map(str, shape))}: {str(error).splitlines()[0]}",
            fix="Use larger images (--set data.image_size=…), other channels, or another model.",
        ) from error
    if num_classes is not None and tuple(scores.shape) != (1, num_classes):
        raise ModelError(
            "wrong-output-shape",
            f"the model gives {tuple(scores.shape)} for one image, and the data have {num_classes} classes.",
            fix=f"Give its last layer {num_classes} outputs.",
        )


def check_independence(model: nn.Module, inputs: Tensor) -> None:
    """Raise ``PrivacyError`` if a row of the output depends on another row of the input.

    Guarantee: numeric, not by class names. The last row is replaced first by large values, then by
    values that are not numbers, which spread through every sum, mean and maximum they enter; the other
    rows must not change at all in the first case beyond rounding, and must stay finite in the second.
    """
    with _undisturbed(model), torch.no_grad():
        before = {name: value.clone() for name, value in model.named_buffers()}
        plain = _layer_outputs(model, inputs)
        if not torch.isfinite(plain[-1][2]).all():
            raise ModelError(
                "non-finite-output",
                "the model's output is not finite on plain inputs.",
                fix="Check the initialisation and the scale of the inputs.",
            )
        changed = [
            name
            for name, value in model.named_buffers()
            if not torch.equal(torch.nan_to_num(value), torch.nan_to_num(before[name]))
        ]
        for disturbance in (lambda row: 50.0 * torch.randn_like(row) + 7.0, lambda row: row * math.nan):
            disturbed = inputs.clone()
            disturbed[-1] = disturbance(disturbed[-1])
            _restore(model, before)
            _compare(plain, _layer_outputs(model, disturbed))
    if changed:
        raise PrivacyError(
            "private-statistics",
            f"a forward pass changes the model's buffer {changed[0]}.",
            why="It keeps statistics of private images, which the release would contain without noise.",
            fix="Use --set model.options.norm=group, or sfumato.models.make_private_ready(model).",
        )


def check_engine(
    model: nn.Module,
    inputs: Tensor,
    *,
    loss: Callable[..., Tensor] = cross_entropy,
    sum_function: Callable[..., object] = clipped_sum,
) -> None:
    """Raise ``ModelError`` if the engine's norms and sums on this model are not those of plain autograd.

    Guarantee: every strategy of every layer is compared, since training chooses among them by timing.
    """
    with _undisturbed(model):
        with torch.no_grad():
            outputs = model(inputs)
            if not torch.equal(outputs, model(inputs)):
                model.eval()  # dropout and the like would differ from pass to pass
        targets = torch.arange(len(inputs), device=inputs.device) % outputs.shape[1]
        rows = row_gradients(model, inputs, targets, loss)
        norms = [math.sqrt(sum(g.double().square().sum().item() for g in row.values())) for row in rows]
        clip_norm = 0.7 * max(norms) if max(norms) > 0 else 1.0
        number, most = 0, 1
        while number < most:
            # choices of its own: what is met on these few rows must not decide for whole batches
            choices = NumberedStrategy(number=number)
            total = sum_function(model, inputs, targets, clip_norm=clip_norm, loss=loss, choices=choices)
            _compare_sum(total, rows, norms, clip_norm=clip_norm)
            number, most = number + 1, choices.most


@dataclass
class NumberedStrategy(Choices):
    """Takes each layer's strategy of one number, so that every one is checked that timing may choose."""

    number: int = 0
    most: int = 1  # the largest number of strategies of any layer met

    def pieces(self, key: Hashable, strategies: list[Strategy]) -> dict[str, Piece]:
        self.most = max(self.most, len(strategies))
        return strategies[self.number % len(strategies)].pieces()


def _compare_sum(
    total: ClippedSum, rows: list[dict[str, Tensor]], norms: list[float], *, clip_norm: float
) -> None:
    """Raise unless ``total`` is the clipped sum of these gradients, with these norms."""
    missing = set(rows[0]) - set(total.gradients)
    if missing:
        raise _disagrees(f"parameter {min(missing)} is missing from the sum")
    for i, norm in enumerate(norms):
        if not abs(total.norms[i].item() - norm) <= _TOLERANCE * norm + 1e-9:
            raise _disagrees(f"row {i} has norm {total.norms[i].item():.6g}, by autograd {norm:.6g}")
    scale = max(clip_norm, 1e-9)
    for name in rows[0]:
        expected = sum(
            row[name].double() * min(1.0, clip_norm / max(norm, 1e-30))
            for row, norm in zip(rows, norms, strict=True)
        )
        error = (total.gradients[name].double() - expected).norm().item()
        if not error <= _TOLERANCE * scale:
            raise _disagrees(f"the sum of {name} is off by {error:.3g} at clip norm {clip_norm:.3g}")


def check_augmentation(augmentation: Callable[[Tensor, torch.Generator], Tensor], images: Tensor) -> None:
    """Raise ``PrivacyError`` if a view of one image depends on another image, as in mixup or cutmix.

    ``augmentation(images, generator)`` returns the same number of views of each image, those of image 0
    first.
    """

    def views(batch: Tensor) -> Tensor:
        return augmentation(batch, torch.Generator(device=batch.device).manual_seed(0))

    disturbed = images.clone()
    disturbed[-1] = 1.0 - disturbed[-1] * 3.0
    plain, other = views(images), views(disturbed)
    kept = len(plain) // len(images) * (len(images) - 1)
    if not torch.equal(plain[:kept], other[:kept]):
        raise PrivacyError(
            "mixes-examples",
            "a view of image 0 changes when another image changes.",
            why="Clipping one unit's gradient then no longer bounds the unit's influence.",
            fix="Use augmentation that treats each image on its own: no mixup, cutmix or batch statistics.",
        )


def _layer_outputs(model: nn.Module, inputs: Tensor) -> list[tuple[str, str, Tensor]]:
    """(name, class, output) of every module in the order in which they finish, the model itself last."""
    outputs: list[tuple[str, str, Tensor]] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if isinstance(output, Tensor) and output.ndim and len(output) == len(inputs):
                outputs.append((name or "the model", type(module).__name__, output))

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # dropout draws the same mask for both passes
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not outputs:
        raise ModelError(
            "no-row-outputs",
            "the model gives no output with one row per input row for inputs of shape "
            f"{tuple(inputs.shape)}.",
            fix="A classifier must return a tensor of shape (rows, classes).",
        )
    return outputs


def _compare(plain: list[tuple[str, str, Tensor]], other: list[tuple[str, str, Tensor]]) -> None:
    """Judge by the model's own output; the layers before it only tell where the mixing began."""
    if not _moved(plain[-1][2], other[-1][2]):
        return
    name, kind = next(
        (name, kind)
        for (name, kind, first), (_, _, second) in zip(plain, other, strict=True)
        if _moved(first, second)
    )
    raise PrivacyError(
        "mixes-examples",
        f"output 0 changes when another example changes (first such layer: {name}, {kind}).",
        why="Clipping one example then no longer bounds its influence.",
        fix="Use --set model.options.norm=group, or sfumato.models.make_private_ready(model).",
    )


def _moved(first: Tensor, second: Tensor) -> bool:
    """Whether rows other than the last differ by more than rounding, or stopped to be numbers."""
    first, second = first[:-1].double(), second[:-1].double()
    if not first.numel():
        return False
    return not (first - second).abs().max().item() <= 1e-5 * (first.abs().max().item() + 1e-12)


def row_gradients(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]
) -> list[dict[str, Tensor]]:
    """Each row's gradients, all from one forward pass.

    A pass per row would round differently, and where a ReLU then falls on the other side of zero the
    gradient jumps by up to a hundredth: no fault of the engine, which takes all rows at once too.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    rows = []
    # PyTorch's group norm crashes in channels last if its scale is trained and its input wants no gradient.
    image = [inputs.detach().requires_grad_()] if inputs.is_floating_point() else []
    with torch.enable_grad():
        outputs = model(*(image or [inputs]))
        for i in range(len(inputs)):
            value = loss(outputs[i : i + 1], targets[i : i + 1])
            found = torch.autograd.grad(
                value, [*trained.values(), *image], allow_unused=True, retain_graph=i + 1 < len(inputs)
            )
            rows.append(
                {
                    name: torch.zeros_like(parameter) if gradient is None else gradient
                    for (name, parameter), gradient in zip(trained.items(), found, strict=False)
                }
            )
    return rows


def _frozen_statistics(model: nn.Module) -> list[Finding]:
    kinds = (nn.modules.batchnorm._BatchNorm,)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if not names:
        return []
    return [
        Finding(
            severity="note",
            code="frozen-batch-norm",
            what=f"{len(names)} batch norms (first: {names[0]}) use fixed statistics and passed the probe.",
            cure="Nothing, if their statistics come from public data; if not, they reveal private images.",
        )
    ]


def _disagrees(what: str) -> ModelError:
    return ModelError(
        "engine-disagrees",
        f"{what}.",
        why="The engine's gradients on this model are not autograd's, so its clip bounds nothing.",
        fix="Report the model; until then wrap the layer concerned in a module of its own.",
    )


def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, value in model.named_buffers():
        value.copy_(buffers[name])


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Modes of training inside; modes, buffers and random state as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    training_mode(model)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            _restore(model, buffers)
