"""``sfumato serve``: a page for this machine only, tried in a real browser."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import sfumato
from chromium import browser
from sfumato.errors import ConfigError, DataError, RunError
from sfumato.serve import app as app_module
from sfumato.serve.app import MAX_BYTES, bind, check_origin, classify_bytes, create_app
from small_releases import CLASSES, small_release

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return small_release(tmp_path_factory.mktemp("serve") / "release")


@pytest.fixture(scope="module")
def server(release, tmp_path_factory):
    """The command itself, in a folder of its own: (port, that folder)."""
    folder = tmp_path_factory.mktemp("place")
    command = [sys.executable, "-m", "sfumato", "serve", str(release), "--port", "0"]
    surroundings = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder), "HOME": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=surroundings)
    try:
        line = process.stdout.readline()
        yield int(re.search(r"http://[^:]+:(\d+)/", line)[1]), folder
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@pytest.fixture
def picture(tmp_path) -> Path:
    pixels = torch.randint(256, (20, 30, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    Image.fromarray(pixels.numpy()).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply, content


def test_an_image_gets_the_answer_that_python_gives_and_is_stored_nowhere(server, release, picture):
    port, folder = server
    reply, content = ask(port, "POST", "/classify", picture.read_bytes())
    expected = sfumato.load(release).predict([picture])[0]
    answer = json.loads(content)
    assert reply.status == 200
    assert answer["label"] == expected.label
    assert answer["probability"] == pytest.approx(expected.probability, abs=1e-5)
    assert [entry["label"] for entry in answer["classes"]] == [
        name for _, name in sorted(zip(expected.probabilities, CLASSES, strict=True), reverse=True)
    ]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [
        path for path in files if path.suffix in (".png", ".tmp", "") and b"PNG" in path.read_bytes()
    ] == []


def test_the_server_listens_on_this_machine_only(server):
    port, _ = server
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    # Another address of this machine: who listens on all interfaces answers there too.
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=10).close()
    with socket.socket() as everywhere:  # the control: it would be noticed
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        socket.create_connection(("127.0.0.2", everywhere.getsockname()[1]), timeout=10).close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:1234"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "localhost:9", "Origin": "http://localhost:9"}, 200),
        ({"Host": "localhost:9", "Origin": "https://evil.example"}, 403),
    ],
)
def test_another_site_cannot_ask_it(server, headers, status):
    reply, content = ask(server[0], "GET", "/", None, **headers)
    assert reply.status == status
    assert (b"guarantee" in content) == (status == 200)


def test_bad_and_huge_files_get_a_clear_answer_and_the_server_goes_on(server, picture):
    port, _ = server
    for body in (b"", b"not an image", picture.read_bytes()[:60]):
        reply, content = ask(port, "POST", "/classify", body)
        assert (reply.status, json.loads(content)["code"]) == (422, "corrupt-image")
        assert json.loads(content)["what"].startswith("the image: ")
    reply, content = ask(port, "POST", "/classify", bytes(MAX_BYTES + 1))
    assert (reply.status, json.loads(content)["code"]) == (413, "upload-too-large")
    assert ask(port, "POST", "/classify", picture.read_bytes())[0].status == 200


def test_the_page_asks_nobody_else_and_shows_the_statement(server, release):
    reply, content = ask(server[0], "GET", "/")
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    statement = sfumato.load(release).privacy["statement"].split("\n")[0]
    assert statement.split(",")[0] in content.decode()
    for path in ("/", "/page.js", "/page.css"):
        assert not re.search(
            rb"(src|href)=\"?https?:|url\(|@import|https?://", ask(server[0], "GET", path)[1]
        )
    for path in ("/docs", "/openapi.json", "/redoc", "/../app.py", "/app.py"):
        assert ask(server[0], "GET", path)[0].status == 404


def test_a_browser_shows_what_a_dropped_image_is_taken_for(server, release, picture, tmp_path):
    port, _ = server
    expected = sfumato.load(release).predict([picture])[0]
    with browser(tmp_path / "profile") as page:
        page.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
        page.wait("document.readyState == 'complete' && document.getElementById('zone') != null")
        assert "ε = 3" in page.value("document.querySelector('.guarantee').textContent")
        page.drop(picture, "#zone")
        text = page.wait("document.querySelector('#answer').hidden ? '' : document.body.innerText")
        assert f"{expected.label}, {100 * expected.probability:.1f} %" in text
        assert page.value("document.querySelectorAll('#answer tr').length") == len(CLASSES)
        assert page.value("document.getElementById('preview').naturalWidth") == 30
        (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
        page.drop(tmp_path / "broken.png", "#zone")
        message = page.wait("document.querySelector('#message.bad')?.textContent")
        assert "is not an image" in message
        assert page.value("document.querySelector('#answer').hidden")
        own = (f"http://127.0.0.1:{port}/", "blob:", "data:", "about:", "file:")
        assert [url for url in page.requested if not url.startswith(own)] == []
        assert any(url.endswith("/classify") for url in page.requested)  # the control: requests were seen
        assert [text for text in page.complaints if "Content Security Policy" in text] == []
        if os.environ.get("SFUMATO_SCREENSHOT"):  # for whoever wants to look at the page
            page.drop(picture, "#zone")
            page.wait("!document.querySelector('#answer').hidden")
            page.screenshot(Path(os.environ["SFUMATO_SCREENSHOT"]))


def test_names_of_classes_are_shown_as_text(release):
    released = sfumato.load(release)
    from dataclasses import replace

    evil = replace(released, classes=("<script>x</script>", "b", "c"))
    assert "<script>x" not in app_module._page(evil)
    assert "&lt;script&gt;x" in app_module._page(evil)


def test_a_taken_port_and_a_missing_package_are_explained(release, monkeypatch):
    with bind(0) as first, pytest.raises(RunError) as caught:
        bind(first.getsockname()[1])
    assert caught.value.code == "port-taken"
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ConfigError) as caught:
        create_app(sfumato.load(release))
    assert caught.value.code == "serve-not-installed"


def test_an_image_of_too_many_pixels_is_refused_in_memory_too(release):
    content = io.BytesIO()
    Image.new("1", (10_000, 9_000)).save(content, "PNG")
    with pytest.raises(DataError) as caught:
        classify_bytes(sfumato.load(release), content.getvalue())
    assert caught.value.code == "image-too-large"
    with pytest.raises(DataError):
        check_origin(None, None)
