"""The launcher: every rank's end is reported, in order and in time, and nothing outlives it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from evenep import EPGroup
from evenep.errors import ConfigError, EvenEPError, LaunchError, PeerDied
from evenep.launch import RankExit, launch, report
from tests import harness

PROCESSES = ["shm", "collective"]
ALL = ["threads", *PROCESSES]


class Picky(Exception):
    """Pickles, but can't be rebuilt: its arguments are not its constructor's."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Rude:
    """Can't be pickled at all."""

    def __reduce__(self) -> Any:
        raise ValueError("I won't go")


class RudeError(Exception):
    """Carries something that can't be pickled."""

    def __init__(self) -> None:
        super().__init__("rude", Rude())


def square(group: EPGroup, base: int) -> tuple[int, int, int]:
    return group.rank, group.size, base + group.rank**2


@pytest.mark.parametrize("transport", ALL)
def test_results_come_by_rank(transport: str) -> None:
    with harness.nothing_left_behind():
        assert launch(square, 3, transport, (10,)) == [(0, 3, 10), (1, 3, 11), (2, 3, 14)]


def talk(group: EPGroup, words: int) -> None:
    for i in range(words):
        report((i, group.rank, "x" * 1000))


@pytest.mark.parametrize("transport", ALL)
def test_reports_of_a_rank_come_in_order_and_before_the_end(transport: str) -> None:
    done = harness.run(talk, 3, transport, 100)
    for rank in range(3):
        assert done.by(rank) == [(i, rank, "x" * 1000) for i in range(100)]


def test_report_outside_a_launch_says_nothing() -> None:
    report("into the void")


def part(group: EPGroup) -> str:
    if group.rank == 0:
        raise KeyError("zero")
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 2:
        sys.exit(3)
    return "fine"


@pytest.mark.parametrize("transport", PROCESSES)
def test_failures_are_complete_and_keep_their_types(transport: str) -> None:
    with harness.nothing_left_behind(), pytest.raises(LaunchError) as caught:
        launch(part, 4, transport)
    failures = caught.value.failures
    assert {r: type(e) for r, e in failures.items()} == {0: KeyError, 1: RankExit, 2: SystemExit}
    assert failures[0].args == ("zero",)
    assert "rank 1" in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert sorted(again.failures) == [0, 1, 2]


def speak_badly(group: EPGroup, what: str) -> Any:
    if group.rank == 1 and what == "result":
        return Rude()
    if group.rank == 1 and what == "exception":
        raise RudeError
    if group.rank == 1 and what == "picky":
        raise Picky(1, 2)
    if group.rank == 1 and what == "noted":
        error = PeerDied(rank=1, peer=0, phase="counts", layer=0, epoch=4)
        error.add_note("seen by a test")
        raise error
    return "fine"


@pytest.mark.parametrize("what", ["result", "exception", "picky", "noted"])
def test_what_cannot_be_sent_is_that_ranks_failure_alone(what: str) -> None:
    with harness.nothing_left_behind(), pytest.raises(LaunchError) as caught:
        launch(speak_badly, 3, "shm", (what,))
    assert list(caught.value.failures) == [1]
    error = caught.value.failures[1]
    assert isinstance(error, EvenEPError)
    if what == "picky":
        assert "1 and 2" in str(error)
    if what == "noted":
        assert isinstance(error, PeerDied)
        assert error.epoch == 4


def hang(group: EPGroup, hangs: bool) -> str:
    if group.rank == 0 and not hangs:
        raise ValueError("first")
    if group.rank == 1 or hangs:
        time.sleep(6)
    return "fine"


@pytest.mark.parametrize("transport", ALL)
def test_timeout_ends_the_call(transport: str) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(hang, 2, transport, (True,), timeout_s=0.4)
    assert {type(e) for e in caught.value.failures.values()} == {RankExit}
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("transport", ALL)
def test_others_get_the_grace_and_no_more(transport: str) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(hang, 3, transport, (False,), grace_s=0.4)
    assert {r: type(e) for r, e in caught.value.failures.items()} == {0: ValueError, 1: RankExit}
    assert 0.3 < time.monotonic() - start < 3


def stop_for_good(group: EPGroup) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_does_not_outlive_the_call() -> None:
    with harness.nothing_left_behind(), pytest.raises(LaunchError) as caught:
        launch(stop_for_good, 2, "shm", timeout_s=3.0)
    assert list(caught.value.failures) == [1]


def test_a_listener_that_raises_ends_every_rank() -> None:
    def listen(rank: int, message: Any) -> None:
        raise ZeroDivisionError

    with harness.nothing_left_behind(), pytest.raises(ZeroDivisionError):
        launch(talk, 2, "shm", (3,), on_event=listen)


def test_two_launches_at_once_do_not_meet() -> None:
    out: dict[tuple[str, int], Any] = {}

    def go(transport: str, number: int) -> None:
        done = harness.run(step_right, 2, transport, number, timeout_s=30)
        out[transport, number] = done.failures or done.results

    everyone = [(t, n) for t in ("threads", "shm") for n in (0, 1)]
    for rank in range(2):
        for number in range(2):
            harness.answer(rank, number, 1)
    threads = [threading.Thread(target=go, args=each) for each in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == {(t, n): [n, n] for t, n in everyone}


def step_right(group: EPGroup, number: int) -> int:
    with harness.engine(group) as engine:
        harness.require_right(engine, number)
    return number


@pytest.mark.parametrize(("ranks", "transport"), [(0, "shm"), (2, "symm"), (2, "pigeon")])
def test_impossible_launches_are_refused(ranks: int, transport: str) -> None:
    with pytest.raises(ConfigError):
        launch(square, ranks, transport, (0,))


def test_a_function_that_can_not_be_sent_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="module-level function"):
        launch(lambda group: group.rank, 2, "shm")


def test_a_program_from_standard_input_is_told_to_use_a_file() -> None:
    code = "from evenep import launch\nlaunch(print, 2, 'shm')\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True)
    assert "save it to a file" in done.stderr
