"""Models that the engine refuses before the first pass, and what a forward pass may not do to a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients.contents import buffers_of, modules_of, parameters_of

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_suitable(model: nn.Module) -> None:
    """Refuse what has no per-example gradient here or changes its own weights, before it is called."""
    for path, module in modules_of(model):
        name = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, WRAPPERS):
            raise ModelError(
                "wrapped-model",
                f"{name} spreads each pass over devices.",
                why="The gradients of single units are taken layer by layer, on one device.",
                fix="Pass the model inside: model.module.",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                "scripted-model",
                f"{name} is compiled by TorchScript.",
                why="Its layers cannot be looked into.",
                fix="Pass the Python model that it was made from; torch.compile is understood.",
            )
        if ".quantized" in type(module).__module__:
            raise ModelError(
                "quantised-model",
                f"{name} is quantised.",
                why="Quantised layers have no gradient.",
                fix="Train the model in floating point and quantise the released one.",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(name, module)
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            raise PrivacyError(
                "mixes-examples",
                f"{name} normalises with statistics of the whole batch.",
                why="Clipping one example then no longer bounds its influence.",
                fix="Use --set model.options.norm=group, or sfumato.make_private_ready(model), or eval mode.",
            )
    _check_tensors(model)


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    trained = module.weight.requires_grad
    if module.max_norm is not None or (trained and module.scale_grad_by_freq):
        raise PrivacyError(
            "embedding-options",
            f"{name} has max_norm or scale_grad_by_freq.",
            why="max_norm rewrites the weights of looked-up entries without noise, even frozen ones; "
            "scale_grad_by_freq makes a gradient depend on other examples.",
            fix="Build it without them.",
        )
    if trained and module.sparse and isinstance(module, nn.EmbeddingBag):
        raise ModelError(
            "sparse-gradient",
            f"{name} has sparse gradients.",
            why="Noise must reach every entry, so that a private gradient is never sparse.",
            fix="Build it with sparse=False.",
        )


def contents_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each parameter and buffer is, and how often it has been written to."""
    state = (*parameters_of(model), *buffers_of(model))
    return {name: (id(value), 0 if value.is_inference() else value._version) for name, value in state}


def check_untouched(model: nn.Module, before: dict[str, tuple[int, int]]) -> None:
    """Refuse a forward pass that leaves something behind in the model."""
    after = contents_of(model)
    if after == before:
        return
    name = next(name for name in (*after, *before) if after.get(name) != before.get(name))
    raise PrivacyError(
        "private-statistics",
        f"a forward pass changes {name} in the model.",
        why="What it keeps comes from the private images, or depends on how many there were, and no noise "
        "covers it.",
        fix="Put that layer into eval mode, or use sfumato.make_private_ready(model).",
    )


def _check_tensors(model: nn.Module) -> None:
    """Refuse parameters that were made under torch.inference_mode: autograd cannot record with them."""
    for name, value in parameters_of(model):
        if value.is_inference():
            raise ModelError(
                "inference-tensor",
                f"{name} was created under torch.inference_mode().",
                why="Such tensors take no part in any gradient.",
                fix="Build or load the model outside of inference mode.",
            )
