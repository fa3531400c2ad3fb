"""The results: what is committed is what the rows say, and the page works in a real browser."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MODULES = ("page", "figures", "drawing", "website", "papers", "forest")
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RESULTS))
        yield importlib.import_module("page")
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)


@pytest.fixture(scope="module")
def tables(page: ModuleType) -> list[dict]:
    return page.documents()


def test_what_is_committed_is_what_the_generator_writes(page: ModuleType, tables: list[dict]) -> None:
    groups = page.grouped_rows()
    assert page.page(groups, tables) == (RESULTS / "README.md").read_text(encoding="utf-8")
    assert page.website(groups, tables) == (RESULTS / "index.html").read_text(encoding="utf-8")
    drawing = importlib.import_module("drawing")
    assert _description(RESULTS / "accuracy.svg") == drawing.drawn(groups)


def test_another_row_would_be_another_page(page: ModuleType, tables: list[dict]) -> None:
    groups = page.grouped_rows()
    groups["fast/patches", "cifar10", "accuracy", "8.0"][0]["value"] = "0.9999"
    assert page.page(groups, tables) != (RESULTS / "README.md").read_text(encoding="utf-8")
    assert page.website(groups, tables) != (RESULTS / "index.html").read_text(encoding="utf-8")


def test_the_page_fetches_nothing_and_its_links_lead_somewhere() -> None:
    text = (RESULTS / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    targets = re.findall(r"(?:src|href)=\"([^\"#]+)\"", text)
    assert targets
    for target in targets:
        assert (RESULTS / target).is_file(), target
    for anchor in re.findall(r"href=\"#([^\"]+)\"", text):
        assert f'id="{anchor}"' in text


def test_every_finished_run_counts_for_the_table_of_its_recipe(page: ModuleType, tables: list[dict]) -> None:
    finished = {place.parents[1].name for place in (RESULTS / "reproductions").glob("*/*/seed*/result.json")}
    shown = {cell["recipe"].replace("/", "_") for table in tables for cell in table["cells"] if cell["n"]}
    assert finished == shown


@in_a_browser
def test_the_search_hides_rows_that_do_not_match(tmp_path: Path) -> None:
    everything = _rows(_dom(RESULTS / "index.html", tmp_path))
    some = _rows(_dom(RESULTS / "index.html", tmp_path, query="?words=fast/patches&data=mnist&ours"))
    assert not any(hidden for _, hidden in everything)
    left = [words for words, hidden in some if not hidden]
    assert left
    assert all("fast/patches" in words for words in left)
    assert len(left) < len(everything) == len(some)


@in_a_browser
@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_runs_out_of_the_window(width: int, tmp_path: Path) -> None:
    measured = _measured(RESULTS / "index.html", tmp_path, width)
    assert measured <= width
    broken = tmp_path / "broken.html"
    text = (RESULTS / "index.html").read_text(encoding="utf-8")
    wide = f"<h1><b style='display:block;width:{width + 100}px'>Results</b>"
    broken.write_text(text.replace("<h1>Results", wide), encoding="utf-8")
    assert _measured(broken, tmp_path, width) > width  # the measure can tell


def _description(svg: Path) -> str:
    from xml.etree import ElementTree

    (found,) = ElementTree.parse(svg).iter("{http://purl.org/dc/elements/1.1/}description")
    return found.text or ""


def _dom(place: Path, scratch: Path, *, query: str = "") -> str:
    """The page as the browser has it once its script has run."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
    ]
    flags += [f"--user-data-dir={scratch / 'browser'}", "--window-size=1400,900", "--dump-dom"]
    done = subprocess.run(
        [str(BROWSER), *flags, place.as_uri() + query],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout


def _measured(place: Path, scratch: Path, width: int) -> int:
    """How wide the content is in a frame of this width: no window is as narrow as a phone."""
    text = re.sub(
        r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", place.read_text(encoding="utf-8")
    )
    probe = (
        "<script>parent.document.body.dataset.width = document.documentElement.scrollWidth</script></body>"
    )
    inside = escape(text.replace("</body>", probe))
    frame = scratch / "frame.html"
    attributes = f"width={width} height=900 style='border:0'"
    frame.write_text(f'<meta charset=utf-8><body><iframe {attributes} srcdoc="{inside}"></iframe>', "utf-8")
    shutil.copy(RESULTS / "accuracy.svg", scratch)
    found = re.search(r"data-width=\"(\d+)\"", _dom(frame, scratch))
    assert found
    return int(found[1])


def _rows(dom: str) -> list[tuple[str, bool]]:
    """The words of every row, and whether it is hidden."""
    found = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            named = dict(attrs)
            if tag == "tr" and "data-words" in named:
                found.append((named["data-words"], "hidden" in named))

    Reader().feed(dom)
    return found
