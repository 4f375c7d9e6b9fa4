"""Ranks as threads of one process: windows are ordinary tensors handed around by reference."""

from __future__ import annotations

import threading

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
        self._shares = 0
        self._seat = f"{meeting.prefix}/thread"
        _threads[f"{self._seat}/{meeting.rank}"] = threading.current_thread()
        meeting.exchange("here", Tag("construct"))
        self._peers = [_threads[f"{self._seat}/{r}"] for r in range(meeting.size)]
        super().__init__(meeting, lanes=lanes, gather_words=gather_words)
        del _threads[f"{self._seat}/{meeting.rank}"]

    def _share(self, nbytes: int) -> list[Tensor]:
        name = f"{self._seat}/{self._shares}"
        self._shares += 1
        _shared[f"{name}/{self.rank}"] = torch.zeros(nbytes, dtype=torch.uint8)
        self._meeting.exchange("made", Tag("construct"))
        memories = [_shared[f"{name}/{r}"] for r in range(self.size)]
        self._meeting.exchange("taken", Tag("construct"))
        del _shared[f"{name}/{self.rank}"]
        return memories

    def _life(self, peer: int) -> str:
        return "running" if self._peers[peer].is_alive() else "dead"
