"""Sockets through torch.distributed: many hosts, no shared memory.

It opens gloo connections of its own through the job's store, whatever backend the job itself uses
(rows are CPU tensors). ``_new_group`` is the only place that names a backend.

A push is held back until ``arrive``, which ships all rows for a peer as one message: row numbers,
then row data, window by window, after a small header with the counts. A pull asks with row numbers
and gets rows back. Every message is a plain send/recv pair, so a wait is always for one peer, and
a peer that doesn't come can be named.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BootstrapError, PeerDied, PeerError, PeerTimeout, explain
from .base import PHASES, Put, Tag, Transfer, Transport, Window, WindowSpec, root_cause
from .meeting import Meeting

_WORD_PATIENCE_S = 0.5  # how long a broken or silent connection waits for word of why


class CollectiveTransport(Transport):
    """Peers are reached through a process group of this transport's own."""

    name = "collective"

    def __init__(self, meeting: Meeting, *, lanes: int, gather_words: int) -> None:
        self._meeting = meeting
        self.rank, self.size, self.timeout_s = meeting.rank, meeting.size, meeting.timeout_s
        self.lanes = lanes
        self._windows: list[Window] = []
        self._held: dict[int, list[Put]] = {}
        self._peers = [r for r in range(self.size) if r != self.rank]
        self._open_groups(Tag("construct"))

    def _open_groups(self, tag: Tag) -> None:
        """Two connections: steps in order on one, fetches on the other thread's."""
        self._meeting.exchange("open", tag)  # names a missing rank; gloo wouldn't
        try:
            self._steps = self._new_group("steps")
            self._fetches = self._new_group("fetches")
        except RuntimeError as error:
            self._meeting.exchange("not connected", tag)  # names a rank that died on the way
            raise BootstrapError(
                explain(f"ranks can't connect: {error}", where="transport 'collective'")
            ) from error
        self._meeting.exchange("connected", tag)

    def _new_group(self, use: str) -> Any:
        store = dist.PrefixStore(
            f"{self._meeting.prefix}/{use}/{self._meeting.generation}", self._meeting.store.raw
        )
        return dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self.timeout_s))

    def windows(self, specs: Sequence[WindowSpec]) -> list[Window]:
        made = []
        for spec in specs:
            local = torch.zeros(spec.shape, dtype=spec.dtype)
            made.append(Window(len(self._windows), local, None))
            self._windows.append(made[-1])
        return made

    # ---- the step

    def all_gather(self, words_N: Tensor, tag: Tag, lane: int) -> Tensor:
        words_RN = words_N.new_empty(self.size, words_N.numel())
        words_RN[self.rank] = words_N
        self._swap([words_N] * self.size, list(words_RN), tag, lane)
        return words_RN

    def push(self, puts: Sequence[Put], tag: Tag, lane: int) -> None:
        self._held.setdefault(lane, []).extend(puts)

    def arrive(self, tag: Tag, lane: int) -> None:
        puts = self._held.pop(lane, [])
        used = sorted({p.window.index for p in puts})
        counts_RW = torch.zeros(self.size, len(self._windows), dtype=torch.int64)
        parts: list[list[Tensor]] = [[] for _ in range(self.size)]
        for index in used:
            mine = [p for p in puts if p.window.index == index]
            for peer in sorted({p.peer for p in mine}):
                rows = torch.cat([p.rows for p in mine if p.peer == peer])
                data = torch.cat([p.data for p in mine if p.peer == peer])
                if peer == self.rank:
                    self._windows[index].local.index_copy_(0, rows, data)
                    continue
                counts_RW[peer, index] = rows.numel()
                parts[peer] += [_bytes(rows), _bytes(data)]
        incoming_RW = self._swap_sizes(counts_RW, tag, lane)
        outgoing = [torch.cat(p) if p else torch.empty(0, dtype=torch.uint8) for p in parts]
        boxes = [torch.empty(self._message_bytes(c), dtype=torch.uint8) for c in incoming_RW]
        self._swap(outgoing, boxes, tag, lane)
        for peer in self._peers:
            self._unpack(boxes[peer], incoming_RW[peer])

    def pull(
        self, window: Window, rows_by_peer: Sequence[Tensor], tag: Tag, lane: int
    ) -> list[Tensor]:
        sizes_R1 = torch.tensor([[r.numel()] for r in rows_by_peer], dtype=torch.int64)
        asked_R1 = self._swap_sizes(sizes_R1, tag, lane)
        asked = [torch.empty(int(n), dtype=torch.int64) for n in asked_R1[:, 0]]
        self._swap([r.contiguous() for r in rows_by_peer], asked, tag, lane)
        answers = [window.local.index_select(0, rows) for rows in asked]
        answers[self.rank] = window.local.index_select(0, rows_by_peer[self.rank])
        width = window.local.shape[1:]
        got = [window.local.new_empty(rows.numel(), *width) for rows in rows_by_peer]
        got[self.rank] = answers[self.rank]
        self._swap(answers, got, tag, lane)
        return got

    def fetch(self, transfers: Sequence[Transfer], tag: Tag, lane: int = 0) -> None:
        pending: list[tuple[int, Any, Tensor]] = []
        for t in transfers:
            if t.source == self.rank:
                row = _bytes(t.window.local[t.source_row])
                post = getattr(self._fetches, "send", None)
                send = self._start(t.dest, post, row, tag, lane)
                pending.append((t.dest, send, row))
            elif t.dest == self.rank:
                row = _bytes(t.window.local[t.dest_row])
                post = getattr(self._fetches, "recv", None)
                recv = self._start(t.source, post, row, tag, lane)
                pending.append((t.source, recv, row))
        # A rank blocked here is silent to peers that are further on: it must speak before they
        # give up, or they would blame it and not the one it waits for.
        self._finish(pending, tag, 0.75 * self.timeout_s)

    # ---- life and death

    def barrier(self, tag: Tag, timeout_s: float | None = None) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        boxes = [torch.empty_like(word) for _ in range(self.size)]
        self._swap([word] * self.size, boxes, tag, self.lanes, timeout_s)

    def fail(self, error: BaseException) -> None:
        if not self.closed:
            self._meeting.leave_word(root_cause(error, self.rank))
            self._hang_up()  # peers that wait for this rank wake up and read the word

    def reset(self) -> None:
        self._hang_up()
        self._held.clear()
        self._meeting.regroup(Tag("reset"))
        self._open_groups(Tag("reset"))

    def close(self, *, orderly: bool = True) -> None:
        if self.closed:
            return
        try:
            if orderly:
                self.barrier(Tag("close"))
        finally:
            self.closed = True
            self._drop_groups()
            self._windows, self._held = [], {}

    def _drop_groups(self) -> None:
        self._steps = self._fetches = None

    def _hang_up(self) -> None:
        """Close every connection now, whoever still holds the groups (tracebacks, the fetch lane).

        Gloo has no call for it, but closes all connections of a group when one wait runs out of
        time: so wait a moment for a message that nobody sends.
        """
        nothing = torch.empty(1, dtype=torch.uint8)
        for group in (self._steps, self._fetches):
            for peer in self._peers if group is not None else ():
                with contextlib.suppress(RuntimeError):
                    group.recv([nothing], peer, _message_tag("hang up", 0)).wait(
                        timedelta(milliseconds=1)
                    )
        self._drop_groups()

    # ---- messages

    def _message_bytes(self, counts_W: Tensor) -> int:
        return sum(
            n * (8 + _row_bytes(w.local))
            for n, w in zip(counts_W.tolist(), self._windows, strict=True)
        )

    def _unpack(self, box: Tensor, counts_W: Tensor) -> None:
        offset = 0
        for count, window in zip(counts_W.tolist(), self._windows, strict=True):
            if count == 0:
                continue
            split, end = offset + 8 * count, offset + count * (8 + _row_bytes(window.local))
            rows = box[offset:split].clone().view(torch.int64)
            data = box[split:end].clone().view(window.local.dtype)
            window.local.index_copy_(0, rows, data.view(count, *window.local.shape[1:]))
            offset = end

    def _swap_sizes(self, sizes_RN: Tensor, tag: Tag, lane: int) -> Tensor:
        """Row p goes to peer p; row p of the result came from peer p."""
        got_RN = torch.zeros_like(sizes_RN)
        self._swap(list(sizes_RN), list(got_RN), tag, lane)
        return got_RN

    def _swap(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        tag: Tag,
        lane: int,
        timeout_s: float | None = None,
    ) -> None:
        """Send ``outgoing[p]`` to each peer p, fill ``incoming[p]`` from it; skip empty ones."""
        pending: list[tuple[int, Any, Tensor]] = []
        for verb, boxes in (("recv", incoming), ("send", outgoing)):
            for peer in self._peers:
                if boxes[peer].numel():
                    post = getattr(self._steps, verb, None)
                    work = self._start(peer, post, boxes[peer], tag, lane)
                    pending.append((peer, work, boxes[peer]))
        self._finish(pending, tag, timeout_s)

    def _start(
        self, peer: int, post: Callable[..., Any] | None, box: Tensor, tag: Tag, lane: int
    ) -> Any:
        try:
            assert post is not None, "the connection was dropped"
            return post([box], peer, _message_tag(tag.phase, lane))
        except (RuntimeError, AssertionError) as error:
            raise self._blame(peer, error, tag) from error

    def _finish(
        self,
        pending: Sequence[tuple[int, Any, Tensor]],
        tag: Tag,
        timeout_s: float | None = None,
    ) -> None:
        """Wait for every message; the tensors stay referenced until then."""
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        for peer, work, _ in pending:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise self._blame(peer, error, tag) from error

    def _blame(self, peer: int, error: BaseException, tag: Tag) -> PeerError:
        """Who is behind a broken or silent connection: the peer, or whom the peer blames."""
        silent = "imed out" in str(error)
        deadline = time.monotonic() + min(_WORD_PATIENCE_S, self.timeout_s / 4)
        while True:
            for rank in [peer, *(p for p in self._peers if p != peer)]:
                known = self._meeting.trouble(rank, tag)
                if known is not None:
                    return known
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        if silent:
            return tag.error(PeerTimeout, self.rank, peer, f"waited {self.timeout_s:g} s: {error}")
        return tag.error(PeerDied, self.rank, peer, f"its connection is gone: {error}")


def _message_tag(phase: str, lane: int) -> int:
    """Messages of different phases or lanes never match, whatever order ranks take them in."""
    names = (*PHASES, "hang up")
    return names.index(phase) + len(names) * lane


def _bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.element_size() if tensor.shape[0] else 0
