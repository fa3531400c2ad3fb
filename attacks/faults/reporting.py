"""Planted faults in the report and in the readers of strangers' files: each must be found by its tests."""

from __future__ import annotations

from planting import fault, rewrite

STRANGERS = "reporting/test_strangers_text.py"
FOLDERS = "fuzz/test_run_files.py"
RELEASE = "release/test_release.py"


@fault("page-not-escaped", tests=(f"{STRANGERS}::test_no_text_of_a_run_folder_becomes_markup",))
def page_not_escaped(patch):
    from sfumato.reporting import report

    unescaped = report._environment().overlay(autoescape=False)
    patch.setattr(report, "_environment", lambda: unescaped)


@fault("chart-not-escaped", tests=(f"{STRANGERS}::test_no_text_of_a_run_folder_becomes_markup",))
def chart_not_escaped(patch):
    from sfumato.reporting import charts

    patch.setattr(charts, "escape", str)


@fault("page-may-run-scripts", tests=(f"{STRANGERS}::test_the_page_allows_its_own_style_and_nothing_else",))
def page_may_run_scripts(patch):
    from sfumato.reporting import report

    patch.setattr(report, "_POLICY", "default-src 'none'; script-src 'unsafe-inline'; style-src 'sha256-{}'")


@fault("documents-without-types", tests=(f"{FOLDERS}::test_documents", f"{FOLDERS}::test_metrics"))
def documents_without_types(patch):
    import json

    from sfumato.release import release
    from sfumato.reporting import records

    patch.setattr(release, "read_json", lambda path, shape: json.loads(path.read_text()))
    patch.setattr(records, "read_json", lambda path, shape: json.loads(path.read_text()))
    patch.setattr(records, "parse_json", lambda data, shape: json.loads(data))


@fault("epsilon-without-figures", tests=(f"{RELEASE}::test_a_release_that_does_not_fit_is_refused",))
def epsilon_without_figures(patch):
    from sfumato.release import release

    patch.setattr(release, "_FIGURES", ())


@fault("scores-not-finite", tests=(f"{RELEASE}::test_weights_beyond_all_numbers_predict_nothing",))
def scores_not_finite(patch):
    rewrite(patch, "sfumato.release.release:ReleasedModel.logits", "or not logits.isfinite().all()", "")


@fault("any-average-fits", tests=(f"{FOLDERS}::test_an_average_of_other_shapes_is_refused",))
def any_average_fits(patch):
    from sfumato.run import state

    patch.setattr(state.RunState, "_check_average", lambda self, average: None)
