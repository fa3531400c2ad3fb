"""Sums over ranks: the same as one process computes, every unit once, and noise once after all of them."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gaussianity import is_gaussian
from sfumato.data import ImageSet
from sfumato.errors import PrivacyError, RunError
from sfumato.gradients import ClippedSum
from sfumato.noise import gaussian
from sfumato.privacy.plan import Plan
from sfumato.randomness import SecureSource, SeededSource
from sfumato.run.ranks import check_alike
from sfumato.training import ranked_sum as ranked_sum_file
from sfumato.training.averaging import WeightAverage
from sfumato.training.gradient_sums import EngineSum, head_gradients
from sfumato.training.inputs import Units, Views
from sfumato.training.last_layer import LastLayerViews
from sfumato.training.loop import fit
from sfumato.training.ranked_sum import RankedSum, StepKeys
from sfumato.training.ranks import Ranks, cut_evenly, stretch
from small_runs import SmallNet, small_set
from thread_ranks import in_turn, led, together

VIEWS = Views(mean=(0.5,), std=(0.25,), count=2, padding=2, flip=True)
PATIENTS = Units.patients(small_set(60, seed=1, patients=23), max_images=2)


class WithDropout(SmallNet):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


def ranked(ranks, model, *, units=PATIENTS, inputs=VIEWS, source=None, clip_norm=0.5, wrap=lambda own: own):
    """The sums of a training on ``ranks``; ``wrap`` changes what one of them computes."""
    keys = StepKeys()
    own = EngineSum(model=model, units=units, inputs=inputs, clip_norm=clip_norm, source=keys, max_rows=16)
    return RankedSum(
        ranks=ranks,
        own=in_turn(wrap(own)),
        keys=keys,
        model=model,
        source=source or SeededSource(5),
        unit_sizes=units.offsets.diff().clamp(max=units.max_images),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_sums_of_one_process(size):
    torch.manual_seed(0)
    model = WithDropout().train()
    alone = EngineSum(
        model=copy.deepcopy(model),
        units=PATIENTS,
        inputs=VIEWS,
        clip_norm=0.5,
        source=SeededSource(5),
        max_rows=16,
    )
    batches = [torch.arange(23), torch.tensor([1, 4, 7]), torch.tensor([], dtype=torch.int64)]
    expected = [alone(indices, step) for step, indices in enumerate(batches)]

    def work(ranks):
        here = copy.deepcopy(model)
        if not ranks.is_first:
            nn.init.zeros_(here.head.weight)  # the first rank's weights are the ones that count
        sums = ranked(ranks, here)
        return led(ranks, sums, lambda: [sums(indices, step) for step, indices in enumerate(batches)])

    found = together(size, work)[0]
    for one, other in zip(found, expected, strict=True):
        assert one.sensitivity == other.sensitivity
        torch.testing.assert_close(one.norms, other.norms.double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.losses, other.losses.double(), rtol=1e-6, atol=1e-6)
        for name, value in other.gradients.items():
            torch.testing.assert_close(one.gradients[name], value, rtol=0, atol=1e-6)
    # the oracle can tell: other draws, or a unit more, are another sum
    other = replace(alone, source=SeededSource(6))(batches[0], 0)
    assert (other.gradients["head.weight"] - expected[0].gradients["head.weight"]).abs().max() > 1e-3


def test_a_head_in_closed_form_has_the_sums_of_one_process():
    data = small_set(50, seed=3)
    units, rows = Units.images(data), torch.rand(50, 12)
    inputs = LastLayerViews(images=VIEWS, features=rows)

    def head_sums():
        torch.manual_seed(1)
        model = nn.Module()
        model.head = nn.Linear(12, 3)
        return model, head_gradients(model, inputs, units, clip_norm=0.1)

    expected = head_sums()[1](torch.arange(50), 0)

    def work(ranks):
        model, own = head_sums()
        sums = RankedSum(
            ranks=ranks,
            own=own,
            keys=StepKeys(),
            model=model,
            source=SeededSource(5),
            unit_sizes=torch.ones(50),
        )
        return led(ranks, sums, lambda: sums(torch.arange(50), 0))

    found = together(3, work)[0]
    for name, value in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], value, rtol=0, atol=1e-6)


@dataclass(frozen=True)
class NoisyShare:
    """A rank that adds noise to its share."""

    own: EngineSum
    stddev: float

    @property
    def num_units(self):
        return self.own.num_units

    def __call__(self, indices, step):
        total = self.own(indices, step)
        gradients = {
            name: value + gaussian(tuple(value.shape), stddev=self.stddev, source=SecureSource(), step=0)
            for name, value in total.gradients.items()
        }
        return replace(total, gradients=gradients)


def silent_noise(size, *, wrap=lambda own: own, noise_multiplier=0.8):
    """Noisy sums where no unit has a gradient: of black pixels, over two steps of a whole training loop."""
    pixels = torch.zeros(30, 1, 40, 100, dtype=torch.uint8)
    pixels[:, :, :, :10] = torch.randint(0, 256, (30, 1, 40, 10)).to(torch.uint8)
    units = Units.images(ImageSet(pixels, torch.arange(30) % 10, tuple("abcdefghij"), None, "dark"))
    plan = Plan(num_examples=30, batch_size=15, num_steps=2, noise_multiplier=0.8, clip_norm=0.5, delta=1e-3)
    plan = replace(plan, noise_multiplier=noise_multiplier)
    seen = []

    def work(ranks):
        model, source = nn.Sequential(nn.Flatten(), nn.Linear(4000, 10)), SecureSource()
        inputs = Views(mean=(0.0,), std=(1.0,))
        sums = ranked(ranks, model, units=units, inputs=inputs, source=source, wrap=wrap)

        def train():
            steps = fit(
                model,
                sums,
                plan,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                learning_rate=lambda step: 0.1,
                average=WeightAverage.start(model, decay=0.0),
                source=source,
                spend=lambda step: None,
                on_noisy_sum=lambda step, noisy: seen.append(noisy["1.weight"].view(10, 40, 100)[:, :, 10:]),
            )
            return [record.step for record in steps]

        return led(ranks, sums, train)

    assert together(size, work)[0] == [1, 2]
    return torch.cat([each.flatten() for each in seen]).double().numpy()


def test_the_noise_of_an_update_does_not_depend_on_the_number_of_ranks():
    stated = 0.8 * 0.5
    for size in (1, 2, 4):
        assert is_gaussian(silent_noise(size), stated)
    # the same check finds noise on each rank besides, shares of it, and a first rank without noise
    on_each = silent_noise(2, wrap=lambda own: NoisyShare(own, stated))
    assert not is_gaussian(on_each, stated)
    assert is_gaussian(on_each / np.sqrt(3), stated)
    shares = silent_noise(2, wrap=lambda own: NoisyShare(own, stated / 2), noise_multiplier=1e-3)
    assert not is_gaussian(shares, stated)
    assert not is_gaussian(silent_noise(2, noise_multiplier=1e-3), stated)


def test_shares_are_every_unit_once_and_about_equally_large():
    generator = torch.Generator().manual_seed(1)
    for count in (0, 1, 3, 50, 1000):
        sizes = torch.randint(1, 5, (count,), generator=generator)
        for parts in (1, 2, 4, 7):
            cuts = cut_evenly(sizes, parts)
            assert len(cuts) == parts + 1
            assert cuts == sorted(cuts)
            assert (cuts[0], cuts[-1]) == (0, count)
            rows = [int(sizes[stretch(cuts, number)].sum()) for number in range(parts)]
            assert max(rows) - min(rows) <= 8  # two units of the largest size
    even = cut_evenly(torch.tensor([4] * 10 + [1] * 40), 2)
    assert even == [0, 10, 50]  # by rows; halves of the units would be 25


def test_a_unit_that_two_ranks_take_is_refused_before_any_noise(monkeypatch):
    def overlapping(cuts, number):
        return slice(max(0, cuts[number] - 1), cuts[number + 1])

    monkeypatch.setattr(ranked_sum_file, "stretch", overlapping)

    def work(ranks):
        sums = ranked(ranks, SmallNet())
        return led(ranks, sums, lambda: sums(torch.arange(23), 0))

    error = together(2, work)[0]
    assert isinstance(error, PrivacyError)
    assert error.code == "ranks-differ"


def test_ranks_whose_sums_have_another_sensitivity_are_refused():
    def work(ranks):
        sums = ranked(ranks, SmallNet(), clip_norm=0.5 if ranks.is_first else 0.6)
        return led(ranks, sums, lambda: sums(torch.arange(23), 0))

    error = together(2, work)[0]
    assert isinstance(error, PrivacyError)
    assert error.code == "ranks-differ"


def alike(ranks, units):
    model = SmallNet()
    empty = SimpleNamespace(val=None, test=None)
    prepared = SimpleNamespace(
        units=units, model=model, splits=empty, components=SimpleNamespace(names=dict), ranks=ranks
    )
    check_alike(ranks, prepared)
    return "alike"


def test_units_must_have_the_same_numbers_on_every_rank():
    data = small_set(20, seed=1, patients=7)
    order = torch.arange(20)
    order[[3, 4]] = order[[4, 3]]
    swapped = data.select(order)
    relabelled = replace(data, labels=data.labels.roll(1))
    assert swapped.fingerprint == data.fingerprint  # what the ledger asks for is not enough here
    assert together(2, lambda ranks: alike(ranks, Units.images(data))) == ["alike"] * 2
    for other in (swapped, relabelled):
        sets = [data, other]
        found = together(2, lambda ranks, sets=sets: alike(ranks, Units.images(sets[ranks.number])))
        assert [error.code for error in found] == ["ranks-differ"] * 2
    regrouped = [Units.patients(data, max_images=count) for count in (2, 3)]
    found = together(2, lambda ranks: alike(ranks, regrouped[ranks.number]))
    assert [error.code for error in found] == ["ranks-differ"] * 2


def test_a_rank_that_fails_stops_all_and_the_first_one_says_why():
    def broken(own):
        def fail(indices, step):
            raise ValueError("no memory for that")

        return fail

    def work(ranks):
        sums = ranked(ranks, SmallNet(), wrap=broken if ranks.number == 1 else lambda own: own)
        return led(ranks, sums, lambda: sums(torch.arange(23), 0))

    found = together(3, work)
    assert all(isinstance(error, RunError) and error.code == "rank-failed" for error in found)
    assert "rank 1 cannot go on: no memory for that" in str(found[0])
    assert together(3, lambda ranks: ranks.agree({"number": ranks.number}))[0][2] == {"number": 2}


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_lost_rank_is_noticed_in_time(how):
    over = threading.Event()

    def work(ranks):
        sums = ranked(ranks, SmallNet())
        ranks.agree()
        ranks.lead()
        if not ranks.is_first:
            ranks.next_order()  # and then nothing
            if how == "silent":
                over.wait(30)
            return None
        try:
            return sums(torch.arange(23), 0)
        finally:
            over.set()

    began = time.monotonic()
    error = together(2, work, seconds=4)[0]
    assert isinstance(error, RunError)
    assert error.code == "rank-lost"
    assert time.monotonic() - began < 25


def test_an_idle_first_rank_is_waited_for_and_a_lost_one_is_not():
    def work(ranks, *, stays):
        ranks.agree()
        ranks.lead()
        if not ranks.is_first:
            return ranks.next_order()["do"]
        time.sleep(3.5 if stays else 0)
        if stays:
            with ranks.order("stop"):
                pass
        return None

    assert together(2, lambda ranks: work(ranks, stays=True), seconds=2)[1] == "stop"
    lost = together(2, lambda ranks: work(ranks, stays=False), seconds=4)[1]
    assert isinstance(lost, RunError)
    assert lost.code == "rank-lost"


def test_other_ranks_see_only_weights_of_steps_that_are_on_record():
    spent, seen = [0], []
    plan = Plan(num_examples=23, batch_size=8, num_steps=3, noise_multiplier=0.8, clip_norm=0.5, delta=1e-3)

    class Recording(RankedSum):
        def take_part(self, **order):
            wrong = super().take_part(**order)
            seen.append((order["step"], spent[0], self.model.head.weight.detach().clone()))
            return wrong

    def work(ranks):
        torch.manual_seed(0)
        model, source = SmallNet(), SecureSource()
        made = ranked(ranks, model, source=source)
        sums = Recording(**{name: getattr(made, name) for name in made.__dataclass_fields__})
        steps = fit(
            model,
            sums,
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            learning_rate=lambda step: 0.1,
            average=WeightAverage.start(model, decay=0.0),
            source=source,
            spend=lambda step: spent.__setitem__(0, step),
        )
        return led(ranks, sums, lambda: len(list(steps)))

    assert together(2, work)[0] == 3
    assert [step for step, _, _ in seen] == [0, 1, 2]
    assert all(steps_on_record >= step for step, steps_on_record, _ in seen)
    assert not torch.equal(seen[0][2], seen[1][2])  # the weights of the next step did arrive


def test_a_rank_draws_nothing_of_its_own():
    keys = StepKeys()
    keys.hold(3, {"model": "ab" * 32})
    assert keys.random_bytes(32, purpose="model", step=3).tobytes() == b"\xab" * 32
    for count, purpose, step in ((32, "noise", 3), (32, "model", 4), (8, "model", 3), (32, "sampling", 3)):
        with pytest.raises(AssertionError):
            keys.random_bytes(count, purpose=purpose, step=step)
    with pytest.raises(AssertionError):
        keys.torch_generator(purpose="model", step=3)


def test_a_rank_that_is_asked_to_stop_tells_the_first():
    def work(ranks: Ranks):
        ranks.stop_wanted = lambda: ranks.number == 1
        sums = ranked(ranks, SmallNet())
        return led(ranks, sums, lambda: (sums(torch.arange(3), 0), ranks.others_want_stop))

    total, wanted = together(2, work)[0]
    assert isinstance(total, ClippedSum)
    assert wanted


def test_sums_are_added_in_an_order_that_depends_on_nothing_but_their_number():
    values = [1.0, 2.0**53, 1.0, -(2.0**53), 0.1]
    expected = ((values[0] + values[1]) + (values[2] + values[3])) + values[4]

    def work(ranks):
        return ranks.add_up(torch.tensor([values[ranks.number]], dtype=torch.float64)).item()

    assert {together(5, work)[0] for _ in range(3)} == {expected}
    assert expected != sum(values)  # another order is another sum, and so is a lower precision
