"""What a stranger may put into a file, and the only ways in which a reader may answer.

Files are valid ones with bytes changed, or documents with one value, key or level changed. More of them:
``SFUMATO_FUZZ_EXAMPLES=2000 pytest tests/fuzz``, which also takes others each time.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sfumato.errors import SfumatoError

_WANTED = os.environ.get("SFUMATO_FUZZ_EXAMPLES")
_ROOT = Path(__file__).resolve().parents[2]
CODES = frozenset(re.findall(r"^#{2,4} ([a-z0-9-]+)$", (_ROOT / "docs/errors.md").read_text(), re.MULTILINE))


def examples(count: int) -> settings:
    """The settings of a fuzz test: the same examples every time, unless more are asked for."""
    return settings(
        max_examples=int(_WANTED) if _WANTED else count,
        derandomize=_WANTED is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class TooSlow(BaseException):
    """Not an Exception: no reader may swallow it."""


@contextmanager
def only_coded_errors(*, seconds: float = 10.0, gibibytes: float = 1.5) -> Iterator[None]:
    """Fails unless the block ends well, or with a documented code, within this time and additional memory."""

    def stop(*_: object) -> None:
        raise TooSlow

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + int(gibibytes * 2**30)
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except SfumatoError as error:
        if error.code not in CODES:
            raise AssertionError(f"{error.code} has no section in docs/errors.md") from error
        str(error).encode("utf-8", "surrogateescape")  # can be shown
    except TooSlow:
        raise AssertionError(f"it took more than {seconds} seconds") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


class Raw(str):
    """Text that stands in a document as it is."""


_DEEP = 3000
# As JSON text: numbers without bounds, words of other types, text that cannot be shown, levels without end.
JSON_VALUES = (
    *("null", "true", "0", "-1", "1.5", "1e308", "-1e308", "5e-324", "1e999", "NaN", "Infinity", "-Infinity"),
    *(str(2**63), str(10**9), str(10**30), "9" * 5000),
    *("[]", "{}", '[1,"a",null]', '{"a":1}', "[[1]]", "[" * _DEEP + "]" * _DEEP),
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
    *('""', '"\\u0000"', '"\\ud800"', '"\\u202e"', '"\\n"', '"²"', '"' + "x" * 100_000 + '"'),
    *('"../../etc/passwd"', '"<script>"', '"wrn_6000004_1"', '"patches"', '"nan"'),
)


def dump(value: object) -> str:
    """JSON text in which a ``Raw`` stands as it is."""
    raw: list[str] = []

    def plain(part: object) -> object:
        if isinstance(part, Raw):
            raw.append(part)
            return f"@raw {len(raw) - 1}@"
        if isinstance(part, dict):
            return {key: plain(inner) for key, inner in part.items()}
        return [plain(inner) for inner in part] if isinstance(part, list) else part

    text = json.dumps(plain(value))
    return re.sub(r'"@raw (\d+)@"', lambda match: raw[int(match[1])], text)


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document; of long lists the first and the last."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else set()):
            yield from places(value[index], (*path, index))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None], new: object) -> Any:
    """A copy of the document in which ``change(container, key)`` was made at ``path``."""
    copy = json.loads(json.dumps(value))
    if not path:
        return new
    container = copy
    for key in path[:-1]:
        container = container[key]
    change(container, path[-1])
    return copy


@st.composite
def documents(draw: st.DrawFn, value: Any) -> str:
    """JSON text of ``value`` with one or two places replaced, removed, doubled or renamed."""
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(value))))
        new = Raw(draw(st.sampled_from(JSON_VALUES)))
        kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename")))

        def change(container: Any, key: Any, kind: str = kind, new: Raw = new) -> None:
            if kind == "replace":
                container[key] = f"@keep {new}"
            elif kind == "remove":
                del container[key]
            elif isinstance(container, dict):
                container["²"] = container.pop(key)
            else:
                container.append(container[key])

        value = changed(value, path, change, f"@keep {new}")
        if not isinstance(value, dict | list):
            break
    return dump(_restored(value))


def _restored(value: Any) -> Any:
    """Copies go through JSON, which knows no ``Raw``."""
    if isinstance(value, str) and value.startswith("@keep "):
        return Raw(value.removeprefix("@keep "))
    if isinstance(value, dict):
        return {key: _restored(inner) for key, inner in value.items()}
    return [_restored(inner) for inner in value] if isinstance(value, list) else value


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with a few bytes changed, cut out, doubled, inserted, or cut off."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(found) - 1)))
        end = min(len(found), start + draw(st.integers(1, 16)))
        kind = draw(st.sampled_from(("flip", "write", "write", "insert", "remove", "double", "cut")))
        if kind == "flip" and found:
            found[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "write":
            found[start:end] = draw(st.sampled_from((b"\0", b"\xff", b"\xff\xff\xff\x7f", b"\x80", b"9" * 8)))
        elif kind == "insert":
            found[start:start] = draw(st.binary(max_size=8))
        elif kind == "remove":
            del found[start:end]
        elif kind == "double":
            found[start:start] = found[start:end] * 3
        elif kind == "cut":
            del found[start:]
    return bytes(found)
