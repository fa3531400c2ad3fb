"""What is searched over: ``KEY=RANGE`` as people write it, checked against the recipe first."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sfumato.errors import ConfigError
from sfumato.recipes.recipe import Recipe, with_settings

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Kind = Literal["log", "lin", "int", "choices"]
Value = float | int | str | bool
_SECTIONS = ("model", "training", "schedule", "augmentation")
_ALSO = ("privacy.clip_norm", "privacy.clipping")
_NEVER = ("training.seed", "model.weights", "training.evaluate_every", "training.early_stopping")
MOST_POINTS = 1000
STEPS = ("training.batch_size", "training.num_steps", "training.num_epochs")

# The grids of the papers; as De et al. C.4, rates on a logarithmic grid and steps on a linear one.
SPACES: Mapping[str, tuple[str, ...]] = {
    "de2022": ("training.learning_rate=log:0.25:8:6", "training.num_steps=lin:250:2000:8"),
    # 4096 is more than any layer has: one group per channel
    "scalenorm2022": ("model.options.groups=1,16,32,64,4096",),
    "smoothnets2022": ("privacy.clip_norm=log:0.1:20", "training.num_epochs=90,120,180"),
}


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values of one setting."""

    key: str
    kind: Kind
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()
    text: str = ""  # as it was given

    @property
    def least(self) -> float | None:
        """The smallest number; None among words."""
        numbers = [value for value in self.choices if isinstance(value, int | float)]
        return self.low if self.kind != "choices" else (min(numbers) if numbers else None)

    @property
    def ends(self) -> tuple[Value, ...]:
        """What has to be allowed so that everything between is."""
        if self.kind == "choices":
            return self.choices
        return (int(self.low), int(self.high)) if self.kind == "int" else (self.low, self.high)

    def distribution(self) -> BaseDistribution:
        """For Optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.kind == "choices":
            return CategoricalDistribution(self.choices)
        if self.kind == "int":
            return IntDistribution(int(self.low), int(self.high))
        return FloatDistribution(self.low, self.high, log=self.kind == "log")


def parse_ranges(texts: Sequence[str], spaces: Sequence[str], recipe: Recipe) -> tuple[Range, ...]:
    """The ranges of this call, those of ``spaces`` first; each setting once, and each a setting."""
    given = [text for name in spaces for text in SPACES[name]] + list(texts)
    ranges = {found.key: found for found in map(parse_range, given)}  # one's own replaces a paper's
    if not ranges:
        raise ConfigError(
            "nothing-to-tune",
            "no setting is given to search over.",
            fix="For example --over training.learning_rate=log:0.1:10, or --space de2022.",
        )
    steps = [key for key in ranges if key in ("training.num_steps", "training.num_epochs")]
    if len(steps) > 1:
        raise ConfigError("steps-and-epochs", f"{' and '.join(steps)} both say how long.", fix="Keep one.")
    for found in ranges.values():
        _check_key(found.key)
        for value in found.ends:
            with_settings(recipe, {found.key: value})  # unknown keys, wrong types, out of range
    return tuple(ranges.values())


def parse_range(text: str) -> Range:
    """``key=log:0.1:10``, ``lin:a:b``, ``int:a:b``, each with ``:n`` for a grid of n points, or ``a,b,c``."""
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or "." not in key or not raw:
        raise _bad(text, "it is not section.key=range")
    kind, _, rest = raw.partition(":")
    if kind in ("log", "lin", "int") and rest:
        return _numbers(key, kind, rest, text)  # type: ignore[arg-type]
    choices = tuple(dict.fromkeys(_value(part) for part in raw.split(",")))
    if len(choices) < 2:
        raise _bad(text, "there is nothing to choose from")
    return Range(key=key, kind="choices", choices=choices, text=raw)


def _numbers(key: str, kind: Kind, rest: str, text: str) -> Range:
    try:
        low, high, *points = rest.split(":")
        start, end = float(low), float(high)
        count = int(points[0]) if points else 0
    except (ValueError, IndexError) as error:
        raise _bad(text, "its ends are no numbers") from error
    if not (math.isfinite(start) and math.isfinite(end) and start < end) or len(points) > 1:
        raise _bad(text, "it does not go from a smaller number to a larger one")
    if kind == "log" and start <= 0:
        raise _bad(text, "a logarithmic range begins above 0")
    if kind == "int" and not (start.is_integer() and end.is_integer()):
        raise _bad(text, "its ends are no whole numbers")
    raw = f"{kind}:{rest}"
    if not points:
        return Range(key=key, kind=kind, low=start, high=end, text=raw)
    if not 2 <= count <= MOST_POINTS:
        raise _bad(text, f"a grid has between 2 and {MOST_POINTS} points")
    ratio = (end / start) ** (1 / (count - 1)) if kind == "log" else 0.0
    grid = [
        start * ratio**place if kind == "log" else start + (end - start) * place / (count - 1)
        for place in range(count)
    ]
    whole = kind == "int" or (kind == "lin" and all(abs(value - round(value)) < 1e-9 for value in grid))
    choices = tuple(round(value) if whole else float(f"{value:.6g}") for value in grid)
    return Range(key=key, kind="choices", choices=tuple(dict.fromkeys(choices)), text=raw)


def _value(text: str) -> Value:
    try:
        value: Any = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
    return value if isinstance(value, float | int | str | bool) else text.strip()


def _check_key(key: str) -> None:
    """Refuse settings that change the guarantee or the data: a search among them is not what is counted."""
    section = key.partition(".")[0]
    if (section in _SECTIONS or key in _ALSO) and key not in _NEVER:
        return
    raise ConfigError(
        "not-tunable",
        f"{key} cannot be searched over.",
        why="Trials have the same budget, unit, data and private releases; only then is the search counted.",
        fix=f"Search over settings of {', '.join(_SECTIONS)}, or {' or '.join(_ALSO)}.",
    )


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(
        "bad-range",
        f"--over {text!r}: {why}.",
        fix="Such as training.learning_rate=log:0.1:10, training.num_steps=int:50:200, model.name=a,b.",
    )
