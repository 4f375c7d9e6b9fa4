"""What the engine asks of a transport whose windows are GPU memory."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..errors import EvenEPError
from .base import Tag, Transport, Window


class DeviceTransport(Transport):
    """Windows are GPU memory of every rank, reached by kernels through plain addresses."""

    @abstractmethod
    def gate(self, tag: Tag, lane: int) -> None:
        """Queue a wait on the current stream: what follows runs after what every rank has queued
        before its own call. The host doesn't wait for a GPU.

        Raises:
            PeerError: a peer is known to be gone, late or failed.
        """

    def follow(self, counter_1: Tensor) -> None:
        """An int32 on the device that every step raises: proof that its gates still open, also
        where graphs are replayed without this transport's knowledge."""

    def trouble(self) -> EvenEPError | None:
        """A failure noticed since, of a wait that was queued; None while all is well."""
        return None

    def settled(self) -> None:
        """What was queued is done: look whether it was let through by a peer that failed."""

    @abstractmethod
    def capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[int]:
        """Record what is queued inside the block into graphs, gates included. Collective.

        Yields the capture's number, equal on all ranks.
        """

    @abstractmethod
    def replay(self, graph: torch.cuda.CUDAGraph, number: int) -> None:
        """Queue a captured graph on the current stream. Collective: all replay one number."""


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream`` in a microsecond: a step asks for it a dozen times."""
    key = torch._C._cuda_getCurrentStream(device.index)
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = torch.cuda.current_stream(device)
    return found


def addresses(window: Window) -> torch.Tensor:
    """Where each rank's memory of a window starts: int64 ``[R]`` on the device, for kernels."""
    assert window.peers is not None
    starts = [peer.data_ptr() for peer in window.peers]
    return torch.tensor(starts, dtype=torch.int64, device=window.local.device)
