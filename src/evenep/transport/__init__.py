"""Memory that peers can see, and the step's few waits. ``base`` is the contract."""

from __future__ import annotations

from .base import Put, Tag, Transfer, Transport, Window, WindowSpec
from .collective import CollectiveTransport
from .meeting import Meeting
from .shm import ShmTransport
from .threads import ThreadsTransport

TRANSPORTS = {t.name: t for t in (ThreadsTransport, ShmTransport, CollectiveTransport)}

__all__ = ["TRANSPORTS", "Meeting", "Put", "Tag", "Transfer", "Transport", "Window", "WindowSpec"]
