"""Text from a stranger's run folder stays text: no element or attribute that a benign page does not have."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from sfumato.audit.run import audit_run
from sfumato.errors import SfumatoError
from sfumato.release.escaping import one_line
from sfumato.reporting import charts, report
from sfumato.reporting.records import read_run
from sfumato.reporting.report import render
from sfumato.run.session import train
from small_runs import small_recipe, small_splits

HOSTILE = (
    '"><script>alert(1)</script>',
    "</style><script>alert(1)</script>",
    "</title><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% include 'style.css' %}",
    "<!--",
    "]]><svg onload=alert(1)>",
    "\x00<b>\u202e",
)
# At every place two texts: all of them one behind the other, and the one that would hide the rest.
AT_ONCE = (" ".join(text for text in HOSTILE if text != "<!--"), "<!--")
FILES = ("release/config.json", "release/privacy.json", "environment.json", "scores.json", "audit.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFUMATO_LEDGER", str(folder / "ledger.sqlite"))
        train(small_recipe(audit__canaries=40), out=folder / "run", data=small_splits())
        audit_run(folder / "run")
    return folder / "run"


class Elements(HTMLParser):
    """Every element with its attributes' names, and the values of those that say what something is."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, ...]] = set()
        self.comments = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        fixed = [
            f"{key}={value}" for key, value in attributes if key in ("class", "http-equiv", "name", "role")
        ]
        self.found.add((tag, *sorted(key for key, _ in attributes), *fixed))

    def handle_comment(self, data: str) -> None:
        self.comments += 1


def elements(page: str) -> set[tuple[str, ...]]:
    parser = Elements()
    parser.feed(page)
    parser.close()
    assert parser.comments == 0
    return parser.found


def benign_elements(whole) -> set[tuple[str, ...]]:
    """All that a page of one run or of several may consist of."""
    record = read_run(whole)
    return elements(render([record])) | elements(render([record] * 2))


def strings(value: object, path: tuple = ()):
    """The path of every string in a document, and of every key of a table of names."""
    if isinstance(value, str):
        yield path, False
    elif isinstance(value, dict):
        for key, inner in value.items():
            if path and path[-1] in ("per_class", "packages"):
                yield (*path, key), True
            yield from strings(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from strings(inner, (*path, index))


def replaced(value, path: tuple, text: str, *, as_key: bool):
    copy = json.loads(json.dumps(value))
    container = functools.reduce(lambda inner, key: inner[key], path[:-1], copy)
    if as_key:
        container[text] = container.pop(path[-1])
    else:
        container[path[-1]] = text
    return copy


def spoilt_pages(run, texts=AT_ONCE):
    """The pages of a run with a hostile text at each place of each file in turn; refusals are left out."""
    for name in FILES:
        file = run / name
        original = file.read_text()
        document = json.loads(original)
        for path, as_key in strings(document):
            for text in texts:
                file.write_text(json.dumps(replaced(document, path, text, as_key=as_key)))
                try:
                    record = read_run(run)
                except SfumatoError:
                    continue
                yield (name, path, text), render([record]) + render([record, record])
        file.write_text(original)


def test_no_text_of_a_run_folder_becomes_markup(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    allowed = benign_elements(whole)
    shown = set()
    for (name, path, text), page in spoilt_pages(run):
        assert elements(page) <= allowed, (name, path, text)
        assert "49{%" not in page  # no template inside a value
        if one_line(text) in html.unescape(page):
            shown.add((name, path))
    assert len(shown) >= 15  # the texts do reach the page: names, statement, versions


def test_a_recipe_and_a_folder_name_stay_text(whole, tmp_path):
    allowed = benign_elements(whole)
    for number, text in enumerate(HOSTILE[:4]):
        safe_name = text.replace("/", "∕")  # a folder's name has no slash
        run = shutil.copytree(whole, tmp_path / f"{number}{safe_name}")
        recipe = (run / "recipe.toml").read_text()
        hostile = re.sub(r'optimizer = "SGD"', lambda _, text=text: f"optimizer = {json.dumps(text)}", recipe)
        assert hostile != recipe
        (run / "recipe.toml").write_text(hostile)
        page = render([read_run(run)])
        assert elements(page) <= allowed
        assert "alert(1)" in page


def test_the_check_sees_a_page_without_escaping(whole, tmp_path, monkeypatch):
    run = shutil.copytree(whole, tmp_path / "run")
    allowed = benign_elements(whole)
    texts = HOSTILE[:1]
    unescaped = report._environment().overlay(autoescape=False)
    with monkeypatch.context() as patch:
        patch.setattr(report, "_environment", lambda: unescaped)
        assert any(elements(page) - allowed for _, page in spoilt_pages(run, texts))
    assert not any(elements(page) - allowed for _, page in spoilt_pages(run, texts))
    monkeypatch.setattr(charts, "escape", str)
    assert any(elements(page) - allowed for _, page in spoilt_pages(run, texts))


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("release/privacy.json", "unit", "<b>patient</b>"),
        ("environment.json", "num_threads", "<b>2</b>"),
        ("scores.json", "split", "<b>test</b>"),
        ("environment.json", "seconds", "1e9"),
        ("scores.json", "accuracy", 7),
    ],
)
def test_what_is_no_text_is_refused_as_text(whole, tmp_path, file, key, value):
    run = shutil.copytree(whole, tmp_path / "run")
    document = json.loads((run / file).read_text())
    read_run(run)
    (run / file).write_text(json.dumps({**document, key: value}))
    with pytest.raises(SfumatoError) as caught:
        read_run(run)
    assert caught.value.code in ("bad-release", "damaged-run")


def test_the_page_allows_its_own_style_and_nothing_else(whole):
    page = render([read_run(whole)])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1].replace(
        "&#39;", "'"
    )
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    checksum = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{checksum}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert page.index("Content-Security-Policy") < page.index("<title>")  # before anything from a stranger
    assert not re.search(r"\sstyle\s*=|\son\w+\s*=|<script|javascript:|url\(", page)
