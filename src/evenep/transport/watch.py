"""Looks after waits that streams carry out: nobody else would notice one that never ends.

Every few milliseconds the watch copies this rank's pad to the host, on a stream of its own, which
works while others are stuck. A gate where this rank has signalled and a peer has not is being
waited for. The pad alone can't tell one long wait from many short ones, so the watch also looks at
how many gates this rank has queued and at whether the pad changed in between.

Before the first wait is released, ``tell`` leaves word of the failure: a peer that is let through
by what a released stream signals then finds that word, and doesn't take its result for right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import EvenEPError, PeerError, TransportError, explain
from .base import Tag
from .stream_waits import own_stream, relax_capture

_LOOK_S, _RELEASE_S = 0.02, 0.002

Judge = Callable[[Tag, Sequence[int], float], PeerError | None]
"""``(tag, missing peers, seconds waited)`` to the error, None while there is hope."""


class Watch:
    """One rank's watch.

    Args:
        pad_LPR: int32 words of this rank on the device: lanes, phases, ranks. 1: signalled.
        phases: their names.
        rank: this rank.
        judge: decides what a wait that doesn't end means.
        tell: leaves word of it where peers look; never waits.
    """

    def __init__(
        self,
        pad_LPR: Tensor,
        phases: Sequence[str],
        rank: int,
        judge: Judge,
        tell: Callable[[EvenEPError], None],
    ) -> None:
        self._pad, self._phases, self._rank, self._judge = pad_LPR, phases, rank, judge
        self._tell, self._last = tell, Tag("counts")
        self._stream = own_stream(pad_LPR.device)
        self._seen = torch.zeros_like(pad_LPR, device="cpu").pin_memory()
        self._latest: dict[tuple[int, str], Tag] = {}  # by lane and phase: what was queued last
        self._progress = 0
        self._counters: list[Tensor] = []
        self._found: EvenEPError | None = None
        self._releasing, self._stopped = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # one look or release at a time
        self._thread = threading.Thread(target=self._run, name="evenep-watch", daemon=True)
        self._thread.start()

    def expect(self, tag: Tag, lane: int) -> None:
        """A gate is about to be queued."""
        self._latest[lane, tag.phase] = self._last = tag
        self._progress += 1

    def follow(self, counter_1: Tensor) -> None:
        """An int32 ``[1]`` on the device whose changes mean progress."""
        with self._lock:
            self._counters.append(counter_1)

    def trouble(self) -> EvenEPError | None:
        """The first error found since the last ``settle``."""
        return self._found

    @property
    def last(self) -> Tag:
        """The gate queued last."""
        return self._last

    def found(self, error: EvenEPError) -> None:
        """Take note of an error, tell the peers, and let every wait end. The first one counts."""
        if self._found is None:
            self._found = error
            self._tell(error)
        self._releasing.set()

    def release(self) -> None:
        """Let every wait of this rank end from now on, whoever is missing."""
        self._releasing.set()

    def settle(self) -> None:
        """Clear the pad and watch again. Nothing may be queued."""
        with self._lock:
            self._releasing.clear()
            self._found = None
            self._latest.clear()
            self._fill(0)

    def stop(self) -> None:
        """End the watch; calling it twice is fine."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ---- inside

    def _run(self) -> None:
        torch.cuda.set_device(self._pad.device)
        relax_capture()
        since, mark = time.monotonic(), None
        while not self._stopped.wait(_RELEASE_S if self._releasing.is_set() else _LOOK_S):
            try:
                with self._lock:
                    if self._releasing.is_set():
                        self._fill(1)
                        continue
                    waits = self._waits()
                    now = time.monotonic()
                    if (state := (self._steps(), tuple(waits))) != mark:
                        since, mark = now, state
                    error = self._first_error(waits, now - since)
                    if error is not None:
                        # A peer may have signalled and left in good order since the pad was read.
                        error = self._first_error(self._waits(), now - since)
                    if error is not None:
                        self.found(error)
            except Exception as error:  # without a watch, waits would never end
                self.found(
                    TransportError(
                        explain(
                            f"the watch can't look: {type(error).__name__}: {error}",
                            where=f"rank {self._rank}, transport 'symm'",
                        )
                    )
                )

    def _waits(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """``(lane, phase, missing peers)`` of each gate where this rank waits."""
        with torch.cuda.stream(self._stream):
            self._seen.copy_(self._pad, non_blocking=True)
        self._stream.synchronize()
        found = []
        for lane, phase in (self._seen[:, :, self._rank] == 1).nonzero().tolist():
            missing = (self._seen[lane, phase] == 0).nonzero().flatten().tolist()
            if missing:
                found.append((lane, phase, tuple(missing)))
        return found

    def _steps(self) -> int:
        """Steps so far by the device's count; by the host's where nothing is followed."""
        if not self._counters:
            return self._progress
        with torch.cuda.stream(self._stream):
            return sum(int(counter) for counter in self._counters)

    def _first_error(
        self, waits: Sequence[tuple[int, int, tuple[int, ...]]], waited_s: float
    ) -> PeerError | None:
        for lane, phase, missing in waits:
            name = self._phases[phase]
            error = self._judge(self._latest.get((lane, name), Tag(name)), missing, waited_s)
            if error is not None:
                return error
        return None

    def _fill(self, value: int) -> None:
        with torch.cuda.stream(self._stream):
            self._pad.fill_(value)
        self._stream.synchronize()
