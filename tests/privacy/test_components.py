"""A plan of components: a scheme of one's own is counted, said, stored, and drawn only by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy import Plan
from sfumato.privacy.noise_mechanisms import MECHANISMS
from sfumato.privacy.sampling_schemes import SCHEMES
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
    again = Plan.from_dict(json.loads(json.dumps(own.as_dict())))
    assert again.epsilon == own.epsilon
    assert again.statement().text == own.statement().text
    with pytest.raises(PrivacyError, match="recorded-sampling"):
        again.sampler()
    assert Plan.from_dict(json.loads(json.dumps(plan().as_dict()))).sampler() == plan().sampler()


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
    assert Plan.from_dict(json.loads(json.dumps(made.as_dict()))) == made


@pytest.mark.parametrize("wrong", [{"sampling": "shuffled"}, {"mechanism": "laplace"}, {"accountant": "clt"}])
def test_an_unknown_component_is_refused(wrong):
    with pytest.raises(ConfigError, match="unknown-choice"):
        plan(**wrong)


def test_a_misspelt_setting_of_calibrate_is_an_error():
    with pytest.raises(TypeError, match="clipnorm"):
        Plan.calibrate(epsilon=3, delta=1e-4, num_examples=1000, batch_size=10, num_steps=5, clipnorm=2.0)
