"""Memory that peers can see, and the step's few waits. ``base`` is the contract."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Put, Tag, Transfer, Transport, Window, WindowSpec
from .collective import CollectiveTransport
from .cuda_threads import CudaThreadsTransport
from .gpu import DeviceTransport, addresses, current_stream
from .meeting import Meeting
from .shm import ShmTransport
from .symm import SymmTransport
from .threads import ThreadsTransport

TRANSPORTS = {t.name: t for t in (ThreadsTransport, ShmTransport, CollectiveTransport)}
"""By name, for windows in host memory."""

DEVICE_TRANSPORTS = {t.name: t for t in (CudaThreadsTransport, SymmTransport)}
"""By name, for windows in GPU memory."""

BY_DEVICE: dict[str, Mapping[str, type[ThreadsTransport | ShmTransport | CollectiveTransport]]] = {
    "cpu": TRANSPORTS,
    "cuda": DEVICE_TRANSPORTS,
}

__all__ = [
    "BY_DEVICE",
    "DEVICE_TRANSPORTS",
    "TRANSPORTS",
    "DeviceTransport",
    "Meeting",
    "Put",
    "Tag",
    "Transfer",
    "Transport",
    "Window",
    "WindowSpec",
    "addresses",
    "current_stream",
]
