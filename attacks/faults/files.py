"""Planted faults in how files are written, locked and found: each must be found by the tests it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

FILES = "test_files.py"


@fault("lock-outlives-kill", tests=(f"{FILES}::test_a_lock_is_held_by_one_process_and_freed_by_kill_9",))
def lock_outlives_kill(patch: MonkeyPatch) -> None:
    """A mere file instead of a lock of the operating system."""
    soft = "if path.exists():\n            raise filelock.Timeout(path)\n        return path.open('x')"
    rewrite(patch, "sfumato.files:hold", "return lock.acquire()", soft)


@fault("private-file-readable", tests=(f"{FILES}::test_a_file_has_its_mode_before_anything_is_in_it",))
def private_file_readable(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.files:replacing", "os.O_EXCL, mode", "os.O_EXCL, 0o666")


@fault("live-workspace-removed", tests=("data/test_cache.py", FILES))
def live_workspace_removed(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.files:_remove_abandoned", 'with hold(leftover / "lock"):', "if True:")


@fault("file-not-synced", tests=(f"{FILES}::test_what_is_put_into_place_is_synced_with_its_folder",))
def file_not_synced(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.files.sync", lambda file: file.flush())


@fault("relative-ledger", tests=(f"{FILES}::test_homes_lie_where_earlier_versions_put_them",))
def relative_ledger(patch: MonkeyPatch) -> None:
    """XDG_DATA_HOME is believed as it is, so that the ledger depends on the working folder."""
    rewrite(
        patch,
        "sfumato.files:ledger_home",
        'platformdirs.user_data_path("sfumato", appauthor=False)',
        'Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "sfumato"',
    )
