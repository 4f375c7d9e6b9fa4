"""Real ranks on one GPU stop in every way at every place; the survivors name them and recover."""

from __future__ import annotations

import pytest

from tests.faults.scenes import (
    PLACES,
    Fault,
    lose_a_rank,
    recover_from,
    require_named,
    watch,
)

pytestmark = pytest.mark.gpu
DEADLINE_S, MARGIN_S = 4.0, 3.0  # kernels may compile in the first step
AROUND = [Fault("", place, (i + 1) % 3) for i, place in enumerate(PLACES)]


def faults_of(kind: str) -> list[Fault]:
    return [Fault(kind, f.place, f.victim) for f in AROUND]


@pytest.mark.parametrize("transport", ["threads@cuda", "symm@cuda"])
@pytest.mark.parametrize("kind", ["raise", "slow"])
def test_every_place_is_named_and_recovered_from(transport: str, kind: str) -> None:
    faults = faults_of(kind)
    done, seen = watch(recover_from, transport, faults, DEADLINE_S)
    assert not done.failures, done.failures
    require_named(done, seen, faults, DEADLINE_S + MARGIN_S, queued=transport == "symm@cuda")


def test_a_stopped_process_is_named_and_recovered_from() -> None:
    faults = faults_of("stop")
    done, seen = watch(recover_from, "symm@cuda", faults, DEADLINE_S)
    assert not done.failures, done.failures
    require_named(done, seen, faults, DEADLINE_S + MARGIN_S, queued=True)


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_process_is_named_at_once(place: str) -> None:
    fault = Fault("kill", place, 1)
    done, seen = watch(lose_a_rank, "symm@cuda", fault, 10.0)
    require_named(done, seen, [fault], 5.0, queued=True)
