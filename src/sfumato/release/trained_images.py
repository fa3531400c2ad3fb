"""Whether images were among those that a release was trained on, as far as this machine can tell.

It is told by content, from the hashes in the run's ``state/`` or in the ledger: private knowledge, of whoever
has the run. A release alone says nothing of its images.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sfumato.errors import RunError
from sfumato.files import ledger_home
from sfumato.ledger.ledger import Ledger
from sfumato.ledger.links import links_of, read_links
from sfumato.ledger.receipt import read_receipt
from sfumato.release.release import ReleasedModel, find_release
from sfumato.release.run_folder import RunFolder


def were_trained_on(run: Path, released: ReleasedModel, image_ids: Tensor) -> bool | None:
    """Whether one of the images is known to be a training image; None if nothing here knows these."""
    filing = released.privacy.get("filing")
    run_id = None if filing is None else filing["run_id"]
    try:
        found = _by_state(RunFolder(find_release(run).resolve().parent), run_id, image_ids)
        return _by_ledger(released.config["data"], run_id, image_ids) if found is None else found
    except (OSError, RunError):  # of another user, or damaged: whoever only has the release cannot ask it
        return None


def _by_state(folder: RunFolder, run_id: str | None, image_ids: Tensor) -> bool | None:
    """From the state of the run that the release lies in, if it is that run's."""
    receipt = read_receipt(folder.state)
    if receipt is None or run_id not in (None, receipt.record.run_id):
        return None
    trained = read_links(folder.state, fingerprint=receipt.record.fingerprint)
    return None if trained.image_ids is None else trained.share_images(links_of(image_ids, None))


def _by_ledger(data: str, run_id: str | None, image_ids: Tensor) -> bool | None:
    """From the ledger, if it is there and has the run on record."""
    if run_id is None or not ledger_home().is_file():
        return None
    with Ledger.open() as ledger:
        record = next((one for one in ledger.records_named(data) if one.run_id == run_id), None)
        if record is None or not ledger.knows_images(record.fingerprint):
            return None
        return ledger.share_images(record.fingerprint, image_ids)
