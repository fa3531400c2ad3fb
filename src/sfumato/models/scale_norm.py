"""ScaleNorm for any residual model: find its additions with torch.fx and put a norm after each.

Paper: Klause et al. 2022, https://arxiv.org/abs/2203.00324.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from sfumato.errors import ModelError
from sfumato.layers import Norm, make_norm
from sfumato.models.change import Change

_ADD_FUNCTIONS = (operator.add, operator.iadd, torch.add)
_ADD_METHODS = ("add", "add_", "__add__", "__iadd__")
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
# These add inside code that the tracer does not enter.
_OPAQUE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer)


class _Tracer(fx.Tracer):
    """Sees layers as single steps, and the inside of everything that is built from layers.

    A layer is what PyTorch or sfumato.layers brings, and any module without children and parameters that
    takes one tensor: an activation, a pool, a stochastic depth, which may act differently in training.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = super().is_leaf_module(m, module_qualified_name)
        return known or isinstance(m, _NORMS) or type(m).__module__.startswith("sfumato.layers")

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        simple = not list(m.children()) and not list(m.parameters()) and len(args) == 1 and not kwargs
        if simple and isinstance(args[0], fx.Proxy):
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)
        return super().call_module(m, forward, args, kwargs)


def add_scale_norm(
    model: nn.Module, example: Tensor, *, norm: Norm = "group", groups: int = 32
) -> tuple[nn.Module, tuple[Change, ...]]:
    """A copy of the model with a normalisation after every residual addition, and where they were put.

    A residual addition is a sum of two tensors of the same shape that both come from the image: feature
    maps (B, C, H, W) get the ``norm``, tokens (B, N, C) a layer norm. Sums that are normalised already
    keep what they have. ``example`` is a small batch of inputs: the shapes are found by running it.

    Raises ``ModelError`` where the additions cannot be found, rather than changing only some of them.
    """
    graph_module, additions = find_additions(model, example)
    changes: list[Change] = []
    for node in additions:
        if norm_after(graph_module, node) is not None:
            continue
        shape = node.meta["tensor_meta"].shape
        tokens = len(shape) == 3
        layer = nn.LayerNorm(shape[-1]) if tokens else make_norm(norm, shape[1], groups=groups)
        name = f"scale_norm_{len(changes) + 1}"
        graph_module.add_submodule(name, layer.to(example.device))
        if node.target is operator.iadd:
            node.target = operator.add  # the engine needs the summands as they were
        with graph_module.graph.inserting_after(node):
            normalised = graph_module.graph.call_module(name)
        node.replace_all_uses_with(normalised)
        normalised.args = (node,)
        kind = "LayerNorm" if tokens else f"{norm} norm"
        changes.append(Change(layer=name, before="sum", after=f"{kind} of the sum", note=_place(node)))
    if not changes:
        raise ModelError(
            "additions-not-found",
            f"{type(model).__name__} has no residual addition that is not normalised already.",
            why="ScaleNorm stands after the addition of a residual block.",
            fix="Nothing is to be done, unless the additions are hidden in compiled or custom operations.",
        )
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module.train(model.training), tuple(changes)


def find_additions(model: nn.Module, example: Tensor) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The model as a graph, and its residual additions in the order of the forward pass.

    Raises ``ModelError`` where the model cannot be traced; the list may be empty.
    """
    graph_module = _trace(model, example)
    sums = _residual_additions(graph_module)
    inner = [node for node in sums if node.users and all(user in sums for user in node.users)]
    return graph_module, [node for node in sums if node not in inner]  # a + b + c is one sum


def norm_after(graph_module: fx.GraphModule, addition: fx.Node) -> fx.Node | None:
    """The norm that takes the sum before anything else does, as ScaleNorm; None if there is none."""
    modules = dict(graph_module.named_modules())
    users = list(addition.users)
    normed = all(user.op == "call_module" and isinstance(modules[str(user.target)], _NORMS) for user in users)
    return users[0] if users and normed else None


def _trace(model: nn.Module, example: Tensor) -> fx.GraphModule:
    """The model as a graph with shapes, checked to compute the same."""
    for name, module in model.named_modules():
        if isinstance(module, _OPAQUE):
            raise _not_found(
                model, f"{name} ({type(module).__name__}) adds inside code that cannot be traced."
            )
    try:
        graphs = {mode: _Tracer().trace(copy.deepcopy(model).train(mode)) for mode in (True, False)}
    except Exception as error:  # tracing runs the user's forward, which may fail in any way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _not_found(model, f"its forward cannot be traced: {reason}") from error
    if str(graphs[True]) != str(graphs[False]):
        raise _not_found(model, "its forward takes another way in training than in evaluation.")
    graph_module = fx.GraphModule(copy.deepcopy(model).eval(), graphs[False], type(model).__name__)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(example)
        outputs = ShapeProp(graph_module).propagate(example)
    if not torch.allclose(outputs, expected, rtol=1e-4, atol=1e-5):
        raise _not_found(model, "the traced model does not compute what the original does.")
    return graph_module


def _residual_additions(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Sums of two tensors of one shape that both depend on the input, in the order of the forward pass."""
    from_input: set[fx.Node] = set()
    sums = []
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" or any(argument in from_input for argument in node.all_input_nodes):
            from_input.add(node)
        if _is_addition(node) and all(argument in from_input for argument in node.args[:2]):
            shapes = [_shape(argument) for argument in node.args[:2]]
            if shapes[0] == shapes[1] and len(shapes[0] or ()) in (3, 4):
                sums.append(node)
    return sums


def _is_addition(node: fx.Node) -> bool:
    named = node.op == "call_function" and node.target in _ADD_FUNCTIONS
    method = node.op == "call_method" and node.target in _ADD_METHODS
    return (named or method) and len(node.args) >= 2 and all(isinstance(a, fx.Node) for a in node.args[:2])


def _shape(node: fx.Node) -> torch.Size | None:
    meta = node.meta.get("tensor_meta")
    return getattr(meta, "shape", None)


def _place(node: fx.Node) -> str:
    """The module in whose forward the addition stands."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    return f"in {names[-1]}" if names and names[-1] else "in the model's own forward"


def _not_found(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        "additions-not-found",
        f"The residual additions of {type(model).__name__} cannot be found: {reason}",
        why="Changing only those that are in sight would give a model that is neither one nor the other.",
        fix="Write the norm after the addition in the model's own code.",
    )
