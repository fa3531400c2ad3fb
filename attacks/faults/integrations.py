"""Planted faults where other programs begin: logs, servers, backbones of other libraries, exported files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planting import fault, rewrite

if TYPE_CHECKING:
    from pytest import MonkeyPatch  # noqa: PT013

LOGS, SERVE, BACKBONES = "run/test_metric_logs.py", "serve/test_serve.py", "run/test_backbones.py"


@fault(
    "sensitive-metrics-logged",
    tests=(f"{LOGS}::test_event_files_hold_the_public_metrics_and_no_other",),
)
def sensitive_metrics_logged(patch: MonkeyPatch) -> None:
    """Losses and norms go to the logs, whoever asked for them."""
    rewrite(patch, "sfumato.run.metric_logs:MirroredMetrics.forward", "if self.sensitive:", "if True:")


@fault(
    "logged-with-the-clock",
    tests=(f"{LOGS}::test_event_files_hold_the_public_metrics_and_no_other",),
)
def logged_with_the_clock(patch: MonkeyPatch) -> None:
    """Each record has the time at which it was made: a step's duration tells its true batch size."""
    rewrite(
        patch,
        "sfumato.run.metric_logs:TensorBoardLog.send",
        "walltime=float(step)",
        "walltime=None",
    )


@fault(
    "distant-store-sees-steps-live",
    tests=(f"{LOGS}::test_a_store_far_away_is_told_only_when_the_run_has_ended",),
)
def distant_store_sees_steps_live(patch: MonkeyPatch) -> None:
    """A store on another machine is told of steps as they are taken."""
    rewrite(patch, "sfumato.run.metric_logs:MlflowLog.__init__", "self.live = ", "self.live = True or ")


@fault(
    "served-to-everybody",
    tests=(f"{SERVE}::test_the_server_listens_on_this_machine_only",),
)
def served_to_everybody(patch: MonkeyPatch) -> None:
    """The page listens on all interfaces."""
    patch.setattr("sfumato.serve.app.HOST", "0.0.0.0")


@fault(
    "served-to-other-sites",
    tests=(f"{SERVE}::test_another_site_cannot_ask_it",),
)
def served_to_other_sites(patch: MonkeyPatch) -> None:
    """Any page in the same browser may ask the server, under any name."""
    patch.setattr("sfumato.serve.app.check_origin", lambda host, origin: None)


@fault(
    "pickle-opened-unasked",
    tests=(f"{BACKBONES}::test_a_pickle_is_opened_only_with_its_checksum_and_never_runs",),
)
def pickle_opened_unasked(patch: MonkeyPatch) -> None:
    """A file of torch is opened whatever it is."""
    rewrite(patch, "sfumato.run.backbones:_tensors", "and not trusted", "and False")


@fault(
    "backbone-public-unasked",
    tests=(f"{BACKBONES}::test_weights_of_undeclared_origin_are_refused_and_so_are_known_ones",),
)
def backbone_public_unasked(patch: MonkeyPatch) -> None:
    """A backbone counts as public although nobody declared which images it saw."""
    rewrite(
        patch,
        "sfumato.run.provenance:assess",
        "declared = settings.weights_are_public or",
        "declared = checkpoint.backbone is not None or settings.weights_are_public or",
    )


@fault(
    "backbone-keeps-its-batch-norm",
    tests=(f"{BACKBONES}::test_rows_are_those_of_the_librarys_own_network",),
)
def backbone_keeps_its_batch_norm(patch: MonkeyPatch) -> None:
    """The batch norms of a backbone look at the other examples in training mode."""
    patch.setattr("sfumato.models.backbones.private_trunk", lambda trunk: trunk)


@fault(
    "export-not-compared",
    tests=("release/test_export.py::test_a_file_that_computes_something_else_is_not_left_behind",),
)
def export_not_compared(patch: MonkeyPatch) -> None:
    """An exported file is kept whatever it computes."""
    patch.setattr("sfumato.release.export.TOLERANCE", 1e9)


@fault(
    "backbone-from-the-network",
    tests=(f"{BACKBONES}::test_a_name_that_is_a_place_is_refused_before_its_library_is_asked",),
)
def backbone_from_the_network(patch: MonkeyPatch) -> None:
    """A stranger's release names a place that timm would fetch from."""
    rewrite(patch, "sfumato.models.libraries:split_name", 'if library != "hf" and', "if False and")


@fault(
    "run-begun-by-the-clock",
    tests=(f"{LOGS}::test_a_store_of_mlflow_holds_the_public_metrics_and_the_guarantee",),
)
def run_begun_by_the_clock(patch: MonkeyPatch) -> None:
    """MLflow takes the present for the beginning of the run."""
    patch.setattr("sfumato.run.metric_logs._BEGAN", None)
