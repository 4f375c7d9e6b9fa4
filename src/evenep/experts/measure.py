"""Cost constants measured on this machine, and agreed by all ranks (the slowest rank's count)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..plan import Fetch, Hardware
from ..plan.cost import PS
from ..transport import Tag, Transport
from ..weights.store import ExpertStore
from .runner import Runner, Segment

_FEW, _MANY = 8, 128  # rows: around the bend of the curve, and far beyond it
_EXPERTS = 16  # touched in turn, so that weights come from memory as they do in a step
_REPEATS = 3


def measure(
    runner: Runner, store: ExpertStore, transport: Transport, *, lane: int, tag: Tag
) -> Hardware:
    """Time an expert at 1, 8 and 128 rows, and one fetch from the next rank. Collective.

    Slot 0 of ``lane`` in the first layer is written; the store forgets that lane's slots there.

    The three points fix the curve ``launch + max(read, rows * row)``: the slope between the last
    two is ``row``, what is left at 8 rows is ``launch``, what is left at 1 row is ``read``. Every
    rank gets the same numbers: the maximum over ranks of each time.
    """
    mine_s = [_time_expert(runner, store, n) for n in (1, _FEW, _MANY)]
    mine_s.append(_time_fetch(store, transport, lane, tag))
    words = torch.tensor([round(s * PS) for s in mine_s], dtype=torch.int64)
    agreed = transport.all_gather(words, tag, lane).max(dim=0).values.tolist()
    one_ps, few_ps, many_ps, fetch_ps = agreed
    row_ps = max(many_ps - few_ps, 0) // (_MANY - _FEW)
    launch_ps = max(few_ps - _FEW * row_ps, 0)
    read_ps = max(one_ps - launch_ps, 0)
    return Hardware(row_ps=row_ps, read_ps=read_ps, launch_ps=launch_ps, fetch_ps=fetch_ps)


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
    layer = store.layers[0]
    segments = [Segment(store.key(layer, e), i, 0, count) for i, e in enumerate(experts)]
    rows_NH = torch.randn(count, store.cfg.hidden_size).to(torch.bfloat16)
    weight_N = torch.ones(count)

    def run() -> None:
        for segment in segments:
            runner.run(rows_NH.clone(), weight_N, [segment], store.layer(layer))

    run()
    return _best(run) / len(segments)


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
