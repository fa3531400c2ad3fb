"""A loss, clipping function or sampling scheme of one's own: planned for, checked early, told apart."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import cross_entropy

from sfumato.errors import PrivacyError, RunError
from sfumato.gradients import PerLayerClipping
from sfumato.privacy.sampling_schemes import Full
from sfumato.run import estimate as estimates
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from sfumato.training.component_identity import identity_of
from sfumato.training.components import Components
from small_runs import Watcher, small_recipe, small_splits


@pytest.fixture(autouse=True)
def own_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


class Remembering:
    """A loss that grows with every row that it has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, outputs, targets):
        self.seen += 1
        return cross_entropy(outputs, targets) * self.seen


@dataclass(frozen=True)
class Loose:
    """Clips to what it says only up to a norm of ten."""

    largest: float = 10.0

    def sensitivity(self, clip_norm):
        return clip_norm

    def factors(self, squared_norms, clip_norm, margin):
        norms = torch.stack(list(squared_norms.values())).sum(0).sqrt()
        factors = torch.where(
            norms < self.largest, clip_norm * (1 - margin) / norms.clamp(min=clip_norm), 0.5
        )
        return dict.fromkeys(squared_norms, torch.where(norms.isfinite(), factors, 0.0))


@dataclass(frozen=True)
class Wide(Loose):
    """States twice the plan's clip norm."""

    def sensitivity(self, clip_norm):
        return 2 * clip_norm


def smoothed(amount: float):
    return functools.partial(cross_entropy, label_smoothing=amount)


def scaled(amount: float):
    return lambda outputs, targets: amount * cross_entropy(outputs, targets)


def test_a_full_batch_needs_no_batch_size_also_as_an_object():
    recipe = small_recipe(training__batch_size=None)
    by_object = prepare(recipe, data=small_splits(), components=Components(sampling=Full()))
    by_name = prepare(small_recipe(training__batch_size=None, privacy__sampling="full"), data=small_splits())
    assert by_object.plan.epsilon == by_name.plan.epsilon
    assert by_object.batch_size == by_name.batch_size == 96
    assert prepare(recipe, data=small_splits()).batch_size == 12  # control: by default an eighth of them


@pytest.mark.parametrize(
    ("own", "code"),
    [
        ({"loss": Remembering()}, "stateful-loss"),
        ({"clipping": Loose()}, "clipping-exceeds-sensitivity"),
        ({"clipping": Wide()}, "sensitivity-above-plan"),
    ],
)
def test_what_a_step_would_refuse_is_refused_before_anything_is_written(own, code, tmp_path):
    with pytest.raises(PrivacyError, match=code):
        train(small_recipe(), out=tmp_path / "run", data=small_splits(), **own)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ledger.sqlite").exists()


def test_what_holds_is_not_refused():
    components = Components(loss=smoothed(0.2), clipping=Loose(largest=1e300))
    assert prepare(small_recipe(), data=small_splits(), components=components).plan is not None
    assert prepare(
        small_recipe(), data=small_splits(), components=Components(clipping=PerLayerClipping())
    ).plan


@pytest.mark.parametrize("private", [True, False])
def test_an_estimate_times_the_loss_and_the_clipping_of_the_run(private, monkeypatch):
    used = []
    for name in ("clipped_total", "plain_total"):
        real = getattr(estimates, name)
        spy = lambda *args, real=real, **options: used.append(options) or real(*args, **options)  # noqa: E731
        monkeypatch.setattr(estimates, name, spy)
    own = Components(loss=smoothed(0.2), clipping=PerLayerClipping())
    changes = {} if private else {"privacy__enabled": False}
    estimates.estimate(prepare(small_recipe(**changes), data=small_splits(), components=own))
    assert used
    for options in used:
        assert options["loss"] is own.loss
        assert options.get("clipping") is (own.clipping if private else None)


def test_a_resumed_run_must_bring_the_same_arguments_too(tmp_path):
    begun = {"out": tmp_path / "run", "data": small_splits()}
    with pytest.raises(RuntimeError, match="as if killed"):
        train(small_recipe(), **begun, loss=smoothed(0.1), observer=Watcher(crash_after=3))
    for other in (smoothed(0.3), scaled(1.0), None):
        with pytest.raises(RunError, match="changed-components"):
            train(small_recipe(), **begun, loss=other, resume=True)
    train(small_recipe(), **begun, loss=smoothed(0.1), resume=True)


class Weighted(torch.nn.Module):
    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))


def with_default(amount: float):
    def loss(outputs, targets, amount=amount):
        return amount * outputs

    return loss


@pytest.mark.parametrize(
    "make",
    [
        smoothed,
        scaled,
        with_default,
        Loose,
        lambda amount: Loose(amount).factors,
        lambda amount: Weighted(1.0, amount),
        lambda amount: functools.partial(torch.optim.SGD, lr=amount),
        lambda amount: {"a": [amount], "b": {3, 4}},
        lambda amount: torch.tensor([amount]),
    ],
)
def test_an_identity_tells_arguments_fields_and_closures_apart(make):
    assert identity_of(make(0.1)) == identity_of(make(0.1))
    assert identity_of(make(0.1)) != identity_of(make(0.3))


def test_lambdas_are_told_apart_by_their_code():
    one, same, other = (lambda x: x + 1), (lambda x: x + 1), (lambda x: x + 2)
    assert identity_of(one) == identity_of(same)
    assert identity_of(one) != identity_of(other)
    assert one.__qualname__ == other.__qualname__  # control: the name is the same


def test_what_contains_itself_has_an_identity():
    first, second = Remembering(), Remembering()
    first.held, second.held = {"me": first}, {"me": second}
    assert identity_of(first) == identity_of(second)
