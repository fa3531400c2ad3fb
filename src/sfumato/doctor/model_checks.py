"""Checks on the very model, at the sizes at which it will be trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sfumato.doctor.findings import Finding
from sfumato.doctor.gradient_check import Loss, check_engine, check_unit_gradients
from sfumato.doctor.probing import (
    STRICT,
    Tolerance,
    first_line,
    is_half,
    loose,
    own_dtype,
    probed,
    rows_like,
    unwrapped,
)
from sfumato.doctor.row_independence import check_embeddings, check_evaluation, check_independence
from sfumato.errors import ModelError, PrivacyError, SfumatoError

DEFAULT_ROWS = 32


def check_model(
    model: nn.Module,
    inputs: Tensor,
    *,
    num_rows: int | None = None,
    loss: Loss | None = None,
    targets: Tensor | None = None,
) -> list[Finding]:
    """Refuse a model for which clipping would not bound one unit's influence; returns what is worth knowing.

    ``inputs``: a row or more of the right shape; noise will do, no private image is needed. ``num_rows`` is
    the microbatch size of training (32 if not given). ``loss`` and ``targets`` are needed where training has
    others than cross-entropy and classes; targets of noise will do too.

    What is checked at which size: outputs with 1, 5, 7 and 13 rows, and once with ``num_rows``, forward only;
    the bound on sums of gradients with 2 and 3 rows, units of 1 and 2; every strategy of the engine with 2.
    The modes are those of training, frozen parts in evaluation mode, and for outputs evaluation mode too.
    The model is left as it was. Where float32 leaves a doubt between batches, float64 decides.
    """
    model = unwrapped(model)
    if not len(inputs):
        raise ModelError("no-probe", "the inputs have no rows.", fix="Pass a row or more of the right shape.")
    try:
        with torch.inference_mode(False):
            return _checked(model, inputs, num_rows or DEFAULT_ROWS, loss, targets)
    except SfumatoError:
        raise
    except Exception as error:  # whatever a user's model may do
        raise ModelError(
            "cannot-be-checked",
            f"{type(error).__name__} while {type(model).__name__} was checked: {first_line(error)}",
            why="What cannot be checked cannot be trained with a guarantee.",
            fix="Pass the plain nn.Module: not scripted, not quantised, not wrapped for several devices.",
        ) from error


def _checked(
    model: nn.Module, inputs: Tensor, num_rows: int, loss: Loss | None, targets: Tensor | None
) -> list[Finding]:
    scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise TypeError("its layers are scripted, and cannot be looked into")
    check_embeddings(model)
    drawing: list[str] = []

    def outputs(rows: Tensor, tolerance: Tolerance) -> None:
        drawing[:] = check_independence(model, rows, num_rows=num_rows, tolerance=tolerance)
        if any(module.training for module in model.modules()):
            check_evaluation(model.eval(), rows, tolerance=tolerance)

    def gradients(rows: Tensor, tolerance: Tolerance) -> None:
        check_unit_gradients(model, rows, tolerance=tolerance, loss=loss, targets=targets)

    _check_with_tolerances(outputs, model, inputs)
    if any(value.requires_grad for value in model.parameters()):
        if not is_half(model, inputs):
            check_engine(model, rows_like(inputs, 2), loss=loss, targets=targets)
        _check_with_tolerances(gradients, model, inputs)
    return [*_frozen_statistics(model), *_random_draws(drawing)]


def _check_with_tolerances(
    question: Callable[[Tensor, Tolerance], None], model: nn.Module, inputs: Tensor
) -> None:
    """Check with batches of several sizes; rounding, which differs between them, must not refuse a model.

    Guarantee: a model passes if it holds the strict tolerance in its own precision, or the loose one there
    and the strict one in float64. Half precision is too coarse for the strict one. Where the model cannot
    run in float64, the loose one decides.
    """
    dtype = own_dtype(model)
    half = is_half(model, inputs)
    if not half:
        try:
            with probed(model):
                return question(inputs, STRICT)
        except SfumatoError as error:
            if error.code != "mixes-examples" or dtype == torch.float64:
                raise
    mixed: SfumatoError | None = None
    try:
        with probed(model):
            question(inputs, loose(torch.bfloat16 if half else dtype))
    except SfumatoError as error:
        if error.code != "mixes-examples":
            raise
        mixed = error
    try:
        with probed(model, torch.float64):
            question(inputs.double() if inputs.is_floating_point() else inputs, STRICT)
    except SfumatoError as error:
        if error.code != "forward-fails":
            raise
        if mixed is not None:
            raise mixed from error
    else:
        if mixed is not None:
            raise _differs_by_precision(mixed) from mixed


def _differs_by_precision(mixed: SfumatoError) -> PrivacyError:
    return PrivacyError(
        "differs-by-precision",
        f"{mixed.what.rstrip('.')}; in float64 it does not.",
        why="Either the model mixes examples in its own precision alone, or rounding hides what it computes, "
        "as with weights that have grown without bound: then nothing can be learnt from its gradients.",
        fix="Begin with other weights, or train those with a smaller learning rate; look at their size.",
    )


def check_forward(model: nn.Module, shape: tuple[int, ...], *, num_classes: int | None = None) -> None:
    """Raise ``ModelError`` if the model cannot take images of this shape (channels, height, width), or does
    not give one score for each of ``num_classes`` classes."""
    device = next(model.parameters()).device
    try:
        with probed(model), torch.no_grad():
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


def _random_draws(drawing: list[str]) -> list[Finding]:
    if not drawing:
        return []
    return [
        Finding(
            severity="note",
            code="draws-random-numbers",
            what=f"{len(set(drawing))} layers (first: {drawing[0] or 'the model'}) draw random numbers.",
            cure="Nothing in a run: each unit has draws of its own. In a loop of your own, see to that.",
        )
    ]
