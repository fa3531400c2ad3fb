"""report.html: one self-contained page for one run, or a comparison of several.

Only public records are shown. What was computed from private images stays in ``state/``. All markup is in
``templates/``, where every value is escaped, and in ``charts``, where every text is.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from sfumato.files import write_text
from sfumato.privacy.statement import round_up
from sfumato.recipes.recipe import AugmentationSettings
from sfumato.release.card import headline
from sfumato.release.escaping import one_line
from sfumato.release.finding_rows import COLUMNS, finding_rows
from sfumato.reporting.audit_charts import bound_chart, histogram_chart, roc_chart
from sfumato.reporting.charts import MOST_CLASSES, Series, bar_chart, confusion_chart, line_chart, tag
from sfumato.reporting.measure_charts import measures_of
from sfumato.reporting.records import RunRecord, read_run

_TEMPLATES = resources.files("sfumato.reporting") / "templates"
# Nothing may be fetched, run or sent; the one style sheet is allowed by its checksum.
_POLICY = "default-src 'none'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'"


def write_report(runs: Sequence[Path], target: Path) -> None:
    """Write the page for one run, or the comparison of several."""
    write_text(target, render([read_run(path) for path in runs]))


def render(records: Sequence[RunRecord]) -> str:
    """The page as HTML."""
    if len(records) == 1:
        return render_page("run.html.j2", _single(records[0]))
    return render_page("comparison.html.j2", _comparison(records))


def render_page(template: str, content: Mapping[str, object]) -> str:
    """One of the templates as a self-contained page; every value is escaped."""
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    checksum = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = {"style": Markup(style), "policy": _POLICY.format(checksum)}
    return _environment().get_template(template).render(**page, **content)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (_TEMPLATES / name).read_text(encoding="utf-8")),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: object) -> object:
    """Applied to every value on the page: text without signs that hide, reverse or end it."""
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _single(record: RunRecord) -> dict[str, object]:
    scores = record.scores
    classes = {} if scores is None else scores.get("per_class", {})
    shown = scores if scores is not None and 0 < len(classes) <= MOST_CLASSES else None
    return {
        "title": record.name,
        "lead": f"{record.model} on {record.config['data']}",
        "banners": _banners([record], named=False),
        "tiles": _tiles(record),
        "statement": record.privacy["statement"].split("\n"),
        "audit": _audit(record),
        "learning": _learning([record]),
        "spending": _spending([record]),
        "scored": scores is not None,
        "measures": measures_of(scores),
        "bars": bar_chart(list(classes.items()), label="recall per class") if shown else None,
        "matrix": confusion_chart(shown["confusion"], list(classes)) if shown else None,
        "finding_columns": COLUMNS,
        "findings": [] if scores is None else finding_rows(scores.get("per_finding", {})),
        "settings": _settings(record),
        "machine": _machine(record),
    }


def _comparison(records: Sequence[RunRecord]) -> dict[str, object]:
    return {
        "title": f"{len(records)} runs compared",
        "banners": _banners(records, named=True),
        "columns": ("run", "model", "data", "ε", "δ", "unit", "AUC", "balanced", "accuracy", "steps", "time"),
        "rows": [
            (
                record.name,
                record.model,
                record.config["data"],
                _epsilon(record),
                _delta(record),
                record.privacy["unit"],
                _measure(record, "auc"),
                _measure(record, "balanced_accuracy"),
                _accuracy(record),
                _count(record.privacy.get("num_steps")),
                _duration(_total_seconds(record)),
            )
            for record in records
        ],
        "learning": _learning(records),
        "spending": _spending(records),
    }


def _banners(records: Sequence[RunRecord], *, named: bool) -> list[str]:
    return [
        f"{record.name}: {headline(record.privacy)}" if named else headline(record.privacy)
        for record in records
        if not record.privacy["releasable"]
    ]


def _tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    """(name, value, note) of the figures at the top."""
    privacy, threads = record.privacy, record.environment["num_threads"]
    rate, steps_time = privacy.get("sampling_rate"), _duration(record.environment["seconds"])
    return [
        *_measure_tiles(record),
        (*_accuracy_tile(record), _scored_on(record)),
        ("ε", _epsilon(record), "privacy loss"),
        ("δ", _delta(record), "chance beyond ε"),
        ("protected", privacy["unit"], f"of {_count(privacy.get('num_examples'))}"),
        ("steps", _count(privacy.get("num_steps")), "" if rate is None else f"q = {rate:.3g}"),
        (
            "time",
            _duration(_total_seconds(record)),
            f"steps {steps_time}, {threads} thread{'s' * (threads != 1)}",
        ),
    ]


def _measure_tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    """What stands before the accuracy, which hides rare classes."""
    if record.scores is None or "measures" not in record.scores:
        return []
    positive = record.scores.get("positive")
    names = {"auc": ("AUC", "ROC curve" if positive is not None else "mean over classes")}
    names["balanced_accuracy"] = ("balanced", "accuracy, mean over classes")
    if positive is not None:
        names["sensitivity"] = ("sensitivity", f"{positive} found")
        names["specificity"] = ("specificity", "others left alone")
    return [(title, _measure(record, key), note) for key, (title, note) in names.items()]


def _measure(record: RunRecord, key: str) -> str:
    mean_auc = _mean_auc(record)
    if key == "auc" and mean_auc is not None:
        return f"{mean_auc:.3f}"
    if record.scores is None or key not in record.scores.get("measures", {}):
        return "-"
    value = record.scores["measures"][key]["value"]
    return "-" if value is None else f"{value:.3f}"


def _total_seconds(record: RunRecord) -> float:
    environment = record.environment
    return environment["total_seconds"] if "total_seconds" in environment else environment["seconds"]


def _audit(record: RunRecord) -> dict[str, object] | None:
    """What an audit of the run found; None if there was none."""
    audit = record.audit
    if audit is None:
        return None
    bins = audit["histogram"]
    return {
        "sentence": audit["sentence"],
        "violations": audit["violations"],
        "bound": bound_chart(audit),
        "scores": None if bins is None else histogram_chart(bins),
        "roc": roc_chart(audit["roc"]),
    }


def _learning(records: Sequence[RunRecord]) -> Markup:
    series = [Series(record.name, record.curve) for record in records if record.curve]
    if series and all(len(line.points) < 2 for line in series):
        return tag("p", "Accuracy was measured once, at the end: there is no curve.", class_="empty")
    return line_chart(series, x_label="step", y_label="accuracy", percent=True, markers=True)


def _spending(records: Sequence[RunRecord]) -> Markup | None:
    series = [Series(record.name, record.spending) for record in records if record.spending]
    return line_chart(series, x_label="step", y_label="ε") if series else None


def _settings(record: RunRecord) -> Mapping[str, str]:
    privacy, recipe = record.privacy, record.recipe
    mu, gain = privacy.get("mu_gdp"), recipe.training.kalman_gain
    return {
        "noise multiplier σ": _plain(privacy.get("noise_multiplier")),
        "clip norm C": _plain(privacy.get("clip_norm")),
        "accountant": _plain(privacy.get("accountant")),
        "neighbouring": _plain(privacy.get("neighbouring")),
        "μ (Gaussian DP)": "none" if mu is None else round_up(mu),
        "optimizer": recipe.training.optimizer,
        "learning rate": f"{record.learning_rate} ({recipe.schedule.name})",
        "views": _views(recipe.augmentation),
        **({} if gain is None else {"gain κ of the Kalman filter": f"{gain:g}"}),
        "weight average": f"{recipe.training.ema_decay:g}",
    }


def _views(settings: AugmentationSettings) -> str:
    return f"{settings.views}" + (f" + {settings.mixed_views} mixed" if settings.mixed_views else "")


def _machine(record: RunRecord) -> Mapping[str, str]:
    environment = record.environment
    return {
        "sfumato": environment["sfumato"],
        "python": environment["python"],
        **environment["packages"],
        "system": environment["system"],
        "processor": environment["processor"] or "-",
        "accelerator": environment["accelerator"] or "none",
    }


def _epsilon(record: RunRecord) -> str:
    value = record.privacy["epsilon"]
    return "none" if value is None else round_up(value)


def _delta(record: RunRecord) -> str:
    value = record.privacy["delta"]
    return "none" if value is None else f"{value:g}"


def _accuracy(record: RunRecord) -> str:
    if _mean_auc(record) is not None:
        return "-"
    return "-" if record.scores is None else f"{100 * record.scores['accuracy']:.2f} %"


def _accuracy_tile(record: RunRecord) -> tuple[str, str]:
    """Name and figure; of several findings the mean AUC: accuracy says little where most are rare."""
    mean_auc = _mean_auc(record)
    return ("accuracy", _accuracy(record)) if mean_auc is None else ("mean AUC", f"{mean_auc:.3f}")


def _mean_auc(record: RunRecord) -> float | None:
    """Over the findings; None where an image has one class."""
    return None if record.scores is None else record.scores.get("mean_auc")


def _scored_on(record: RunRecord) -> str:
    if record.scores is None:
        return "no public test set"
    return f"{record.scores['num_examples']:,} {record.scores['split']} images"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"


def _plain(value: float | str | None) -> str:
    if value is None:
        return "none"
    return f"{value:.5g}" if isinstance(value, float) else value
