"""Streams are never given twice, cannot be copied, and a seed says that it is one."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sfumato.errors import ConfigError, PrivacyError
from sfumato.randomness import SecureSource, SeededSource, UnitRandomness


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


def unit_words(units, rows=None, *, count=8, stream=0, step=0):
    draws = UnitRandomness(SeededSource(4), purpose="model", step=step)
    return draws.words(np.array(units), np.array(rows or [0] * len(units)), count, stream=stream)


def test_a_units_draws_do_not_depend_on_its_place_or_on_other_units():
    first, second = unit_words([3, 9, 5]), unit_words([5, 7, 3, 1])
    assert np.array_equal(first[0], second[2])
    assert np.array_equal(first[2], second[0])
    assert np.array_equal(unit_words([5], count=3)[0], second[0, :3])
    different = [
        unit_words([5])[0],
        unit_words([6])[0],
        unit_words([5], [1])[0],
        unit_words([5], stream=1)[0],
        unit_words([5], step=1)[0],
        UnitRandomness(SeededSource(4), purpose="augmentation", step=0).words(
            np.array([5]), np.array([0]), 8, stream=0
        )[0],
        UnitRandomness(SeededSource(4), purpose="model", step=0).shared_words(8, stream=0),
    ]
    assert len({words.tobytes() for words in different}) == len(different)


def test_unit_draws_are_aes_of_written_out_blocks_and_uniform():
    key = SeededSource(4).random_bytes(32, purpose="model", step=0).tobytes()
    block = ((7 << 24) | 2).to_bytes(8, "little") + ((3 << 32) | 1).to_bytes(8, "little")
    expected = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)
    assert unit_words([7], [2], stream=3)[0, 4:].tobytes() == expected
    words = unit_words(list(range(500)), count=2000)
    counts = np.bincount(words.ravel() >> 24, minlength=256)
    assert abs(counts / 1e6 * 256 - 1).max() < 0.08  # 3906 each, five standard deviations
    assert len(np.unique(words)) > 0.999 * words.size


@pytest.mark.parametrize("units", [[-1], [2**40]])
def test_unit_numbers_out_of_range_are_refused(units):
    with pytest.raises(ConfigError, match="bad-unit-ids"):
        unit_words(units)
