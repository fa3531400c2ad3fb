"""One row through the model, to learn which layer can compute which parameter's gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from sfumato.errors import ModelError
from sfumato.gradients.call import tensors_in
from sfumato.gradients.claims import Claim, watched_names
from sfumato.gradients.contents import modules_of, parameters_of
from sfumato.gradients.fallback import output_tensors
from sfumato.gradients.functions import FUNCTIONS
from sfumato.gradients.row_losses import Loss, row_losses
from sfumato.gradients.swapping import parameter_of, swapped
from sfumato.gradients.uses import Watch, watched_places


def state_of(model: nn.Module) -> tuple[object, ...]:
    """What the claims depend on: which parameters are trained, by which layers, in which mode and hooks."""
    layers = [
        (path, id(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for path, module in modules_of(model)
    ]
    return (*layers, *(name for name, value in parameters_of(model) if value.requires_grad))


class _Watch:
    """What the layers receive while one row passes, their own parameters detached as long as they run."""

    def __init__(self, claims: list[Claim]) -> None:
        self.outside: list[AbstractContextManager[None]] = []
        self.shared: dict[str, set[int | str]] = {claim.path: set() for claim in claims}
        self.lost: dict[str, Claim] = {}

    def enter(self, claim: Claim, module: nn.Module, _args: object) -> None:
        parameters = [parameter_of(module, name) for name in claim.parameters]
        self.outside.append(swapped(module, {id(value): value.detach() for value in parameters}))
        self.outside[-1].__enter__()

    def leave(self, claim: Claim, _module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        self.outside.pop().__exit__(None, None, None)
        if not has_rows(tensors_in(args, kwargs), output_tensors(output), 1):
            self.lost[claim.path] = claim
        for key, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor) and (value.dim() == 0 or len(value) != 1):
                self.shared[claim.path].add(key)


def probed(
    model: nn.Module, claims: list[Claim], inputs: Tensor, targets: Tensor, loss: Loss
) -> tuple[list[Claim], list[Claim], list[tuple[str, int]]]:
    """The claims, with the arguments that all rows share; those that cannot stand; and what the watched
    parameters met (``Watch.plan``).

    One row is sent through with every layer's own parameters detached while the layer runs. A layer that
    receives anything but one row does not have rows first, whatever lengths happen to be equal in a batch. A
    parameter that has a gradient all the same is used around its layer.
    """
    trained = {name: value for name, value in parameters_of(model) if value.requires_grad}
    leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
    watch, uses = _Watch(claims), Watch(FUNCTIONS, len(inputs))
    places = watched_places(uses, model, watched_names(claims), _by_id(model, leaves))
    leaves |= uses.leaves
    with torch.enable_grad(), _watching(model, claims, watch), swapped(model, places):
        # PyTorch's group norm crashes in channels last if its scale wants a gradient and its input does not
        image = inputs.detach().requires_grad_(inputs.is_floating_point())
        value = row_losses(loss, model(image.clone()), targets).sum()
    claims = [replace(claim, shared=frozenset(watch.shared[claim.path])) for claim in claims]
    wanted = [target for claim in claims for target in claim.parameters.values()]
    gradients = torch.autograd.grad(
        value, [*(leaves[name] for name in wanted), *trained.values()], allow_unused=True
    ) if value.requires_grad else ()  # fmt: skip
    for name, gradient in zip(trained, gradients[len(wanted) :], strict=False):
        if gradient is not None:
            raise ModelError(
                "hidden-parameter",
                f"the model uses {name} through a reference of its own, beside the layer that holds it.",
                why="Its gradient would be missed.",
                fix="Use it as self.name, or through nn.ParameterList.",
            )
    used = {name for name, gradient in zip(wanted, gradients, strict=False) if gradient is not None}
    lost = {(path, False): claim for path, claim in watch.lost.items()}
    lost |= {
        (claim.path, bool(claim.watched)): claim for claim in claims if used & set(claim.parameters.values())
    }
    return claims, list(lost.values()), uses.seen


@contextmanager
def _watching(model: nn.Module, claims: list[Claim], watch: _Watch) -> Iterator[None]:
    handles = []
    for claim in claims:
        if claim.watched:
            continue
        module = model.get_submodule(claim.path)
        handles.append(module.register_forward_pre_hook(partial(watch.enter, claim)))
        handles.append(module.register_forward_hook(partial(watch.leave, claim), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_id(model: nn.Module, leaves: Mapping[str, Tensor]) -> dict[int, Tensor]:
    return {id(value): leaves.get(name, value.detach()) for name, value in parameters_of(model)}


def has_rows(inputs: list[Tensor], outputs: tuple[Tensor, ...], rows: int) -> bool:
    """Whether a layer's input and its outputs have one entry for each row."""
    if not inputs or not outputs:
        return False
    return all(value.dim() > 0 and len(value) == rows for value in (inputs[0], *outputs))
