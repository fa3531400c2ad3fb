"""Turn a model with batch norm into one that can be trained privately."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from sfumato.errors import ModelError
from sfumato.layers import FrozenBatchNorm, suitable_groups
from sfumato.models.change import Change
from sfumato.models.options import check_option

BatchNormTo = Literal["group", "frozen"]
CHANNELS_PER_GROUP = 16  # at least, so that a group has a spread even where the map has one pixel
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def make_private_ready(
    model: nn.Module, *, batch_norm: BatchNormTo = "group", groups: int = 32
) -> tuple[nn.Module, tuple[Change, ...]]:
    """A copy of the model that can be trained privately, and what was changed in it.

    Guarantee: no layer of the copy that PyTorch calls a batch norm mixes examples or records statistics of
    the data, and no activation module overwrites its input. Code inside a ``forward`` is not rewritten:
    ``sfumato.doctor.check_model`` finds what it does.

    - Batch norm becomes group norm with at most ``groups`` groups of at least 16 channels, or one
      group. Learnt scale and shift are kept; running statistics have no meaning there and are dropped.
    - With ``batch_norm="frozen"`` its running statistics become constants instead: right for weights that
      were learnt on public data, since the model then computes what it did in eval mode.
    - Instance norm stops recording statistics. In-place activations become ordinary ones.
    """
    check_option("batch_norm", batch_norm, BatchNormTo)
    if any(is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        raise ModelError(
            "lazy-model",
            f"{type(model).__name__} has layers that do not know their number of channels yet.",
            fix="Run it once on an image first: model(torch.zeros(1, 3, 32, 32)).",
        )
    ready = copy.deepcopy(model)
    changes: list[Change] = []
    done: dict[nn.Module, nn.Module] = {}  # a layer used in two places stays one layer

    def visit(name: str, module: nn.Module) -> nn.Module:
        if module in done:
            return done[module]
        for child_name, child in list(module._modules.items()):  # named_children skips a second use
            if child is None:
                continue
            replacement = visit(f"{name}.{child_name}" if name else child_name, child)
            if replacement is not child:
                setattr(module, child_name, replacement)
        done[module] = _convert(name, module, batch_norm=batch_norm, groups=groups, report=changes.append)
        return done[module]

    return visit("", ready), tuple(changes)


def _convert(
    name: str, module: nn.Module, *, batch_norm: BatchNormTo, groups: int, report: Callable[[Change], None]
) -> nn.Module:
    """The module that takes this one's place: itself, if nothing is wrong with it."""
    if isinstance(module, _BatchNorm):
        _refuse_unknown(name, module)
        norm, note = _frozen(name, module) if batch_norm == "frozen" else _group(module, groups)
        report(Change(layer=name, before=_short(module), after=_short(norm), note=note))
        rest = list(module.children())  # layers fused into a norm, as timm's BatchNormAct2d has them
        return nn.Sequential(norm, *rest) if rest else norm
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        norm, note = _group(module, module.num_features)
        report(Change(layer=name, before=_short(module), after=_short(norm), note=note))
        return norm
    if getattr(module, "inplace", False) is True:
        setattr(module, "inplace", False)  # noqa: B010  # known by its name only
        kind = type(module).__name__
        report(Change(layer=name, before=f"{kind}(inplace=True)", after=f"{kind}(inplace=False)"))
    return module


def _group(module: _NormBase, groups: int) -> tuple[nn.Module, str]:
    channels = module.num_features
    if not isinstance(module, _InstanceNorm):
        # On a map of one pixel, as in squeeze-and-excitation, a group has as many values as channels: of one
        # value nothing is left, of a few mostly their signs.
        groups = min(groups, max(1, channels // CHANNELS_PER_GROUP))
    norm = nn.GroupNorm(suitable_groups(channels, groups), channels, eps=module.eps, affine=module.affine)
    note = "running statistics dropped" if module.track_running_stats else ""
    return _carry_over(module, norm), f"scale and shift kept, {note}".rstrip(", ") if module.affine else note


def _frozen(name: str, module: _NormBase) -> tuple[nn.Module, str]:
    if module.running_mean is None or module.running_var is None:
        raise ModelError(
            "no-running-statistics",
            f"{name} ({type(module).__name__}) keeps no running statistics that could be frozen.",
            fix='Use make_private_ready(model, batch_norm="group").',
        )
    norm = FrozenBatchNorm(module.num_features, eps=module.eps)
    norm.running_mean, norm.running_var = module.running_mean.clone(), module.running_var.clone()
    return _carry_over(module, norm), "statistics are constants now: they must come from public data"


def _carry_over(old: _NormBase, new: nn.GroupNorm | FrozenBatchNorm) -> nn.Module:
    """Scale, shift, their place and precision, and whether they are trained."""
    if old.affine:
        new = new.to(old.weight)
        with torch.no_grad():
            new.weight.copy_(old.weight)
            new.bias.copy_(old.bias)
        new.weight.requires_grad_(old.weight.requires_grad)
        new.bias.requires_grad_(old.bias.requires_grad)
    else:
        for parameter in new.parameters():
            parameter.requires_grad_(False)
    return new.train(old.training)


def _refuse_unknown(name: str, module: nn.Module) -> None:
    """Refuse a batch norm that does more than normalise, in a way that cannot be seen from outside."""
    plain = isinstance(module, _PLAIN)
    own_forward = type(module).forward not in {base.forward for base in _PLAIN}
    if not plain or (own_forward and not list(module.children())):
        raise ModelError(
            "unknown-batch-norm",
            f"{name} is a {type(module).__name__}, a batch norm of a kind that cannot be replaced safely.",
            why="It has a forward of its own, which may do more than normalise.",
            fix="Replace it yourself, for instance by torch.nn.GroupNorm.",
        )


def _short(module: nn.Module) -> str:
    if isinstance(module, nn.GroupNorm):
        return f"GroupNorm({module.num_groups}, {module.num_channels})"
    channels = getattr(module, "num_features", None) or getattr(module, "channels", None)
    return f"{type(module).__name__}({channels})"
