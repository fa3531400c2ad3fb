"""What passes leave behind, in which precision, and what a stranger's model may do: all have a code."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hostile_models import Bank, LastMean, Layer, OddCalls, Renormed, Words, net
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from sfumato.doctor import check_model
from sfumato.errors import ModelError, PrivacyError

IMAGES = torch.randn(4, 1, 8, 8)
WORDS = torch.randint(0, 10, (4, 5))


class Counter(nn.Module):
    """Outputs do not mix, but it keeps the mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.mean()
        return x


class FrozenNorm(nn.BatchNorm2d):
    """Batch norm with fixed statistics that stays in evaluation mode."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


def test_frozen_batch_norm_is_allowed_and_said():
    model = net(FrozenNorm(4).requires_grad_(False))
    findings = check_model(model, IMAGES)
    assert [finding.code for finding in findings] == ["frozen-batch-norm"]
    assert findings[0].severity == "note"


def test_statistics_kept_in_a_buffer_are_refused():
    with pytest.raises(PrivacyError, match="private-statistics"):
        check_model(net(Counter()), IMAGES)


def test_a_model_is_left_as_it_was():
    model = net(FrozenNorm(4).requires_grad_(False), nn.Dropout(0.5)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check_model(model, IMAGES)
    assert torch.equal(random_state, torch.get_rng_state())  # a seeded run goes on as if nobody had looked
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    broken = net(Counter())
    with pytest.raises(PrivacyError):
        check_model(broken, IMAGES)
    assert broken[1].seen == 0


def test_outputs_that_are_no_numbers_or_no_rows_are_model_errors():
    overflowing = net()
    with torch.no_grad():
        overflowing[-1].weight.fill_(float("inf"))
    with pytest.raises(ModelError, match="non-finite-output"):
        check_model(overflowing, IMAGES)

    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    with pytest.raises(ModelError, match="no-row-outputs"):
        check_model(Total(), IMAGES)


@pytest.mark.parametrize(
    "layer",
    [OddCalls(), LastMean(), Layer(lambda x: x * random.random()), Layer(lambda x: x + time.time() % 1)],
    ids=["odd calls", "last mean", "random", "time"],
)
def test_what_changes_from_pass_to_pass_is_refused(layer):
    with pytest.raises(PrivacyError, match="stateful-forward"):
        check_model(net(layer), IMAGES)
    assert check_model(net(Layer(lambda x: x * 0.5)), IMAGES) == []


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # weight norm has no batching rule
def test_what_a_pass_keeps_or_changes_is_refused_by_name():
    with pytest.raises(PrivacyError, match="private-statistics") as caught:
        check_model(net(Bank()), IMAGES)
    assert "1.rows" in caught.value.what
    changing = net(Renormed())
    with pytest.raises(PrivacyError, match="changes-weights") as caught:
        check_model(changing, IMAGES)
    assert "1.scale" in caught.value.what
    assert (changing[1].scale == 1.0).all()  # the model is left as it was
    with pytest.raises(PrivacyError, match="stateful-forward") as caught:
        check_model(net(spectral_norm(nn.Conv2d(4, 4, 1))), IMAGES)
    assert "_u" in caught.value.what
    assert check_model(net(weight_norm(nn.Conv2d(4, 4, 1))), IMAGES) == []


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_shorten_their_rows_are_refused(kind, trained):
    with pytest.raises(PrivacyError, match="changes-weights"):
        check_model(Words(kind, max_norm=1e6, trained=trained), WORDS)
    assert check_model(Words(nn.Embedding, max_norm=None, trained=trained), WORDS) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precisions_are_not_refused_without_need(dtype):
    assert check_model(net(nn.GroupNorm(2, 4), nn.ReLU()).to(dtype), IMAGES.to(dtype)) == []
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(net(nn.BatchNorm2d(4, track_running_stats=False)).to(dtype), IMAGES.to(dtype))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, when its compiler is loaded
def test_autocast_inference_mode_and_compiled_models_are_taken():
    sound, mixing = net(nn.GroupNorm(2, 4)), net(nn.BatchNorm2d(4))
    with torch.autocast("cpu", torch.bfloat16):
        assert check_model(sound, IMAGES) == []
        with pytest.raises(PrivacyError, match="mixes-examples"):
            check_model(mixing, IMAGES)
    with torch.inference_mode():
        assert check_model(sound, torch.randn(4, 1, 8, 8)) == []
    assert check_model(torch.compile(sound), IMAGES) == []
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(torch.compile(mixing), IMAGES)


class FromBytes(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = net(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.float() / 255)


def test_inputs_of_bytes_are_taken_where_the_model_takes_them():
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert check_model(FromBytes(nn.ReLU()), images) == []
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(FromBytes(nn.BatchNorm2d(4)), images)
    with pytest.raises(ModelError, match="forward-fails"):
        check_model(net(), images)


def test_outputs_of_one_number_or_of_maps_are_checked_too():
    assert check_model(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), IMAGES) == []
    assert check_model(nn.Conv2d(1, 3, 3), IMAGES) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_cannot_be_examined_has_a_code():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

    with pytest.raises(ModelError, match="no-row-outputs") as caught:
        check_model(Named(), IMAGES)
    assert "dict" in caught.value.what
    with pytest.raises(ModelError, match="no-probe"):
        check_model(net(), IMAGES[:0])
    with pytest.raises(ModelError, match="cannot-be-checked"):
        check_model(torch.jit.script(net()), IMAGES)
    with pytest.raises(ModelError, match="forward-fails"):
        check_model(net(), torch.randn(4, 3, 8, 8))


class MixesIn(nn.Module):
    """Adds the mean over the batch, in one precision or in all."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.dtypes, self.head = dtypes, nn.Linear(64, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x + x.mean(dim=0) if x.dtype in self.dtypes else x)


def test_what_only_one_precision_mixes_is_refused_and_says_so():
    for dtypes, code in (
        ((torch.float32,), "differs-by-precision"),
        ((torch.float32, torch.float64), "mixes-examples"),
    ):
        with pytest.raises(PrivacyError) as caught:
            check_model(MixesIn(*dtypes), IMAGES)
        assert caught.value.code == code
    check_model(MixesIn(), IMAGES)
