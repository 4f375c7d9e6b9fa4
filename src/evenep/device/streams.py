"""Streams and events of the device that steps run on.

On a GPU they are torch's own. On a CPU, where Triton interprets the kernels, work is over when it
is queued: nothing to wait for, one stream, and no graphs.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..transport import current_stream


class Event(Protocol):
    """A joint in a stream; ``torch.cuda.Event`` says what each call means."""

    def record(self, stream: Any, /) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float: ...


class Stream(Protocol):
    """Work in order; ``torch.cuda.Stream`` says what each call means."""

    def wait_event(self, event: Any, /) -> None: ...

    def synchronize(self) -> None: ...


class Streams(ABC):
    """One device's.

    Attributes:
        identity: tells it from other devices of its host.
    """

    identity: str

    @abstractmethod
    def make(self) -> Stream:
        """A stream beside all others."""

    @abstractmethod
    def current(self) -> Stream:
        """The one that work is queued on."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """The stream is the current one inside the block."""

    @abstractmethod
    def event(self, *, timing: bool) -> Event:
        """One that isn't recorded yet."""

    @abstractmethod
    def capturing(self) -> bool:
        """What is queued now is recorded into a graph, not run."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for every stream of the device."""

    @abstractmethod
    def landing(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory that queued copies can write to without waiting."""


class Turn:
    """Memory that one stream uses at a time: another stream waits for the last user's event.

    Inside a capture nothing outside it can be waited for; ``Captured`` takes and gives the turns
    around a replay.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: tuple[Stream, Event] | None = None

    def take(self) -> None:
        """What the current stream does from now on comes after the last user."""
        if self._last is None or self._streams.capturing():
            return
        stream = self._streams.current()
        if stream != self._last[0]:
            stream.wait_event(self._last[1])

    def give(self, event: Event) -> None:
        """The current stream's use ends at an event it has recorded."""
        if not self._streams.capturing():
            self._last = self._streams.current(), event


def streams_of(device: torch.device) -> Streams:
    """The device's."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


class CudaStreams(Streams):
    """A GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.identity = str(torch.cuda.get_device_properties(device).uuid)

    def make(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def current(self) -> Stream:
        return current_stream(self._device)

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, torch.cuda.Stream)
        before = current_stream(self._device)
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    def event(self, *, timing: bool) -> Event:
        made: Event = torch.cuda.Event(enable_timing=timing)
        return made

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def landing(self, numbers: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numbers, dtype=dtype).pin_memory()


class HostStreams(Streams):
    """A CPU's, which does everything at once."""

    identity = "cpu"

    def make(self) -> Stream:
        return _Idle()

    def current(self) -> Stream:
        return _Idle()

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def event(self, *, timing: bool) -> Event:
        return _Moment()

    def capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Nothing is under way."""

    def landing(self, numbers: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numbers, dtype=dtype)


class _Idle:
    """A stream whose work is over."""

    def wait_event(self, event: Any, /) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """It is over."""


class _Moment:
    """An event that happens when it is recorded."""

    _at_s = 0.0

    def record(self, stream: Any, /) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, end: Any, /) -> float:
        assert isinstance(end, _Moment)
        return (end._at_s - self._at_s) * 1e3
