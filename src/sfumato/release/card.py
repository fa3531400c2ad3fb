"""The model card: README.md of a release, for the person who receives the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.privacy.statement import round_up
from sfumato.recipes.recipe import DISTORTIONS, Recipe
from sfumato.release.escaping import markdown
from sfumato.release.finding_rows import COLUMNS, finding_rows
from sfumato.training.evaluation import AnyScores
from sfumato.training.finding_scores import FindingScores

_AUDIT = "## Audit"


def headline(privacy: Mapping[str, Any]) -> str:
    """The guarantee in one line, for terminals and titles."""
    if privacy["epsilon"] is None:
        return "NO PRIVACY: trained without any guarantee"
    line = f"ε = {round_up(privacy['epsilon'])}, δ = {privacy['delta']:g} for each {privacy['unit']}"
    return line if privacy["releasable"] else f"{line}, NOT RELEASABLE (seeded randomness)"


def model_card(
    *,
    config: Mapping[str, Any],
    privacy: Mapping[str, Any],
    scores: AnyScores | None,
    assessment: Mapping[str, Any] | None = None,
    recipe: Recipe | None,
) -> str:
    """The card as Markdown; without a ``recipe`` the training was a loop of somebody's own."""
    name = config["model"]["name"] or "own model"
    sections = [
        f"# {name} on {markdown(config['data'])}\n\n**{headline(privacy)}**",
        "## Privacy\n\n" + privacy["statement"].replace("\n", "\n\n"),
        _figures(privacy),
        _record(privacy),
        _accuracy(scores, guaranteed=privacy["epsilon"] is not None),
        measures_table(assessment),
        _use(config),
        _training(config, recipe),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def with_audit(card: str, sentence: str, violations: Sequence[str]) -> str:
    """The card with the audit's section at its end, in place of an earlier one."""
    before = card.partition(f"\n{_AUDIT}\n")[0].rstrip("\n")
    found = "".join(f"\n\n**VIOLATION: {text}**" for text in violations)
    return f"{before}\n\n{_AUDIT}\n\n{sentence}{found}\n"


def _figures(privacy: Mapping[str, Any]) -> str:
    if privacy["epsilon"] is None:
        return ""
    rows = [
        ("ε", round_up(privacy["epsilon"], 6)),
        ("δ", f"{privacy['delta']:g}"),
        ("what is protected", f"one {privacy['unit']}"),
        ("neighbouring relation", privacy["neighbouring"]),
        ("accountant", privacy["accountant"]),
        ("μ (Gaussian DP)", "-" if privacy["mu_gdp"] is None else round_up(privacy["mu_gdp"])),
        ("noise multiplier σ", f"{privacy['noise_multiplier']:.6g}"),
        ("clip norm C", f"{privacy['clip_norm']:g}"),
        ("sampling rate q", f"{privacy['sampling_rate']:.6g}"),
        ("steps T", f"{privacy['num_steps']:,}"),
        (f"{privacy['unit']}s N", f"{privacy['num_examples']:,}"),
        ("may be released", "yes" if privacy["releasable"] else "**no**"),
    ]
    body = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"| | |\n|---|---|\n{body}\n\n{_recomputation(privacy)}"


def _recomputation(privacy: Mapping[str, Any]) -> str:
    """The command that gives ε again, with every setting that matters and in full precision."""
    keys = ("num_examples", "batch_size", "noise_multiplier", "num_steps", "delta")
    words = [f"--{key.replace('_', '-')} {privacy[key]!r}" for key in keys]
    words += [f"--{key} {privacy[key]}" for key in ("accountant", "unit", "neighbouring", "mechanism")]
    events = privacy["events"]
    if privacy["tuning_runs"] is not None:
        words.append(f"--tuning-runs {privacy['tuning_runs']!r}")
        events = events[0]["events"]
    if privacy["delta"] > 1 / privacy["num_examples"]:
        words.append("--force")
    text = f"To compute ε again:\n\n```\nsfumato budget {' '.join(words)}\n```"
    if len(events) > 1:
        text += (
            f"\n\nThat leaves out {len(events) - 1} further noisy release(s) from the same data, which the ε "
            "above counts too: `privacy.json` lists all under `events`."
        )
    return text


def _record(privacy: Mapping[str, Any]) -> str:
    """What whoever files the model asks for."""
    filing = privacy.get("filing")
    if filing is None:
        return ""
    rows = [
        ("date", filing["date"]),
        ("run", filing["run_id"]),
        ("units were recognised by", markdown(filing["units_from"])),
    ]
    if privacy["epsilon"] is not None:
        rows.append(("earlier private runs on data of this name", filing["earlier_runs"]))
    if filing["earlier_runs"]:
        total = filing["total_epsilon"]
        rows.append(("ε of all together", "no bound" if total is None else round_up(total)))
    body = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return (
        f"## For the record\n\n| | |\n|---|---|\n{body}\n\nThe ledger of whoever trained this knows the "
        "images under the run's number. Nothing here is computed from them."
    )


def _accuracy(scores: AnyScores | None, *, guaranteed: bool) -> str:
    if scores is None:
        return (
            "## Accuracy\n\nNot stated: there was no public test set, and scores on private images would be "
            "a release of their own."
        )
    covered = (
        "The guarantee covers the training images only, not the test images behind these figures."
        if guaranteed
        else ""
    )
    if isinstance(scores, FindingScores):
        return f"## Accuracy\n\n{_findings(scores, covered)}"
    lines = [f"{100 * scores.accuracy:.2f} % of {scores.num_examples:,} test images are classified correctly"]
    lines.append(f"(balanced over classes: {100 * scores.balanced_accuracy:.2f} %).")
    if scores.top5_accuracy is not None:
        lines.append(f"Top-5: {100 * scores.top5_accuracy:.2f} %.")
    if scores.auc is not None:
        lines.append(f"Area under the ROC curve: {scores.auc:.4f}.")
    lines += [covered] * guaranteed
    table = "\n".join(
        f"| {markdown(name)} | {'-' if share is None else f'{100 * share:.1f} %'} |"
        for name, share in scores.per_class.items()
    )
    return f"## Accuracy\n\n{' '.join(lines)}\n\n| class | recall |\n|---|---|\n{table}"


def _findings(scores: FindingScores, covered: str) -> str:
    mean = "" if scores.mean_auc is None else f"Mean area under the ROC curve: {scores.mean_auc:.4f}. "
    shown = finding_rows(scores.as_dict()["per_finding"])
    rows = [f"| {markdown(name)} | {' | '.join(values)} |" for name, *values in shown]
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    return (
        f"{mean}At the thresholds below {100 * scores.accuracy:.2f} % of all findings in "
        f"{scores.num_examples:,} test images are called rightly, and all of an image in "
        f"{100 * scores.exact_match:.2f} % of them. {covered}\n\n" + "\n".join([head, *rows])
    )


NAMES = {
    "auc": "area under the ROC curve",
    "average_precision": "average precision",
    "balanced_accuracy": "balanced accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "precision": "positive predictive value",
    "negative_predictive_value": "negative predictive value",
    "f1": "F1",
    "mcc": "MCC",
    "accuracy": "accuracy",
}  # of measures, in the order in which they are shown


def measures_table(assessment: Mapping[str, Any] | None) -> str:
    """The measures with their intervals as Markdown."""
    if assessment is None:
        return ""
    rows = [
        f"| {name} | {measure_text(assessment['measures'][key])} |"
        for key, name in NAMES.items()
        if key in assessment["measures"]
    ]
    people = f"{assessment['num_people']:,} people or images of nobody known"
    note = f"Intervals of {100 * assessment['confidence']:g} %: bootstrap over {people}."
    if assessment["positive"] is not None:
        called = f"{markdown(assessment['positive'])} from a probability of {assessment['threshold']:.3g} on"
        note = f"Called {called}. {note}"
    return "| measure | value (interval) |\n|---|---|\n" + "\n".join(rows) + f"\n\n{note}"


def measure_text(entry: Mapping[str, Any]) -> str:
    """A value with its interval, in few signs."""
    if entry["value"] is None:
        return "not defined"
    ends = "" if entry["lower"] is None else f" ({entry['lower']:.3f} to {entry['upper']:.3f})"
    return f"{entry['value']:.3f}{ends}"


def _use(config: Mapping[str, Any]) -> str:
    argument = "" if config["model"]["name"] else ", model=my_model"
    return (
        "## Use\n\n```python\nimport sfumato\n\n"
        f'classifier = sfumato.load("release"{argument})\n'
        'for prediction in classifier.predict(["image.png"]):\n'
        "    print(prediction.label, prediction.probability)\n```\n\n"
        "or `sfumato predict release image.png`."
    )


def _training(config: Mapping[str, Any], recipe: Recipe | None) -> str:
    size, channels = config["image_size"], "grey" if config["channels"] == 1 else "colour"
    if recipe is None:
        return (
            f"## Training\n\n{len(config['classes'])} classes; {channels} images of {size} x {size} pixels, "
            "normalised with the constants in config.json, in a loop of the trainer's own. Weights are "
            "safetensors; nothing in this folder is executable."
        )
    training = recipe.training
    kind = "findings, any number in an image" if config.get("task") == "multi-label" else "classes"
    rate = f"{training.optimizer}, learning rate {training.learning_rate:g} ({recipe.schedule.name})"
    views, mixed = recipe.augmentation.views, recipe.augmentation.mixed_views
    shown = f"{views} view{'s' if views > 1 else ''} per image" + (
        f" and {mixed} mixtures of them" if mixed else ""
    )
    shown += _distortions(recipe)
    filtered = "" if training.kalman_gain is None else f", Kalman filter of gain {training.kalman_gain:g}"
    return (
        f"## Training\n\n{len(config['classes'])} {kind}; {channels} images of {size} x {size} pixels, "
        f"normalised with the public constants in config.json. {rate}{filtered}; "
        f"{shown if views else 'no augmentation'}; weight average with decay "
        f"{training.ema_decay:g}. {_canaries(recipe)}Weights are safetensors; nothing in this folder is "
        "executable."
    )


def _distortions(recipe: Recipe) -> str:
    """What views are changed by beyond crops and flips, with the largest change of each kind."""
    settings = recipe.augmentation
    largest = {name: getattr(settings, name) for name in DISTORTIONS}
    listed = ", ".join(f"{name} {value:g}" for name, value in largest.items() if value)
    return f" ({listed})" if listed else ""


def _canaries(recipe: Recipe) -> str:
    count = recipe.audit.canaries
    return f"{count:,} canaries for an audit, made by chance, each in by a fair coin. " if count else ""
