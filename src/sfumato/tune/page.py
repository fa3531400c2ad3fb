"""The page of a search: what came out and what it cost, and the trials where they may be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sfumato.files import write_text
from sfumato.privacy.statement import round_up
from sfumato.release.release import read_description
from sfumato.release.run_folder import RunFolder
from sfumato.reporting.report import render_page
from sfumato.tune.budget import Budget
from sfumato.tune.charts import by_batch_size, importance_chart, progress_chart, setting_chart
from sfumato.tune.ranges import Value
from sfumato.tune.records import Found, TrialRecord, importances
from sfumato.tune.store import TuneFolder

HIDDEN = (
    "Under random stopping the number of trials and all scores are sensitive: the guarantee covers the one "
    "model that was let out. The page with them is state/report.html, and stays in the house."
)
UNCOUNTED = (
    "Scores are of private images, and nothing of the search is counted: the page with them is "
    "state/report.html, and stays in the house."
)
PUBLIC = "Made by Sfumato from what the guarantee covers: settings, noisy or public scores, and the release."
SENSITIVE = "SENSITIVE: this page shows what epsilon does not cover. Keep it in the house."


def trials_are_public(budget: Budget) -> bool:
    """Whether all trials and scores may be shown: composed, and noisy or of public images."""
    return budget.settings.strategy in ("scaled", "public")


def write_pages(folder: TuneFolder, budget: Budget, records: Sequence[TrialRecord], found: Found) -> None:
    """``report.html``; where trials are sensitive it leaves them out, and ``state/report.html`` has them."""
    public = trials_are_public(budget)
    shown = records if public else []
    write_text(
        folder.report, render_page("tune.html.j2", _content(folder, budget, shown, found, marked=False))
    )
    if not public:
        page = _content(folder, budget, records, found, marked=True)
        write_text(folder.state / "report.html", render_page("tune.html.j2", page))


def _content(
    folder: TuneFolder, budget: Budget, records: Sequence[TrialRecord], found: Found, *, marked: bool
) -> dict[str, Any]:
    settings = budget.settings
    _, privacy = read_description(found.run / "release")
    varied = [one.key for one in settings.ranges]
    drawn = (
        [(f"Score against {key}", setting_chart(records, key, found.settings)) for key in varied]
        if records
        else []
    )
    strategy_note = {"scaled": "linear scaling rule", "random-stopping": "Papernot and Steinke"}
    tested = "no test images" if found.num_examples is None else f"{found.num_examples:,} test images, once"
    return {
        "title": folder.path.resolve().name,
        "lead": f"A search over {', '.join(varied)} on {settings.recipe.data.name}",
        "banners": [SENSITIVE]
        if marked
        else ([] if found.releasable else ["NOT RELEASABLE: the randomness came from a seed"]),
        "tiles": [
            (
                "ε of the whole search" if _counted(budget) else "ε of one run",
                round_up(found.epsilon),
                f"δ = {found.delta:g}",
            ),
            ("accuracy", "-" if found.accuracy is None else f"{100 * found.accuracy:.2f} %", tested),
            ("strategy", settings.strategy, strategy_note.get(settings.strategy, "")),
            ("trials", _count(budget), "on average" if settings.strategy == "random-stopping" else ""),
        ],
        "statement": privacy["statement"].split("\n"),
        "hidden": HIDDEN if settings.strategy == "random-stopping" else UNCOUNTED,
        "progress": progress_chart(records) if records else None,
        "importance": importance_chart(importances(records)),
        "charts": [*drawn, *by_batch_size(records, _noise(folder, records))],
        "columns": ["trial", *varied, "score"],
        "rows": [_row(record, varied) for record in sorted(records, key=lambda one: -one.score)],
        "settings": {key: _text(value) for key, value in found.settings.items()},
        "asked": _asked(budget),
        "footer": SENSITIVE if marked else PUBLIC,
    }


def _asked(budget: Budget) -> dict[str, str]:
    settings = budget.settings
    facts = {one.key: one.text for one in settings.ranges}
    facts |= {"sampler": settings.chosen_sampler, "pruner": settings.pruner}
    if budget.search is not None and budget.search.is_counted:
        facts["ε of one trial alone"] = round_up(budget.trial_epsilon)
        facts["noise of a trial"] = f"{budget.search.trial[-1].noise_multiplier:.4g}"
    if budget.score_noise is not None:
        facts["noise of a score, in units"] = f"{budget.score_noise:.4g}"
    return facts


def _counted(budget: Budget) -> bool:
    return budget.search is not None and budget.search.is_counted


def _count(budget: Budget) -> str:
    return f"{budget.settings.num_trials}"


def _row(record: TrialRecord, varied: Sequence[str]) -> list[str]:
    values = [_text(record.settings.get(key, "")) for key in varied]
    score = f"{100 * record.score:.2f} %" + ("" if record.is_whole else " (pruned)")
    return [str(record.number), *values, score]


def _noise(folder: TuneFolder, records: Sequence[TrialRecord]) -> dict[int, float]:
    """The noise multiplier of each trial, from its recipe: public, as every plan is."""
    found = {}
    for record in records:
        place = RunFolder(folder.trial(record.number))
        if place.recipe.is_file():
            noise = place.stored_recipe().privacy.noise_multiplier
            if noise is not None:
                found[record.number] = noise
    return found


def _text(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
