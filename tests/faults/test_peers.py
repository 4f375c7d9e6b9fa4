"""Kill, stop, slow and raise, in each rank position, at each place of a step."""

from __future__ import annotations

import pytest

from evenep.errors import PeerDied, PeerTimeout
from tests import harness

from .scenes import (
    PLACES,
    RANKS,
    Fault,
    lose_a_rank,
    recover_from,
    require_dead_at_reset,
    require_named,
    watch,
)

PROMPT_S = 1.0
DEADLINE_S, MARGIN_S = 1.2, 1.0
WORD_S = 3.0  # a broken connection waits this long for the peer's word of why

EVERYWHERE = [(place, victim) for place in PLACES for victim in range(RANKS)]
AROUND = [(place, i % RANKS) for i, place in enumerate(PLACES)]


def faults_of(kind: str, spots: list[tuple[str, int]], *, straggle: bool = False) -> list[Fault]:
    return [
        Fault(kind, place, victim, (victim + 1 + i % 2) % RANKS if straggle else None)
        for i, (place, victim) in enumerate(spots)
    ]


def require_recovery(
    transport: str, faults: list[Fault], within_s: float, deadline_s: float
) -> None:
    with harness.nothing_left_behind():
        done, seen = watch(recover_from, transport, faults, deadline_s)
        assert not done.failures, done.failures
        require_named(done, seen, faults, within_s)


@pytest.mark.parametrize("kind", ["stop", "slow"])
@pytest.mark.parametrize(
    "spots",
    [
        pytest.param(AROUND, id="around"),
        pytest.param(EVERYWHERE, id="everywhere", marks=pytest.mark.slow),
    ],
)
def test_an_absent_process_is_named_and_comes_back(kind: str, spots: list[tuple[str, int]]) -> None:
    faults = faults_of(kind, spots)
    require_recovery("shm", faults, DEADLINE_S + MARGIN_S, DEADLINE_S)


@pytest.mark.parametrize("kind", ["stop", "slow"])
def test_an_absent_rank_of_a_collective_is_named_and_comes_back(kind: str) -> None:
    faults = faults_of(kind, AROUND)
    require_recovery("collective", faults, DEADLINE_S + MARGIN_S, DEADLINE_S)


def test_a_slow_thread_is_named_and_comes_back() -> None:
    require_recovery("threads", faults_of("slow", AROUND), DEADLINE_S + MARGIN_S, DEADLINE_S)


@pytest.mark.parametrize("straggle", [False, True])
@pytest.mark.parametrize("transport", ["threads", "shm"])
def test_a_rank_that_raises_is_named_at_once(transport: str, straggle: bool) -> None:
    faults = faults_of("raise", EVERYWHERE, straggle=straggle)
    require_recovery(transport, faults, PROMPT_S, 10.0)


@pytest.mark.parametrize("straggle", [False, True])
def test_a_rank_of_a_collective_that_raises_is_named(straggle: bool) -> None:
    faults = faults_of("raise", EVERYWHERE if straggle else AROUND, straggle=straggle)
    require_recovery("collective", faults, WORD_S, 10.0)


@pytest.mark.parametrize(("place", "victim"), EVERYWHERE)
def test_a_killed_process_is_named_at_once_and_reset_refuses(place: str, victim: int) -> None:
    fault = Fault("kill", place, victim, (victim + 1) % RANKS)
    with harness.nothing_left_behind():
        done, seen = watch(lose_a_rank, "shm", fault, 10.0)
    require_named(done, seen, [fault], PROMPT_S)
    require_dead_at_reset(done, fault, PROMPT_S)
    assert list(done.failures) == [victim]
    assert done.seconds < 5


@pytest.mark.parametrize(("place", "victim"), AROUND)
def test_a_killed_rank_of_a_collective_is_named(place: str, victim: int) -> None:
    fault = Fault("kill", place, victim, (victim + 1) % RANKS)
    with harness.nothing_left_behind():
        done, seen = watch(lose_a_rank, "collective", fault, 2.0)
    require_named(done, seen, [fault], WORD_S)
    require_dead_at_reset(done, fault, 2.0 + MARGIN_S, (PeerDied, PeerTimeout))
    assert list(done.failures) == [victim]
