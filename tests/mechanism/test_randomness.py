"""Streams are never given twice, cannot be copied, and a seed says that it is one."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sfumato.errors import ConfigError, PrivacyError
from sfumato.randomness import SecureSource, SeededSource


def draw(source: SecureSource | SeededSource, *, purpose: str = "noise", step: int = 0) -> bytes:
    return source.random_bytes(64, purpose=purpose, step=step).tobytes()


def test_a_secure_source_never_repeats_itself():
    source = SecureSource()
    drawn = {draw(source) for _ in range(100)} | {draw(SecureSource()) for _ in range(100)}
    assert len(drawn) == 200
    assert len({draw(SeededSource(0)) for _ in range(100)}) == 1  # the control does repeat


def _child(pipe) -> None:
    pipe.send(draw(_child.source))


def test_a_forked_child_takes_a_stream_of_its_own():
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system cannot fork")
    _child.source = SecureSource()
    context = multiprocessing.get_context("fork")
    answers = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs,))
        process.start()
        answers.append(ours.recv())
        process.join()
    assert len({*answers, draw(_child.source)}) == 3


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_secure_source_cannot_be_copied(duplicate):
    with pytest.raises(PrivacyError, match="copied-randomness"):
        duplicate(SecureSource())
    assert draw(duplicate(SeededSource(3)) if duplicate is not pickle.dumps else SeededSource(3)) == draw(
        SeededSource(3)
    )


def test_a_seeded_source_depends_on_seed_purpose_and_step_and_on_nothing_else():
    reference = draw(SeededSource(7), purpose="noise", step=3)
    assert draw(SeededSource(7), purpose="noise", step=3) == reference
    others = [
        draw(SeededSource(8), purpose="noise", step=3),
        draw(SeededSource(7), purpose="sampling", step=3),
        draw(SeededSource(7), purpose="noise", step=4),
    ]
    assert reference not in others
    assert len(set(others)) == 3


def test_only_a_secure_source_is_releasable():
    assert SecureSource().releasable
    assert not SeededSource(0).releasable


def test_the_bytes_are_those_of_aes_in_counter_mode():
    import hashlib

    key = hashlib.sha256(b"sfumato seed 5 noise 2").digest()
    expected = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(1_000_000))
    drawn = SeededSource(5).random_bytes(1_000_000, purpose="noise", step=2)
    assert drawn.tobytes() == expected  # also across the pieces in which it is computed
    assert drawn.flags.writeable


def test_bytes_look_uniform():
    counts = np.bincount(SecureSource().random_bytes(1_000_000, purpose="noise", step=0), minlength=256)
    chi_square = float(((counts - 1e6 / 256) ** 2 / (1e6 / 256)).sum())
    assert 130 < chi_square < 400  # 255 degrees of freedom: 8 standard deviations either way


def test_torch_generators_repeat_only_with_a_seed():
    first, second = (SeededSource(1).torch_generator(purpose="init", step=0) for _ in range(2))
    assert first.initial_seed() == second.initial_seed()
    source = SecureSource()
    seeds = {source.torch_generator(purpose="init", step=0).initial_seed() for _ in range(20)}
    assert len(seeds) == 20


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ConfigError, match="bad-seed"):
        SeededSource(seed)
