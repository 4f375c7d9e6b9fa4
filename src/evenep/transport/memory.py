"""The transport of ranks that can load and store each other's memory: threads and processes.

A subclass says only how memory is shared and whether a peer still lives.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import PeerDied, PeerError, PeerFailed, PeerTimeout
from .base import (
    GAVE_UP,
    KINDS,
    Put,
    Tag,
    Transfer,
    Transport,
    Window,
    WindowSpec,
    Word,
    root_cause,
)
from .board import CLOSING, FAILED, GENERATION, Board, board_bytes
from .meeting import Meeting

_ALIGN = 64  # windows start on a cache line
_SPINS = 64  # looks before the first nap
_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3
_CHECKUP_S = 0.02  # how often a waiting rank asks whether its peers still live


class MemoryTransport(Transport):
    """Windows are plain memory of every rank; waits go through a board."""

    def __init__(self, meeting: Meeting, *, lanes: int, gather_words: int) -> None:
        self._meeting = meeting
        self.rank, self.size, self.timeout_s = meeting.rank, meeting.size, meeting.timeout_s
        self.lanes = lanes
        meeting.gone = lambda peer: self._life(peer) == "dead"
        self._windows = 0
        self._counts = [0] * (lanes + 1)
        self._gathers = [0] * (lanes + 1)
        nbytes = board_bytes(self.size, lanes, gather_words)
        # Rank 0's board is the group's; the others' stay untouched pages.
        memory = self._share(nbytes if self.rank == 0 else 8)[0]
        self._board = Board(memory[:nbytes].numpy(), self.size, lanes, gather_words)

    # ---- what a subclass provides

    @abstractmethod
    def _share(self, nbytes: int) -> list[Tensor]:
        """Zeroed memory of every rank as uint8 tensors, sizes as each rank asked. Collective."""

    @abstractmethod
    def _life(self, peer: int) -> str:
        """``running``, ``stopped`` or ``dead``."""

    def _share_windows(self, nbytes: int) -> list[Tensor]:
        """Memory for windows, where it isn't the board's kind."""
        return self._share(nbytes)

    def _publish(self, lane: int) -> None:
        """Before arriving at a wait: make what this rank has queued so far waitable."""

    def _join(self, lane: int) -> None:
        """After a wait: whatever is queued from now on comes after what the peers published."""

    # ---- windows

    def windows(self, specs: Sequence[WindowSpec]) -> list[Window]:
        offsets, end = [], 0
        for spec in specs:
            offsets.append(end)
            end = -(-(end + spec.nbytes) // _ALIGN) * _ALIGN
        memories = self._share_windows(max(end, 1))
        made = []
        for spec, offset in zip(specs, offsets, strict=True):
            views = tuple(
                m[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape) for m in memories
            )
            made.append(Window(self._windows, views[self.rank], views))
            self._windows += 1
        return made

    # ---- the step

    def all_gather(self, words_N: Tensor, tag: Tag, lane: int) -> Tensor:
        page = self._board.words[lane, self._gathers[lane] % 2]
        self._gathers[lane] += 1
        n = words_N.numel()
        page[self.rank, :n] = words_N.numpy()
        self._wait(tag, lane)
        return torch.from_numpy(page[:, :n].copy())

    def push(self, puts: Sequence[Put], tag: Tag, lane: int) -> None:
        for put in puts:
            assert put.window.peers is not None
            here = put.window.local.device
            peer = put.window.peers[put.peer]
            peer.index_copy_(0, put.rows.to(here), put.data.to(here))

    def arrive(self, tag: Tag, lane: int) -> None:
        self._wait(tag, lane)

    def pull(
        self, window: Window, rows_by_peer: Sequence[Tensor], tag: Tag, lane: int
    ) -> list[Tensor]:
        self._wait(tag, lane)
        assert window.peers is not None
        return [
            peer.index_select(0, rows.to(peer.device))
            for peer, rows in zip(window.peers, rows_by_peer, strict=True)
        ]

    def fetch(self, transfers: Sequence[Transfer], tag: Tag, lane: int = 0) -> None:
        for t in transfers:
            if t.dest == self.rank:
                assert t.window.peers is not None
                t.window.local[t.dest_row].copy_(t.window.peers[t.source][t.source_row])

    # ---- life and death

    def barrier(self, tag: Tag, timeout_s: float | None = None) -> None:
        self._wait(tag, self.lanes, timeout_s)

    def fail(self, error: BaseException) -> None:
        if not self.closed:
            word = root_cause(error, self.rank)
            self._board.set_fault(self.rank, FAILED, word, self._meeting.generation)
            self._meeting.leave_word(word)

    def reset(self) -> None:
        self._meeting.regroup(Tag("reset"))
        self._counts = [self._meeting.generation * GENERATION] * (self.lanes + 1)
        self._gathers = [0] * (self.lanes + 1)

    def close(self, *, orderly: bool = True) -> None:
        if self.closed:
            return
        try:
            if orderly:
                word = Word(self.rank, KINDS.index(PeerFailed), "closed its engine")
                self._board.set_fault(self.rank, CLOSING, word, self._meeting.generation)
                self._wait(Tag("close"), self.lanes)
        finally:
            self.closed = True
            del self._board  # its memory goes; windows live as long as callers hold views

    # ---- waiting

    def _wait(self, tag: Tag, lane: int, timeout_s: float | None = None) -> None:
        """Arrive at this lane's next wait and stay until every rank has."""
        self._publish(lane)
        self._meet(tag, lane, timeout_s)
        self._join(lane)

    def _meet(self, tag: Tag, lane: int, timeout_s: float | None = None) -> None:
        """The host's half of a wait."""
        self._counts[lane] += 1
        count = self._counts[lane]
        self._board.arrive(lane, self.rank, count)
        start = time.monotonic()
        looks, nap, checkup = 0, _NAP_S, start + _CHECKUP_S
        while missing := self._board.missing(lane, count):
            looks += 1
            if looks <= _SPINS:
                time.sleep(0)
                continue
            time.sleep(nap)
            nap = min(nap * 1.5, _LONGEST_NAP_S)
            now = time.monotonic()
            if now >= checkup:
                checkup = now + _CHECKUP_S
                late_s = now - start if now - start > (timeout_s or self.timeout_s) else None
                error = self._diagnose(missing, tag, late_s)
                # A peer may have arrived and left in good order since ``missing`` was read.
                if error is not None and self._board.missing(lane, count):
                    raise error
        self._board.fence()

    def _diagnose(self, missing: Sequence[int], tag: Tag, late_s: float | None) -> PeerError | None:
        """What keeps the missing ranks, root cause first; None while there is still hope."""
        for peer in missing:
            state, word = self._board.read_fault(peer, self._meeting.generation)
            if state == FAILED and word.blamed == self.rank:
                return tag.error(PeerFailed, self.rank, peer, f"{GAVE_UP}: {word.detail}")
            if state == FAILED:
                detail = f"reported by rank {peer}: {word.detail}"
                return tag.error(KINDS[word.kind], self.rank, word.blamed, detail)
            if state == CLOSING and tag.phase != "close":
                detail = "it closed its engine while others are in a step"
                return tag.error(PeerFailed, self.rank, peer, detail)
        for peer in missing:
            if self._life(peer) == "dead":
                return tag.error(PeerDied, self.rank, peer, "its process is gone")
        if late_s is not None:
            lives = {p: self._life(p) for p in missing}
            states = ", ".join(f"rank {p} is {life}" for p, life in lives.items())
            detail = f"waited {late_s:.3g} s; {states}"
            worst = min(missing, key=lambda p: lives[p] == "running")  # a stopped rank, if any
            return tag.error(PeerTimeout, self.rank, worst, detail)
        return None
