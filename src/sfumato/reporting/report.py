"""report.html: one self-contained page for one run, or a comparison of several.

Only public records are shown. What was computed from private images stays in ``state/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from sfumato.errors import RunError
from sfumato.files import write_text
from sfumato.privacy.statement import round_up
from sfumato.recipes.recipe import Recipe
from sfumato.release.card import headline
from sfumato.release.release import read_description
from sfumato.release.run_folder import RunFolder
from sfumato.reporting.charts import Series, bar_chart, confusion_chart, line_chart


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run's folder says about it, without its state."""

    name: str
    recipe: Recipe
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    config: dict[str, Any]
    privacy: dict[str, Any]
    scores: dict[str, Any] | None

    @property
    def learning_rate(self) -> str:
        """The first one, as it was used: where the recipe names none, the budget decided."""
        return f"{self.metrics[0]['learning_rate']:g}" if self.metrics else "-"

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(step, accuracy) wherever accuracy was measured on images that may be shown."""
        return [
            (line["step"], value)
            for line in self.metrics
            for key, value in line.items()
            if key.endswith("_accuracy")
        ]

    @property
    def spending(self) -> list[tuple[float, float]]:
        """(step, epsilon) at the steps for which it was computed; between two the later value is recorded."""
        points = {line["epsilon"]: line["step"] for line in self.metrics if line["epsilon"] is not None}
        return [(0, 0.0), *((step, epsilon) for epsilon, step in points.items())] if points else []


def read_run(path: Path) -> RunRecord:
    """Read the public files of a finished run."""
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        raise RunError("no-run", f"{path} is not a run", fix="Give the folder of a run: runs/NAME.")
    recipe = folder.stored_recipe()
    if not folder.release.is_dir():
        raise RunError(
            "not-finished",
            f"{path} is not a finished run",
            fix=f"Finish it: sfumato train --resume --out {path}",
        )
    config, privacy = read_description(folder.release)
    try:
        lines = folder.metrics.read_text(encoding="utf-8").splitlines() if folder.metrics.exists() else []
        scores_file = folder.scores(sensitive=False)
        return RunRecord(
            name=path.resolve().name,
            recipe=recipe,
            metrics=[json.loads(line) for line in lines],
            environment=_json(folder.environment),
            config=config,
            privacy=privacy,
            scores=_json(scores_file) if scores_file.exists() else None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "damaged-run",
            f"{path}: a record cannot be read: {error}",
            fix=f"Restore the file, or write the records anew: sfumato train --resume --out {path}",
        ) from error


def write_report(runs: Sequence[Path], target: Path) -> None:
    """Write the page for one run, or the comparison of several."""
    write_text(target, render([read_run(path) for path in runs]))


def render(records: Sequence[RunRecord]) -> str:
    """The page as HTML."""
    template = (
        resources.files("sfumato.reporting").joinpath("report_template.html").read_text(encoding="utf-8")
    )
    single = len(records) == 1
    title = records[0].name if single else f"{len(records)} runs compared"
    body = _single(records[0]) if single else _comparison(records)
    return Template(template).substitute(title=escape(title), body=body)


def _single(record: RunRecord) -> str:
    parts = [
        f"<h1>{escape(record.name)}</h1>",
        f'<p class="lead">{escape(_model(record))} on {escape(record.config["data"])}</p>',
        _banner(record),
        _tiles(record),
        _guarantee(record),
        '<section class="pair">',
        _figure("Learning curve", _learning([record])),
        _figure("Privacy spent", _spending([record])),
        "</section>",
        _classes(record),
        _details(record),
    ]
    return "\n".join(parts)


def _comparison(records: Sequence[RunRecord]) -> str:
    head = "<th>run</th><th>model</th><th>data</th><th>ε</th><th>δ</th><th>unit</th><th>accuracy</th>"
    rows = "".join(
        f'<tr><td><span class="key s{number % 6}"></span>{escape(record.name)}</td>'
        f"<td>{escape(_model(record))}</td><td>{escape(record.config['data'])}</td>"
        f"<td>{_epsilon(record)}</td><td>{_delta(record)}</td><td>{record.privacy['unit']}</td>"
        f"<td>{_accuracy(record)}</td><td>{record.privacy['num_steps']:,}</td>"
        f"<td>{_duration(record.environment['seconds'])}</td></tr>"
        for number, record in enumerate(records)
    )
    banners = "".join(_banner(record, named=True) for record in records)
    table = f"<table><thead><tr>{head}<th>steps</th><th>time</th></tr></thead><tbody>{rows}</tbody></table>"
    return "\n".join(
        [
            f"<h1>{len(records)} runs</h1>",
            banners,
            f'<section class="wide">{table}</section>',
            '<section class="pair">',
            _figure("Learning curves", _learning(records)),
            _figure("Privacy spent", _spending(records)),
            "</section>",
        ]
    )


def _banner(record: RunRecord, *, named: bool = False) -> str:
    if record.privacy["releasable"]:
        return ""
    prefix = f"{record.name}: " if named else ""
    return f'<p class="banner">{escape(prefix + headline(record.privacy))}</p>'


def _tiles(record: RunRecord) -> str:
    privacy = record.privacy
    tiles = [
        ("accuracy", _accuracy(record), _scored_on(record)),
        ("ε", _epsilon(record), "privacy loss"),
        ("δ", _delta(record), "chance beyond ε"),
        ("protected", escape(privacy["unit"]), f"of {privacy['num_examples']:,}"),
        ("steps", f"{privacy['num_steps']:,}", f"q = {privacy['sampling_rate']:.3g}"),
        ("time", _duration(record.environment["seconds"]), f"{record.environment['num_threads']} threads"),
    ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd><small>{note}</small></div>" for name, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _guarantee(record: RunRecord) -> str:
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in record.privacy["statement"].split("\n"))
    return f'<section class="guarantee"><h2>The guarantee</h2>{paragraphs}</section>'


def _learning(records: Sequence[RunRecord]) -> str:
    series = [Series(record.name, record.curve) for record in records if record.curve]
    return line_chart(series, x_label="step", y_label="accuracy", percent=True, markers=True)


def _spending(records: Sequence[RunRecord]) -> str:
    series = [Series(record.name, record.spending) for record in records if record.spending]
    if not series:
        return '<p class="empty">No privacy: there is no budget to show.</p>'
    return line_chart(series, x_label="step", y_label="ε")


def _classes(record: RunRecord) -> str:
    if record.scores is None:
        return (
            '<section><h2>Accuracy</h2><p class="empty">There was no public test set. Scores on private '
            "images are sensitive and stay in <code>state/</code>.</p></section>"
        )
    bars = bar_chart(list(record.scores["per_class"].items()), label="recall per class")
    matrix = confusion_chart(record.scores["confusion"], list(record.scores["per_class"]))
    right = _figure("Confusion: true class down, predicted across", matrix)
    return f'<section class="pair">{_figure("Per class", bars)}{right}</section>'


def _details(record: RunRecord) -> str:
    environment = record.environment
    settings = {
        "noise multiplier σ": _plain(record.privacy["noise_multiplier"]),
        "clip norm C": _plain(record.privacy["clip_norm"]),
        "accountant": _plain(record.privacy["accountant"]),
        "neighbouring": _plain(record.privacy["neighbouring"]),
        "μ (Gaussian DP)": "none" if record.privacy["mu_gdp"] is None else round_up(record.privacy["mu_gdp"]),
        "optimizer": record.recipe.training.optimizer,
        "learning rate": f"{record.learning_rate} ({record.recipe.schedule.name})",
        "views": str(record.recipe.augmentation.views),
        "weight average": f"{record.recipe.training.ema_decay:g}",
    }
    machine = {
        "sfumato": environment["sfumato"],
        "python": environment["python"],
        **environment["packages"],
        "system": environment["system"],
        "processor": environment["processor"] or "-",
        "accelerator": environment["accelerator"] or "none",
    }
    pair = _figure("Settings", _facts(settings)) + _figure("Environment", _facts(machine))
    return f'<section class="pair">{pair}</section>'


def _facts(values: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in values.items()
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _figure(title: str, body: str) -> str:
    return f"<figure><figcaption>{title}</figcaption>{body}</figure>"


def _model(record: RunRecord) -> str:
    return record.config["model"]["name"] or "own model"


def _epsilon(record: RunRecord) -> str:
    value = record.privacy["epsilon"]
    return "none" if value is None else round_up(value)


def _delta(record: RunRecord) -> str:
    value = record.privacy["delta"]
    return "none" if value is None else f"{value:g}"


def _accuracy(record: RunRecord) -> str:
    return "-" if record.scores is None else f"{100 * record.scores['accuracy']:.2f} %"


def _scored_on(record: RunRecord) -> str:
    if record.scores is None:
        return "no public test set"
    return f"{record.scores['num_examples']:,} {record.scores['split']} images"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _plain(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
