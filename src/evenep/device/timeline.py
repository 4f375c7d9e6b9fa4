"""When the parts of a step ran on the GPU, and how much of the fetch was exposed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..observe import StepRecord
from .streams import Event, Stream, Streams

_STAGES = {  # stage of the record: from mark to mark
    "plan": ("begin", "plan"),
    "dispatch": ("plan", "arrived"),
    "combine": ("computed", "combined"),
}

TIMED = 64
"""Steps whose times can still be asked for: making events costs more than recording them."""


@dataclass(slots=True)
class _Events:
    """Events that steps take turns to use."""

    by_name: dict[str, Event] = field(default_factory=dict)
    user: int = -1


@dataclass(slots=True)
class Timeline:
    """Events at the joints of one step. While a graph is captured they order, but don't time."""

    streams: Streams
    timing: bool
    number: int
    events: _Events
    reached: list[str] = field(default_factory=list)

    def mark(self, name: str, stream: Stream | None = None) -> None:
        """This joint is reached, on the current stream or another."""
        event = self.events.by_name.get(name)
        if event is None:
            event = self.events.by_name[name] = self.streams.event(timing=self.timing)
        event.record(self.streams.current() if stream is None else stream)
        self.reached.append(name)

    def event(self, name: str) -> Event:
        """The event of a joint, to wait for."""
        return self.events.by_name[name]

    def wait(self) -> None:
        """Until the GPU has passed every joint so far."""
        if self._known:
            for name in self.reached:
                self.events.by_name[name].synchronize()
        else:  # its events belong to a later step by now, or to a graph
            self.streams.current().synchronize()

    def fill(self, record: StepRecord) -> None:
        """Seconds per stage. ``fetch`` is what slot groups had to wait for beyond home groups."""
        if not self._known:
            return
        for stage, (first, last) in _STAGES.items():
            record.stage_s[stage] = self._seconds(first, last)
        computed = self._seconds("arrived", "computed")
        if "fetched" in self.reached and "home" in self.reached:
            exposed = max(0.0, self._seconds("home", "fetched"))
            record.stage_s["fetch"] = exposed
            record.fetch_busy_s = max(0.0, self._seconds("plan", "fetched"))
            computed -= exposed
        record.stage_s["compute"] = computed

    @property
    def _known(self) -> bool:
        return self.timing and self.events.user == self.number

    def _seconds(self, first: str, last: str) -> float:
        if first not in self.reached or last not in self.reached:
            return 0.0
        by_name = self.events.by_name
        milliseconds: float = by_name[first].elapsed_time(by_name[last])
        return milliseconds / 1e3


class Timelines:
    """Makes the timelines of one machine's steps."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._ring = [_Events() for _ in range(TIMED)]
        self._made = 0

    def start(self) -> Timeline:
        """A timeline that begins now, on the current stream."""
        self._made += 1
        timing = not self._streams.capturing()
        events = self._ring[self._made % TIMED] if timing else _Events()
        events.user = self._made
        made = Timeline(self._streams, timing, self._made, events)
        made.mark("begin")
        return made
