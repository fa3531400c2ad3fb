"""Where randomness comes from: the operating system's entropy, or a seed that voids the guarantee.

Both sources are AES-256 in counter mode (NIST SP 800-38A, from the ``cryptography`` package). They differ
only in the key: a fresh one from the operating system, or one that anybody who knows the seed can compute.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import TYPE_CHECKING, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sfumato.errors import ConfigError, PrivacyError

if TYPE_CHECKING:
    import torch
    from cryptography.hazmat.primitives.ciphers import CipherContext

__all__ = ["RandomSource", "SecureSource", "SeededSource"]

_ZEROS = bytes(1 << 18)  # what is encrypted; a piece of this size stays in the cache


class RandomSource(Protocol):
    """Random bytes for a purpose ("sampling", "noise", "augmentation", "init") at a step."""

    releasable: bool

    def random_bytes(self, count: int, *, purpose: str, step: int) -> np.ndarray:
        """``count`` bytes as a writable uint8 array."""

    def torch_generator(self, *, purpose: str, step: int, device: str = "cpu") -> torch.Generator:
        """A torch generator for augmentation and initialisation; never for sampling or noise."""


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


def _encryptor(key: bytes, first_counter: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(first_counter)).encryptor()


def _keystream(stream: CipherContext, count: int) -> np.ndarray:
    out = np.empty(count, dtype=np.uint8)
    for start in range(0, count, len(_ZEROS)):
        piece = out[start : start + len(_ZEROS)]
        stream.update_into(memoryview(_ZEROS)[: len(piece)], piece)
    return out


def _torch_generator(seed: np.ndarray, device: str) -> torch.Generator:
    import torch

    # 63 bits: manual_seed takes an int64
    return torch.Generator(device=device).manual_seed(int(seed.view(np.uint64)[0] >> np.uint64(1)))
