"""Ranks as threads of one process that share a GPU: a stream each, waits by events.

A wait has two halves. On the host, every rank records an event and arrives at the board; once all
have, each makes its stream wait for the others' events. So a wait is queued only when what it
waits for is queued too: streams that share a hardware queue can't block one another, and no kernel
ever spins. The host's half has the deadline and names who is missing; it waits for peers to queue
work, not for a GPU to finish any.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import AgreementError, explain
from .base import Tag, Transfer
from .gpu import DeviceTransport
from .meeting import Meeting
from .threads import ThreadsTransport

_events: dict[str, list[list[torch.cuda.Event]]] = {}


class CudaThreadsTransport(ThreadsTransport, DeviceTransport):
    """Peers live in this process and use the same GPU."""

    def __init__(self, meeting: Meeting, *, lanes: int, gather_words: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._fetch_stream = torch.cuda.Stream(self.device)
        self._captures = 0
        super().__init__(meeting, lanes=lanes, gather_words=gather_words)
        # Two events a lane: a rank records the next one only after every peer has passed the
        # wait before it, so nobody can still be about to wait for the event that is reused.
        mine = [[torch.cuda.Event() for _ in range(2)] for _ in range(lanes + 1)]
        self._peer_events = self._hand_around(mine)

    def gate(self, tag: Tag, lane: int) -> None:
        if self.size > 1:
            self._wait(tag, lane)

    def barrier(self, tag: Tag, timeout_s: float | None = None) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        super().barrier(tag, timeout_s)

    def fetch(self, transfers: Sequence[Transfer], tag: Tag, lane: int = 0) -> None:
        with torch.cuda.stream(self._fetch_stream):
            super().fetch(transfers, tag, lane)
        self._fetch_stream.synchronize()

    @contextlib.contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[int]:
        """One graph holds all ranks: rank 0's, which the others' streams fork off and join again.

        Other ranks' ``graph`` stays empty.
        """
        self._captures += 1
        tag, outside, stream = Tag("construct"), self.lanes, torch.cuda.current_stream()
        fork, ends = self._peer_events[0][outside][0], [e[outside][1] for e in self._peer_events]
        stream.synchronize()
        self._meet(tag, outside)
        if self.rank == 0:
            # Relaxed: the other ranks' threads queue into this capture.
            graph.capture_begin(capture_error_mode="relaxed")
            fork.record()
        self._meet(tag, outside)
        if self.rank:
            stream.wait_event(fork)
        try:
            yield self._captures
            ends[self.rank].record()
            self._meet(tag, outside)
        except BaseException:
            if self.rank == 0:  # a stream left recording could never be used again
                with contextlib.suppress(RuntimeError):  # of streams that didn't join
                    graph.capture_end()
            raise
        if self.rank == 0:
            for end in ends[1:]:
                stream.wait_event(end)
            graph.capture_end()
        self._meet(tag, outside)

    def replay(self, graph: torch.cuda.CUDAGraph, number: int) -> None:
        outside, tag = self.lanes, Tag("counts")
        said = self.all_gather(torch.tensor([number]), tag, outside).flatten().tolist()
        if len(set(said)) > 1:  # rank 0's graph holds all of them
            raise AgreementError(
                explain(
                    "ranks replay different captures",
                    where=f"rank {self.rank}",
                    got=f"by rank: {said}",
                    fix="make the same calls in the same order on every rank",
                )
            )
        if self.rank == 0:
            graph.replay()
        self._wait(tag, outside)

    def _hand_around(
        self, mine: list[list[torch.cuda.Event]]
    ) -> list[list[list[torch.cuda.Event]]]:
        name = uuid.uuid4().hex
        _events[name] = mine
        try:
            names = self._meeting.exchange(name, Tag("construct"))
            events = [_events[n] for n in names]
            self._meeting.exchange("taken", Tag("construct"))
        finally:
            del _events[name]
        return events

    def _share_windows(self, nbytes: int) -> list[Tensor]:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream().synchronize()  # zero before a peer's stream may write
        return self._hand_over(memory)

    def _publish(self, lane: int) -> None:
        if hasattr(self, "_peer_events"):  # not while this is being built
            self._peer_events[self.rank][lane][(self._counts[lane] + 1) % 2].record()

    def _join(self, lane: int) -> None:
        if hasattr(self, "_peer_events"):
            stream = torch.cuda.current_stream()
            for peer, events in enumerate(self._peer_events):
                if peer != self.rank:
                    stream.wait_event(events[lane][self._counts[lane] % 2])
