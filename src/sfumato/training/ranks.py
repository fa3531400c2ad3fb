"""The processes of one training, its ranks: what they tell each other, and in which order sums are added.

The first rank leads. It orders, the others do as ordered, and whoever is lost is noticed: a process that ends
closes its connections, and one that falls silent is given up after a time.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sfumato.errors import RunError, SfumatoError

Group = Any  # dist.ProcessGroupGloo or ProcessGroupNCCL, which builds of torch without them do not have
WAIT, STOP = "wait", "stop"  # orders that need no answer
_BEATS = 4  # signs of life of an idle first rank, in the time after which it is given up


@dataclass(eq=False)
class Ranks:
    """This process among those of the training; ``Ranks()`` is a process alone.

    Guarantee: ``add_up`` adds in an order that depends on the number of ranks alone. When a rank is lost,
    whatever the others do next ends in a RunError within ``timeout``; nobody goes on without it.
    """

    group: Group | None = None  # gloo; None: alone
    number: int = 0
    size: int = 1
    number_on_host: int = 0
    size_on_host: int = 1
    store: dist.Store | None = None  # where further groups meet
    timeout: timedelta = timedelta(minutes=30)
    stop_wanted: Callable[[], bool] = lambda: False  # whether this process was asked to stop
    others_want_stop: bool = False  # known to the first rank, from answers
    leading: bool = False  # from now on the first rank orders
    broken: bool = False  # a connection failed: nothing more can be said
    _tensors: Group | None = None  # where tensors go, if not through ``group``
    _wire: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _end: threading.Event = field(default_factory=threading.Event)
    _heart: threading.Thread | None = None

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def send_tensors_by_device(self, device: torch.device) -> None:
        """From now on tensors go from device to device by NCCL, if they are CUDA's; orders stay with gloo."""
        if device.type == "cuda" and self.store is not None:
            torch.cuda.set_device(device)
            store = dist.PrefixStore("tensors", self.store)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            self._tensors = dist.ProcessGroupNCCL(store, self.number, self.size, options)
            self._wire = device

    def broadcast(self, values: Tensor) -> Tensor:
        """The first rank's ``values`` on every rank: same shape and dtype everywhere, on the CPU if sent."""
        if self.group is None:
            return values
        sent = values.detach().to(self._wire).contiguous()
        with self._connected():
            _broadcast(self._tensors or self.group, sent, root=0)
        return sent

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the tensors of every rank with the first rank's; names and shapes are alike."""
        for dtype in sorted({value.dtype for value in tensors.values()}, key=str):
            alike = [value for value in tensors.values() if value.dtype == dtype]
            flat = self.broadcast(torch.cat([value.detach().reshape(-1) for value in alike]))
            if not self.is_first:
                with torch.no_grad():
                    for value, part in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
                        value.copy_(part.view(value.shape))

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of all ranks' ``values`` on the first rank; what other ranks get is of no use.

        By pairs: 0 + 1 and 2 + 3, then those two. With one rank: the values themselves.
        """
        if self.group is None:
            return values
        total, group = values.to(self._wire, copy=True), self._tensors or self.group
        received, distance = torch.empty_like(total), 1
        with self._connected():
            while distance < self.size:
                if self.number % (2 * distance):
                    group.send([total], self.number - distance, 0).wait()
                    break
                if self.number + distance < self.size:
                    group.recv([received], self.number + distance, 0).wait()
                    total += received
                distance *= 2
        return total.to(values.device)

    def agree(self, value: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """What every rank says, once all have come here; raises if one of them has failed instead."""
        said = [json.loads(self._text(json.dumps(dict(value or {})), root=root)) for root in range(self.size)]
        for number, each in enumerate(said):
            if "failed" in each:
                self.broken = True  # nobody listens any more
                raise RunError(
                    "rank-failed",
                    f"rank {number} cannot go on: {each['failed']}",
                    why="A share of every step would be missing, so that all ranks stop.",
                    fix="Correct it there, and start or resume the run on all ranks.",
                )
        return said

    @contextmanager
    def order(self, what: str, **values: object) -> Iterator[None]:
        """Order the other ranks to do something, and do your own part of it inside the block."""
        if self.group is None:
            yield
            return
        with self._lock:
            self._text(json.dumps({"do": what, **values}), root=0)
            try:
                yield
            except BaseException:
                self.broken = True  # the others wait for what will not come
                raise

    def next_order(self) -> dict[str, Any]:
        """What the first rank wants next; its signs of life are passed over."""
        while True:
            order = json.loads(self._text("", root=0))
            if order["do"] != WAIT:
                return order

    def lead(self) -> None:
        """The others are ready for orders. From now on they hear from this rank, also while it is busy."""
        self.leading = True
        if self.is_first and self.group is not None:
            self._heart = threading.Thread(target=self._beat, daemon=True)
            self._heart.start()

    def _beat(self) -> None:
        while not self._end.wait(self.timeout.total_seconds() / _BEATS):
            if self._lock.acquire(blocking=False):  # else an order is being carried out
                try:
                    if self._end.is_set() or self.broken:
                        return
                    with suppress(SfumatoError):  # whoever orders next says it
                        self._text(json.dumps({"do": WAIT}), root=0)
                finally:
                    self._lock.release()

    def leave(self, error: BaseException) -> bool:
        """Say why this rank goes, if the others can still hear it. Returns whether the first one knows."""
        self._end.set()
        if self.group is None or self.broken:
            return False
        with self._lock:
            if not self.leading:
                with suppress(RunError):  # its own failure comes back to it
                    self.agree({"failed": str(error) or type(error).__name__})
                return True
            if self.is_first:
                code = error.exit_code if isinstance(error, SfumatoError) else 1
                with (
                    suppress(RunError),
                    self.order(STOP, exit_code=code if isinstance(error, Exception) else 130),
                ):
                    pass
        return self.is_first

    def close(self) -> None:
        """Close the connections: at the end of the program it would be too late for their threads."""
        self._end.set()
        if self._heart is not None:
            self._heart.join(timeout=5)
        self.group = self._tensors = self.store = None

    def _text(self, text: str, *, root: int) -> str:
        """The text of rank ``root``, on every rank."""
        if self.group is None:
            return text
        said = text.encode() if self.number == root else b""
        with self._connected():
            length = torch.tensor([len(said)])
            _broadcast(self.group, length, root=root)
            letters = torch.empty(int(length), dtype=torch.uint8)
            if said:
                letters = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            if len(letters):
                _broadcast(self.group, letters, root=root)
        return letters.numpy().tobytes().decode()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Name what is wrong when a connection fails."""
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            raise RunError(
                "rank-lost",
                f"rank {self.number} of {self.size} has lost another one: {reason_of(error)}",
                why="Its process was killed, its machine is gone, or it was silent for too long. The steps "
                "that were whole are saved.",
                fix="Go on with --resume, with any number of ranks. If a step may take longer than "
                f"{self.timeout.total_seconds():g} s, set SFUMATO_RANK_TIMEOUT.",
            ) from error


ALONE = Ranks()


@contextmanager
def first_on_host(ranks: Ranks) -> Iterator[None]:
    """Run the block on the first rank of each host, and on its other ranks once that one has finished."""
    if ranks.number_on_host:
        ranks.agree()
    yield
    if not ranks.number_on_host:
        ranks.agree()


def cut_evenly(sizes: Tensor, parts: int) -> list[int]:
    """Where to cut a row of things of these sizes into ``parts`` stretches of about the same total size.

    Guarantee: parts + 1 ascending numbers from 0 to the number of things, so that each is in one stretch.
    """
    ends = sizes.double().cumsum(0)
    total = float(ends[-1]) if len(ends) else 0.0
    wanted = torch.arange(1, parts, dtype=torch.float64) * total / parts
    inner = torch.searchsorted(ends, wanted, right=True).clamp(max=len(sizes))
    return [0, *inner.tolist(), len(sizes)]


def stretch(cuts: Sequence[int], number: int) -> slice:
    """What lies between two cuts."""
    return slice(cuts[number], cuts[number + 1])


def reason_of(error: Exception) -> str:
    """What gloo says, without the place in its source and its advice."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\]\s*", "", first).partition(". ")[0]


def _broadcast(group: Group, values: Tensor, *, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    group.broadcast([values], options).wait()
