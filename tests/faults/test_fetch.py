"""A rank that stops while a replica is in transit is named by those who wait for it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from evenep import Engine, EPConfig, EPGroup, ExpertWeights, launch
from evenep.errors import LaunchError, PeerError, PeerTimeout
from evenep.launch import report

from ..cases import EAGER, Inputs, config


def _stop_in_transit(group: EPGroup, cfg: EPConfig, inputs: Inputs, victim: int) -> None:
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        step = engine.begin(*inputs.of(group.rank)[1:])
        report(("owners", sorted({f.owner for f in step.plan.fetches if f.rank == group.rank})))
        if group.rank == victim:
            arrived, transport = threading.Event(), engine.transport
            arrive, fetch = transport.arrive, transport.fetch

            def arrive_then_say(*args: object) -> None:
                arrive(*args)  # type: ignore[arg-type]
                arrived.set()

            def stop_then_fetch(*args: object) -> None:
                arrived.wait()
                time.sleep(0.6)  # the peers have this rank's rows by now
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0.5)  # a stop reaches the thread that asked for it a moment later
                fetch(*args)  # type: ignore[arg-type]

            transport.arrive = arrive_then_say  # type: ignore[method-assign,assignment]
            transport.fetch = stop_then_fetch  # type: ignore[method-assign,assignment]
        step.dispatch(inputs.of(group.rank)[0])
        step.fetch()
        try:
            step.compute()
            step.combine()
        except PeerError as error:
            report(("named", type(error), error.peer, error.phase))
            raise


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_owner_of_a_replica_that_stops_in_transit_is_named(victim: int) -> None:
    cfg = config(policy="exact", timeout_s=2.0)
    inputs = Inputs.skewed(cfg, [20, 20, 20])
    said: list[tuple[int, tuple[object, ...]]] = []
    with pytest.raises(LaunchError):
        launch(
            _stop_in_transit, 3, "collective", (cfg, inputs, victim),
            on_event=lambda rank, message: said.append((rank, message)), grace_s=6.0,
        )  # fmt: skip
    named = {rank: message[1:] for rank, message in said if message[0] == "named"}
    waits = {rank for rank, m in said if m[0] == "owners" and victim in list(m[1])}  # type: ignore[call-overload]
    assert set(named) == {0, 1, 2} - {victim}
    for rank, (kind, peer, phase) in named.items():
        assert (kind, peer) == (PeerTimeout, victim), f"rank {rank}: {named}"
        assert phase in ("fetch", "combine")
    assert all(named[rank][2] == "fetch" for rank in waits - {victim})
