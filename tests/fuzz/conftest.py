"""One small finished run, whose files are then spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from sfumato.audit.run import audit_run
from sfumato.run.session import train
from small_runs import small_recipe, small_splits


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFUMATO_LEDGER", str(folder / "ledger.sqlite"))
        train(small_recipe(audit__canaries=40), out=folder / "run", data=small_splits())
        audit_run(folder / "run")
    return folder / "run"
