"""[data]: which images, and what is publicly known about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from sfumato.recipes.decision_settings import Shares
from sfumato.recipes.settings import Count, Pair, Positive, setting


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """[data]: which images, and what is publicly known about them."""

    name: str | None = setting(None, "a folder, or a known name; the DATA of `sfumato train` comes first")
    image_size: Positive | None = setting(None, "pixels per side; absent: a folder 64, a known set its own")
    channels: Annotated[int, Meta(ge=1, le=4)] | None = setting(
        None, "1 grey, 3 colour; absent: a folder 3, a known set its own"
    )
    classes: tuple[str, ...] | None = setting(None, "a folder's class names in order, known beforehand")
    findings: tuple[str, ...] | None = setting(None, "a manifest's findings, any number per image; public")
    fit: Literal["crop", "pad", "stretch"] = setting("crop", "how other shapes become square")
    patient_from: str | None = setting(
        None, "regular expression that finds the patient in a file name; dicom: the PatientID of headers"
    )
    window: Pair | None = setting(
        None, "[centre, width]: grey values that become black to white; absent: each DICOM file's own"
    )
    range: Pair | None = setting(None, "[lowest, highest]: the same, said otherwise")
    bits: Annotated[int, Meta(ge=9, le=16)] | None = setting(None, "bits that 16-bit files use; absent: 16")
    frame: Count | None = setting(None, "which frame of files with several, from 0; absent: refused")
    mean: tuple[float, ...] | None = setting(None, "per-channel mean to subtract: a public constant")
    std: tuple[float, ...] | None = setting(None, "per-channel deviation to divide by: a public constant")
    holdout: Annotated[float, Meta(ge=0, le=0.9)] = setting(
        0.0, "share of the training units set aside and scored instead"
    )
    val_is_public: bool = setting(False, "the val/ images are public: they may steer the training")
    prevalence: Shares | None = setting(
        None, "how frequent classes are among the training units: publicly known"
    )
    class_counts: Literal["released"] | None = setting(
        None, "released: count them with noise, which epsilon pays for"
    )
