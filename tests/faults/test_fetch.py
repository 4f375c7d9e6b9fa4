"""A rank that stops while a replica is in transit is named by those who wait for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

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


@pytest.mark.parametrize("victim", [0, *(pytest.param(r, marks=pytest.mark.slow) for r in (1, 2))])
def test_a_rank_that_stops_in_transit_is_named_by_all_others(victim: int) -> None:
    cfg = config(policy="exact", timeout_s=2.0)
    inputs = Inputs.skewed(cfg, [20, 20, 20])  # rank 0 is home to what is hot
    said: list[tuple[int, tuple[Any, ...]]] = []
    with pytest.raises(LaunchError):
        launch(
            _stop_in_transit, 3, "collective", (cfg, inputs, victim),
            on_event=lambda rank, message: said.append((rank, message)), grace_s=6.0,
        )  # fmt: skip
    owners = {rank: message[1] for rank, message in said if message[0] == "owners"}
    assert owners == {0: [], 1: [0], 2: [0]}
    named = {rank: message[1:3] for rank, message in said if message[0] == "named"}
    assert named == dict.fromkeys({0, 1, 2} - {victim}, (PeerTimeout, victim))
