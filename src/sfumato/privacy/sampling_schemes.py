"""How the units of a step are chosen: each scheme draws its batches, counts them, and says them in words.

To add one: a class here and its row in ``SCHEMES``, from which recipes and commands take their choices.
An object of your own goes into ``Plan(sampling=…)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sfumato.accounting import SampledGaussian
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.randomness import RandomSource


class Batches(Protocol):
    """The batches of a whole run."""

    @property
    def num_steps(self) -> int:
        """Of the whole run."""

    @property
    def sampling_rate(self) -> float:
        """The probability of each unit to be in a step."""

    def batches(self, num_units: int, source: RandomSource, start_step: int = 0) -> Iterator[Tensor]:
        """Indices of the units of each step from ``start_step`` on, ascending, int64."""


@runtime_checkable
class SamplingScheme(Protocol):
    """A way of drawing units that the accountant knows.

    Guarantee that an implementation gives: in each step of ``batches`` each unit takes part independently
    of all others, with at most the probability ``sampling_rate``, or the event it returns says otherwise.
    More steps never cost less. Files hold the event (``records``), not only the rate.
    """

    @property
    def name(self) -> str:
        """As recipes and files write it."""

    def default_batch_size(self, num_examples: int) -> float | None:
        """The batch size that needs no decision; None if it has to be given."""

    def sampling_rate(self, batch_size: float, num_examples: int) -> float:
        """The probability of each unit to be in a step; refuses a batch size that cannot be."""

    def event(self, release: SampledGaussian, *, sampling_rate: float, num_steps: int) -> SampledGaussian:
        """What ``num_steps`` such noisy sums over drawn units are for the accountant."""

    def batches(self, *, sampling_rate: float, num_steps: int) -> Batches:
        """The batches, as they are accounted."""

    def sentence(self, *, unit: str, units: str, num_examples: int, batch_size: float) -> str:
        """For the statement, after "steps of differentially private SGD, "."""


@dataclass(frozen=True)
class Poisson:
    """Each unit takes part independently of all others (``sampling.PoissonSampling``)."""

    name = "poisson"

    def default_batch_size(self, num_examples: int) -> None:
        return None

    def sampling_rate(self, batch_size: float, num_examples: int) -> float:
        return batch_size / num_examples

    def event(self, release: SampledGaussian, *, sampling_rate: float, num_steps: int) -> SampledGaussian:
        return replace(release, sampling_rate=sampling_rate, num_steps=num_steps)

    def batches(self, *, sampling_rate: float, num_steps: int) -> Batches:
        from sfumato.sampling import PoissonSampling

        return PoissonSampling(sampling_rate=sampling_rate, num_steps=num_steps)

    def sentence(self, *, unit: str, units: str, num_examples: int, batch_size: float) -> str:
        return (
            f"each on a Poisson sample of the {num_examples:,} {units}, every {unit} taken with "
            f"probability {batch_size / num_examples:.4g} ({batch_size:,g} expected)"
        )


@dataclass(frozen=True)
class Full:
    """All units in every step (``sampling.FullBatch``): no amplification, exact Gaussian accounting."""

    name = "full"

    def default_batch_size(self, num_examples: int) -> float:
        return num_examples

    def sampling_rate(self, batch_size: float, num_examples: int) -> float:
        if batch_size != num_examples:
            raise ConfigError(
                "batch-size-out-of-range",
                f"batch_size is {batch_size}, but a full batch has all {num_examples} units.",
                fix="Leave batch_size out, or use poisson sampling.",
            )
        return 1.0

    def event(self, release: SampledGaussian, *, sampling_rate: float, num_steps: int) -> SampledGaussian:
        return replace(release, sampling_rate=1.0, num_steps=num_steps)

    def batches(self, *, sampling_rate: float, num_steps: int) -> Batches:
        from sfumato.sampling import FullBatch

        return FullBatch(num_steps=num_steps)

    def sentence(self, *, unit: str, units: str, num_examples: int, batch_size: float) -> str:
        return f"each on all {num_examples:,} {units}"


SCHEMES: Mapping[str, SamplingScheme] = {scheme.name: scheme for scheme in (Poisson(), Full())}


def find_scheme(sampling: str | SamplingScheme) -> SamplingScheme:
    """The scheme of this name, or the object itself."""
    if isinstance(sampling, SamplingScheme):
        return sampling
    if sampling not in SCHEMES:
        raise ConfigError(
            "unknown-choice", f"sampling is {sampling!r}.", fix=f"Use one of: {', '.join(SCHEMES)}."
        )
    return SCHEMES[sampling]
