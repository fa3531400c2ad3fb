"""A release for another place: the same weights and guarantee, another operating point.

What is computed from a release costs its training units nothing. The images of the other place are another
matter: the new operating point is computed from them without noise, and every file of the new folder says so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sfumato.data.images import Unit
from sfumato.data.readers.decode import is_dicom, read_patients
from sfumato.data.readers.folder import FROM_DICOM
from sfumato.data.readers.patients import find_patients
from sfumato.errors import ConfigError, DataError, ModelError, PrivacyError, RunError
from sfumato.files import put, read_bytes, replacing, workspace, write_json, write_text
from sfumato.ledger.links import one_spelling
from sfumato.release.documents import AdaptedDocument, Config, DecisionDocument, Privacy
from sfumato.release.escaping import markdown, one_line
from sfumato.release.release import CARD, CONFIG, PRIVACY, WEIGHTS, ReleasedModel, find_release
from sfumato.release.trained_images import were_trained_on
from sfumato.training.decision import Decision, Shares, shares_of_classes, shares_of_findings
from sfumato.training.operating_points import moved_decision

FEWEST = 50  # images, or patients where they are known, below which the point follows single ones
FEWEST_EXPECTED = 20  # of the rarer side of a finding, below which somebody is told
_SECTION = "## Another place"


@dataclass(frozen=True, kw_only=True)
class Place:
    """What is known of the place: outputs for its images, how much each counts, and declared prevalences."""

    logits: Tensor  # (N, classes), corrected as the release does
    weights: Tensor  # (N,), which sum to the number of units
    unit: Unit
    prevalence: Shares  # one for each class or finding
    image_ids: Tensor  # (N,), hashes of the images' content: sensitive, written nowhere

    @property
    def num_images(self) -> int:
        return len(self.logits)

    @property
    def num_units(self) -> int:
        return round(float(self.weights.sum()))


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The decision before and after, and the shares of the place's units that each calls every class."""

    decision: Decision
    called_before: Shares
    called: Shares
    moved: Shares  # what was added to each logit


def declared_shares(released: ReleasedModel, declared: Sequence[float]) -> Shares:
    """The declared prevalence as one share for each class or finding."""
    value = declared[0] if len(declared) == 1 else list(declared)
    number = len(released.classes)
    if released.task == "multi-label":
        shares = shares_of_findings(value, num_findings=number, setting="--prevalence")
    else:
        positive = released.decision.positive
        shares = shares_of_classes(value, setting="--prevalence", num_classes=number, positive=positive)
    assert shares is not None  # something was declared
    return shares


def look_at_place(
    released: ReleasedModel,
    files: Sequence[Path],
    prevalence: Shares,
    *,
    patient_from: str | None = None,
    at_least: int = FEWEST,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Place:
    """The model's outputs for the place's images; a patient's images count together as one.

    A file that cannot be read is refused by its name, one that is named twice counts once. No label is
    looked for.
    """
    files = list({file.resolve(): file for file in files}.values())
    weights = _weights(files, patient_from)
    unit: Unit = "image" if patient_from is None else "patient"
    num_units = round(float(weights.sum()))
    if num_units < at_least:
        raise DataError(
            "few-images-of-place",
            f"there are {num_units:,} {unit}s of the place.",
            why=f"An operating point from fewer than {at_least:,} follows single ones of them.",
            fix="Give more images; they need no labels. --at-least N takes fewer.",
        )
    logits, ids, done = [], [], 0
    for images, hashes in released.decode_pieces(files):
        logits.append(released.logits(images))
        ids.append(hashes)
        done += len(hashes)
        if on_progress is not None:
            on_progress("images of the place", done, len(files))
    return Place(
        logits=torch.cat(logits).double(),
        weights=weights,
        unit=unit,
        prevalence=prevalence,
        image_ids=torch.cat(ids),
    )


def _weights(files: Sequence[Path], patient_from: str | None) -> Tensor:
    """One for each image; of each patient's images together, if file names or headers name the patients."""
    if patient_from is None:
        return torch.ones(len(files), dtype=torch.float64)
    patients = [one_spelling(patient) for patient in _patients(files, patient_from)]
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    index = torch.tensor([numbers[patient] for patient in patients])
    return (1 / torch.bincount(index).double())[index]


def _patients(files: Sequence[Path], patient_from: str) -> list[str]:
    found: Sequence[str | None]
    if patient_from != FROM_DICOM:
        found = find_patients(patient_from, [file.as_posix() for file in files])
    elif all(map(is_dicom, files)):
        found = read_patients(files)
    else:
        found = ["" if not is_dicom(file) else "of a header" for file in files]
    for file, patient in zip(files, found, strict=True):
        if not patient:
            raise DataError(
                "missing-patient",
                f"--patient-from {patient_from!r} finds no patient in {file.as_posix()!r}.",
                why="Patients can count once each only if every image's patient is known.",
                fix="Widen the expression, or leave it out: every image then counts.",
            )
    return [patient for patient in found if patient]


def check_apart(run: Path, released: ReleasedModel, place: Place) -> bool:
    """Refuse images that the model was trained on; returns whether that could be told.

    What is computed from those without noise is no post-processing: the guarantee would be void for them.
    """
    if released.privacy["epsilon"] is None:
        return True  # there is no guarantee that it could make false
    shared = were_trained_on(run, released, place.image_ids)
    if shared:
        raise PrivacyError(
            "place-was-trained-on",
            "the model was trained on some of the images of the place.",
            why="The operating point is computed without noise, so the guarantee would not hold for these.",
            fix="Give images of people that the model was not trained on.",
        )
    return shared is not None


def adapt(released: ReleasedModel, place: Place) -> Adapted:
    """The decision that suits the place; nothing but its outputs and declared prevalences is used."""
    before, several = released.decision, released.task == "multi-label"
    after, moved = moved_decision(before, place.logits, place.weights, place.prevalence, several=several)
    moved_logits = place.logits + torch.tensor(moved, dtype=torch.float64) / before.temperature

    def called(decision: Decision, corrected: Tensor) -> Shares:
        if several:
            rows = decision.found(corrected).double()
        else:
            rows = torch.nn.functional.one_hot(decision.choose(corrected), corrected.shape[1]).double()
        return tuple((place.weights @ rows / place.weights.sum()).tolist())

    return Adapted(
        decision=after,
        called_before=called(before, place.logits),
        called=called(after, moved_logits),
        moved=moved,
    )


def notes(released: ReleasedModel, place: Place, *, is_known_apart: bool) -> list[str]:
    """What somebody should know before relying on the point: findings of which few are expected.

    ``is_known_apart``: as ``check_apart`` says.
    """
    found = []
    if not is_known_apart:
        found.append(
            "nothing here knows which images the model was trained on, so nobody checked that none of these "
            "is among them: for such an image the guarantee would not hold."
        )
    for name, share in zip(released.classes, place.prevalence, strict=True):
        expected = place.num_units * min(share, 1 - share)
        if expected < FEWEST_EXPECTED:
            rarer = "with" if share <= 0.5 else "without"
            found.append(
                f"only about {expected:.0f} {place.unit}s {rarer} {name} are expected among "
                f"{place.num_units:,}: its operating point follows single ones."
            )
    return found


def sentence(classes: Sequence[str], place: Place, privacy: Privacy) -> str:
    """For the statement: whom the new operating point was computed from, and who is not protected."""
    declared = ", ".join(
        f"{one_line(name)} {share:.3g}" for name, share in zip(classes, place.prevalence, strict=True)
    )
    counted = f"{place.num_images:,} images"
    if place.unit == "patient":
        counted += f" of {place.num_units:,} patients"
    set_from = (
        f"The operating point was set afterwards for another place, from {counted} of it without labels and "
        f"declared prevalences ({declared})."
    )
    numbers = "one number for each class in config.json (decision.shift) is computed from them without noise."
    if privacy["epsilon"] is None:
        return f"{set_from} Nor are the people on the other place's images protected: {numbers}"
    return (
        f"{set_from} For everybody whose images the model was trained on, none of which may be among these, "
        "this is post-processing, and the guarantee stays as it is. It does not protect the people on the "
        f"other place's images: {numbers}"
    )


def write_adapted(run: Path, out: Path, released: ReleasedModel, place: Place, decision: Decision) -> None:
    """A new release folder: the weights byte for byte, the new decision, and the sentence wherever one reads.

    Guarantee: the folder of the original release is only read, and nothing that is at ``out`` is replaced.
    """
    source, said = find_release(run), sentence(released.classes, place, released.privacy)
    card, stated = _card(source), released.privacy["statement"]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)  # by the umask; a workspace would make it the owner's
        with workspace(out.parent) as work:
            building = work / "release"
            building.mkdir()
            with replacing(building / WEIGHTS) as temporary:
                shutil.copyfile(source / WEIGHTS, temporary)
            write_json(building / CONFIG, adapted_config(released.config, place, decision))
            write_json(building / PRIVACY, {**released.privacy, "statement": f"{stated}\n{said}"})
            write_text(building / CARD, adapted_card(card, stated, said))
            for file in building.iterdir():
                file.chmod(0o644)  # to be handed over, as any release
            building.chmod(0o755)
            check_new(out)  # also if it has come to be meanwhile
            put(building, out)
    except OSError as error:
        raise RunError(
            "cannot-save", f"{out} could not be written: {error}", fix="Make room, or give another --out."
        ) from error


def _card(source: Path) -> str:
    """The original's card; empty if there is none."""
    if not (source / CARD).is_file():
        return ""
    try:
        return read_bytes(source / CARD).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(
            "bad-release",
            f"{source}: {CARD} cannot be read: {error}",
            fix="Copy the release folder again, complete.",
        ) from error


def check_new(out: Path) -> None:
    """Refuse to write where something is, be it a link that leads nowhere."""
    if os.path.lexists(out):
        raise RunError(
            "run-exists",
            f"{out} already exists",
            why="A release is never overwritten.",
            fix="Give another --out.",
        )


def check_original(released: ReleasedModel) -> None:
    """Refuse a release that was made for another place already: its statement would speak of two."""
    if "adapted" in released.config:
        raise ConfigError(
            "already-adapted",
            "this release was made for another place already.",
            why="Its statement would then name images that the operating point no longer follows.",
            fix="Give the run or the release that it was made from.",
        )


def adapted_config(config: Config, place: Place, decision: Decision) -> Config:
    """config.json with the new decision, and what it was computed from."""
    new = cast(Config, dict(config))
    new["decision"] = cast(DecisionDocument, decision.as_dict())
    new["adapted"] = AdaptedDocument(
        prevalence=list(place.prevalence),
        num_images=place.num_images,
        num_units=place.num_units,
        unit=place.unit,
    )
    return new


def adapted_card(card: str, stated: str, said: str) -> str:
    """The card with the sentence in its statement, and before its figures whom these are of."""
    shown, written = stated.replace("\n", "\n\n"), markdown(said)
    with_sentence = card.replace(shown, f"{shown}\n\n{written}", 1) if stated else card
    section = (
        f"{_SECTION}\n\n{'' if with_sentence != card else f'{written} '}Figures on this card were measured "
        "before, at the operating point of the original release: measure anew, on labelled images of the "
        "place."
    )
    before, heading, after = with_sentence.partition("\n## Accuracy\n")
    return f"{before.rstrip(chr(10))}\n\n{section}\n{heading}{after}"
