"""The components that a recipe can name: whatever the tables of components hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sfumato.accounting import ACCOUNTANTS
from sfumato.privacy.noise_mechanisms import MECHANISMS
from sfumato.privacy.sampling_schemes import SCHEMES

LossName = Literal["cross-entropy", "label-smoothing", "binary-cross-entropy"]  # training.components.LOSSES

if TYPE_CHECKING:  # which a type checker cannot read
    AccountantName = str
    MechanismName = str
    SchemeName = str
else:
    AccountantName = Literal[tuple(ACCOUNTANTS)]
    MechanismName = Literal[tuple(MECHANISMS)]
    SchemeName = Literal[tuple(SCHEMES)]
