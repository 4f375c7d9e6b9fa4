"""When the parts of a step ran on the GPU, and how much of the fetch was exposed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..observe import StepRecord
from .streams import Event, Streams

_STAGES = {  # stage of the record: from mark to mark
    "plan": ("begin", "plan"),
    "dispatch": ("plan", "arrived"),
    "combine": ("computed", "combined"),
}


@dataclass(slots=True)
class Timeline:
    """Events at the joints of a step. While a graph is captured they order, but don't time."""

    streams: Streams
    timing: bool
    events: dict[str, Event] = field(default_factory=dict)

    @classmethod
    def start(cls, streams: Streams) -> Timeline:
        """A timeline that begins now, on the current stream."""
        made = cls(streams, timing=not streams.capturing())
        made.mark("begin")
        return made

    def mark(self, name: str) -> None:
        """This joint is reached, on the current stream."""
        event = self.streams.event(timing=self.timing)
        event.record()
        self.events[name] = event

    def event(self, name: str) -> Event:
        """The event of a joint, to wait for."""
        return self.events[name]

    def wait(self) -> None:
        """Until the GPU has passed every joint so far."""
        if self.timing:
            for event in self.events.values():
                event.synchronize()

    def fill(self, record: StepRecord) -> None:
        """Seconds per stage. ``fetch`` is what slot groups had to wait for beyond home groups."""
        if not self.timing:
            return
        for stage, (first, last) in _STAGES.items():
            record.stage_s[stage] = self._seconds(first, last)
        computed = self._seconds("arrived", "computed")
        if "fetched" in self.events and "home" in self.events:
            exposed = max(0.0, self._seconds("home", "fetched"))
            record.stage_s["fetch"] = exposed
            record.fetch_busy_s = max(0.0, self._seconds("plan", "fetched"))
            computed -= exposed
        record.stage_s["compute"] = computed

    def _seconds(self, first: str, last: str) -> float:
        if first not in self.events or last not in self.events:
            return 0.0
        return self.events[first].elapsed_time(self.events[last]) / 1e3
