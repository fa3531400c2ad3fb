"""Where randomness comes from: the operating system's entropy, or a seed that voids the guarantee.

Both sources are AES-256 in counter mode (NIST SP 800-38A, from the ``cryptography`` package). They differ
only in the key: a fresh one from the operating system, or one that anybody who knows the seed can compute.
What belongs to one unit in a step (its views, its dropout) is drawn by ``UnitRandomness``.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sfumato.errors import ConfigError, PrivacyError

if TYPE_CHECKING:
    import torch
    from cryptography.hazmat.primitives.ciphers import CipherContext

__all__ = ["RandomSource", "SecureSource", "SeededSource", "UnitRandomness"]

_ZEROS = bytes(1 << 18)  # what is encrypted; a piece of this size stays in the cache
_MAX_UNITS = (1 << 40) - 1  # the last number stands for what all units share
_MAX_ROWS = 1 << 24  # of one unit


@runtime_checkable
class RandomSource(Protocol):
    """Random bytes for a purpose ("sampling", "noise", "augmentation", "model", "init") at a step."""

    releasable: bool

    def random_bytes(self, count: int, *, purpose: str, step: int) -> np.ndarray:
        """``count`` bytes as a writable uint8 array."""

    def torch_generator(self, *, purpose: str, step: int, device: str = "cpu") -> torch.Generator:
        """A torch generator for initialisation; never for what a private step draws."""


class SecureSource:
    """Bytes that nobody can predict or repeat.
    Guarantee: each instance has its own 256-bit key from the operating system and never gives the same
    part of its stream twice, so a resumed run or another rank cannot repeat noise. A forked child
    takes a new key. The key is never written anywhere: copying or pickling the source is refused.
    """

    releasable = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rekey()

    def _rekey(self) -> None:
        self._process = os.getpid()
        self._stream = _encryptor(os.urandom(32), os.urandom(16))

    def random_bytes(self, count: int, *, purpose: str, step: int) -> np.ndarray:
        with self._lock:
            if self._process != os.getpid():  # after a fork both processes would go on with the same stream
                self._rekey()
            return _keystream(self._stream, count)

    def torch_generator(self, *, purpose: str, step: int, device: str = "cpu") -> torch.Generator:
        return _torch_generator(self.random_bytes(8, purpose=purpose, step=step), device)

    def __reduce__(self) -> str:
        raise PrivacyError(
            "copied-randomness",
            "a SecureSource was copied or pickled.",
            why="Two copies would give the same noise twice, and the noise could be subtracted.",
            fix="Create a SecureSource() in each process.",
        )


class SeededSource:
    """The same (seed, purpose, step) gives the same bytes: for experiments, never for a release."""

    releasable = False

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError("bad-seed", f"seed is {seed!r}.", fix="Give a whole number of 0 or more.")
        self.seed = seed

    def random_bytes(self, count: int, *, purpose: str, step: int) -> np.ndarray:
        key = hashlib.sha256(f"sfumato seed {self.seed} {purpose} {step}".encode()).digest()
        return _keystream(_encryptor(key, bytes(16)), count)

    def torch_generator(self, *, purpose: str, step: int, device: str = "cpu") -> torch.Generator:
        return _torch_generator(self.random_bytes(8, purpose=purpose, step=step), device)


class UnitRandomness:
    """The draws of one step that belong to its units, whichever other units are in the batch.

    A draw is AES-256 of (unit, row of the unit, number of the draw, place in the draw) under a key that the
    run's source gives for this step and purpose: a keyed function, so that any part can be had on its own.
    Guarantee: what a unit draws does not depend on its place in the batch, on the borders of microbatches,
    or on other units; what all units share is the same in every microbatch of the step.
    """

    def __init__(self, source: RandomSource, *, purpose: str, step: int) -> None:
        key = source.random_bytes(32, purpose=purpose, step=step).tobytes()
        # one block after another, each written out in full: counter mode with a counter of our own
        self._cipher = Cipher(algorithms.AES(key), modes.ECB())

    def words(self, units: np.ndarray, rows: np.ndarray, count: int, *, stream: int) -> np.ndarray:
        """(len(units), count) uniform uint32: draw number ``stream`` of these rows of these units.

        ``units`` are numbers in the data set, ``rows`` count from 0 within each unit.
        """
        if len(units) and not 0 <= units.min() <= units.max() < _MAX_UNITS:
            raise ConfigError(
                "bad-unit-ids",
                f"unit numbers range from {units.min()} to {units.max()}.",
                fix="Number the units of the data set from 0.",
            )
        if len(rows) and not 0 <= rows.min() <= rows.max() < _MAX_ROWS:
            raise ValueError(f"rows of a unit are numbered from 0 to {_MAX_ROWS - 1}")
        return self._words(units.astype(np.uint64) << np.uint64(24) | rows.astype(np.uint64), count, stream)

    def shared_words(self, count: int, *, stream: int) -> np.ndarray:
        """(count,) uniform uint32: draw number ``stream`` of all units together."""
        return self._words(np.array([_MAX_UNITS << 24], dtype=np.uint64), count, stream)[0]

    def _words(self, owners: np.ndarray, count: int, stream: int) -> np.ndarray:
        num_blocks = -(-count // 4)
        out = np.empty((len(owners), num_blocks * 4), dtype=np.uint32)
        at_once = max(1, len(_ZEROS) // max(1, 16 * num_blocks))
        places = np.arange(num_blocks, dtype=np.uint64) | np.uint64(stream << 32)
        encryptor = self._cipher.encryptor()
        for start in range(0, len(owners) if count else 0, at_once):
            batch = owners[start : start + at_once]
            blocks = np.empty((len(batch), num_blocks, 2), dtype="<u8")
            blocks[:, :, 0], blocks[:, :, 1] = batch[:, None], places
            drawn = np.frombuffer(encryptor.update(blocks.data.cast("B")), dtype="<u4")
            out[start : start + at_once] = drawn.reshape(len(batch), -1)
        return out[:, :count]


def _encryptor(key: bytes, first_counter: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(first_counter)).encryptor()


def _keystream(stream: CipherContext, count: int) -> np.ndarray:
    out = np.empty(count, dtype=np.uint8)
    for start in range(0, count, len(_ZEROS)):
        piece = out[start : start + len(_ZEROS)]
        stream.update_into(memoryview(_ZEROS)[: len(piece)], piece.data)
    return out


def _torch_generator(seed: np.ndarray, device: str) -> torch.Generator:
    import torch

    # 63 bits: manual_seed takes an int64
    return torch.Generator(device=device).manual_seed(int(seed.view(np.uint64)[0] >> np.uint64(1)))
