"""Which module computes whose gradient: every trained parameter is claimed by one module of the model.

A layer claims its own parameters. Where a layer is never called with one entry per row (a parametrisation, a
weight that its parent uses directly), the nearest module around it that is takes its parameters over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, cast

from torch import nn

from sfumato.errors import ModelError
from sfumato.gradients.call import BackwardPass, Call, Rule
from sfumato.gradients.contents import modules_of, parameters_of
from sfumato.gradients.convolution import convolution_rule
from sfumato.gradients.fallback import fallback_rule
from sfumato.gradients.linear import embedding_rule, linear_rule
from sfumato.gradients.normalisation import (
    batch_norm_rule,
    group_norm_pass,
    group_norm_rule,
    instance_norm_rule,
    layer_norm_pass,
    layer_norm_rule,
)

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_rule,
    nn.Embedding: embedding_rule,
    nn.GroupNorm: group_norm_rule,
    nn.LayerNorm: layer_norm_rule,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution_rule),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm_rule),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm_rule),
}
PASSES = {nn.GroupNorm: group_norm_pass, nn.LayerNorm: layer_norm_pass}
OWN_NAMES = frozenset({"weight", "bias"})  # what the rules above know of a layer
WHOLE = (nn.MultiheadAttention,)  # use their children's parameters without calling the children


class BringsRule(Protocol):
    """A layer's class that says itself how its units' gradients are found."""

    gradient_rule: Rule


@dataclass(frozen=True)
class Claim:
    """The trained parameters whose unit gradients one module computes; modules are named, not held."""

    path: str
    parameters: dict[str, str]  # name within the module -> name in the model
    rule: Rule
    kind: str  # the layer's settings in words, for choosing its strategy
    backward: Callable[[Call], BackwardPass | None] | None = None  # a backward pass that finds the pieces too
    shared: frozenset[int | str] = frozenset()  # arguments that are the same for all rows
    # True: the parameters are watched wherever they are used (``uses``), and the module is not asked;
    # False: that has been tried
    watched: bool | None = None


def claims_of(model: nn.Module) -> list[Claim]:
    """Every layer claims its own trained parameters; where it has no rule they are watched."""
    names = {id(value): name for name, value in parameters_of(model) if value.requires_grad}
    claims: list[Claim] = []
    whole: tuple[str, ...] = ()
    for path, module in modules_of(model):
        if whole and path.startswith(whole):
            continue
        if isinstance(module, WHOLE):
            whole = (*whole, f"{path}." if path else "")
            parameters = dict(module.named_parameters())
        else:
            parameters = {name: value for name, value in module._parameters.items() if value is not None}
        claimed = {name: names[id(value)] for name, value in parameters.items() if id(value) in names}
        if claimed:
            rule = rule_for(module, claimed)
            claim = Claim(path, claimed, rule, repr(module), PASSES.get(type(module)))
            claims.append(_watching(claim) if rule is fallback_rule else claim)
    return _without_nested(model, claims)


def _watching(claim: Claim) -> Claim:
    return Claim(claim.path, claim.parameters, fallback_rule, claim.kind, watched=True)


def _without_nested(model: nn.Module, claims: list[Claim]) -> list[Claim]:
    """A parameter that a module and one inside it both hold is the outer one's, which sees both uses."""
    held: dict[str, list[str]] = {}  # parameter -> paths of the modules that hold it
    for claim in claims:
        for target in claim.parameters.values():
            held.setdefault(target, []).append(claim.path)

    def inside(path: str, other: str) -> bool:
        return path != other and (other == "" or path.startswith(f"{other}."))

    result = []
    for claim in claims:
        paths = {name: held[target] for name, target in claim.parameters.items()}
        remaining = {
            name: claim.parameters[name]
            for name, others in paths.items()
            if not any(inside(claim.path, other) for other in others)
        }
        if any(inside(other, claim.path) for name in remaining for other in paths[name]):
            claim = _watching(claim)
        if remaining:
            result.append(replace(claim, parameters=remaining))
    return result


def rule_for(module: nn.Module, names: Iterable[str]) -> Rule:
    """The rule that a layer brings (``gradient_rule``), the one for its kind, or the fallback.

    A subclass with a forward pass of its own is another layer, and so is one whose calls a hook changes.
    """
    kind = type(module)
    if module._forward_hooks or module._forward_pre_hooks:
        return fallback_rule
    brings = next(
        (base for base in kind.__mro__ if issubclass(base, nn.Module) and "gradient_rule" in vars(base)), None
    )
    if brings is not None and kind.forward is brings.forward:
        return cast(BringsRule, brings).gradient_rule
    for base in kind.__mro__:
        if base in RULES:
            same = kind.forward is base.forward and _inner(kind) is _inner(base)
            return RULES[base] if same and OWN_NAMES.issuperset(names) else fallback_rule
    return fallback_rule


def _inner(kind: type[nn.Module]) -> object:
    return getattr(kind, "_conv_forward", None)


def passed_on(model: nn.Module, claims: list[Claim], lost: Iterable[Claim]) -> list[Claim]:
    """The claims, each of ``lost`` taken one step on.

    What its own rule cannot answer for is watched; what cannot be watched is left to the fallback, by the
    module itself and then by those around it.
    """
    by_place = {(claim.path, bool(claim.watched)): claim for claim in claims}

    def put(path: str, parameters: dict[str, str], *, watched: bool) -> None:
        if (path, watched) in by_place:
            parameters = {**by_place[path, watched].parameters, **parameters}
        kind = repr(model.get_submodule(path))
        by_place[path, watched] = Claim(path, parameters, fallback_rule, kind, watched=watched)

    for claim in lost:
        # with what its children have passed to it meanwhile
        claim = by_place.pop((claim.path, bool(claim.watched)), claim)
        if claim.watched is not False:
            put(claim.path, claim.parameters, watched=not claim.watched)
            continue
        if claim.path == "":
            raise ModelError(
                "no-rows",
                "the model's output does not have one entry for each row of its input.",
                why="A unit's gradient can be bounded only if its rows can be told apart.",
                fix="Let the model take (rows, ...) and return (rows, ...), rows first.",
            )
        parent, _, last = claim.path.rpartition(".")
        parameters = {f"{last}.{name}": target for name, target in claim.parameters.items()}
        put(parent, parameters, watched=False)
    return list(by_place.values())


def watched_names(claims: Iterable[Claim]) -> frozenset[str]:
    """The parameters that are watched."""
    return frozenset(name for claim in claims if claim.watched for name in claim.parameters.values())


def holders(claims: Iterable[Claim], names: Iterable[str]) -> list[Claim]:
    """The claims by which these parameters are watched."""
    wanted = set(names)
    return [claim for claim in claims if claim.watched and wanted & set(claim.parameters.values())]
