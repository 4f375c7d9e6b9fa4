"""What the engine asks of a transport whose windows are GPU memory."""

from __future__ import annotations

from abc import abstractmethod

import torch

from .base import Tag, Transport, Window


class DeviceTransport(Transport):
    """Windows are GPU memory of every rank, reached by kernels through plain addresses.

    Attributes:
        captures: how a CUDA graph of a step is made: ``"together"`` (one graph holds all ranks of
            this process) or ``"each"`` (one graph per rank; waits are inside).
    """

    captures: str

    @abstractmethod
    def gate(self, tag: Tag, lane: int) -> None:
        """Queue a wait on the current stream: what follows runs after what every rank has queued
        before its own call. The host doesn't wait for a GPU.

        Raises:
            PeerError: a peer is known to be gone, late or failed.
        """


def addresses(window: Window) -> torch.Tensor:
    """Where each rank's memory of a window starts: int64 ``[R]`` on the device, for kernels."""
    assert window.peers is not None
    starts = [peer.data_ptr() for peer in window.peers]
    return torch.tensor(starts, dtype=torch.int64, device=window.local.device)
