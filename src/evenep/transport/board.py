"""Signals between ranks that share memory: who has arrived, who has failed, and a few words.

Layout, all int64, one board for the whole group (rank r writes only its own rows):

    arrived  [lanes + 1, R]            number of the last wait each rank has reached on a lane;
                                       the last lane is for waits outside a step
    words    [lanes + 1, 2, R, W]      what each rank gathers, alternating between two pages
    fault    [R, 4]                    0 fine | 1 failed | 2 closing, blamed rank, of what,
                                       and the generation in which this was said
    message  [R, 512] bytes            why, UTF-8

Synchronisation pattern: *publish then count*. A rank writes data, then its ``arrived`` counter;
a peer that sees the counter sees the data. Two lock round trips between the two writes order them
on weakly ordered CPUs (an unlock releases, the next lock acquires); on x86 stores are ordered.
Counters only grow, also over a reset (a new generation starts at ``generation * 2**32``), so a
late reader can't mistake an old arrival for a new one. Two pages suffice for ``words``: writing
page p again needs a wait in between that every reader of p has already passed.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from .base import Word

FINE, FAILED, CLOSING = 0, 1, 2
GENERATION = 2**32
_MESSAGE_BYTES = 512


def board_bytes(ranks: int, lanes: int, words: int) -> int:
    """Size of a board."""
    return 8 * ((lanes + 1) * ranks + (lanes + 1) * 2 * ranks * words + ranks * 4) + (
        ranks * _MESSAGE_BYTES
    )


class Board:
    """Views over one board's memory, a uint8 array shared by all ranks."""

    def __init__(self, memory: NDArray[np.uint8], ranks: int, lanes: int, words: int) -> None:
        sizes = [(lanes + 1, ranks), (lanes + 1, 2, ranks, words), (ranks, 4)]
        views, offset = [], 0
        for shape in sizes:
            nbytes = 8 * int(np.prod(shape))
            views.append(memory[offset : offset + nbytes].view(np.int64).reshape(shape))
            offset += nbytes
        self.arrived, self.words, self.fault = views
        self.message = memory[offset : offset + ranks * _MESSAGE_BYTES].reshape(ranks, -1)
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Order the writes before it ahead of the writes after it."""
        for _ in range(2):
            with self._lock:
                continue

    def arrive(self, lane: int, rank: int, count: int) -> None:
        """Publish everything written so far, then the counter."""
        self.fence()
        self.arrived[lane, rank] = count

    def missing(self, lane: int, count: int) -> list[int]:
        """Ranks that have not reached wait ``count`` on a lane."""
        late = self.arrived[lane] < count
        return np.flatnonzero(late).tolist() if late.any() else []

    def set_fault(self, rank: int, state: int, word: Word, generation: int) -> None:
        """Raise this rank's flag for the rest of a generation."""
        text = word.detail.encode()[: _MESSAGE_BYTES - 1]
        self.message[rank, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        self.message[rank, len(text)] = 0
        self.fault[rank, 1:3] = word.blamed, word.kind
        self.fault[rank, 0] = state
        self.fence()
        self.fault[rank, 3] = generation

    def failed(self, generation: int) -> list[int]:
        """Ranks that have said in this generation that they failed."""
        said = (self.fault[:, 0] == FAILED) & (self.fault[:, 3] == generation)
        return np.flatnonzero(said).tolist() if said.any() else []

    def read_fault(self, rank: int, generation: int) -> tuple[int, Word]:
        """``(state, word)`` of a rank in a generation."""
        if int(self.fault[rank, 3]) != generation or int(self.fault[rank, 0]) == FINE:
            return FINE, Word(rank, 0, "")
        text = self.message[rank].tobytes().split(b"\0", 1)[0].decode(errors="replace")
        state, blamed, kind = self.fault[rank, :3].tolist()
        return state, Word(blamed, kind, text)
