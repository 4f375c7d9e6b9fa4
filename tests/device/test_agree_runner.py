"""Ranks with different caches, clocks and candidates end with one table and one runner."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evenep import EPConfig, EPGroup, launch
from evenep.device.agree_runner import agree_on_runner
from evenep.device.runner_times import RunnerTimes, problem
from evenep.errors import LaunchError, UnsupportedError
from evenep.experts.auto_runner import AutoRunner
from evenep.experts.choice import ROWS, RunnerChoice
from evenep.experts.device import DeviceRunner, Groups

CPU = torch.device("cpu")
RANKS = 3
CFG = EPConfig(
    num_experts=6, top_k=2, hidden_size=8, intermediate_size=8, max_tokens_per_rank=24, ranks=RANKS
)  # 24 rows an expert in a full step: buckets 1, 16 and 64
ALL = 3 * len(ROWS)  # calls that are timed
Made = tuple[str, str, int, "dict[str, object] | None"]


class StandIn(DeviceRunner):
    """Does nothing, under a name."""

    batch_invariant = True

    def __init__(self, name: str, ran: list[str]) -> None:
        super().__init__(CFG, CPU)
        self.name, self.reserved, self.ran = name, 0, ran

    def reserve(self, rows: int) -> None:
        self.reserved = max(self.reserved, rows)

    def run(
        self, rows_NH: object, weight_N: object, groups: Groups, sms: int | None = None
    ) -> None:
        assert int(groups.count_G.sum()) == groups.rows <= self.reserved
        assert groups.start_G.tolist() == [g * groups.likely for g in range(len(groups.count_G))]
        self.ran.append(self.name)


def stand_in(name: str, ran: list[str], refuse: str) -> DeviceRunner:
    if name in refuse:
        raise UnsupportedError(f"{name} is refused here")
    return StandIn(name, ran)


def three(ran: list[str], refuse: str = "") -> AutoRunner:
    makers = {name: functools.partial(stand_in, name, ran, refuse) for name in "abc"}
    return AutoRunner(CFG, CPU, makers)


def agree(
    group: EPGroup, folders: list[Path], speeds: list[dict[str, int]], refuse: list[str]
) -> Made:
    """One rank: its own folder, nanoseconds of each candidate, and candidates it refuses."""
    transport = group.connect(timeout_s=20.0, lanes=1, gather_words=16, identity="same")
    ran: list[str] = []
    runner = three(ran, refuse[group.rank])
    runner.reserve(10)

    def timer(call: Callable[[], None]) -> int:
        call()
        return speeds[group.rank][ran[-1]] * 4  # 4 experts a call

    cache = RunnerTimes(folders[group.rank], problem(CFG, CPU))
    try:
        agree_on_runner(runner, CFG, transport, cache, {"w": torch.zeros(4, 1)}, timer)
    finally:
        transport.close(orderly=False)
    assert runner.candidates == (runner.name,), "the others are let go"
    kept = json.loads(cache.path.read_text())["ns"] if cache.path.exists() else None
    return runner.name, runner.why, len(ran), kept


def start(
    folders: list[Path], speeds: list[dict[str, int]], refuse: list[str] | None = None
) -> list[Made]:
    args = (folders, speeds, refuse or [""] * RANKS)
    made: list[Made] = launch(agree, RANKS, "threads", args)
    assert len({name for name, *_ in made}) == 1, "ranks chose differently"
    return made


FAST_A = {"a": 10, "b": 20, "c": 30}
FAST_B = {"a": 20, "b": 10, "c": 30}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / str(rank) for rank in range(RANKS)]


def test_the_slowest_rank_counts_and_everyone_keeps_the_same_table(folders: list[Path]) -> None:
    made = start(folders, [FAST_A, FAST_A, {"a": 50, "b": 20, "c": 30}])
    for name, why, timed, kept in made:
        assert name == "b"
        assert "b 0.1 us" in why
        assert timed == ALL
        assert kept == {n: [ns] * len(ROWS) for n, ns in {"a": 50, "b": 20, "c": 30}.items()}


def test_a_second_engine_measures_nothing_and_chooses_alike(folders: list[Path]) -> None:
    first = start(folders, [FAST_A] * RANKS)
    again = start(folders, [FAST_B] * RANKS)
    assert [m[2] for m in again] == [0] * RANKS
    assert [m[:2] for m in again] == [m[:2] for m in first]


def test_caches_of_different_contents_end_as_one(folders: list[Path]) -> None:
    """Rank 0 knows b to be fast, rank 1 knows a to be, rank 2 measures."""
    for rank, speeds in ((0, FAST_B), (1, FAST_A)):
        known = {name: (ns,) * len(ROWS) for name, ns in speeds.items()}
        RunnerTimes(folders[rank], problem(CFG, CPU)).write(known)
    made = start(folders, [FAST_A, FAST_B, {"a": 25, "b": 15, "c": 5}])
    assert [m[2] for m in made] == [0, 0, ALL]
    assert made[0][0] == "b", "20 against a's 25 and c's 30, each the slowest rank's"
    assert made[0][3] == made[1][3] == made[2][3]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"problem": 1}', "\x00\xff", '{"ns": {"a": [1, 1, 1, 1, 1]}}'],
)
def test_a_broken_cache_file_is_measured_again_and_replaced(folders: list[Path], text: str) -> None:
    path = RunnerTimes(folders[1], problem(CFG, CPU)).path
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    made = start(folders, [FAST_A] * RANKS)
    assert made[1][2] == ALL
    assert made[1][3] == made[0][3]


@pytest.mark.parametrize("ns", [[1, 2], [1, 2, 3, 4, -5], [1.5] * 5, ["1"] * 5, None, [2**63] * 5])
def test_a_cache_file_with_odd_numbers_is_measured_again(folders: list[Path], ns: object) -> None:
    cache = RunnerTimes(folders[1], problem(CFG, CPU))
    cache.write(dict.fromkeys("abc", ns))  # type: ignore[arg-type]
    assert start(folders, [FAST_A] * RANKS)[1][2] == ALL


def test_times_of_another_problem_are_not_taken(tmp_path: Path) -> None:
    cache = RunnerTimes(tmp_path, problem(CFG, CPU))
    other = RunnerTimes(tmp_path, problem(CFG.replace(hidden_size=16), CPU))
    other.write({name: (1,) * len(ROWS) for name in "abc"})
    assert other.read("abc") is not None
    assert other.path != cache.path
    assert cache.read("abc") is None
    other.path.rename(cache.path)
    assert cache.read("abc") is None


def test_a_candidate_that_one_rank_refuses_is_left_out_everywhere(folders: list[Path]) -> None:
    made = start(folders, [FAST_A] * RANKS, ["", "a", ""])
    assert {m[0] for m in made} == {"b"}
    assert "not 'a': it doesn't work on every rank" in made[0][1]
    assert "not 'a': a is refused here" in made[1][1]
    again = start(folders, [FAST_B] * RANKS)
    assert again[0][2] == 0, "its own times of a were kept"
    assert again[1][2] == ALL, "a works there now, and hasn't been timed"


def test_no_candidate_for_all_ranks_is_an_error_on_every_rank(folders: list[Path]) -> None:
    with pytest.raises(LaunchError) as caught:
        start(folders, [FAST_A] * RANKS, ["bc", "ac", "ab"])
    assert len(caught.value.failures) == RANKS
    for error in caught.value.failures.values():
        assert "no runner works on every rank" in str(error)


def test_a_rank_without_experts_follows_the_others() -> None:
    assert three([]).measure({"w": torch.zeros(0, 1)}) == dict.fromkeys("abc", (0,) * len(ROWS))


def test_a_candidate_that_fails_while_timed_is_refused_with_the_reason() -> None:
    class Broken(StandIn):
        def run(self, *args: object, **more: object) -> None:
            raise RuntimeError("no kernel image")

    runner = AutoRunner(CFG, CPU, {"x": lambda: Broken("x", []), "a": lambda: StandIn("a", [])})
    assert runner.name == "x", "the preferred one, until measured"

    def timer(call: Callable[[], None]) -> int:
        call()
        return 1

    assert runner.measure({"w": torch.zeros(4, 1)}, timer).keys() == {"a"}
    assert "no kernel image" in runner.refused["x"]


def test_none_that_works_is_refused_with_every_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"a is refused.*b is refused.*c is refused"):
        three([], "abc")


def test_scratch_is_reserved_for_whoever_is_chosen() -> None:
    runner = three([])
    runner.reserve(10)
    runner.settle(RunnerChoice("c", "for the test"))
    assert isinstance(runner._runner, StandIn)
    assert (runner.name, runner._runner.name, runner._runner.reserved) == ("c", "c", 10)


def test_an_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    RunnerTimes(tmp_path / "file" / "below", problem(CFG, CPU)).write({"a": (1,) * len(ROWS)})
