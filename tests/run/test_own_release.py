"""From a loop of one's own to a release: what does not fit together is refused, and nothing is written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import sfumato
from sfumato.errors import ConfigError, PrivacyError, RunError
from sfumato.ledger.ledger import Account, Ledger
from sfumato.privacy.plan import Plan
from sfumato.run import own_release
from small_runs import SmallNet, small_set

PLAN = Plan(num_examples=60, batch_size=60, num_steps=4, noise_multiplier=3.0, delta=1e-3, sampling="full")


def begun(folder: Path, *, plan: Plan = PLAN, steps: int = 4, releasable: bool = True) -> Account:
    """An account that has spent so many steps."""
    folder.mkdir(exist_ok=True)
    data = small_set(60, seed=1)
    ledger = Ledger.open(folder.parent / "ledger.sqlite")
    account = ledger.begin(
        fingerprint=data.fingerprint,
        name=data.name,
        plan=plan,
        folder=folder,
        image_ids=data.content_ids,
        releasable=releasable,
    )
    if steps:
        account.spend(steps)
    return account


def released(place: Path, account: Account, *, model: nn.Module | None = None, **changes: object) -> Path:
    given = {
        "model": model or SmallNet(),
        "plan": PLAN,
        "account": account,
        "source": sfumato.SecureSource(),
        "classes": ("dark", "middle", "bright"),
        "image_size": 8,
        "channels": 1,
        "data": "shades",
    }
    return sfumato.write_release(place, **{**given, **changes})


def test_a_release_of_ones_own_loop_is_whole_readable_and_says_what_was_checked(tmp_path: Path) -> None:
    model, account = SmallNet(), begun(tmp_path / "state")
    place = released(tmp_path / "release", account, model=model)
    found = sfumato.load(place, model=SmallNet())
    assert torch.equal(found.model.head.weight, model.head.weight)
    assert found.privacy["epsilon"] == PLAN.epsilon
    assert found.privacy["filing"]["run_id"] == account.record.run_id
    assert "is their word" in found.privacy["statement"]
    assert account.record.finished
    assert stat.S_IMODE(place.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in place.iterdir()} == {0o644}
    with pytest.raises(RunError, match="run-exists"):
        released(place, account, model=model)


@pytest.mark.parametrize(
    ("code", "steps", "changes"),
    [
        ("plan-not-spent", 3, {}),
        ("other-plan", 4, {"plan": Plan(**{**PLAN.as_dict(), "noise_multiplier": 9.0, "extra_events": ()})}),
        ("other-name", 4, {"data": "others"}),
        ("changed-source", 4, {"source": sfumato.SeededSource(1)}),
        ("mixes-examples", 4, {"model": nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))}),
    ],
)
def test_what_does_not_fit_together_is_refused_and_nothing_is_written(
    tmp_path: Path, code: str, steps: int, changes: dict[str, object]
) -> None:
    with pytest.raises(PrivacyError, match=code):
        released(tmp_path / "release", begun(tmp_path / "state", steps=steps), **changes)
    assert not (tmp_path / "release").exists()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the doctor, which takes seconds."""
    monkeypatch.setattr(own_release, "check_model", lambda *_, **__: [])


@pytest.mark.usefixtures("unchecked")
def test_weights_that_are_not_numbers_and_units_that_nobody_described_are_refused(tmp_path: Path) -> None:
    broken = SmallNet()
    broken.head.bias.data[0] = float("nan")
    with pytest.raises(RunError, match="diverged"):
        released(tmp_path / "release", begun(tmp_path / "state"), model=broken)
    per_patient = Plan(**{**PLAN.as_dict(), "unit": "patient", "extra_events": ()})
    account = begun(tmp_path / "other", plan=per_patient)
    with pytest.raises(ConfigError, match="units-not-said"):
        released(tmp_path / "release", account, plan=per_patient)
    assert released(tmp_path / "release", account, plan=per_patient, units_from="a list").is_dir()


@pytest.mark.usefixtures("unchecked")
def test_a_seeded_loop_gets_a_release_that_says_not_to_publish_it(tmp_path: Path) -> None:
    account = begun(tmp_path / "state", releasable=False)
    place = released(tmp_path / "release", account, source=sfumato.SeededSource(1))
    assert sfumato.load(place, model=SmallNet()).privacy["releasable"] is False
    assert "NOT RELEASABLE" in (place / "README.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("unchecked")
def test_a_release_counts_earlier_runs_by_the_name_in_the_ledger(tmp_path: Path) -> None:
    begun(tmp_path / "first").finish()
    place = released(tmp_path / "release", begun(tmp_path / "second"), data=None)
    found = sfumato.load(place, model=SmallNet())
    assert found.config["data"] == "shades"
    assert found.privacy["filing"]["earlier_runs"] == 1
