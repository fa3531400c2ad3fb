"""The page and the one question that it asks: which class is this image of?

Nothing is stored and nothing is fetched from elsewhere: an image is read in memory, answered and forgotten.
"""

from __future__ import annotations

import importlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from sfumato.data.readers.decode import Upload, decode_image
from sfumato.errors import ConfigError, DataError, RunError, SfumatoError
from sfumato.release.card import headline
from sfumato.release.image_files import ranked
from sfumato.release.release import ReleasedModel

if TYPE_CHECKING:
    import socket

    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"  # this machine only: who can reach a model can ask it for ever, and send it any file
MAX_BYTES = 20 * 2**20
_SHOWN = 10  # classes in an answer
_OWN_NAMES = ("127.0.0.1", "localhost")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_STATUS = {"upload-too-large": 413, "image-too-large": 413, "not-this-machine": 403}


def classify_bytes(released: ReleasedModel, content: bytes) -> dict[str, Any]:
    """The likeliest classes of one image file in memory."""
    import torch

    config = released.config
    pixels = decode_image(
        Upload(content),
        image_size=config["image_size"],
        channels=config["channels"],
        fit=config["fit"],
        rendering=released.rendering,
    )
    prediction = released.predict(torch.from_numpy(pixels)[None])[0]
    named = ranked(prediction, released.classes, _SHOWN)
    return {
        "label": prediction.label or "no finding",  # of several, an image may have none
        "probability": prediction.probability,
        "classes": [{"label": name, "probability": chance} for name, chance in named],
    }


def create_app(released: ReleasedModel) -> Any:
    """The FastAPI application for one released model."""
    fastapi, responses, threads = (
        _package(name) for name in ("fastapi", "fastapi.responses", "starlette.concurrency")
    )
    _package("uvicorn")  # which will run it
    # without the pages that document an interface: they fetch their scripts from elsewhere
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = _page(released)

    def answer(content: Any, *, kind: str, status: int = 200) -> Response:
        text = content if isinstance(content, str) else json.dumps(content)
        return responses.Response(text, status_code=status, media_type=kind, headers=_HEADERS)

    def refused(error: SfumatoError) -> Response:
        return answer(error.as_dict(), kind="application/json", status=_STATUS.get(error.code, 422))

    async def show(request: Request) -> Response:
        try:
            check_origin(request.headers.get("host"), request.headers.get("origin"))
        except SfumatoError as error:
            return refused(error)
        name = request.url.path
        if name == "/":
            return answer(page, kind="text/html")
        return answer(_text(name[1:]), kind="text/javascript" if name.endswith(".js") else "text/css")

    async def classify(request: Request) -> Response:
        try:
            check_origin(request.headers.get("host"), request.headers.get("origin"))
            content = await _body(request)
            found = await threads.run_in_threadpool(classify_bytes, released, content)
        except SfumatoError as error:
            return refused(error)
        return answer(found, kind="application/json")

    for path in ("/", "/page.js", "/page.css"):
        app.add_route(path, show, methods=["GET"])
    app.add_route("/classify", classify, methods=["POST"])
    return app


def check_origin(host: str | None, origin: str | None) -> None:
    """Refuse requests that a page of somebody else has sent, also under a name that leads to this machine."""
    name = (host or "").rpartition(":")[0] if ":" in (host or "") else host
    if name not in _OWN_NAMES or (origin is not None and origin != f"http://{host}"):
        raise DataError(
            "not-this-machine",
            f"the request came to {str(host)[:80]!r} from {str(origin)[:80]!r}.",
            why="The page answers to itself only; another site in the same browser may not ask it.",
            fix="Open the address that sfumato serve has printed.",
        )


async def _body(request: Request) -> bytes:
    """The image that was sent, at most 20 MiB of it."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BYTES:
            raise DataError(
                "upload-too-large",
                f"the file is larger than {MAX_BYTES // 2**20} MiB.",
                fix="Use a smaller copy, or sfumato predict.",
            )
    return bytes(content)


def bind(port: int) -> socket.socket:
    """A socket that listens on this machine only; port 0 takes any that is free."""
    import socket

    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()  # from now on whoever asks is answered, as soon as the server has started
    except (OSError, OverflowError) as error:
        listening.close()
        raise RunError(
            "port-taken",
            f"port {port} of {HOST} cannot be used: {error}",
            fix="Choose another: --port 0 takes any that is free.",
        ) from error
    return listening


def run_server(app: Any, listening: socket.socket) -> None:
    """Answer until interrupted; requests are not recorded."""
    uvicorn = _package("uvicorn")
    settings = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    uvicorn.Server(settings).run(sockets=[listening])


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            "serve-not-installed",
            f"sfumato serve needs fastapi and uvicorn: {error}",
            fix="pip install 'sfumato[serve]'",
        ) from error


def _text(name: str) -> str:
    return (resources.files("sfumato") / "serve" / name).read_text(encoding="utf-8")


def _page(released: ReleasedModel) -> str:
    """The page, every value in it escaped: names of classes are a stranger's."""
    from jinja2 import Environment, StrictUndefined

    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_text("page.html.j2"))
    return template.render(
        model=released.config["model"]["name"] or "own model",
        data=released.config["data"],
        classes=released.classes,
        guarantee=headline(released.privacy),
        releasable=released.privacy["releasable"],
        statement=released.privacy["statement"].split("\n"),
        megabytes=MAX_BYTES // 2**20,
    )
