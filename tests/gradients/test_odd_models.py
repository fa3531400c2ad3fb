"""Whole models of every odd shape equal autograd one example at a time, by every strategy."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from comparison import UNEVEN, assert_exact, classifier
from torch import nn
from torch.nn import functional as F

from oracles import distance, reference
from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients import Choices, clipped_sum
from sfumato.layers import WSConv2d

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, of its own speed


class SharedLayer(nn.Module):
    """One layer called twice, the second time on another size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(self.conv(x))
        return self.head(torch.tanh(self.conv(F.avg_pool2d(x, 2))).mean(dim=(2, 3)))


class SharedStandardised(nn.Module):
    """A weight-standardised layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = WSConv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.conv(torch.tanh(self.conv(x))).mean(dim=(2, 3)))


class TiedWeights(nn.Module):
    """Two layers that hold the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x.mean(dim=(2, 3))))))


class TransposedTie(nn.Module):
    """A layer's weight used a second time by its parent, the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(4, 6), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.up(x.mean(dim=(2, 3)))) @ self.up.weight)


class BareParameters(nn.Module):
    """A matrix, a vector and a number that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(x.mean(dim=(2, 3)) @ self.matrix + self.shift)) * self.temperature


class ClassToken(nn.Module):
    """Attention over patches with a learnt token and learnt positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, 8, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head(x[:, 0])


class Residual(nn.Module):
    """A branch and a skip, with group norm and weight standardisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = WSConv2d(4, 8, 3, stride=2), nn.GroupNorm(2, 8)
        self.conv2, self.skip = WSConv2d(8, 8, 3), WSConv2d(4, 8, 1, stride=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.conv2(F.mish(self.norm1(self.conv1(x))))
        return self.head(F.mish(y + self.skip(x)).mean(dim=(2, 3)))


class Dense(nn.Module):
    """Each layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4 + 3 * i, 3, 3, padding=1) for i in range(3)])
        self.head = nn.Linear(13, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, torch.selu(layer(x))], dim=1)
        return self.head(x.mean(dim=(2, 3)))


class TwoOutputs(nn.Module):
    """A custom module that returns a pair, of which one entry goes nowhere."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return {"used": torch.sin(x @ self.weight), "unused": x @ self.weight}

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = self.Pair(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.pair(x.mean(dim=(2, 3)))["used"])


class UnusedLayer(nn.Module):
    """A layer that is there but never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.head = nn.Linear(7, 7), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x.mean(dim=(2, 3)))


class PatchesAsRows(nn.Module):
    """Folds positions into rows, so that a layer does not see one entry per example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        flat = x.flatten(2).transpose(1, 2).reshape(-1, 4)
        return self.head(torch.tanh(self.layer(flat)).view(len(x), -1, 5).mean(dim=1))


def weight_normed() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 5, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
    )


def half_frozen() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 5, 1), nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(20, 3)
    )
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return model


def frozen_weights() -> nn.Module:
    """Only biases are trained (Bu et al. 2022: BiTFiT)."""
    model = nn.Sequential(WSConv2d(4, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    for name, value in model.named_parameters():
        value.requires_grad_(name.endswith("bias"))
    return model


def writes_in_place() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 4, 1), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


class Hooked(nn.Module):
    """Somebody's hook changes what a layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.layer.register_forward_hook(lambda module, args, output: 3 * output.sin())

    def forward(self, x):
        return self.head(self.layer(x.mean(dim=(2, 3))))


class OwnForward(nn.Conv2d):
    """A convolution by inheritance, but another function."""

    def forward(self, x):
        return super().forward(x.square()) * 2


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shared layer": SharedLayer,
    "shared standardised layer": SharedStandardised,
    "tied weights": TiedWeights,
    "bare parameters": BareParameters,
    "attention with a class token": ClassToken,
    "residual": Residual,
    "dense": Dense,
    "two outputs": TwoOutputs,
    "unused layer": UnusedLayer,
    "patches as rows": PatchesAsRows,
    "weight norm": weight_normed,
    "half frozen": half_frozen,
    "only biases": frozen_weights,
    "in-place activations": writes_in_place,
    "hooked": Hooked,
    "subclass with its own forward": lambda: nn.Sequential(OwnForward(4, 3, 4), nn.Flatten()),
    "deep nesting": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Conv2d(4, 3, 4))), nn.Flatten()),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(6)
    return MODELS[name]().to(dtype), torch.randn(8, 4, 4, 4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_odd_models_equal_autograd(name, dtype):
    model, inputs = made(name, dtype)
    assert_exact(model, inputs)
    assert_exact(model, inputs, unit_index=UNEVEN)


def test_a_weight_used_by_its_layer_and_by_its_parent_counts_both_uses():
    torch.manual_seed(6)
    assert_exact(TransposedTie(), torch.randn(8, 4, 4, 4))


@pytest.mark.parametrize("name", ["residual", "dense", "half frozen", "attention with a class token"])
def test_memory_format_mode_and_microbatches_do_not_matter(name):
    model, inputs = made(name)
    assert_exact(model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last))
    assert_exact(model.eval(), inputs, unit_index=UNEVEN, microbatch_size=3)
    assert_exact(model, inputs, microbatch_size=3)
    assert_exact(model, inputs, microbatch_size=1)


@pytest.mark.parametrize("name", ["shared layer", "bare parameters", "residual"])
def test_any_loss_of_one_row_is_taken_row_by_row(name):
    model, inputs = made(name, torch.float64)
    targets = torch.randn(8, 3, dtype=torch.float64)
    assert_exact(model, inputs, targets=targets, loss=F.mse_loss)
    soft = targets.softmax(dim=1)
    assert_exact(model, inputs, targets=soft, loss=lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1))
    assert_exact(model, inputs, targets=soft, loss=looks_at_values)


def looks_at_values(outputs, targets):
    """A loss that vmap cannot follow."""
    return F.mse_loss(outputs, targets) if outputs.sum().item() > 0 else F.l1_loss(outputs, targets)


def test_one_unit_of_all_rows_is_the_gradient_of_the_mean_loss():
    model, inputs = made("residual", torch.float64)
    targets = torch.arange(8) % 3
    total = clipped_sum(
        model, inputs, targets, clip_norm=1e9, unit_index=torch.zeros(8, dtype=torch.int64), microbatch_size=2
    )
    F.cross_entropy(model(inputs), targets).backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert distance(total.gradients, expected) < 1e-10
    assert distance(total.gradients, {name: 2 * value for name, value in expected.items()}) > 0.1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_a_compiled_model_is_taken_as_what_it_was_compiled_from():
    model, inputs = made("residual")
    targets = torch.arange(8) % 3
    plain = clipped_sum(model, inputs, targets, clip_norm=0.1, choices=Choices(deterministic=True))
    compiled = clipped_sum(
        torch.compile(model), inputs, targets, clip_norm=0.1, choices=Choices(deterministic=True)
    )
    assert plain.gradients.keys() == compiled.gradients.keys()
    assert distance(compiled.gradients, plain.gradients) == 0


@pytest.mark.parametrize("name", ["residual", "dense", "half frozen", "shared layer", "patches as rows"])
def test_bfloat16_autocast_changes_the_gradients_by_its_rounding_alone(name):
    model, inputs = made(name)
    targets = torch.arange(8) % 3
    expected = reference(model, inputs, targets)
    clip_norm = float(expected.norms.median())
    with torch.autocast("cpu", torch.bfloat16):
        total = clipped_sum(model, inputs, targets, clip_norm=clip_norm)
    assert all(value.dtype == torch.float64 for value in total.gradients.values())
    apart = distance(total.gradients, expected.clipped_sum(clip_norm))
    assert 1e-5 < apart < 0.05  # bfloat16 was used, and no more than that
    torch.testing.assert_close(total.norms, expected.norms, rtol=0.05, atol=0.0)


def test_the_zoo_of_tests_would_notice_a_missing_use():
    """Control: the reference of a shared layer whose second use is ignored differs."""
    model, inputs = made("shared layer")
    targets = torch.arange(8) % 3
    total = clipped_sum(model, inputs, targets, clip_norm=0.1)

    class Forgetful(SharedLayer):
        def forward(self, x):
            x = torch.tanh(self.conv(x))
            fixed = {name: value.detach() for name, value in self.conv.named_parameters()}
            y = torch.func.functional_call(self.conv, fixed, (F.avg_pool2d(x, 2),))
            return self.head(torch.tanh(y).mean(dim=(2, 3)))

    wrong = Forgetful()
    wrong.load_state_dict(model.state_dict())
    assert distance(total.gradients, reference(model, inputs, targets).clipped_sum(0.1)) < 1e-5
    assert distance(total.gradients, reference(wrong, inputs, targets).clipped_sum(0.1)) > 1e-2


def test_classifiers_of_tests_train_all_their_layers():
    inputs = torch.randn(2, 4, 4, 4)
    model = classifier(nn.Conv2d(4, 2, 3), inputs=inputs)
    total = clipped_sum(model, inputs, torch.tensor([0, 1]), clip_norm=1.0)
    assert set(total.gradients) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(value.abs().sum() > 0 for value in total.gradients.values())


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x, mask):
        return mask @ x @ self.weight


class WithMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing, self.head = Mixing(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.mixing(x, torch.ones(4, 4).tril().to(x)).mean(dim=1))


def test_a_mask_that_all_rows_share_is_no_row_even_where_its_length_is_theirs():
    model = WithMask()
    assert_exact(model, torch.randn(5, 4, 6))
    assert_exact(model, torch.randn(4, 4, 6))


class SequenceFirst(nn.Module):
    """Positions first, as transformers of old: (positions, rows, channels) inside."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x.transpose(0, 1))).mean(dim=0))


def test_a_layer_that_has_positions_first_is_exact_even_with_as_many_rows_as_positions():
    for rows in (3, 4, 5):
        assert_exact(SequenceFirst(), torch.randn(rows, 4, 6))


def test_frozen_batch_norm_stays_frozen():
    """In evaluation mode inside a model in training mode: measuring memory may not wake it up."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 3))
    model[:2].requires_grad_(False)
    model.train()
    model[1].eval()
    before = model[1].running_mean.clone()
    inputs = torch.randn(6, 3, 4, 4)
    total = clipped_sum(model, inputs, torch.zeros(6, dtype=torch.int64), clip_norm=1.0, choices=Choices())
    assert not model[1].training
    assert model.training
    assert torch.equal(before, model[1].running_mean)
    expected = reference(model, inputs, torch.zeros(6, dtype=torch.int64))
    assert distance(total.gradients, expected.clipped_sum(1.0)) < 1e-5


class Overwritten(nn.Module):
    """Writes into what a layer has just returned, which is a view."""

    def __init__(self, layer: nn.Module, *, factor: float | None = None) -> None:
        super().__init__()
        self.layer, self.factor = layer, factor
        self.first = nn.Conv2d(3, 16, 1) if not isinstance(layer, nn.Linear) else nn.Linear(5, 5)

    def forward(self, x):
        y = self.layer(self.first(x))
        return y.relu_() if self.factor is None else y.mul_(self.factor)


@pytest.mark.parametrize(
    ("layer", "shape", "factor"),
    [
        (nn.Linear(5, 5), (4, 5), None),
        (nn.InstanceNorm2d(16, affine=True), (3, 4, 4), None),
        (nn.GroupNorm(4, 16), (3, 4, 4), 30.0),
        (WSConv2d(16, 16, 3), (3, 2, 2), 30.0),
        (WSConv2d(16, 16, 3), (3, 2, 2), None),
    ],
    ids=["linear", "instance norm", "group norm", "standardised, scaled", "standardised"],
)
def test_what_is_written_into_a_layers_output_is_seen(layer, shape, factor):
    torch.manual_seed(5)
    inputs = torch.randn(6, *shape)
    assert_exact(classifier(Overwritten(layer, factor=factor), inputs=inputs), inputs)


def test_claims_follow_hooks_and_modes():
    torch.manual_seed(6)
    model, inputs = made("residual")
    targets, choices = torch.arange(len(inputs)) % 3, Choices()
    clipped_sum(model, inputs, targets, clip_norm=1.0, choices=choices)
    model.conv1.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    total = clipped_sum(model, inputs, targets, clip_norm=1.0, choices=choices)
    expected = reference(model, inputs, targets)
    assert distance(total.gradients, expected.clipped_sum(1.0)) < 1e-5


def test_a_model_with_a_bare_parameter_is_let_go():
    model, inputs = made("bare parameters")
    choices, gone = Choices(), weakref.ref(model)
    clipped_sum(model, inputs, torch.arange(len(inputs)) % 3, clip_norm=1.0, choices=choices)
    del model
    gc.collect()
    assert gone() is None


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            x = self.inner(x)
        return self.head(x)


def test_what_cannot_be_trained_is_told():
    with pytest.raises(ModelError, match="hidden-gradient"):
        clipped_sum(Hidden(), torch.randn(3, 4), torch.zeros(3, dtype=torch.int64), clip_norm=1.0)
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(PrivacyError, match="embedding-options"):
        clipped_sum(model, torch.randint(9, (3, 2)), torch.zeros(3, dtype=torch.int64), clip_norm=1.0)
