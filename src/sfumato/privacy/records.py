"""Components of a caller's own as files hold them: they can be counted and read, but not used again.

What is recorded is the event itself that the component gave to the accountant, so that whoever reads the file
counts what was counted. It holds for the plan it was recorded for and refuses to stand for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from sfumato.accounting import SampledGaussian, event_from_dict, event_to_dict
from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.noise_mechanisms import MECHANISMS, NoiseMechanism
from sfumato.privacy.sampling_schemes import SCHEMES, Batches, SamplingScheme

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.gradients import ClippedSum
    from sfumato.randomness import RandomSource

_MOST_COMPARED_STEPS = 100_000  # beyond, a record counts the whole run however far it got


class _SchemeValues(TypedDict):
    name: str
    rate: Annotated[float, Meta(gt=0, le=1)]
    text: str
    release: dict[str, Any]
    event: dict[str, Any]
    per_step: bool
    num_steps: Annotated[int, Meta(ge=1, le=2**53)]


class _MechanismValues(TypedDict):
    name: str
    words: str
    assumption: str | None
    noise_multiplier: float
    release: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RecordedScheme:
    """A sampling scheme of a caller's own.

    Guarantee: the cost of steps is what the scheme said, or more. If k steps always were k times one,
    ``recorded_event`` is that of one step (``per_step``); otherwise it is that of the whole run, and counts
    in full from the first step on.
    """

    name: str
    rate: float
    text: str
    release: SampledGaussian  # the noisy sum over all units that it was asked about
    recorded_event: SampledGaussian
    per_step: bool
    num_steps: int  # of the whole run

    def default_batch_size(self, num_examples: int) -> None:
        return None

    def sampling_rate(self, batch_size: float, num_examples: int) -> float:
        return self.rate

    def event(self, release: SampledGaussian, *, sampling_rate: float, num_steps: int) -> SampledGaussian:
        if release != self.release or num_steps > self.num_steps:
            raise _other_plan("sampling scheme", self.name)
        if self.per_step or not num_steps:
            return replace(self.recorded_event, num_steps=num_steps * self.recorded_event.num_steps)
        return self.recorded_event

    def batches(self, *, sampling_rate: float, num_steps: int) -> Batches:
        raise PrivacyError(
            "recorded-sampling",
            f"the sampling scheme {self.name!r} is known by its record only.",
            why="Batches that are not drawn as they are accounted have no guarantee.",
            fix="Build the plan with the scheme itself.",
        )

    def sentence(self, *, unit: str, units: str, num_examples: int, batch_size: float) -> str:
        return self.text

    def as_dict(self) -> dict[str, object]:
        """As JSON values."""
        events = {"release": event_to_dict(self.release), "event": event_to_dict(self.recorded_event)}
        return {
            "name": self.name,
            "rate": self.rate,
            "text": self.text,
            **events,
            "per_step": self.per_step,
            "num_steps": self.num_steps,
        }


@dataclass(frozen=True, kw_only=True)
class RecordedMechanism:
    """A noise mechanism of a caller's own, for the noise multiplier of one plan."""

    name: str
    words: str
    assumption: str | None
    noise_multiplier: float
    release: SampledGaussian

    def event(self, noise_multiplier: float) -> SampledGaussian:
        if noise_multiplier != self.noise_multiplier:
            raise _other_plan("noise mechanism", self.name)
        return self.release

    def add(
        self, total: ClippedSum, *, noise_multiplier: float, source: RandomSource, step: int
    ) -> dict[str, Tensor]:
        raise PrivacyError(
            "recorded-mechanism",
            f"the noise mechanism {self.name!r} is known by its record only.",
            why="Noise that is not drawn as it is accounted gives no guarantee.",
            fix="Build the plan with the mechanism itself.",
        )

    def as_dict(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "name": self.name,
            "words": self.words,
            "assumption": self.assumption,
            "noise_multiplier": self.noise_multiplier,
            "release": event_to_dict(self.release),
        }


def record_scheme(
    scheme: SamplingScheme, release: SampledGaussian, *, sampling_rate: float, num_steps: int, text: str
) -> str | RecordedScheme:
    """What a file holds of a scheme: the name of one of ours; of another, what ``num_steps`` of it cost."""
    if scheme == SCHEMES.get(scheme.name):
        return scheme.name
    if isinstance(scheme, RecordedScheme):
        return scheme

    def event(steps: int) -> SampledGaussian:
        return scheme.event(release, sampling_rate=sampling_rate, num_steps=steps)

    one = event(1)
    per_step = num_steps <= _MOST_COMPARED_STEPS and all(
        event(steps) == replace(one, num_steps=steps * one.num_steps) for steps in range(1, num_steps + 1)
    )
    return RecordedScheme(
        name=scheme.name,
        rate=sampling_rate,
        text=text,
        release=release,
        recorded_event=one if per_step else event(num_steps),
        per_step=per_step,
        num_steps=num_steps,
    )


def record_mechanism(mechanism: NoiseMechanism, *, noise_multiplier: float) -> str | RecordedMechanism:
    """What a file holds of a mechanism: the name of one of ours, and of another what it costs."""
    if mechanism == MECHANISMS.get(mechanism.name):
        return mechanism.name
    if isinstance(mechanism, RecordedMechanism):
        return mechanism
    return RecordedMechanism(
        name=mechanism.name,
        words=mechanism.words,
        assumption=mechanism.assumption,
        noise_multiplier=noise_multiplier,
        release=mechanism.event(noise_multiplier),
    )


def read_scheme(values: Mapping[str, Any]) -> RecordedScheme:
    """What ``RecordedScheme.as_dict`` wrote; ConfigError for whatever else."""
    read = _checked(values, _SchemeValues, "sampling scheme")
    return RecordedScheme(
        name=read["name"],
        rate=read["rate"],
        text=read["text"],
        release=_step(read["release"]),
        recorded_event=_step(read["event"]),
        per_step=read["per_step"],
        num_steps=read["num_steps"],
    )


def read_mechanism(values: Mapping[str, Any]) -> RecordedMechanism:
    """What ``RecordedMechanism.as_dict`` wrote; ConfigError for whatever else."""
    read = _checked(values, _MechanismValues, "noise mechanism")
    return RecordedMechanism(**{**read, "release": _step(read["release"])})


def _checked(values: Mapping[str, Any], kind: Any, what: str) -> Any:
    try:
        read = msgspec.convert(values, kind)
        if read.keys() != values.keys():
            raise msgspec.ValidationError(f"Unknown {', '.join(values.keys() - read.keys())}")
    except msgspec.ValidationError as error:
        raise ConfigError(
            "bad-record",
            f"a recorded {what} cannot be counted: {error}.",
            why="Leaving out what it cost could understate what was spent.",
            fix="Correct the file, or update sfumato.",
        ) from error
    return read


def _step(values: Mapping[str, Any]) -> SampledGaussian:
    if values.get("kind") != "sampled-gaussian":
        raise ConfigError(
            "unknown-event",
            f"a recorded component has an event of kind {values.get('kind')!r}.",
            fix="Update sfumato, or correct the file.",
        )
    event = event_from_dict(values)
    assert isinstance(event, SampledGaussian)
    return event


def _other_plan(what: str, name: str) -> PrivacyError:
    return PrivacyError(
        "recorded-for-another-plan",
        f"the {what} {name!r} was recorded for other noise or fewer steps.",
        why="What it would cost then only the component itself can tell.",
        fix="Build the plan with the component itself.",
    )
