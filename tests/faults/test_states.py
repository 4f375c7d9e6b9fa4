"""What an engine allows in each of its states, and what it does to its peers meanwhile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evenep import Engine, EPGroup
from evenep.errors import (
    AgreementError,
    InputError,
    PeerDied,
    PeerError,
    PeerFailed,
    PeerTimeout,
    PoisonedError,
    StateError,
)
from evenep.launch import report
from tests import harness

RANKS = 3
everywhere = pytest.mark.parametrize("transport", ["threads", "shm", "collective"])


def go(fn: Callable[..., None], transport: str, *args: object) -> harness.Run:
    for number in range(8 if transport == "threads" else 0):
        for rank in range(RANKS):
            harness.answer(rank, number, 1)
    with harness.nothing_left_behind():
        return harness.run(fn, RANKS, transport, *args, timeout_s=40)


def require_fine(fn: Callable[..., None], transport: str, *args: object) -> None:
    done = go(fn, transport, *args)
    assert not done.failures, done.failures


# ---- poison and reset


def poison_then_reset(group: EPGroup) -> None:
    with harness.engine(group, in_flight=2) as engine:
        x_TH, ids_TK, weights_TK = harness.batch(group.rank, 0)
        open_step = engine.begin(ids_TK, weights_TK, 1)
        engine.poison(RuntimeError("mine"))
        verbs: list[Callable[[], object]] = [
            lambda: engine(x_TH, ids_TK, weights_TK, layer=1),
            lambda: engine.begin(ids_TK, weights_TK, 1),
            lambda: engine.update_weights(0, None),  # type: ignore[arg-type]
            lambda: open_step.dispatch(x_TH),
            open_step.fetch,
            open_step.compute,
            open_step.combine,
        ]
        for verb in verbs:
            with pytest.raises(PoisonedError, match="mine"):
                verb()
        engine.reset()
        for number in range(3):
            harness.require_right(engine, number)
        with pytest.raises(StateError):
            open_step.dispatch(x_TH)  # lost in the reset: its lane belongs to others now
        harness.require_right(engine, 3)
    with pytest.raises(StateError, match="closed"):
        engine.reset()


@everywhere
def test_a_poisoned_engine_refuses_every_verb_until_reset(transport: str) -> None:
    require_fine(poison_then_reset, transport)


def reset_unevenly(group: EPGroup, tries_R: list[int], pause_s: float) -> None:
    """Ranks give up on reset a different number of times before all of them mean it."""
    with harness.engine(group, timeout_s=0.4) as engine:
        harness.require_right(engine, 0)
        engine.poison(RuntimeError("mine"))
        for _ in range(tries_R[group.rank]):
            with pytest.raises(PeerError) as caught:
                engine.reset()
            assert isinstance(caught.value, PeerTimeout), caught.value
            with pytest.raises(PoisonedError):
                harness.walk(engine, 1, 1)
            time.sleep(pause_s)
        if not tries_R[group.rank]:
            time.sleep(max(tries_R) * (0.4 + pause_s) - pause_s / 2)
        engine.transport.timeout_s = engine.transport._meeting.timeout_s = 5.0  # type: ignore[attr-defined]
        deadline = time.monotonic() + 8
        while True:
            try:
                engine.reset()
                break
            except PeerError:
                assert time.monotonic() < deadline
        for number in range(1, 4):
            harness.require_right(engine, number)


@everywhere
@pytest.mark.parametrize("tries", [[1, 0, 0], [2, 2, 0], [0, 3, 0], [1, 2, 0]])
def test_resets_of_different_number_still_meet(transport: str, tries: list[int]) -> None:
    require_fine(reset_unevenly, transport, tries, 0.4)


def reset_unprovoked(group: EPGroup) -> None:
    with harness.engine(group, timeout_s=5.0) as engine:
        harness.require_right(engine, 0)
        if group.rank == 1:
            engine.reset()
        else:
            start = time.monotonic()
            with pytest.raises(PeerFailed) as caught:
                harness.walk(engine, 1, 1)
            assert caught.value.peer == 1, caught.value
            assert time.monotonic() - start < 3, "not noticed at once"
            engine.reset()
        harness.require_right(engine, 2)


@everywhere
def test_a_rank_that_resets_alone_is_joined_by_the_others(transport: str) -> None:
    require_fine(reset_unprovoked, transport)


# ---- errors that must not spread


def refuse_input(group: EPGroup) -> None:
    with harness.engine(group) as engine:
        x_TH, ids_TK, weights_TK = harness.batch(group.rank, 0)
        if group.rank == 1:
            bad = ids_TK.clone()
            bad[0, 0] = harness.EXPERTS
            calls: list[tuple[type[Exception], Callable[[], object]]] = [
                (InputError, lambda: engine(x_TH, bad, weights_TK)),
                (InputError, lambda: engine(x_TH[:, :-1], ids_TK, weights_TK)),
                (InputError, lambda: engine(x_TH, ids_TK, weights_TK.double())),
                (InputError, lambda: engine(x_TH, ids_TK, weights_TK, layer=9)),
                (ValueError, lambda: engine(x_TH, ids_TK, weights_TK, policy="nonsense")),
            ]
            for kind, call in calls:
                with pytest.raises(kind):
                    call()
        harness.require_right(engine, 0)
        step = engine.begin(ids_TK, weights_TK, 1)
        if group.rank == 2:
            with pytest.raises(InputError):
                step.dispatch(x_TH.float()[:, :3].bfloat16())
        step.dispatch(x_TH)
        step.fetch()
        step.compute()
        assert torch.equal(step.combine(), harness.answer(group.rank, 0, 1))


@everywhere
def test_a_refused_argument_leaves_the_engine_and_its_peers_alone(transport: str) -> None:
    require_fine(refuse_input, transport)


def wrong_order(group: EPGroup) -> None:
    with harness.engine(group) as engine:
        for number in range(3):
            x_TH, ids_TK, weights_TK = harness.batch(group.rank, number)
            step = engine.begin(ids_TK, weights_TK, 1)
            verbs: dict[str, Callable[[], Any]] = {
                "dispatch": functools.partial(step.dispatch, x_TH),
                "fetch": step.fetch,
                "compute": step.compute,
                "combine": step.combine,
            }
            for now in verbs:
                for other, verb in verbs.items():
                    if other != now and group.rank != number:  # ranks err differently
                        with pytest.raises(StateError):
                            verb()
                got = verbs[now]()
            assert torch.equal(got, harness.answer(group.rank, number, 1))
            for verb in verbs.values():
                with pytest.raises(StateError):
                    verb()


@everywhere
def test_verbs_in_the_wrong_order_queue_nothing(transport: str) -> None:
    require_fine(wrong_order, transport)


# ---- steps in flight


def overlap(group: EPGroup) -> None:
    with harness.engine(group, in_flight=2) as engine:
        for turn in range(3):
            inputs = [harness.batch(group.rank, 2 * turn + i) for i in range(2)]
            steps = [engine.begin(ids, weights, 1) for _, ids, weights in inputs]
            with pytest.raises(StateError, match="in flight"):
                engine.begin(inputs[0][1], inputs[0][2], 1)
            for step, (x, _, _) in zip(steps, inputs, strict=True):
                step.dispatch(x)
            for step in steps:
                step.fetch()
            order = (1, 0) if turn % 2 else (0, 1)
            for i in order:
                steps[i].compute()
            for i in order:
                wanted = harness.answer(group.rank, 2 * turn + i, 1)
                assert torch.equal(steps[i].combine(), wanted), (turn, i)


@everywhere
def test_overlapping_steps_give_the_sequential_results(transport: str) -> None:
    require_fine(overlap, transport)


# ---- disagreement and leaving


def disagree_in_a_step(group: EPGroup, what: str) -> None:
    with harness.engine(group, timeout_s=5.0) as engine:
        harness.require_right(engine, 0)
        x_TH, ids_TK, weights_TK = harness.batch(group.rank, 1)
        odd = group.rank == 2
        layer = 0 if odd and what == "layer" else 1
        policy = "static" if odd and what == "policy" else None
        with pytest.raises(AgreementError, match=what):
            engine(x_TH, ids_TK, weights_TK, layer=layer, policy=policy)
        engine.reset()
        harness.require_right(engine, 2)


@everywhere
@pytest.mark.parametrize("what", ["layer", "policy"])
def test_ranks_that_disagree_on_a_step_all_hear_of_it(transport: str, what: str) -> None:
    require_fine(disagree_in_a_step, transport, what)


def leave_early(group: EPGroup) -> None:
    engine = harness.engine(group, timeout_s=2.0)
    harness.require_right(engine, 0)
    start = time.monotonic()
    try:
        if group.rank == 1:
            engine.close()
        else:
            harness.walk(engine, 1, 1)
    except PeerError as error:
        report((type(error), error.peer, time.monotonic() - start))
    if group.rank != 1:
        engine.close()
    engine.close()


@everywhere
def test_closing_while_peers_are_in_a_step_is_an_error_everywhere(transport: str) -> None:
    done = go(leave_early, transport)
    assert not done.failures, done.failures
    for rank in range(RANKS):
        ((kind, peer, seconds),) = done.by(rank)
        if transport != "collective":  # there, nobody hears of a close before the deadline
            assert issubclass(kind, PeerFailed), done.said
        assert peer == 1 if rank != 1 else peer in (0, 2), done.said
        assert seconds < 3.5, done.said


def vanish(group: EPGroup) -> None:
    """Rank 2 returns without closing; the others are in a step."""
    engine: Engine = harness.engine(group, timeout_s=5.0)
    if group.rank == 2:
        return
    with pytest.raises(PeerDied) as caught, engine:
        harness.walk(engine, 1, 1)
    assert caught.value.peer == 2


@everywhere
def test_a_rank_that_leaves_without_closing_counts_as_dead(transport: str) -> None:
    require_fine(vanish, transport)
