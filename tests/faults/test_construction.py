"""Failures and disagreements while engines are being built and closed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from evenep import Engine, EPGroup, ExpertWeights
from evenep.errors import (
    AgreementError,
    ConfigError,
    PeerDied,
    PeerError,
    PeerFailed,
    PeerTimeout,
)
from evenep.launch import report
from evenep.transport import threads
from tests import harness
from tests.harness import Footprint, every, settled_growth

from .scenes import Boom

RANKS = 3
NAMES = {"kill": (PeerDied, PeerTimeout), "absent": (PeerTimeout,), "raise": (PeerFailed,)}


class Failing(ExpertWeights):
    """Weights that fail while rank ``victim`` loads them."""

    def __init__(self, inner: ExpertWeights, kind: str) -> None:
        self.cfg, self.layers, self.kind = inner.cfg, inner.layers, kind

    def load(self, *args: Any, **options: Any) -> None:
        fail(self.kind)


def fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise Boom("while building")
    time.sleep(2.0)  # absent: longer than everyone's deadline


def build(group: EPGroup, kind: str, where: str, victim: int) -> None:
    """Fail before the engine is built, or in the middle of it."""
    start = time.monotonic()
    cfg = harness.config(timeout_s=1.2, load_timeout_s=1.2)
    experts = ExpertWeights.random(cfg, harness.LAYERS)
    try:
        if group.rank == victim and where == "before":
            fail(kind)
        if group.rank == victim:
            experts = Failing(experts, kind)
        Engine(cfg, group, experts)
    except PeerError as error:
        report((type(error), error.rank, error.peer, error.phase, time.monotonic() - start))


CASES = [
    *[("shm", "kill", "loading", victim) for victim in range(RANKS)],
    *[("shm", "raise", "loading", victim) for victim in range(RANKS)],
    ("shm", "kill", "before", 0),
    ("shm", "raise", "before", 2),
    ("shm", "absent", "before", 1),
    ("shm", "absent", "loading", 2),
    ("collective", "kill", "before", 2),
    ("collective", "kill", "loading", 0),
    ("collective", "raise", "before", 0),
    ("collective", "raise", "loading", 1),
    ("collective", "absent", "loading", 2),
    ("threads", "raise", "before", 0),
    ("threads", "raise", "loading", 2),
    ("threads", "absent", "loading", 1),
]


@pytest.mark.parametrize(("transport", "kind", "where", "victim"), CASES)
def test_a_rank_that_fails_while_building_is_named(
    transport: str, kind: str, where: str, victim: int
) -> None:
    with harness.nothing_left_behind():
        done = harness.run(build, RANKS, transport, kind, where, victim, timeout_s=20)
    prompt = kind == "raise" or (kind, where, transport) == ("kill", "loading", "shm")
    for rank in range(RANKS):
        if rank == victim:
            continue
        assert len(done.by(rank)) == 1, (rank, done)
        ((error, said, peer, phase, seconds),) = done.by(rank)
        assert issubclass(error, NAMES[kind]), done.said
        assert (said, peer, phase) == (rank, victim, "construct"), done.said
        assert seconds < (1.2 if prompt else 3.0), done.said
    if (kind, where, transport) == ("kill", "loading", "shm"):
        assert all(m[0] is PeerDied for _, m in done.said)


def fail_in_connect(group: EPGroup) -> None:
    """Rank 1 can't make its memory, and its caller lives on."""
    from evenep.transport import shm

    start = time.monotonic()
    if group.rank == 1:

        def no_memory(nbytes: int) -> Any:
            raise OSError("no memory")

        shm._create = no_memory
    try:
        harness.engine(group, timeout_s=5.0)
    except PeerError as error:
        report((type(error), error.peer, time.monotonic() - start))
    except OSError:
        time.sleep(2.0)


def test_a_rank_that_cannot_share_memory_tells_its_peers() -> None:
    done = harness.run(fail_in_connect, RANKS, "shm", timeout_s=20)
    for rank in (0, 2):
        ((error, peer, seconds),) = done.by(rank)
        assert issubclass(error, PeerFailed), done.said
        assert peer == 1
        assert seconds < 1.5


# ---- agreement


def disagree(group: EPGroup, odd: int, what: str) -> None:
    changes: dict[str, Any] = {"timeout_s": 3.0}
    layers, placement = harness.LAYERS, None
    if group.rank == odd:
        if what == "experts":
            changes["num_experts"] = 60
        elif what == "in_flight":
            changes["in_flight"] = 3
        elif what == "width":
            changes["hidden_size"] = 64
        elif what == "top_k":
            changes["top_k"] = 1
        elif what == "layers":
            layers = 1
        elif what == "placement":
            placement = [2, 2, 1, 1, 0, 0]
    cfg = harness.config(**changes)
    Engine(cfg, group, ExpertWeights.random(cfg, layers), placement=placement).close()


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", ["top_k", "layers", "placement", "width", "experts", "in_flight"])
@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_ranks_that_come_with_different_choices_all_hear_of_it(
    transport: str, what: str, odd: int
) -> None:
    done = harness.run(disagree, RANKS, transport, odd, what, timeout_s=20)
    every([type(done.failures.get(r)) for r in range(RANKS)], AgreementError)
    assert done.seconds < 3.0, done.seconds


def wrong_size(group: EPGroup) -> None:
    cfg = harness.config(ranks=group.size + 1)
    Engine(cfg, group, ExpertWeights.random(cfg))


def wrong_size_of_one(group: EPGroup) -> None:
    cfg = harness.config(ranks=group.size + (group.rank == 1), timeout_s=4.0)
    Engine(cfg, group, ExpertWeights.random(cfg))


@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_a_config_for_another_number_of_ranks_is_refused(transport: str) -> None:
    done = harness.run(wrong_size, RANKS, transport)
    every([type(done.failures.get(r)) for r in range(RANKS)], ConfigError)
    done = harness.run(wrong_size_of_one, RANKS, transport)
    assert type(done.failures[1]) is ConfigError
    for rank in (0, 2):
        error = done.failures[rank]
        assert isinstance(error, PeerFailed), error
        assert error.peer == 1
    assert done.seconds < 2.0


# ---- leaks


def build_engines(group: EPGroup, times: int) -> dict[str, int]:
    def once() -> None:
        with harness.engine(group) as engine:
            harness.walk(engine, 1, 0)

    once()
    before = Footprint.now()
    for _ in range(times):
        once()
    return settled_growth(before)


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_twenty_engines_built_and_closed_leak_nothing(transport: str) -> None:
    done = harness.run(build_engines, 2, transport, 20, timeout_s=100)
    assert not done.failures, done.failures
    every(done.results, {})


def test_a_failed_construction_keeps_no_memory_of_threads() -> None:
    harness.run(build, RANKS, "threads", "raise", "loading", 1, timeout_s=20)
    harness.run(build, RANKS, "threads", "raise", "before", 1, timeout_s=20)
    assert not threads._shared
    assert not threads._threads


def nest(group: EPGroup) -> None:
    """While this group's engine is being built, a group of one builds another here."""
    for number in range(3):
        alone = EPGroup(dist.HashStore(), 0, 1, transport="threads")
        with harness.engine(group) as engine, harness.engine(alone, slots_per_rank=0) as solo:
            harness.require_right(engine, number)
            x_TH, ids_TK, weights_TK = harness.batch(0, number)
            solo(x_TH, ids_TK, weights_TK)


def test_groups_of_one_process_do_not_meet_by_accident() -> None:
    done = harness.run(nest, RANKS, "threads", timeout_s=30)
    assert not done.failures, done.failures
