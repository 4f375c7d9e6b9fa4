"""Ranks as threads of one process: windows are ordinary tensors handed around by reference."""

from __future__ import annotations

import threading
import uuid

import torch
from torch import Tensor

from .base import Tag
from .meeting import Meeting
from .memory import MemoryTransport

_shared: dict[str, Tensor] = {}  # memory on its way from the rank that made it to its peers
_threads: dict[str, threading.Thread] = {}


class ThreadsTransport(MemoryTransport):
    """Peers live in this process."""

    name = "threads"

    def __init__(self, meeting: Meeting, *, lanes: int, gather_words: int) -> None:
        seat = uuid.uuid4().hex  # groups with stores of their own may use equal names
        _threads[seat] = threading.current_thread()
        try:
            seats = meeting.exchange(seat, Tag("construct"))
            self._peers = [_threads[s] for s in seats]
            meeting.exchange("seated", Tag("construct"))
        finally:
            del _threads[seat]
        super().__init__(meeting, lanes=lanes, gather_words=gather_words)

    def _share(self, nbytes: int) -> list[Tensor]:
        return self._hand_over(torch.zeros(nbytes, dtype=torch.uint8))

    def _hand_over(self, memory: Tensor) -> list[Tensor]:
        """Every rank's memory, by reference. Collective."""
        name = uuid.uuid4().hex
        _shared[name] = memory
        try:
            names = self._meeting.exchange(name, Tag("construct"))
            memories = [_shared[n] for n in names]
            self._meeting.exchange("taken", Tag("construct"))
        finally:
            del _shared[name]
        return memories

    def _life(self, peer: int) -> str:
        return "running" if self._peers[peer].is_alive() else "dead"
