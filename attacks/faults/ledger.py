"""Planted faults in the ledger and in what a run saves and shows: how spending is forgotten or seen twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

RESUMED = "sfumato.ledger.ledger:Ledger._resumed"
COPIES = "ledger/test_copies.py"
LINKS = "ledger/test_links.py"
RUNS = "run/test_copied_runs.py"


@fault(
    "stale-lease-goes-on",
    tests=(f"{COPIES}::test_of_copies_resumed_at_once_one_goes_on_and_the_others_are_paid_for",),
)
def stale_lease_goes_on(patch: MonkeyPatch) -> None:
    rewrite(patch, RESUMED, 'lineage(known.leases, held.leases) in ("older", "apart")', "False")


@fault(
    "finishing-keeps-the-lease",
    tests=(f"{COPIES}::test_whatever_the_original_did_since_makes_the_copy_a_run_of_its_own",),
)
def finishing_keeps_the_lease(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.ledger.ledger:Ledger.reserve",
        "(*leases, secrets.token_hex(8)) if record.finished else tuple(leases)",
        "tuple(leases)",
    )


@fault(
    "further-steps-not-compared",
    tests=(f"{COPIES}::test_whatever_the_original_did_since_makes_the_copy_a_run_of_its_own",),
)
def further_steps_not_compared(patch: MonkeyPatch) -> None:
    rewrite(patch, RESUMED, "held.record.reserved_steps < known.record.reserved_steps", "False")


@fault("seen-steps-not-compared", tests=(COPIES,))
def seen_steps_not_compared(patch: MonkeyPatch) -> None:
    rewrite(patch, RESUMED, "saved < max(known.record.saved_steps, held.record.saved_steps)", "False")


@fault(
    "finished-run-takes-steps",
    tests=(f"{COPIES}::test_a_finished_run_can_be_opened_again_anywhere_but_takes_no_step",),
)
def finished_run_takes_steps(patch: MonkeyPatch) -> None:
    from sfumato.ledger.account import Account

    patch.setattr(Account, "_check_open", lambda self, step: None)


@fault("copy-does-not-count-its-state", tests=(f"{COPIES}::test_the_control_of_a_copy_is_a_resumed_run",))
def copy_does_not_count_its_state(patch: MonkeyPatch) -> None:
    rewrite(
        patch,
        "sfumato.ledger.ledger:Ledger.begin",
        "reserved_steps=max(0, saved_steps)",
        "reserved_steps=0",
    )


@fault(
    "published-before-the-ledger-agrees", tests=(f"{RUNS}::test_a_run_that_was_taken_over_publishes_nothing",)
)
def published_before_the_ledger_agrees(patch: MonkeyPatch) -> None:
    from sfumato.run import session
    from sfumato.run.steps import Run

    close_account, publish, waiting = Run.close_account, session.publish, []

    def publish_and_close(*args, **options):
        result = publish(*args, **options)
        close_account(waiting.pop())
        return result

    patch.setattr(Run, "close_account", lambda self: waiting.append(self))
    patch.setattr(session, "publish", publish_and_close)


@fault(
    "import-forgets-the-images", tests=(f"{LINKS}::test_a_rebuilt_ledger_knows_which_data_sets_share_images",)
)
def import_forgets_the_images(patch: MonkeyPatch) -> None:
    import numpy as np

    from sfumato.ledger.links import Links

    nothing = Links(image_ids=np.empty(0, dtype="<i8"))
    patch.setattr("sfumato.ledger.ledger.read_links", lambda folder, *, fingerprint: nothing)


@fault(
    "unknown-images-are-nobodys",
    tests=(f"{LINKS}::test_what_an_older_folder_does_not_tell_counts_with_everything",),
)
def unknown_images_are_nobodys(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.ledger.links:Links.share_images", "return True", "return False")


@fault("patients-not-linked", tests=(LINKS,))
def patients_not_linked(patch: MonkeyPatch) -> None:
    from sfumato.ledger.links import Links

    patch.setattr(Links, "share_patients", lambda self, other: False)


@fault("other-key-is-nobody", tests=(LINKS,))
def other_key_is_nobody(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.ledger.links:Links.share_patients", "return True", "return False")


@fault(
    "unnamed-patients-are-nobody", tests=(f"{LINKS}::test_a_cap_on_one_years_patients_sees_the_other_year",)
)
def unnamed_patients_are_nobody(patch: MonkeyPatch) -> None:
    from sfumato.ledger.ledger import Ledger

    patch.setattr(Ledger, "_with_patients", lambda self: set())


@fault("names-hashed-without-the-key", tests=(f"{LINKS}::test_no_name_is_written_and_hashes_need_the_key",))
def names_hashed_without_the_key(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.ledger.links:_tag", "hmac.new(key,", 'hmac.new(b"",')


@fault("names-do-not-reach-the-ledger", tests=(f"{RUNS}::test_patients_of_two_runs_are_linked_by_name",))
def names_do_not_reach_the_ledger(patch: MonkeyPatch) -> None:
    from sfumato.data import DataSplits

    patch.setattr(DataSplits, "names_of", lambda self, images: ("nobody",))


@fault(
    "seed-outside-the-state",
    tests=(f"{RUNS}::test_the_seed_belongs_to_the_run_and_not_to_a_file_that_can_be_edited",),
)
def seed_outside_the_state(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.run.state:check_identity", 'saved["source"] != now["source"]', "False")


@fault(
    "seeded-record-turns-private", tests=(f"{COPIES}::test_a_run_never_changes_between_seeded_and_private",)
)
def seeded_record_turns_private(patch: MonkeyPatch) -> None:
    rewrite(patch, RESUMED, "{held.record.releasable, known.record.releasable} != {new.releasable}", "False")


@fault("closing-keeps-the-lease", tests=(f"{COPIES}::test_closing_a_live_run_cannot_pass_the_cap",))
def closing_keeps_the_lease(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.ledger.ledger:Ledger.close_run", "(*known.leases, CLOSED)", "known.leases")


@fault("closed-run-resumed-unchecked", tests=(f"{COPIES}::test_closing_a_live_run_cannot_pass_the_cap",))
def closed_run_resumed_unchecked(patch: MonkeyPatch) -> None:
    rewrite(patch, RESUMED, "known.record.finished and not known.closed", "known.record.finished")


@fault("scores-before-the-state", tests=(f"{RUNS}::test_no_score_is_seen_of_a_step_that_is_taken_again",))
def scores_before_the_state(patch: MonkeyPatch) -> None:
    save = "save_state(state, self.folder.state)\n"
    rewrite(
        patch, "sfumato.run.persistence:Persistence.commit", save, f"self.metrics.write()\n        {save}"
    )


@fault(
    "scores-before-the-ledger", tests=(f"{RUNS}::test_closing_a_run_at_work_stops_it_before_its_next_result",)
)
def scores_before_the_ledger(patch: MonkeyPatch) -> None:
    confirm = "self.account.confirm(step)\n"
    rewrite(
        patch,
        "sfumato.run.persistence:Persistence.commit",
        confirm,
        f"self.metrics.write()\n        {confirm}",
    )


@fault("log-tail-not-recovered", tests=(f"{RUNS}::test_no_score_is_seen_of_a_step_that_is_taken_again",))
def log_tail_not_recovered(patch: MonkeyPatch) -> None:
    rewrite(patch, "sfumato.run.state:LineLog.recover", '[saved["lines"]] if saved["lines"] else []', "[]")


@fault("spending-folder-not-synced", tests=(f"{LINKS}::test_spending_is_synced_to_the_disk_with_its_folder",))
def spending_folder_not_synced(patch: MonkeyPatch) -> None:
    patch.setattr("sfumato.files.sync_folder", lambda folder: None)
