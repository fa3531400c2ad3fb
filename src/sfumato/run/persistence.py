"""The progress of a run on disk: state, ledger and logs, written in this order and no other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sfumato.errors import RunError
from sfumato.ledger.ledger import Account, Ledger
from sfumato.ledger.receipt import plan_values
from sfumato.release.run_folder import RunFolder
from sfumato.run.ancestry import write_ancestry
from sfumato.run.prepare import Prepared
from sfumato.run.resolve import record_resolved
from sfumato.run.state import LineLog, RunState, check_identity, load_state, save_state
from sfumato.training.averaging import WeightAverage


@dataclass
class Persistence:
    """The folder and the account of a run; ``saved``: the state that the folder held when it was opened."""

    prepared: Prepared
    folder: RunFolder
    account: Account
    metrics: LineLog
    sensitive: LineLog
    saved: RunState | None
    last_save: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, prepared: Prepared, folder: RunFolder, *, ledger: Ledger) -> Persistence:
        """Begin the account, or continue it; refuses a folder that holds a different run."""
        state = load_state(folder.state) if folder.has_state else None
        if state is not None:
            check_identity(state.values, _identity(prepared), folder=folder.path)
        record_resolved(prepared.resolved, folder, resuming=state is not None)
        if prepared.provenance is not None:
            write_ancestry(folder.state, prepared.provenance.ancestors)
        images = prepared.units.data
        account = ledger.begin(
            fingerprint=images.fingerprint,
            name=images.name,
            plan=prepared.plan,
            folder=folder.state,
            label=folder.path.name,
            releasable=prepared.releasable,
            image_ids=images.content_ids,
            patient_names=prepared.splits.names_of(images),
            saved_steps=-1 if state is None else state.values["step"],
            parent="" if prepared.components.searched is None else prepared.components.searched.parent,
        )
        return cls(
            prepared=prepared,
            folder=folder,
            account=account,
            metrics=LineLog(folder.metrics),
            sensitive=LineLog(folder.sensitive),
            saved=state,
        )

    @property
    def is_overdue(self) -> bool:
        """Whether the recipe's time between saved states is over."""
        return time.monotonic() - self.last_save >= self.prepared.recipe.performance.save_every_seconds

    def commit(
        self,
        step: int,
        average: WeightAverage,
        values: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save the state, confirm it to the ledger, and only then write the new lines of the logs.

        Guarantee: after a crash at any point, no line can be read whose step might be taken again with fresh
        noise.
        """
        prepared = self.prepared
        _check_finite(prepared.model, step)
        logs = {"metrics": self.metrics.pending(), "sensitive": self.sensitive.pending()}
        saved = {"step": step, **values, **logs, **_identity(prepared)}
        state = RunState.capture(prepared.model, average, prepared.optimizer, saved, tensors)
        save_state(state, self.folder.state)
        self.account.confirm(step)
        self.metrics.write()
        self.sensitive.write()
        self.last_save = time.monotonic()

    def restore(self, state: RunState, average: WeightAverage) -> None:
        """Put weights and logs back to the saved state, whose identity was checked."""
        state.restore(self.prepared.model, average, self.prepared.optimizer)
        self.metrics.recover(state.values["metrics"])
        self.sensitive.recover(state.values["sensitive"])

    def close_account(self) -> None:
        """Spend the whole plan and finish; before anything is published, since this refuses a copied run."""
        if not self.account.record.finished:
            if self.prepared.plan is not None:
                self.account.spend(self.prepared.num_steps)  # after early stopping too: see stated_privacy
            self.account.finish()


def _identity(prepared: Prepared) -> dict[str, Any]:
    """What may not change between start and resume, besides recipe and resolved values."""
    seed = prepared.recipe.training.seed
    return {
        "fingerprint": prepared.units.data.fingerprint,
        "units": prepared.units.checksum(),
        "plan": plan_values(prepared.plan),
        "source": "the operating system" if seed is None else f"seed {seed}",
        "components": prepared.components.names(),
    }


def _check_finite(model: nn.Module, step: int) -> None:
    bad = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if bad:
        raise RunError(
            "diverged",
            f"after step {step} the weights are no longer finite (first: {bad[0]})",
            why="The learning rate is too large for this model and noise.",
            fix="Start anew with a smaller training.learning_rate. What was spent stays spent.",
        )
