"""Shapes of other people's models: exact, or refused with a code."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from comparison import UNEVEN, assert_exact
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from oracles import distance, reference
from sfumato.errors import ConfigError, ModelError, PrivacyError, SfumatoError
from sfumato.gradients import Choices, clipped_sum

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


class TwoNames(nn.Module):
    """One module under two names, as timm's shared relative positions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second, self.head = self.first, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class BothOutputs(nn.Module):
    """A module that returns h and f(h), both of which are used, as encoders that return hidden states."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4))
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            h = torch.tanh(self.inner(x) + self.table)
            return h, torch.sin(h) * self.table

    def __init__(self):
        super().__init__()
        self.encoder, self.head = self.Encoder(), nn.Linear(4, 3)

    def forward(self, x):
        h, last = self.encoder(x)
        return self.head(h * last + last)


class BothOutputsRepeated(BothOutputs):
    """The same by a function that no rule knows: the encoder's forward pass is repeated for each unit."""

    class Encoder(BothOutputs.Encoder):
        def forward(self, x):
            h = torch.tanh(torch.maximum(self.inner(x), self.table))
            return h, torch.maximum(torch.sin(h), self.table)


class OnParentAndChild(nn.Module):
    """A parameter that a module and one inside it both hold."""

    class Child(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight, self.bias = weight, nn.Parameter(torch.randn(4))

        def forward(self, x):
            return torch.tanh(x * self.weight + self.bias)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.child, self.head = self.Child(self.weight), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.child(x) * self.weight)


class OnParentAndLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.weight, self.head = self.child.weight, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.child(x)) @ self.weight)


def eval_spectral() -> nn.Module:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)
    )
    model[0].parametrizations.eval()
    return model


def orthogonal() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


class Recurrent(nn.Module):
    def __init__(self, kind, *, packed=False, **options):
        super().__init__()
        self.rnn, self.packed = kind(2, 5, batch_first=True, **options), packed
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = x.view(len(x), 2, 2)
        if not self.packed:
            return self.head(self.rnn(x)[0][:, -1, :5])
        lengths = torch.ones(len(x), dtype=torch.int64) * 2
        hidden = self.rnn(pack_padded_sequence(x, lengths, batch_first=True))[1]
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden)[-1])


class ByHeart(nn.Module):
    """Keeps a list of its parameters beside the registered ones."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 3)
        self.all = [self.weight]

    def forward(self, x):
        return self.head(x @ self.all[0])


EXACT = {
    "two names": TwoNames,
    "both outputs": BothOutputs,
    "both outputs, repeated": BothOutputsRepeated,
    "parent and child": OnParentAndChild,
    "parent and linear": OnParentAndLinear,
    "spectral norm in eval mode": eval_spectral,
    "orthogonal": orthogonal,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU, num_layers=2),
    "RNN": lambda: Recurrent(nn.RNN, bidirectional=True),
    "LSTM, packed": lambda: Recurrent(nn.LSTM, packed=True),
    "GRU, packed": lambda: Recurrent(nn.GRU, packed=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_other_peoples_models_equal_autograd_call_after_call(name, dtype):
    torch.manual_seed(3)
    model, inputs = EXACT[name]().to(dtype), torch.randn(8, 4, dtype=dtype)
    before = {key: (id(value), value.requires_grad) for key, value in model.named_parameters()}
    for _ in range(2):  # the second call knows the model already
        assert_exact(model, inputs)
        assert_exact(model, inputs, unit_index=UNEVEN)
    assert {key: (id(value), value.requires_grad) for key, value in model.named_parameters()} == before


def test_a_module_of_two_outputs_still_goes_to_the_fallback():
    torch.manual_seed(3)
    for model, watched in ((BothOutputs(), True), (BothOutputsRepeated(), False)):
        choices = Choices()
        clipped_sum(model, torch.randn(6, 4), torch.arange(6) % 3, clip_norm=0.1, choices=choices)
        by_path = {claim.path: claim for claim in choices.claims[model].claims}
        assert by_path["encoder"].watched is watched


def test_inputs_that_require_gradients_give_the_same_sum():
    model, inputs, targets = TwoNames(), torch.randn(6, 4), torch.arange(6) % 3
    plain = clipped_sum(model, inputs, targets, clip_norm=0.1).gradients
    other = clipped_sum(model, inputs.clone().requires_grad_(), targets, clip_norm=0.1).gradients
    assert distance(other, plain) < 1e-6


def test_inference_mode_changes_nothing():
    model, targets = TwoNames(), torch.arange(6) % 3
    inputs = torch.randn(6, 4)
    plain = clipped_sum(model, inputs, targets, clip_norm=0.1).gradients
    with torch.inference_mode():
        other = clipped_sum(model, inputs + 0, targets + 0, clip_norm=0.1).gradients
    assert distance(other, plain) < 1e-6
    with torch.inference_mode():
        inside = nn.Linear(4, 3)
    assert refused(inside).code == "inference-tensor"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_compiled_in_place_is_understood():
    model, inputs, targets = TwoNames(), torch.randn(6, 4), torch.arange(6) % 3
    plain = clipped_sum(model, inputs, targets, clip_norm=0.1).gradients
    model.compile()
    assert distance(clipped_sum(model, inputs, targets, clip_norm=0.1).gradients, plain) < 1e-6
    assert model._compiled_call_impl is not None


class GroupNorm1(nn.GroupNorm):
    """timm's: one group. A forward of its own sends it to the fallback, and ``item`` past vmap."""

    def __init__(self, channels):
        super().__init__(1, channels)

    def forward(self, x):
        assert x.sum().item() < 1e9
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def test_a_group_norm_of_its_own_kind_does_not_end_the_process_in_channels_last():
    layers = [GroupNorm1(8), nn.Conv2d(8, 4, 3), nn.ReLU(), GroupNorm1(4), nn.Flatten(), nn.Linear(16, 3)]
    model, inputs, targets = nn.Sequential(*layers), torch.randn(8, 8, 4, 4), torch.arange(8) % 3
    expected = reference(model, inputs, targets)  # in the plain format, where PyTorch does not crash
    last = inputs.to(memory_format=torch.channels_last)
    total = clipped_sum(model.to(memory_format=torch.channels_last), last, targets, clip_norm=0.1)
    assert distance(total.gradients, expected.clipped_sum(0.1)) < 2e-5
    model[0].requires_grad_(False)
    clipped_sum(model, last, targets, clip_norm=0.1)


def refused(model, inputs=None, targets=None, *, kind=SfumatoError, **options) -> SfumatoError:
    inputs = torch.randn(6, 4) if inputs is None else inputs
    targets = torch.arange(len(inputs)) % 3 if targets is None else targets
    with pytest.raises(kind) as caught:
        clipped_sum(model, inputs, targets, clip_norm=1.0, choices=Choices(), **options)
    return caught.value


@pytest.mark.parametrize("size", [-1, 0, True, 2.5, "8"])
def test_a_microbatch_of_no_size_is_refused(size):
    assert refused(TwoNames(), microbatch_size=size, kind=ConfigError).code == "bad-microbatch-size"


@pytest.mark.parametrize(
    "targets", [torch.zeros(7, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), [0] * 6]
)
def test_surplus_and_missing_targets_are_refused(targets):
    assert refused(TwoNames(), targets=targets, kind=ConfigError).code == "bad-targets"


def test_a_list_of_units_is_refused():
    assert refused(TwoNames(), unit_index=[0, 1, 2, 3, 4, 5], kind=ConfigError).code == "bad-unit-index"


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("bag", [True, False])
def test_embeddings_that_rewrite_their_weights_are_refused(bag, trained):
    layer = nn.EmbeddingBag(9, 4, max_norm=1.0) if bag else nn.Embedding(9, 4, max_norm=1.0)
    model = nn.Sequential(layer.requires_grad_(trained), nn.Flatten(), nn.Linear(4 if bag else 8, 3))
    before = layer.weight.clone()
    error = refused(model, torch.randint(9, (6, 2)), kind=PrivacyError)
    assert error.code == "embedding-options"
    assert torch.equal(layer.weight, before)


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3))
    assert refused(model, torch.randint(9, (6, 2))).code == "sparse-gradient"
    assert_exact(nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3)), torch.randint(9, (6, 2)))


class Counting(nn.Module):
    """Counts its calls, and with them the batches."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.head(x)


def test_a_forward_pass_that_keeps_something_is_refused():
    spectral = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 3))
    assert refused(spectral, kind=PrivacyError).code == "private-statistics"
    norm = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))
    assert refused(norm, kind=PrivacyError).code == "mixes-examples"
    assert refused(Counting(), kind=PrivacyError).code == "private-statistics"


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.head = make, nn.Linear(4, 3)

    def forward(self, x):
        return self.make(self.head(x))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


def test_outputs_that_are_no_tensors_are_refused_unless_the_loss_takes_them():
    named = Returns(lambda y: {"logits": y})
    assert refused(named).code == "output-not-tensor"
    assert refused(Returns(Output)).code == "output-not-tensor"
    inputs, targets = torch.randn(6, 4), torch.arange(6) % 3
    total = clipped_sum(
        named, inputs, targets, clip_norm=0.1, loss=lambda o, t: F.cross_entropy(o["logits"], t)
    )
    plain = nn.Sequential(named.head)
    expected = reference(plain, inputs, targets).clipped_sum(0.1)
    assert distance(total.gradients, {f"head{k[1:]}": v for k, v in expected.items()}) < 2e-5


def test_a_loss_of_several_values_is_refused():
    loss = nn.BCEWithLogitsLoss(reduction="none")
    error = refused(nn.Linear(4, 3), targets=torch.rand(6, 3), loss=loss, kind=ConfigError)
    assert error.code == "loss-not-scalar"
    clipped_sum(
        nn.Linear(4, 3), torch.randn(6, 4), torch.rand(6, 3), clip_norm=1.0, loss=nn.BCEWithLogitsLoss()
    )


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        return self.head(checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_refused(reentrant):
    assert refused(Checkpointed(reentrant), kind=ModelError).code in {"hidden-gradient", "checkpointed-model"}


@pytest.mark.filterwarnings("ignore")
def test_wrapped_scripted_and_quantised_models_are_refused():
    assert refused(nn.DataParallel(nn.Linear(4, 3))).code == "wrapped-model"
    assert refused(torch.jit.trace(nn.Linear(4, 3), torch.randn(2, 4))).code == "scripted-model"
    half = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 3))
    half[1] = torch.ao.quantization.quantize_dynamic(half[1], {nn.Linear})
    assert refused(half).code == "quantised-model"


def test_parameters_used_past_their_layer_are_refused():
    assert refused(ByHeart(), kind=ModelError).code == "hidden-parameter"
