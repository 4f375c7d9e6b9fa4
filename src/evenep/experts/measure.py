"""Cost constants measured on this machine, and agreed by all ranks (the slowest rank's count)."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence

import torch

from ..plan import Fetch, Hardware
from ..plan.cost import PS
from ..transport import Tag, Transport
from ..transport.place import host_identity
from ..weights.store import ExpertStore
from .registry import make_runner
from .runner import Runner, Segment

_FEW, _MANY = 8, 128  # rows: around the bend of the curve, and far beyond it
_EXPERTS = 16  # touched in turn, so that weights come from memory as they do in a step
_REPEATS = 3


def measure(
    runner: Runner, store: ExpertStore, transport: Transport, *, lane: int, tag: Tag
) -> Hardware:
    """Time an expert at 1, 8 and 128 rows, its first use, and a fetch. Collective.

    Slot 0 of ``lane`` in the first layer is written; the store forgets that lane's slots there.

    The three points fix the curve ``launch + max(read, rows * row)``: the slope between the last
    two is ``row``, what is left at 8 rows is ``launch``, what is left at 1 row is ``read``. Every
    rank gets the same numbers: the maximum over ranks of each time.
    """
    mine_s = [_time_expert(runner, store, n) for n in (1, _FEW, _MANY)]
    mine_s.append(_time_fetch(store, transport, lane, tag))
    mine_s.append(max(_time_first_use(store) - mine_s[0], 0.0))
    words = torch.tensor([round(s * PS) for s in mine_s], dtype=torch.int64)
    agreed = transport.all_gather(words, tag, lane).max(dim=0).values.tolist()
    one_ps, few_ps, many_ps, fetch_ps, cold_ps = agreed
    row_ps = max(many_ps - few_ps, 0) // (_MANY - _FEW)
    launch_ps = max(few_ps - _FEW * row_ps, 0)
    read_ps = max(one_ps - launch_ps, 0)
    return Hardware(
        row_ps=row_ps,
        read_ps=read_ps,
        launch_ps=launch_ps,
        fetch_ps=fetch_ps,
        cold_ps=cold_ps,
        parallel=_parallel(transport, lane, tag),
    )


def _parallel(transport: Transport, lane: int, tag: Tag) -> int:
    """Ranks that find a core of their own, over all hosts. Collective; equal on every rank."""
    host = int(hashlib.sha256(host_identity().encode()).hexdigest()[:12], 16)
    mine = torch.tensor([host, os.cpu_count() or 1], dtype=torch.int64)
    cores_of: dict[int, list[int]] = {}
    for place, cores in transport.all_gather(mine, tag, lane).tolist():
        cores_of.setdefault(place, []).append(cores)
    return sum(min(len(cores), min(cores)) for cores in cores_of.values())


def _best(run: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _time_expert(runner: Runner, store: ExpertStore, count: int) -> float:
    """Seconds for ``count`` rows through one of this rank's experts, weights seen before."""
    experts = store.placement.experts_of(store.rank)[:_EXPERTS]
    if not experts:
        return 0.0
    _run_experts(runner, store, experts, count)
    return _best(lambda: _run_experts(runner, store, experts, count)) / len(experts)


def _time_first_use(store: ExpertStore) -> float:
    """Seconds for one row through an expert that a runner has not seen yet."""
    experts = store.placement.experts_of(store.rank)[:_REPEATS]
    if not experts:
        return 0.0
    fresh = make_runner(store.cfg)
    start = time.perf_counter()
    _run_experts(fresh, store, experts, 1)
    return (time.perf_counter() - start) / len(experts)


def _run_experts(runner: Runner, store: ExpertStore, experts: Sequence[int], count: int) -> None:
    layer = store.layers[0]
    rows_NH = torch.ones(count, store.cfg.hidden_size, dtype=torch.bfloat16)
    weight_N = torch.ones(count)
    for row, expert in enumerate(experts):
        segment = Segment(store.key(layer, expert), row, 0, count)
        runner.run(rows_NH.clone(), weight_N, [segment], store.layer(layer))


def _time_fetch(store: ExpertStore, transport: Transport, lane: int, tag: Tag) -> float:
    """Seconds to bring one expert from the next rank into slot 0, all ranks at once."""
    ranks, placement = transport.size, store.placement
    if store.cfg.slots == 0 or ranks == 1:
        return 0.0
    fetches = []
    for rank in range(ranks):
        experts = placement.experts_of((rank + 1) % ranks)
        if experts:
            fetches.append(Fetch(experts[0], (rank + 1) % ranks, rank, 0))
    transfers = store.transfers(store.layers[0], lane, fetches)
    store.forget(store.layers[0], lane)
    transport.barrier(tag)
    return _best(lambda: transport.fetch(transfers, tag, lane))
