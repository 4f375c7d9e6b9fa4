"""What the engine asks of a transport: symmetric windows, and a step's few waits.

Every rank makes the same calls in the same order on a *lane*. A lane is one step in flight; lanes
share nothing. The calls of one step and what they promise:

    all_gather   wait 1: everyone's words are here, and everyone has left the previous step
    push         start writing rows into peers' windows
    arrive       wait 2: every row pushed to me is in my window
    pull         wait 3: every peer has finished its window; read rows from it

``fetch`` moves expert rows between windows on a lane of its own and may run on another thread.
On a GPU a step's waits are ``gate``s: queued on the stream, never on the host.

Because the first wait of step n + 1 needs every rank, no rank can push into a window that a peer
still pulls from: three waits a step are enough.

Adding a transport: subclass ``Transport``, one entry in ``evenep.transport.TRANSPORTS``, one
``Choice`` in ``evenep.support``, and the conformance suite covers it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PeerDied, PeerError, PeerFailed, PeerTimeout

PHASES = ("construct", "counts", "dispatch", "fetch", "combine", "reset", "close")


@dataclass(frozen=True, slots=True)
class Tag:
    """Where in the work a wait stands; every peer error carries it."""

    phase: str
    layer: int = -1
    epoch: int = -1

    def error(self, kind: type[PeerError], rank: int, peer: int, detail: str) -> PeerError:
        """The peer error that happened here."""
        return kind(
            rank=rank,
            peer=peer,
            phase=self.phase,
            layer=self.layer,
            epoch=self.epoch,
            detail=detail,
        )


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """A window to be: the same on every rank."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on each rank."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Symmetric memory: every rank has one of the same shape; row 0 is the first index.

    Attributes:
        index: its number among the windows of its transport, equal on all ranks.
        local: this rank's memory.
        peers: every rank's memory where peers can be reached directly, else None.
    """

    index: int
    local: Tensor
    peers: tuple[Tensor, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Rows on their way: ``data[i]`` goes to row ``rows[i]`` of ``peer``'s window."""

    window: Window
    peer: int
    rows: Tensor
    data: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One row copied between ranks: the same list, in the same order, on every rank."""

    window: Window
    source: int
    source_row: int
    dest: int
    dest_row: int


class Transport(ABC):
    """One rank's end of the wire.

    Attributes:
        rank, size: this rank and how many there are.
        timeout_s: deadline of every wait.
        lanes: steps that may be in flight.
        device: where windows live.
    """

    name: str
    rank: int
    size: int
    timeout_s: float
    lanes: int
    device: torch.device = torch.device("cpu")
    closed: bool = False

    @abstractmethod
    def windows(self, specs: Sequence[WindowSpec]) -> list[Window]:
        """Make windows, zero-filled. Collective.

        Raises:
            BootstrapError: the memory can't be made or a peer's can't be mapped.
        """

    @abstractmethod
    def all_gather(self, words_N: Tensor, tag: Tag, lane: int) -> Tensor:
        """Everyone's int64 words, ``[R, N]``; N is at most ``gather_words``."""

    @abstractmethod
    def push(self, puts: Sequence[Put], tag: Tag, lane: int) -> None:
        """Start writing rows into peers' windows; ``arrive`` completes it."""

    @abstractmethod
    def arrive(self, tag: Tag, lane: int) -> None:
        """Wait until every row pushed to this rank is in its windows."""

    @abstractmethod
    def pull(
        self, window: Window, rows_by_peer: Sequence[Tensor], tag: Tag, lane: int
    ) -> list[Tensor]:
        """Wait until every peer is ready, then read the given rows of each peer's window."""

    @abstractmethod
    def fetch(self, transfers: Sequence[Transfer], tag: Tag, lane: int = 0) -> None:
        """Carry out the transfers that concern this rank. Blocks; safe on another thread."""

    @abstractmethod
    def barrier(self, tag: Tag, timeout_s: float | None = None) -> None:
        """Wait for every rank outside a step; ``timeout_s`` where this takes longer than a step."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank stops here and why. Never raises, never waits."""

    @abstractmethod
    def reset(self) -> None:
        """Meet again after a failure and forget what was under way. Collective.

        Raises:
            PeerError: a peer is gone for good or didn't come.
        """

    @abstractmethod
    def close(self, *, orderly: bool = True) -> None:
        """Release everything. Collective when ``orderly``; calling it twice is fine."""


KINDS: tuple[type[PeerError], ...] = (PeerFailed, PeerTimeout, PeerDied)
GAVE_UP = "it gave up on this rank"


@dataclass(frozen=True, slots=True)
class Word:
    """What a failed rank leaves for its peers: whom it blames, of what (in ``KINDS``), and why."""

    blamed: int
    kind: int
    detail: str


def root_cause(error: BaseException, rank: int) -> Word:
    """The rank to blame for an error of ``rank``, and the words for it.

    A rank that fails because a peer did passes the blame on, so that every survivor names the
    rank where the trouble began. A rank that was given up by others blames itself.
    """
    said = f"{type(error).__name__}: {error}"
    detail = said.encode(errors="replace").decode()  # an OSError may name a path that isn't UTF-8
    if not isinstance(error, PeerError):
        return Word(rank, KINDS.index(PeerFailed), detail)
    if error.detail.startswith(GAVE_UP):
        return Word(rank, KINDS.index(PeerTimeout), detail)
    return Word(error.peer, KINDS.index(type(error)), detail)
