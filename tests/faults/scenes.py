"""One rank fails in a chosen way at a chosen place of a step; every survivor says what it saw."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from evenep import Engine, EPGroup
from evenep.errors import PeerDied, PeerError
from evenep.launch import report
from tests import harness

RANKS = 3
LAYER = 1
KINDS = {"kill": "PeerDied", "stop": "PeerTimeout", "slow": "PeerTimeout", "raise": "PeerFailed"}
# Where the victim stands when it fails -> the wait in which the survivors notice.
NOTICED = {
    "counts": "counts",
    "dispatch": "dispatch",
    "fetch": "dispatch",
    "compute": "dispatch",
    "combine": "combine",
}
PLACES = tuple(NOTICED)
OVERSLEEP_S = 0.4  # how much longer than the deadline a slow or stopped rank is away


class Boom(Exception):
    """An ordinary exception of the user's."""


@dataclass(frozen=True)
class Fault:
    """``victim`` fails by ``kind`` just before ``place``; ``straggler`` gets there late."""

    kind: str
    place: str
    victim: int
    straggler: int | None = None
    late_s: float = 0.3


@dataclass(frozen=True)
class Sighting:
    """What one survivor saw of a fault."""

    fault: Fault
    rank: int
    error: str
    said_rank: int
    peer: int
    phase: str
    layer: int
    epochs: tuple[int, int]  # said, expected
    text: str
    after_s: float  # since the fault, or since this rank got there if that was later


@dataclass(frozen=True)
class Struck:
    """The victim is about to fail."""

    fault: Fault
    pid: int
    at: float


class Waker:
    """In the launcher: wakes stopped ranks ``after_s`` later. Use as ``hear``."""

    def __init__(self, after_s: float) -> None:
        self.after_s, self.timers = after_s, list[threading.Timer]()

    def __call__(self, rank: int, message: Any) -> None:
        if isinstance(message, Struck) and message.fault.kind == "stop":
            timer = threading.Timer(self.after_s, os.kill, (message.pid, signal.SIGCONT))
            timer.start()
            self.timers.append(timer)


def strike(fault: Fault, timeout_s: float) -> None:
    """Fail."""
    report(Struck(fault, os.getpid(), time.monotonic()))
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "slow":
        time.sleep(timeout_s + OVERSLEEP_S)
    else:
        raise Boom(f"in {fault.place}")


def meet(engine: Engine, fault: Fault, number: int) -> PeerError | None:
    """Take part in a step with a fault; survivors report a ``Sighting`` and return the error."""
    me, ready = engine.group.rank, [0.0]
    expected_epoch = engine.records[-1].epoch + 1

    def before(place: str) -> None:
        if place == fault.place and me == fault.victim:
            strike(fault, engine.cfg.timeout_s)
        if place == fault.place and me == fault.straggler:
            time.sleep(fault.late_s)
        if place in (fault.place, NOTICED[fault.place]):
            ready[0] = time.monotonic()

    try:
        got = harness.walk(engine, number, LAYER, before)
    except PeerError as error:
        at = time.monotonic()
        if me != fault.victim:
            see(fault, me, error, expected_epoch, ready[0], at)
        return error
    except Boom as error:
        engine.poison(error)
        return None
    assert me == fault.victim, "a survivor's step went through"
    want = harness.answer(me, number, LAYER, engine.group.device)
    assert torch.equal(got, want), "the victim's own step went through, and wrong"
    return None


def see(
    fault: Fault, me: int, error: PeerError, expected_epoch: int, ready: float, at: float
) -> None:
    report(
        Sighting(
            fault,
            me,
            type(error).__name__,
            error.rank,
            error.peer,
            error.phase,
            error.layer,
            (error.epoch, expected_epoch),
            str(error),
            at - ready,
        )
    )


def recover_from(group: EPGroup, faults: list[Fault], timeout_s: float) -> None:
    """Good step, fault, reset; again for each fault; then a last good step."""
    with harness.engine(group, timeout_s=timeout_s) as engine:
        number = 0
        for fault in faults:
            harness.require_right(engine, number, LAYER)
            meet(engine, fault, number + 1)
            engine.reset()
            number += 2
        harness.require_right(engine, number, LAYER)


def lose_a_rank(group: EPGroup, fault: Fault, timeout_s: float) -> None:
    """A step with a fatal fault; then survivors find that reset can't help, and close."""
    with harness.engine(group, timeout_s=timeout_s) as engine:
        harness.require_right(engine, 0, LAYER)
        assert meet(engine, fault, 1) is not None
        start = time.monotonic()
        try:
            engine.reset()
        except PeerError as error:
            report(("reset", type(error), error.peer, time.monotonic() - start))
        else:
            raise AssertionError("reset without a dead rank went through")


def watch(
    fn: Callable[..., Any], transport: str, faults: Any, timeout_s: float
) -> tuple[harness.Run, list[Sighting]]:
    """Launch a scene; the run and the survivors' sightings."""
    name, _, device = transport.partition("@")
    if name == "threads":  # known before the clocks of ranks in this process run
        for number in range(2 * len(faults) + 1):
            for rank in range(RANKS):
                harness.answer(rank, number, LAYER, device or "cpu")
    waker = Waker(timeout_s + OVERSLEEP_S)
    done = harness.run(fn, RANKS, transport, faults, timeout_s, hear=waker, timeout_s=100)
    for timer in waker.timers:
        timer.join()
    return done, [m for _, m in done.said if isinstance(m, Sighting)]


WAITS = ("counts", "dispatch", "combine")


def require_named(
    done: harness.Run,
    seen: list[Sighting],
    faults: list[Fault],
    within_s: float,
    *,
    queued: bool = False,
) -> None:
    """Every survivor of every fault named the right rank, place and cause, in time.

    ``queued``: the victim's host was ahead of its GPU, so its peers may have missed it in an
    earlier wait of the step than the one where its host stood.
    """
    struck = {m.fault: m.at for _, m in done.said if isinstance(m, Struck)}
    assert set(struck) == set(faults), (struck, done.failures)
    for fault in faults:
        witnesses = sorted(s.rank for s in seen if s.fault == fault)
        assert witnesses == [r for r in range(RANKS) if r != fault.victim], (fault, done.failures)
    for s in seen:
        assert s.error == KINDS[s.fault.kind], s
        assert (s.said_rank, s.peer, s.layer) == (s.rank, s.fault.victim, LAYER), s
        noticed = NOTICED[s.fault.place]
        assert s.phase in (WAITS[: WAITS.index(noticed) + 1] if queued else (noticed,)), s
        assert s.epochs[0] == s.epochs[1], s
        assert s.after_s < within_s, s


def require_dead_at_reset(
    done: harness.Run,
    fault: Fault,
    within_s: float,
    kinds: tuple[type[PeerError], ...] = (PeerDied,),
) -> None:
    """Every survivor's reset named the dead rank."""
    said = [m for _, m in done.said if isinstance(m, tuple) and m[0] == "reset"]
    assert len(said) == RANKS - 1, (said, done.failures)
    for _, kind, peer, seconds in said:
        assert issubclass(kind, kinds), said
        assert peer == fault.victim, said
        assert seconds < within_s, said
