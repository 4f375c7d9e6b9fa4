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

_ROWS = 128
_REPEATS = 3


def measure(runner: Runner, store: ExpertStore, transport: Transport) -> Hardware:
    """Time one expert at 1 and at 128 rows, and one fetch from the next rank. Collective.

    Every rank gets the same numbers: the maximum over ranks of each.
    """
    one_s, many_s = _time_expert(runner, store, 1), _time_expert(runner, store, _ROWS)
    fetch_s = _time_fetch(store, transport)
    mine = [many_s / _ROWS, one_s, 0.0, fetch_s]
    words = torch.tensor([round(s * PS) for s in mine], dtype=torch.int64)
    agreed = transport.all_gather(words, Tag("construct"), 0).max(dim=0).values.tolist()
    row_ps, read_ps, launch_ps, fetch_ps = agreed
    return Hardware(row_ps=row_ps, read_ps=read_ps, launch_ps=launch_ps, fetch_ps=fetch_ps)


def _best(run: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _time_expert(runner: Runner, store: ExpertStore, count: int) -> float:
    """Seconds for ``count`` rows through this rank's first expert, weights warm."""
    experts = store.placement.experts_of(store.rank)
    if not experts:
        return 0.0
    layer = store.layers[0]
    segment = Segment(store.key(layer, experts[0]), 0, 0, count)
    rows_NH = torch.randn(count, store.cfg.hidden_size).to(torch.bfloat16)
    weight_N = torch.ones(count)

    def run() -> None:
        runner.run(rows_NH.clone(), weight_N, [segment], store.layer(layer))

    run()
    return _best(run)


def _time_fetch(store: ExpertStore, transport: Transport) -> float:
    """Seconds to bring one expert from the next rank into slot 0, all ranks at once."""
    ranks, placement = transport.size, store.placement
    if store.cfg.slots == 0 or ranks == 1:
        return 0.0
    fetches = []
    for rank in range(ranks):
        experts = placement.experts_of((rank + 1) % ranks)
        if experts:
            fetches.append(Fetch(experts[0], (rank + 1) % ranks, rank, 0))
    transfers = store.transfers(store.layers[0], 0, fetches)
    transport.barrier(Tag("construct"))
    return _best(lambda: transport.fetch(transfers, Tag("construct")))
