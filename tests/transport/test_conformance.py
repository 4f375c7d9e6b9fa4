"""What every transport promises the engine, on real ranks: one suite for all of them."""

from __future__ import annotations

import concurrent.futures
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from evenep import EPGroup
from evenep.transport import TRANSPORTS, Put, Tag, Transfer, Transport, Window, WindowSpec
from tests.harness import ON_GPU, Footprint, Run, every, run, settled_growth

RANKS = (1, 2, 3, 5)
ROWS = 40
SPECS = [
    WindowSpec("wide", (ROWS, 3, 4), torch.bfloat16),
    WindowSpec("index", (ROWS,), torch.int32),
    WindowSpec("weight", (ROWS,), torch.float32),
    WindowSpec("bytes", (ROWS, 17), torch.uint8),
]

pytestmark = pytest.mark.parametrize("transport", [*sorted(TRANSPORTS), *ON_GPU])
each_size = pytest.mark.parametrize("ranks", RANKS)


def connect(group: EPGroup, timeout_s: float = 20.0) -> Transport:
    return group.connect(timeout_s=timeout_s, lanes=2, gather_words=64)


def rows_like(window: Window, rows: Sequence[int], mark: int) -> Tensor:
    """Data for rows: every element says which row and who wrote it; exact in every dtype."""
    shape = (len(rows), *window.local.shape[1:])
    column = torch.tensor([(mark * ROWS + r) % 251 for r in rows])
    filled = column.view(-1, *[1] * (len(shape) - 1)).expand(shape)
    return filled.to(window.local).contiguous()


def tag(phase: str, epoch: int = 0) -> Tag:
    return Tag(phase, 0, epoch)


def check(fn: Callable[..., Any], ranks: int, transport: str, *args: object) -> Run:
    done = run(fn, ranks, transport, *args, timeout_s=60)
    assert not done.failures, done.failures
    return done


# ---- windows


def windows_of_all_kinds(group: EPGroup) -> list[tuple[Any, ...]]:
    wire = connect(group)
    made = wire.windows(SPECS) + wire.windows([WindowSpec("later", (1, 5), torch.int64)])
    for window in made:
        assert not window.local.any()
        assert window.local.is_contiguous()
        mine = window.peers[group.rank] if window.peers is not None else window.local
        assert mine.data_ptr() == window.local.data_ptr()
    facts = [(w.index, tuple(w.local.shape), str(w.local.dtype)) for w in made]
    wire.close()
    return facts


@each_size
def test_windows_are_zero_and_the_same_shape_on_every_rank(transport: str, ranks: int) -> None:
    specs = [*SPECS, WindowSpec("later", (1, 5), torch.int64)]
    expected = [(i, s.shape, str(s.dtype)) for i, s in enumerate(specs)]
    every(check(windows_of_all_kinds, ranks, transport).results, expected)


def gather_many(group: EPGroup) -> None:
    wire, clock = connect(group), random.Random(group.rank)
    for turn in range(50):
        n, lane = (turn * 7) % 64 + 1, turn % 2
        if clock.random() < 0.3:
            time.sleep(clock.random() * 0.004)
        mine = torch.arange(n) + 1000 * group.rank + 100_000 * turn
        got_RN = wire.all_gather(mine, tag("counts", turn), lane)
        wanted = torch.arange(n) + 100_000 * turn + 1000 * torch.arange(group.size)[:, None]
        assert got_RN.dtype == torch.int64
        assert torch.equal(got_RN, wanted), (turn, got_RN)
        mine.fill_(-1)  # the caller's buffer is its own again
    wire.close()


@each_size
def test_all_gather_gives_every_ranks_words_in_rank_order(transport: str, ranks: int) -> None:
    check(gather_many, ranks, transport)


# ---- push, arrive, pull


def plan_rows(writer: int, reader: int, size: int, turn: int) -> list[int]:
    """Rows a writer owns in a reader's window; some pairs have none."""
    if (writer + reader + turn) % 4 == 3:
        return []
    return [row for row in range(turn % 3, ROWS - 1) if row % size == writer]


def exchange(wire: Transport, windows: list[Window], turn: int, *, parts: int = 1) -> None:
    """Push everywhere, then check what came and read it back out of order, with repeats."""
    lane = turn % 2
    me, size = wire.rank, wire.size
    wire.all_gather(torch.tensor([turn]), tag("counts", turn), lane)
    for window in windows:
        window.local.fill_(255)
    wire.all_gather(torch.tensor([turn]), tag("counts", turn), lane)
    puts = []
    for window in windows:
        for peer in range(size):
            rows = plan_rows(me, peer, size, turn)
            for part in (rows[i::parts] for i in range(parts)):
                data = rows_like(window, part, me + turn)
                puts.append(Put(window, peer, torch.tensor(part, dtype=torch.int64), data))
    wire.push(puts, tag("dispatch", turn), lane)
    wire.arrive(tag("dispatch", turn), lane)
    for window in windows:
        written = {r: w for w in range(size) for r in plan_rows(w, me, size, turn)}
        for row in range(ROWS):
            wanted = torch.full_like(window.local[row], 255)
            if row in written:
                wanted = rows_like(window, [row], written[row] + turn)[0]
            assert torch.equal(window.local[row], wanted), (turn, window.index, row)
    shuffle = random.Random(turn * 31 + me)
    for window in windows:
        asked = []
        for peer in range(size):
            rows = plan_rows(me, peer, size, turn)
            shuffle.shuffle(rows)
            asked.append(rows + rows[:3])
        lists = [torch.tensor(rows, dtype=torch.int64) for rows in asked]
        got = wire.pull(window, lists, tag("combine", turn), lane)
        for peer, rows in enumerate(asked):
            assert got[peer].dtype == window.local.dtype
            assert torch.equal(got[peer], rows_like(window, rows, me + turn)), (turn, peer)


def exchange_many(group: EPGroup, parts: int) -> None:
    wire, clock = connect(group), random.Random(group.rank + 17)
    windows = wire.windows(SPECS)
    for turn in range(4):
        time.sleep(clock.random() * 0.003)
        exchange(wire, windows, turn, parts=parts)
    wire.close()


@each_size
def test_pushed_rows_arrive_once_and_pull_reads_rows_as_asked(transport: str, ranks: int) -> None:
    check(exchange_many, ranks, transport, 1)


def test_several_puts_into_one_window_of_one_peer_all_arrive(transport: str) -> None:
    check(exchange_many, 3, transport, 2)


def push_and_pull_nothing(group: EPGroup) -> None:
    wire = connect(group)
    (window,) = wire.windows(SPECS[:1])
    none = torch.empty(0, dtype=torch.int64)
    for turn in range(3):
        wire.push([], tag("dispatch", turn), 0)
        wire.arrive(tag("dispatch", turn), 0)
        empty = [Put(window, p, none, window.local[:0]) for p in range(group.size)]
        wire.push(empty, tag("dispatch", turn), 1)
        wire.arrive(tag("dispatch", turn), 1)
        got = wire.pull(window, [none] * group.size, tag("combine", turn), 0)
        assert [tuple(g.shape) for g in got] == [(0, 3, 4)] * group.size
        assert not window.local.any()
    wire.close()


@each_size
def test_empty_pushes_and_pulls_are_ordinary(transport: str, ranks: int) -> None:
    check(push_and_pull_nothing, ranks, transport)


def two_lanes(group: EPGroup) -> None:
    wire, me, size = connect(group), group.rank, group.size
    lanes = [wire.windows(SPECS[:2]) for _ in range(2)]
    for turn in range(5):
        for lane in (0, 1):  # open both, then end them in the other order
            got = wire.all_gather(torch.tensor([me, lane, turn]), tag("counts", turn), lane)
            assert got.tolist() == [[r, lane, turn] for r in range(size)]
            puts = [
                Put(w, p, torch.tensor([me]), rows_like(w, [me], 50 * lane + turn))
                for w in lanes[lane]
                for p in range(size)
            ]
            wire.push(puts, tag("dispatch", turn), lane)
        for lane in (1, 0):
            wire.arrive(tag("dispatch", turn), lane)
            for w in lanes[lane]:
                wanted = rows_like(w, range(size), 50 * lane + turn)
                assert torch.equal(w.local[:size], wanted), (turn, lane)
        for lane in (1, 0):
            wanted_rows = [torch.tensor([me])] * size
            got_rows = wire.pull(lanes[lane][0], wanted_rows, tag("combine", turn), lane)
            for g in got_rows:
                assert torch.equal(g, rows_like(lanes[lane][0], [me], 50 * lane + turn))
    wire.close()


@each_size
def test_interleaved_lanes_share_nothing(transport: str, ranks: int) -> None:
    check(two_lanes, ranks, transport)


# ---- fetch


def fetch_beside_steps(group: EPGroup) -> None:
    wire, me, size = connect(group), group.rank, group.size
    step_windows, stores = wire.windows(SPECS[:2]), wire.windows(SPECS)
    home = 4  # rows 0..3 are a rank's own, the rest are slots
    for window in stores:
        window.local[:home] = rows_like(window, range(home), me)
    wire.barrier(tag("construct"))
    with concurrent.futures.ThreadPoolExecutor(1) as lane:
        for turn in range(3):
            slot = home + turn
            ring = [((r + 1) % size, r) for r in range(size)]
            chain = [(r, r + 1) for r in range(size - 1)]
            moves = [
                Transfer(w, source, turn % home, dest, slot + shift)
                for shift, pairs in ((0, ring), (10, chain))
                for source, dest in pairs
                if source != dest
                for w in stores
            ]
            fetched = lane.submit(wire.fetch, moves, tag("fetch", turn))
            exchange(wire, step_windows, turn)
            fetched.result(timeout=20)
            for w in stores:
                for shift, source in ((0, (me + 1) % size), (10, me - 1)):
                    if source >= 0 and source != me:
                        wanted = rows_like(w, [turn % home], source)[0]
                        assert torch.equal(w.local[slot + shift], wanted), (turn, shift)
    for w in stores:
        assert torch.equal(w.local[:home], rows_like(w, range(home), me))
    wire.close()


@each_size
def test_fetch_moves_rows_beside_running_steps(transport: str, ranks: int) -> None:
    check(fetch_beside_steps, ranks, transport)


# ---- life


def barriers(group: EPGroup) -> tuple[float, float]:
    wire = connect(group)
    wire.barrier(tag("construct"))
    time.sleep(0.15 * (group.rank == group.size - 1))
    came = time.monotonic()
    wire.barrier(tag("construct"))
    left = time.monotonic()
    wire.close()
    wire.close()
    wire.close(orderly=False)
    return came, left


@each_size
def test_no_rank_leaves_a_barrier_before_all_came(transport: str, ranks: int) -> None:
    times = check(barriers, ranks, transport).results
    assert min(left for _, left in times) >= max(came for came, _ in times)


def build_and_close(group: EPGroup, times: int) -> dict[str, int]:
    def once(orderly: bool) -> None:
        wire = connect(group)
        (window,) = wire.windows(SPECS[:1])
        wire.all_gather(torch.tensor([1]), tag("counts"), 0)
        wire.barrier(tag("construct"))
        assert not window.local.any()
        wire.close(orderly=orderly)

    once(True)
    before = Footprint.now()
    for turn in range(times):
        once(orderly=turn % 2 == 0)
    connect(group).close()  # everyone is done with its last one
    return settled_growth(before)


def test_a_hundred_builds_and_closes_leak_nothing(transport: str) -> None:
    every(check(build_and_close, 2, transport, 100).results, {})


def test_eight_ranks_launch(transport: str) -> None:
    check(gather_many, 8, transport)
