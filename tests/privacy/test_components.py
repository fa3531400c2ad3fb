"""A plan of components: a scheme of one's own is counted, said, stored, and drawn only by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from sfumato.accounting import SampledGaussian
from sfumato.errors import ConfigError, PrivacyError
from sfumato.gradients import ClippedSum
from sfumato.ledger import Cap, Ledger, total_of
from sfumato.privacy import Plan
from sfumato.privacy.noise_mechanisms import MECHANISMS, Gaussian
from sfumato.privacy.sampling_schemes import SCHEMES, Full
from sfumato.randomness import SecureSource
from sfumato.sampling import PoissonSampling


@dataclass(frozen=True)
class HalfOfThem:
    """Units are tossed for, but with half the rate that the batch size says."""

    name = "half"

    def default_batch_size(self, num_examples):
        return None

    def sampling_rate(self, batch_size, num_examples):
        return batch_size / num_examples / 2

    def event(self, release, *, sampling_rate, num_steps):
        return replace(release, sampling_rate=sampling_rate, num_steps=num_steps)

    def batches(self, *, sampling_rate, num_steps):
        return PoissonSampling(sampling_rate=sampling_rate, num_steps=num_steps)

    def sentence(self, *, unit, units, num_examples, batch_size):
        return f"each on half a sample of the {num_examples} {units}"


@dataclass(frozen=True)
class KnownToTheAttacker(HalfOfThem):
    """Drawn at a rate, but without a secret: each step counts as one over all units."""

    name = "known"

    def event(self, release, *, sampling_rate, num_steps):
        return replace(release, sampling_rate=1.0, num_steps=num_steps)


@dataclass(frozen=True)
class InTurns(HalfOfThem):
    """Every unit is in one of five steps and in no other: five steps cost what one over all units costs."""

    name = "turns"

    def event(self, release, *, sampling_rate, num_steps):
        return replace(release, sampling_rate=1.0, num_steps=-(-num_steps // 5))


@dataclass(frozen=True)
class TwiceAsFar:
    """Noise that is known to hide half of what its deviation says."""

    name = "twice"
    words = "coarse"
    assumption = "The coarse noise is as coarse as it was."

    def event(self, noise_multiplier):
        return SampledGaussian(noise_multiplier=noise_multiplier / 2)

    def add(self, total, *, noise_multiplier, source, step):
        return MECHANISMS["gaussian"].add(total, noise_multiplier=noise_multiplier, source=source, step=step)


OWN = {
    "half": {"sampling": HalfOfThem()},
    "known": {"sampling": KnownToTheAttacker()},
    "turns": {"sampling": InTurns()},
    "twice": {"mechanism": TwiceAsFar()},
    "known and twice": {"sampling": KnownToTheAttacker(), "mechanism": TwiceAsFar()},
}


def plan(**changes) -> Plan:
    settings = {"num_examples": 1000, "batch_size": 200, "num_steps": 50, "noise_multiplier": 2.0}
    return Plan(**{**settings, "delta": 1e-4, **changes})


def test_a_scheme_of_ones_own_is_counted_drawn_and_said():
    own = plan(sampling=HalfOfThem())
    assert own.epsilon == plan(batch_size=100).epsilon
    assert own.epsilon < plan().epsilon  # the default would have been counted at the full rate
    sizes = [len(batch) for batch in own.sampler().batches(1000, SecureSource())]
    assert 80 < torch.tensor(sizes, dtype=torch.float64).mean() < 120
    assert "half a sample of the 1000 images" in own.statement().text


def test_a_stored_scheme_is_counted_as_before_and_cannot_be_drawn():
    own = plan(sampling=HalfOfThem())
    again = stored(own)
    assert again.epsilon == own.epsilon
    assert again.statement().text == own.statement().text
    with pytest.raises(PrivacyError, match="recorded-sampling"):
        again.sampler()
    assert stored(plan()).sampler() == plan().sampler()


def stored(made: Plan) -> Plan:
    return Plan.from_dict(json.loads(json.dumps(made.as_dict())))


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_a_file_counts_what_the_component_itself_counted(own):
    made = plan(**own)
    again = stored(made)
    assert again.events() == made.events()
    assert again.epsilon == made.epsilon
    assert stored(again) == again
    assert again.as_dict() == made.as_dict()  # what a resumed run compares
    for steps in (0, 1, 7, 49):
        if own.get("sampling") == InTurns():
            assert (
                again.events(steps)[0].num_steps >= made.events(steps)[0].num_steps
            )  # whole, from step 1 on
        else:
            assert again.events(steps) == made.events(steps)


def test_the_rate_alone_would_understate_what_a_scheme_costs():
    """Control: the event at the rate of the batches is another one, and far cheaper."""
    known = plan(sampling=KnownToTheAttacker())
    assert known.sampling_rate == plan(sampling=HalfOfThem()).sampling_rate
    assert known.epsilon > 5 * plan(sampling=HalfOfThem()).epsilon


@pytest.mark.parametrize("name", ["known", "twice", "known and twice"])
def test_the_ledger_holds_a_component_of_ones_own_to_its_cap(name, tmp_path):
    made = plan(**OWN[name])
    told = {"fingerprint": "a" * 64, "name": "images", "image_ids": torch.arange(9)}
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.begin(plan=made, folder=tmp_path, **told).spend(made.num_steps)
        spent = total_of(ledger.records("a" * 64), unit="image", delta=made.delta)
        assert spent.epsilon == made.epsilon
        cap = Cap(
            unit="image", epsilon=made.epsilon * 1.01, delta=made.delta
        )  # room for less than another run
        ledger.set_cap("a" * 64, cap, unit="image")
        (tmp_path / "second").mkdir()
        with pytest.raises(PrivacyError, match="over-cap"):
            ledger.begin(plan=made, folder=tmp_path / "second", **told)


def test_a_record_stands_for_no_other_plan():
    again = stored(plan(**OWN["known and twice"]))
    total = ClippedSum(
        gradients={"w": torch.zeros(2)}, norms=torch.zeros(0), losses=torch.zeros(0), sensitivity=1.0
    )
    with pytest.raises(PrivacyError, match="recorded-mechanism"):
        again.noise(total, source=SecureSource(), step=1)
    with pytest.raises(PrivacyError, match="recorded-for-another-plan"):
        replace(stored(plan(mechanism=TwiceAsFar())), noise_multiplier=1.0)
    for change in ({"noise_multiplier": 1.0}, {"num_steps": 51}):
        with pytest.raises(PrivacyError, match="recorded-for-another-plan"):
            replace(stored(plan(sampling=KnownToTheAttacker())), **change)


def test_one_of_ours_is_stored_by_its_name_and_drawn_again():
    made = plan(batch_size=1000, sampling=Full(), mechanism=Gaussian())
    assert (made.as_dict()["sampling"], made.as_dict()["mechanism"]) == ("full", "gaussian")
    assert stored(made).sampler() == made.sampler()


def test_a_mechanism_of_ones_own_adds_its_noise_and_is_said():
    made = plan(mechanism=TwiceAsFar())
    assert made.epsilon == plan(noise_multiplier=1.0).epsilon > plan().epsilon
    zeros = {"w": torch.zeros(20_000, dtype=torch.float64)}
    total = ClippedSum(gradients=zeros, norms=torch.zeros(0), losses=torch.zeros(0), sensitivity=1.0)
    assert made.noise(total, source=SecureSource(), step=1)["w"].std().item() == pytest.approx(2.0, rel=0.05)
    for text in (made.statement().text, stored(made).statement().text):
        assert "coarse noise of standard deviation 2" in text
        assert TwiceAsFar.assumption in text


@pytest.mark.parametrize("sampling", sorted(SCHEMES))
@pytest.mark.parametrize("mechanism", sorted(MECHANISMS))
def test_every_component_states_itself_and_survives_a_file(sampling, mechanism):
    accountant = "rdp" if mechanism == "discrete-gaussian" else "pld"
    made = Plan.calibrate(
        epsilon=3,
        delta=1e-4,
        num_examples=1000,
        batch_size=100 if sampling == "poisson" else None,
        num_steps=10,
        sampling=sampling,
        mechanism=mechanism,
        accountant=accountant,
    )
    assert made.epsilon <= 3
    assert MECHANISMS[mechanism].words in made.statement().text
    assert stored(made) == made


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampling": "shuffled"},
        {"mechanism": "laplace"},
        {"accountant": "clt"},
        {"sampling": 5},
        {"mechanism": 5},
    ],
)
def test_an_unknown_component_is_refused(wrong):
    with pytest.raises(ConfigError, match="unknown-choice"):
        plan(**wrong)


def test_a_misspelt_setting_of_calibrate_is_an_error():
    with pytest.raises(TypeError, match="clipnorm"):
        Plan.calibrate(epsilon=3, delta=1e-4, num_examples=1000, batch_size=10, num_steps=5, clipnorm=2.0)
