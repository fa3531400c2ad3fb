"""What links data sets: hashes of their images and, under a secret key, of their patients' names.

Data sets that share one image or one patient are about the same people, and their runs count together. What
is not known links with everything: too much is counted then, never too little. Names themselves are written
nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sfumato.errors import RunError
from sfumato.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

LINKS_FILE = "links.safetensors"  # in the run's state folder, for rebuilding a lost ledger


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """The hashes of one data set, as sorted int64; None where they are not known."""

    image_ids: np.ndarray | None = None
    patient_tags: np.ndarray | None = None
    key_id: str = ""  # of the key that made the tags: tags of different keys cannot be compared

    def share_images(self, other: Links) -> bool:
        """Whether the two have an image in common, or might."""
        if self.image_ids is None or other.image_ids is None:
            return True
        return bool(np.isin(self.image_ids, other.image_ids, assume_unique=True).any())

    def share_patients(self, other: Links) -> bool:
        """Whether the two are known to have a patient in common, or name them under different keys."""
        if self.patient_tags is None or other.patient_tags is None:
            return False
        if not len(self.patient_tags) or not len(other.patient_tags):
            return False
        if self.key_id != other.key_id:
            return True
        return bool(np.isin(self.patient_tags, other.patient_tags, assume_unique=True).any())

    @property
    def has_patients(self) -> bool:
        return self.patient_tags is not None and len(self.patient_tags) > 0

    def joined(self, newer: Links) -> Links:
        """These links and newer ones of the same images; tags under a key that is out of use are replaced."""
        tags, key_id = self.patient_tags, self.key_id
        if newer.patient_tags is not None and newer.has_patients:
            same = tags is not None and self.has_patients and key_id == newer.key_id
            tags = np.union1d(tags, newer.patient_tags) if tags is not None and same else newer.patient_tags
            key_id = newer.key_id
        ids = self.image_ids if self.image_ids is not None else newer.image_ids
        return Links(image_ids=ids, patient_tags=tags, key_id=key_id)


def links_of(
    image_ids: Tensor | None, patient_names: Sequence[str] | None, *, key: bytes | None = None
) -> Links:
    """Hash the names under ``key`` and pack the image ids. Neither names nor their order are kept."""
    ids = None if image_ids is None else np.unique(image_ids.cpu().numpy().astype("<i8"))
    if not patient_names:
        return Links(image_ids=ids)
    assert key is not None  # who names patients brings the ledger's key
    tags = np.unique(np.array([_tag(name, key) for name in set(patient_names)], dtype="<i8"))
    key_id = hashlib.sha256(b"sfumato key " + key).hexdigest()[:16]
    return Links(image_ids=ids, patient_tags=tags, key_id=key_id)


def _tag(name: str, key: bytes) -> int:
    """64 bits of HMAC-SHA256 of the name's one spelling."""
    digest = hmac.new(key, b"sfumato patient " + one_spelling(name).encode(), hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def one_spelling(name: str) -> str:
    """The form that all spellings of a patient's name share: two names with one form are one patient.

    Case, blanks around the name, and how an accent is encoded do not matter. Readers group images by it and
    the ledger hashes it, so that training and ledger never disagree about who is who. In doubt two people
    become one: that protects both together, while one person as two would be protected half as well.
    """
    # what is no text (bytes of a file name that is not UTF-8) stays apart, but can be encoded
    text = name.encode("utf-8", "backslashreplace").decode()
    return unicodedata.normalize("NFC", text).strip().casefold()


def key_beside(ledger: Path) -> bytes:
    """The secret key of a ledger, in a file of its own (mode 0600); made if it is not there.

    Call it inside a transaction of the ledger: two processes may not make two keys.
    """
    path = ledger.with_name(f"{ledger.name}.key")
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = os.urandom(32)
        with replacing(path, mode=0o600) as temporary:
            temporary.write_bytes(key)
    except OSError as error:
        raise _bad_key(path, error) from error
    if len(key) != 32:
        raise _bad_key(path, "it is damaged")
    return key


def _bad_key(path: Path, reason: object) -> RunError:
    return RunError(
        "ledger-unavailable",
        f"{path} cannot be read: {reason}.",
        why="Patients are recognised across data sets by hashes under this key.",
        fix="Restore the file. Without it, data sets with patients count together until each is seen again.",
    )


def write_links(folder: Path, links: Links, *, fingerprint: str) -> None:
    """Keep the hashes with the run's state, durably."""
    known = {"image_ids": links.image_ids, "patient_tags": links.patient_tags}
    held = {name: values for name, values in known.items() if values is not None}
    data = save(held, metadata={"fingerprint": fingerprint, "key_id": links.key_id})
    # readable by its owner only: whoever has an image can see whether it is among them
    with replacing(folder / LINKS_FILE, mode=0o600) as temporary:
        temporary.write_bytes(data)


def read_links(folder: Path, *, fingerprint: str) -> Links:
    """What ``write_links`` kept for this data set; nothing is known if there is no such file."""
    path = folder / LINKS_FILE
    if not path.is_file():
        return Links()
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        if any(values.dtype != np.int64 or values.ndim != 1 for values in held.values()):
            raise ValueError("it does not hold lists of 64-bit hashes")
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(
            "damaged-spending",
            f"{path} cannot be read: {error}",
            why="It tells which data sets share images or patients with this run's.",
            fix="Restore the file; or remove it, and the run's data count together with every data set.",
        ) from error
    if metadata.get("fingerprint") != fingerprint:
        return Links()
    names = ("image_ids", "patient_tags")
    ids, tags = (None if name not in held else np.unique(held[name]) for name in names)
    return Links(image_ids=ids, patient_tags=tags, key_id=metadata.get("key_id", ""))
