"""The settings of fixed features; those of all other parts are in ``recipe.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from sfumato.errors import ConfigError
from sfumato.recipes.settings import NotNegative, Positive, setting


def check_mean_noise(value: float) -> None:
    """Refuse noise so small that no accountant can say what it costs."""
    if 0 < value < 1e-3:
        raise ConfigError(
            "bad-value",
            f"features.mean_noise_multiplier is {value:g}.",
            why="So little noise protects nobody.",
            fix="Use 0 for no centring, or at least 0.001; 200 costs next to nothing.",
        )


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """[features]: the model's features are fixed and computed once; only what stands on them is trained."""

    num_images: Annotated[int, Meta(ge=50)] = setting(12_000, "generated images that features are fitted on")
    seed: Annotated[int, Meta(ge=0, le=2**31)] = setting(0, "of the generated images: public")
    mean_noise_multiplier: NotNegative = setting(
        200.0, "noise of the private mean row; 0: no centring", check=check_mean_noise
    )
    reference_steps: Positive = setting(60, "steps at ε = 1 on 50,000 units; scaled to the budget")
    reference_rate: NotNegative = setting(20.0, "learning rate there; scaled to the budget")
    rate_power: NotNegative = setting(2 / 3, "of the budget, with which the learning rate grows")
