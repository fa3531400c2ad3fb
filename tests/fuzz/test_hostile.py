"""The fuzz tests' own control: what a reader must not do is found."""

from __future__ import annotations

import json
import time

import pytest
from hostile import JSON_VALUES, damaged, documents, examples, only_coded_errors
from hypothesis import given

from sfumato.errors import RunError


def hang() -> None:
    time.sleep(5)


def swallow() -> None:
    try:
        hang()
    except Exception:
        hang()


def fill() -> None:
    bytearray(2**32)


def guess() -> None:
    {}["step"]


def unknown() -> None:
    raise RunError("no-such-code", "x")


@pytest.mark.parametrize("reader", [hang, swallow, fill, guess, unknown])
def test_a_reader_that_hangs_fills_the_memory_or_has_no_code_is_found(reader):
    with pytest.raises((AssertionError, KeyError, MemoryError)), only_coded_errors(seconds=0.3):
        reader()


def test_a_documented_refusal_and_an_answer_are_fine():
    with only_coded_errors():
        raise RunError("no-run", "x")
    with only_coded_errors():
        pass


def test_documents_are_changed_in_every_way():
    whole = {"a": {"b": [1, 2, 3]}, "c": "x"}
    seen = set()

    @examples(300)
    @given(documents(whole), damaged(json.dumps(whole).encode()))
    def collect(text, data):
        seen.update((text, data))

    collect()
    texts = [text for text in seen if isinstance(text, str)]
    assert sum(any(value in text for text in texts) for value in JSON_VALUES) > 0.9 * len(JSON_VALUES)
    assert '{"a": {}, "c": "x"}' in seen  # a key is gone
    assert len([data for data in seen if isinstance(data, bytes)]) > 100
