"""The report: self-contained, escaped, complete, and silent about what is sensitive."""

from __future__ import annotations

import dataclasses
import re
import shutil
from html.parser import HTMLParser

import pytest

from sfumato.errors import RunError, SfumatoError
from sfumato.reporting.charts import Series, bar_chart, confusion_chart, line_chart
from sfumato.reporting.records import read_run
from sfumato.reporting.report import render, write_report
from sfumato.run.session import train
from small_runs import small_recipe, small_splits


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFUMATO_LEDGER", str(folder / "ledger.sqlite"))
        train(small_recipe(), out=folder / "private", data=small_splits())
        plain = small_recipe(privacy__enabled=False, training__learning_rate=0.1)
        train(plain, out=folder / "plain", data=small_splits())
    return folder


class Balanced(HTMLParser):
    """Complains about tags that do not close."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def assert_balanced(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []


def test_the_page_stands_alone_and_shows_everything(runs):
    page = (runs / "private/report.html").read_text()
    assert not re.search(r"""(src|href)\s*=|url\(|@import|<script""", page)
    for part in ("The guarantee", "Learning curve", "Privacy spent", "Per class", "Confusion", "Environment"):
        assert part in page
    for sentence in read_run(runs / "private").privacy["statement"].splitlines():
        assert sentence[:60] in page.replace("&#x27;", "'")
    assert_balanced(page)


def test_several_runs_are_compared_and_the_unprotected_one_is_marked(runs, tmp_path):
    write_report([runs / "private", runs / "plain"], tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "plain: NO PRIVACY" in page
    assert "private: ε" not in page
    assert page.count("<polyline") == 3  # two learning curves, one budget
    assert_balanced(page)


def test_the_mean_auc_of_several_findings_is_called_so_and_is_no_accuracy(runs):
    record = read_run(runs / "private")
    scores = {key: value for key, value in record.scores.items() if key != "measures"}
    findings = dataclasses.replace(record, scores={**scores, "mean_auc": 0.8154})
    page = render([findings])
    assert re.search(r"<dt>mean AUC</dt>\s*<dd>0\.815</dd>", page)
    assert "<dt>accuracy</dt>" not in page
    assert "<td>0.815</td>" in render([findings, record])
    assert "<dt>accuracy</dt>" in render([record])


def test_names_from_the_data_cannot_become_markup(runs):
    record = read_run(runs / "private")
    evil = '<img src=x onerror="alert(1)">'
    spoilt = dataclasses.replace(
        record,
        name=evil,
        config={**record.config, "data": evil},
        scores={**record.scores, "per_class": {evil: 0.5, "b": None, "c": 1.0}},
    )
    page = render([spoilt])
    assert "<img" not in page
    assert_balanced(page)
    assert "<img" in page.replace("&lt;", "<")  # the name is there, as text


def test_a_folder_that_is_no_run_is_told_so(runs, tmp_path):
    for place in (tmp_path, tmp_path / "nowhere", runs / "private/release"):
        with pytest.raises(RunError, match="is not a run") as caught:
            write_report([place], tmp_path / "report.html")
        assert caught.value.code == "no-run"
        assert "resume" not in caught.value.fix  # there is nothing to go on with
    write_report([runs / "private"], tmp_path / "report.html")


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("release/privacy.json", "{}", "bad-release"),
        ("release/config.json", "[]", "bad-release"),
        ("metrics.jsonl", "{", "damaged-run"),
        ("scores.json", "", "damaged-run"),
        ("environment.json", None, "damaged-run"),
    ],
)
def test_a_damaged_run_is_named_and_not_drawn(runs, tmp_path, file, text, code):
    copy = shutil.copytree(runs / "private", tmp_path / "copy")
    write_report([copy], tmp_path / "whole.html")
    (copy / file).unlink() if text is None else (copy / file).write_text(text)
    with pytest.raises(SfumatoError) as caught:
        write_report([copy], tmp_path / "report.html")
    assert caught.value.code == code
    assert not (tmp_path / "report.html").exists()


def test_an_unfinished_run_has_no_report(runs, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half/recipe.toml").write_text((runs / "private/recipe.toml").read_text())
    with pytest.raises(RunError) as caught:
        write_report([tmp_path / "half"], tmp_path / "report.html")
    assert caught.value.code == "not-finished"
    assert not (tmp_path / "report.html").exists()


def test_charts_draw_any_number_of_classes_and_no_points_at_all():
    for count in (2, 10, 31, 200):
        names = [f"class {number}" for number in range(count)]
        chart = confusion_chart([[1] * count for _ in names], names)
        assert chart.count("<rect") == count**2
        assert_balanced(chart)
    assert "Nothing to draw" in line_chart([Series("a", [])], x_label="x", y_label="y")
    assert bar_chart([("a", 0.5), ("b", None)], label="l").count('class="bar"') == 2
